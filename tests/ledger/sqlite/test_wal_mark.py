"""A WAL that is not what it was when its owner was killed, and files that are whole."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from tailrace.ledger.errors import Damaged
from tailrace.ledger.inspection.commands import accept, reading, verify
from tailrace.ledger.sqlite.disk import wal_mark
from tailrace.ledger.sqlite.disk.wal_mark import WalMark, read_mark
from tests.ledger.backends import A, everything, indexes, new, opened_file, tokens

pytestmark = pytest.mark.anyio

COUNT = 50
OWNER = f"""
import asyncio, signal, sys
from pathlib import Path
from tests.ledger.backends import A, Clock, new, tokens
from tailrace.ledger.sqlite.ledger import SqliteLedger

async def main():
    ledger = await SqliteLedger.open(Path(sys.argv[1]), Clock())
    await ledger.create(new(A))
    for index in range({COUNT}):
        await ledger.append(tokens(A, [index]))
    print("acknowledged", flush=True)
    signal.pause()

asyncio.run(main())
"""


OPENED = """
import asyncio, os, sys
from pathlib import Path
from tailrace.ledger.sqlite.disk.file import SqliteFile

asyncio.run(SqliteFile.open(Path(sys.argv[1]), wal_sync=lambda *_: os._exit(9)))
"""
"""Is gone as soon as it has moved the WAL that it found."""


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a ledger whose owner was killed after all appends were acknowledged."""
    folder = tmp_path_factory.mktemp("killed")
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(folder / "ledger.db")], stdout=subprocess.PIPE
    )
    assert owner.stdout is not None
    assert owner.stdout.readline() == b"acknowledged\n"
    owner.kill()
    owner.communicate()
    return folder


@pytest.fixture
def path(killed: Path, tmp_path: Path) -> Path:
    shutil.copytree(killed, tmp_path / "copy")
    return tmp_path / "copy" / "ledger.db"


def wal_of(path: Path) -> Path:
    return path.with_name(path.name + "-wal")


def edit(path: Path, at: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        file.write(data)


async def findings(path: Path) -> list[str]:
    async with reading(path) as reader:
        return [finding.what for finding in (await verify(reader)).findings]


def in_the_middle(path: Path) -> None:
    edit(wal_of(path), wal_of(path).stat().st_size // 2, b"\xa5\x5a\xa5")


def half(path: Path) -> None:
    os.truncate(wal_of(path), wal_of(path).stat().st_size // 2)


def head(path: Path) -> None:
    edit(wal_of(path), 16, b"\xa5\x5a\xa5")


def rewrite_mark(path: Path, *, boot: bytes | None = None, anew: int = 0) -> None:
    """Rewrite the mark as if another boot of the system had made it, or `anew` WALs ago."""
    mark = read_mark(path)
    assert mark is not None
    descriptor = os.open(path.with_name(path.name + ".lock"), os.O_RDWR)
    high = WalMark(path, descriptor)
    high._boot = boot or mark.boot
    first = int.from_bytes(mark.salts[:4], "big") - anew
    high._salts, high._frames = first.to_bytes(4, "big") + mark.salts[4:], mark.frames
    high.advance(mark.frames + anew)
    os.close(descriptor)


def of_another_boot(path: Path) -> None:
    rewrite_mark(path, boot=b"another one")


async def require_only_the_first_are_there(path: Path) -> None:
    async with opened_file(path) as ledger:
        found = indexes(await everything(ledger, A))
        assert found == list(range(len(found)))
        assert len(found) < COUNT


@pytest.mark.parametrize("damage", [in_the_middle, half, head])
async def test_a_damaged_wal_is_named_and_not_written_over_before_it_is_accepted(
    path: Path, damage: Callable[[Path], None]
) -> None:
    damage(path)
    left = wal_of(path).read_bytes()
    [finding, *_] = await findings(path)
    assert finding.startswith("it lacks acknowledged commits: its WAL ends after")
    for _ in range(2):
        with pytest.raises(Damaged, match=r"its WAL ends after \d+ of \d+ pages.*ledger accept"):
            async with opened_file(path):
                pass
    assert wal_of(path).read_bytes() == left
    if damage is head:
        return  # nothing is left of the stream
    accept(path)
    with capture_logs() as said:
        await require_only_the_first_are_there(path)
    assert not said
    assert await findings(path) == []


async def test_behind_a_link_a_damaged_wal_is_named_too(path: Path, tmp_path: Path) -> None:
    half(path)
    link = tmp_path / "link.db"
    link.symlink_to(path)
    with pytest.raises(Damaged, match="its WAL ends after"):
        async with opened_file(link):
            pass


async def test_after_a_power_cut_the_ledger_opens_and_says_what_is_missing(path: Path) -> None:
    half(path)
    of_another_boot(path)
    assert "its WAL ends after" in (await findings(path))[0]
    with capture_logs() as said:
        await require_only_the_first_are_there(path)
    [line] = [line for line in said if line["event"] == "ledger.commits_lost"]
    assert line["log_level"] == "error"
    assert "its WAL ends after" in line["error"]


async def test_a_wal_that_is_gone_is_named(path: Path) -> None:
    """There is nothing that could still be saved from it."""
    wal_of(path).unlink()
    assert "its WAL of" in (await findings(path))[0]
    with capture_logs() as said:
        async with opened_file(path) as ledger:
            await ledger.create(new(A))
    assert ["pages is gone" in line["error"] for line in said] == [True]


async def test_an_emptied_file_beside_a_wal_is_named_and_its_wal_is_left(path: Path) -> None:
    os.truncate(path, 0)
    left = wal_of(path).read_bytes()
    with pytest.raises(Damaged, match="it is empty, but had commits"):
        async with reading(path):
            pass
    with pytest.raises(Damaged, match="it is empty, but had commits"):
        async with opened_file(path):
            pass
    assert wal_of(path).read_bytes() == left
    accept(path)
    async with opened_file(path) as ledger:
        await ledger.create(new(A))


async def test_an_emptied_file_without_a_wal_is_begun_anew_and_named(path: Path) -> None:
    async with opened_file(path):
        pass
    os.truncate(path, 0)
    with pytest.raises(Damaged, match="it is empty, but had commits"):
        async with reading(path):
            pass
    with capture_logs() as said:
        async with opened_file(path) as ledger:
            await ledger.create(new(A))
    assert [line["error"] for line in said] == ["it is empty, but had commits"]


async def test_what_a_killed_owner_leaves_is_no_damage(path: Path) -> None:
    """Neither is a commit that was cut short behind what was acknowledged."""
    with wal_of(path).open("ab") as wal:
        wal.write(wal_of(path).read_bytes()[-9_000:])
    assert await findings(path) == []
    with capture_logs() as said:
        async with opened_file(path) as ledger:
            assert indexes(await everything(ledger, A)) == list(range(COUNT))
    assert not said


async def test_a_wal_that_begins_anew_or_is_cut_off_is_no_damage(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The files as they are after each commit are what a kill would leave."""
    monkeypatch.setattr("tailrace.ledger.sqlite.disk.checkpointer.CHECKPOINT_PAGES", 8)
    monkeypatch.setattr("tailrace.ledger.sqlite.disk.wal.CUT_ABOVE_BYTES", 0)
    anew = 0
    async with opened_file(path) as ledger:
        before = read_mark(path)
        for index in range(COUNT, 2 * COUNT):
            await ledger.append(tokens(A, [index]))
            if index % 10 == 0:
                await ledger._storage.maintenance.checkpoint(cut=True)
            left = tmp_path / f"left{index}"
            shutil.copytree(path.parent, left)
            assert await findings(left / path.name) == []
            mark = read_mark(path)
            assert mark is not None and before is not None
            anew += mark.salts != before.salts
            before = mark
    assert anew > 3


async def test_a_kill_between_a_new_wals_first_commit_and_its_mark_is_no_damage(
    path: Path,
) -> None:
    rewrite_mark(path, anew=1)
    assert await findings(path) == []
    with capture_logs() as said:
        async with opened_file(path) as ledger:
            assert indexes(await everything(ledger, A)) == list(range(COUNT))
    assert not said


async def test_a_kill_while_the_ledger_opens_is_no_damage(path: Path) -> None:
    opened = await asyncio.create_subprocess_exec(sys.executable, "-c", OPENED, str(path))
    assert await opened.wait() == 9
    assert wal_of(path).stat().st_size == 0
    with capture_logs() as said:
        async with opened_file(path) as ledger:
            assert indexes(await everything(ledger, A)) == list(range(COUNT))
    assert not said


def test_a_mark_that_is_damaged_says_nothing(path: Path) -> None:
    lock = path.with_name(path.name + ".lock")
    assert read_mark(path) is not None
    edit(lock, 6, b"\xff")
    assert read_mark(path) is None
    assert wal_mark.lost_file(path, None) is None
