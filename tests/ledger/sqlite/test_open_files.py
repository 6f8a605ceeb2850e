"""The names of a ledger's files: links, second names, and files that go while they are open."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tailrace.ledger.errors import ConfigError, LedgerFailed
from tailrace.ledger.frame import Durability
from tailrace.ledger.sqlite.disk.disk_sync import DiskSync, Failed, sync_of
from tailrace.ledger.sqlite.disk.work_thread import WorkThread
from tailrace.ledger.sqlite.ledger import SqliteLedger
from tests.ledger.backends import A, B, Clock, new, opened_file, tokens

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("left_behind", [False, True], ids=["alone", "beside-an-old-wal"])
async def test_behind_a_link_the_wal_that_sqlite_writes_is_synced(
    tmp_path: Path, left_behind: bool
) -> None:
    (tmp_path / "disk").mkdir()
    link = tmp_path / "ledger.db"
    link.symlink_to(tmp_path / "disk" / "ledger.db")
    if left_behind:
        (tmp_path / "ledger.db-wal").touch()
    synced: list[Path] = []

    def noted(path: Path, thread: WorkThread, failed: Failed) -> DiskSync:
        synced.append(path)
        return sync_of(path, thread, failed)

    ledger = await SqliteLedger.open(link, Clock(), wal_sync=noted)
    await ledger.create(new(A, Durability.POWER))
    assert await ledger.append(tokens(A, range(3))) == []
    assert [path.relative_to(tmp_path) for path in synced] == [Path("disk/ledger.db-wal")]
    assert synced[0].stat().st_size > 0
    await ledger.close()


@pytest.mark.parametrize("name", [Path.symlink_to, Path.hardlink_to])
async def test_a_file_is_locked_under_all_of_its_names(
    tmp_path: Path, name: Callable[[Path, Path], None]
) -> None:
    async with opened_file(tmp_path / "ledger.db"):
        name(tmp_path / "other.db", tmp_path / "ledger.db")
        assert "in use by another process" in what_another_process_says(tmp_path / "other.db")


def what_another_process_says(path: Path) -> str:
    """When it opens the ledger at `path`; in this one that would be refused for another reason."""
    code = (
        "import asyncio, sys; from pathlib import Path;"
        " from tailrace.ledger.sqlite.ledger import SqliteLedger;"
        " from tests.ledger.backends import Clock;"
        " asyncio.run(SqliteLedger.open(Path(sys.argv[1]), Clock()))"
    )
    command = [sys.executable, "-c", code, str(path)]
    return subprocess.run(command, capture_output=True, text=True, check=False).stderr


@pytest.mark.parametrize("lost", ["ledger.db", "ledger.db-wal", ""])
@pytest.mark.parametrize("replaced", [False, True], ids=["gone", "replaced"])
async def test_a_ledger_whose_files_have_gone_fails_with_the_next_sweep(
    tmp_path: Path, lost: str, replaced: bool
) -> None:
    folder = tmp_path / "data"
    ledger = await SqliteLedger.open(folder / "ledger.db", Clock())
    try:
        await ledger.create(new(A))
        assert await ledger.expire() == 0
        (folder / lost).rename(tmp_path / "moved")
        if replaced:
            folder.mkdir(exist_ok=True)
            (folder / (lost or "ledger.db")).touch()
        with pytest.raises(LedgerFailed, match=rf"{lost or 'ledger.db'} was moved or deleted"):
            await ledger.expire()
        with pytest.raises(LedgerFailed, match="moved or deleted"):
            await ledger.append(tokens(A, [0]))
        with pytest.raises(LedgerFailed, match="moved or deleted"):
            await ledger.create(new(B))
    finally:
        await ledger.close()


async def test_a_create_in_a_folder_that_is_gone_says_so_before_the_sweep(tmp_path: Path) -> None:
    ledger = await SqliteLedger.open(tmp_path / "data" / "ledger.db", Clock())
    (tmp_path / "data").rename(tmp_path / "moved")
    assert ledger.shortage() is None  # this is not a shortage of space
    with pytest.raises(LedgerFailed, match=r"ledger\.db was moved or deleted"):
        await ledger.create(new(A))
    await ledger.close()


async def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"^ledger\.path: .*ledger\.db: Not a directory"):
        await SqliteLedger.open(tmp_path / "file" / "data" / "ledger.db", Clock())
