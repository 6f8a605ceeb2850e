"""Files that are written as a whole or not at all, and when they are on the disk."""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tailrace.edge.access.keys import changing
from tailrace.ledger.process.durable_file import OWNER_MODE, create_file, locked, replace_file
from tailrace.origin.generations.resume_tokens import TokenKeys


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """Record the system calls from now on: the call, and the file's name without its suffix."""
    made: list[tuple[str, str]] = []

    def noted(name: str, file_of: Callable[..., object]) -> None:
        real = getattr(os, name)

        def call(*arguments: Any, **options: Any) -> Any:
            path = Path(str(file_of(*arguments)))
            made.append((name, "new" if path.suffix == ".new" else path.name))
            return real(*arguments, **options)

        monkeypatch.setattr(os, name, call)

    noted("fsync", lambda descriptor: os.readlink(f"/proc/self/fd/{descriptor}"))
    noted("link", lambda _, to: to)
    noted("replace", lambda _, to: to)
    return made


def test_a_file_is_on_the_disk_before_it_gets_its_name(
    tmp_path: Path, calls: list[tuple[str, str]]
) -> None:
    path = tmp_path / "file"
    assert create_file(path, b"one", mode=OWNER_MODE)
    assert calls == [("fsync", "new"), ("link", "file"), ("fsync", tmp_path.name)]
    assert stat.S_IMODE(path.stat().st_mode) == OWNER_MODE
    calls.clear()
    replace_file(path, b"two")
    assert calls == [("fsync", "new"), ("replace", "file"), ("fsync", tmp_path.name)]
    calls.clear()
    replace_file(path, b"three", sync=False)
    assert calls == [("replace", "file")]
    assert path.read_bytes() == b"three"
    assert list(tmp_path.iterdir()) == [path]


def test_the_keys_of_tokens_are_on_the_disk_before_a_token_is_signed(
    tmp_path: Path, calls: list[tuple[str, str]]
) -> None:
    TokenKeys.load(tmp_path / "keys.json")
    assert calls == [("fsync", "new"), ("link", "keys.json"), ("fsync", tmp_path.name)]


def test_a_key_of_an_edge_is_on_the_disk_before_it_is_given_out(
    tmp_path: Path, calls: list[tuple[str, str]]
) -> None:
    with changing(tmp_path / "keys.json"):
        pass
    assert calls == [("fsync", "new"), ("replace", "keys.json"), ("fsync", tmp_path.name)]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may change the file of another user")
def test_a_replaced_file_keeps_its_owner_if_that_is_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "file"
    replace_file(path, b"one")
    os.chown(path, 1234, 5678)
    replace_file(path, b"two", mode=OWNER_MODE, keeps_owner=True)
    found = path.stat()
    assert (found.st_uid, found.st_gid, stat.S_IMODE(found.st_mode)) == (1234, 5678, OWNER_MODE)
    replace_file(path, b"three")
    assert path.stat().st_uid == 0


def test_a_file_that_is_there_is_not_created_again(tmp_path: Path) -> None:
    path = tmp_path / "file"
    assert create_file(path, b"one")
    assert not create_file(path, b"two")
    assert path.read_bytes() == b"one"
    assert list(tmp_path.iterdir()) == [path]


def test_what_cannot_be_replaced_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError, match="folder"):
        replace_file(tmp_path / "folder", b"bytes")
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


def test_one_at_a_time_changes_a_locked_file(tmp_path: Path) -> None:
    path, at_once = tmp_path / "count", threading.Barrier(8)
    path.write_text("0")

    def count() -> None:
        at_once.wait()
        for _ in range(20):
            with locked(path):
                replace_file(path, b"%d" % (int(path.read_text()) + 1), sync=False)

    threads = [threading.Thread(target=count) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert path.read_text() == "160"
