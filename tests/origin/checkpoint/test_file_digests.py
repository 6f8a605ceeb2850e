"""Digests of files that are kept, and files that change under them."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from threading import Thread

import pytest

from tailrace.origin.checkpoint.file_digests import FileDigests

LATER_S = 1e12
"""Long after any file here was written."""


def kept_at(path: Path) -> FileDigests:
    return FileDigests(path, lambda: LATER_S)


def digest_of(path: Path) -> bytes:
    return hashlib.sha256(path.read_bytes()).digest()


def kept(folder: Path) -> tuple[Path, Path]:
    """Return a file of weights, and where its digest is kept."""
    weights, store = folder / "weights", folder / "data" / "digests.json"
    weights.write_bytes(b"weights")
    digests = kept_at(store)
    assert digests.of(weights) == digest_of(weights)
    digests.keep()
    return weights, store


def test_a_file_is_hashed_once(tmp_path: Path) -> None:
    weights, store = kept(tmp_path)
    again = kept_at(store)
    assert again.of(weights) == digest_of(weights)
    assert again.hashed_bytes == 0


def test_workers_that_keep_digests_at_once_lose_none(tmp_path: Path) -> None:
    files, store = [tmp_path / f"weights{n}" for n in range(8)], tmp_path / "digests.json"
    for file in files:
        file.write_bytes(file.name.encode())
    workers = [kept_at(store) for _ in files]  # each has read the stored digests before any writes
    for worker, file in zip(workers, files, strict=True):
        worker.of(file)
    threads = [Thread(target=worker.keep) for worker in workers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    again = kept_at(store)
    assert [again.of(file) for file in files] == list(map(digest_of, files))
    assert again.hashed_bytes == 0


def test_a_file_of_the_same_size_and_mtime_that_was_written_to_is_hashed_again(
    tmp_path: Path,
) -> None:
    weights, store = kept(tmp_path)
    before = weights.stat()
    with weights.open("r+b") as file:
        file.write(b"W")
    os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert kept_at(store).of(weights) == digest_of(weights) != hashlib.sha256(b"weights").digest()


def test_another_file_in_its_place_is_hashed_again(tmp_path: Path) -> None:
    weights, store = kept(tmp_path)
    other = tmp_path / "other"
    other.write_bytes(b"WEIGHTS")
    other.replace(weights)
    assert kept_at(store).of(weights) == digest_of(weights)


def test_a_file_that_was_just_written_is_not_kept(tmp_path: Path) -> None:
    weights, store = tmp_path / "weights", tmp_path / "digests.json"
    weights.write_bytes(b"weights")
    digests = FileDigests(store, lambda: weights.stat().st_ctime + 1)
    digests.of(weights)
    digests.keep()
    assert not store.exists()


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[: len(text) // 2],
        lambda text: "[]",
        lambda text: text.replace('"version": 1', '"version": 2'),
        lambda text: json.dumps({"version": 1, "files": {"x": [["a"], "00"]}}),
        lambda text: json.dumps({"version": 1, "files": {"x": [[1, 2, 3, 4, 5], "00"]}}),
    ],
)
def test_what_is_damaged_or_of_another_version_is_computed_again(
    tmp_path: Path, damage: object
) -> None:
    weights, store = kept(tmp_path)
    assert callable(damage)
    store.write_text(damage(store.read_text("utf-8")), "utf-8")
    again = kept_at(store)
    assert again.of(weights) == digest_of(weights)
    assert again.hashed_bytes == len(b"weights")
    again.keep()
    assert kept_at(store).of(weights) == digest_of(weights)


def test_a_folder_that_cannot_be_written_to_is_left_alone(tmp_path: Path) -> None:
    weights = tmp_path / "weights"
    weights.write_bytes(b"weights")
    digests = kept_at(weights / "no-folder" / "digests.json")
    assert digests.of(weights) == digest_of(weights)
    digests.keep()
