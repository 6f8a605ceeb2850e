"""Folders of workers' sockets: removed at the next start if their process was killed."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tailrace.origin.workers.socket_folder import OWNER, remove_left_folders, socket_folder

HELD = """
import sys, tempfile
from tailrace.origin.workers.socket_folder import socket_folder
tempfile.tempdir = sys.argv[1]
with socket_folder() as folder:
    print(folder, flush=True)
    sys.stdin.read()
"""
ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_only_the_folder_of_a_process_that_was_killed_is_removed(place: Path) -> None:
    other = subprocess.Popen(
        [sys.executable, "-c", HELD, str(place)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with other, socket_folder() as own:
        assert other.stdout is not None
        theirs = Path(other.stdout.readline().strip())
        (theirs / "worker.sock").touch()
        assert remove_left_folders() == 0
        assert theirs.is_dir() and own.is_dir()
        other.kill()
        other.wait()
        assert remove_left_folders() == 1
        assert not theirs.exists() and own.is_dir()
    assert list(place.iterdir()) == []


def test_folders_that_may_be_something_else_are_left_alone(place: Path) -> None:
    (place / "tailrace-file").touch()
    (place / "tailrace-empty").mkdir()
    (place / "elsewhere").mkdir()
    (place / "elsewhere" / OWNER).touch()
    (place / "tailrace-link").symlink_to(place / "elsewhere")
    (place / "tailrace-odd").mkdir()
    (place / "tailrace-odd" / OWNER).symlink_to(place / "elsewhere" / OWNER)
    before = sorted(place.rglob("*"))
    assert remove_left_folders() == 0
    assert sorted(place.rglob("*")) == before
