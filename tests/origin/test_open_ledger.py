"""Opening the ledger that the settings name."""

import socket
import sys
from pathlib import Path

import pytest

from tailrace.ledger.errors import ConfigError
from tailrace.ledger.sqlite.ledger import SqliteLedger
from tailrace.origin.config import LedgerConfig
from tailrace.origin.open_ledger import SEEN_NAME, open_ledger, owner_name

pytestmark = pytest.mark.anyio


def now_ms() -> int:
    return 1000


@pytest.mark.parametrize("path", [None, Path("elsewhere") / "streams.db"])
async def test_without_a_url_it_is_a_file(tmp_path: Path, path: Path | None) -> None:
    config = LedgerConfig(path=path and tmp_path / path)
    ledger = await open_ledger(config, tmp_path / "data", now_ms)
    assert isinstance(ledger, SqliteLedger)
    await ledger.close()
    assert (tmp_path / (path or Path("data") / "ledger.db")).exists()


@pytest.mark.parametrize("moved", [False, True], ids=["in_its_place", "with_the_data_folder"])
async def test_an_empty_ledger_does_not_take_the_place_of_one_that_is_gone(
    tmp_path: Path, moved: bool
) -> None:
    data, config = tmp_path / "data", LedgerConfig()
    for _ in range(2):
        await (await open_ledger(config, data, now_ms)).close()
    if moved:
        data = data.rename(tmp_path / "elsewhere")
    (data / "ledger.db").rename(tmp_path / "kept")
    with pytest.raises(ConfigError, match="has disappeared") as error:
        await open_ledger(config, data, now_ms)
    assert str(data / SEEN_NAME) in str(error.value.hint)
    assert not (data / "ledger.db").exists()
    (tmp_path / "kept").rename(data / "ledger.db")
    await (await open_ledger(config, data, now_ms)).close()
    for path in data.glob("ledger.db*"):
        path.unlink()
    await (await open_ledger(config, data, now_ms)).close()


async def test_a_link_to_a_disk_that_is_not_mounted_is_no_new_ledger(tmp_path: Path) -> None:
    data, disk = tmp_path / "data", tmp_path / "disk"
    for folder in (data, disk):
        folder.mkdir()
    (data / "ledger.db").symlink_to(disk / "tailrace" / "ledger.db")
    with pytest.raises(ConfigError, match=r"is a link to .*, and there is no folder"):
        await open_ledger(LedgerConfig(), data, now_ms)
    assert list(disk.iterdir()) == []
    (disk / "tailrace").mkdir()
    await (await open_ledger(LedgerConfig(), data, now_ms)).close()
    (disk / "tailrace").rename(tmp_path / "unmounted")
    (disk / "tailrace").mkdir()  # the mount point exists, but its disk is not mounted
    with pytest.raises(ConfigError, match="has disappeared"):
        await open_ledger(LedgerConfig(), data, now_ms)
    assert list((disk / "tailrace").iterdir()) == []


async def test_without_the_driver_it_is_said_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [*sys.modules]:
        if name.startswith("tailrace.ledger.postgres.ledger"):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "psycopg", None)
    config = LedgerConfig.load(url="postgresql://db.example/tailrace")
    with pytest.raises(ConfigError, match=r"pip install 'tailrace\[postgres\]'"):
        await open_ledger(config, tmp_path, now_ms)


async def test_a_missing_module_of_our_own_is_not_taken_for_the_driver(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tailrace.ledger.postgres.ledger", None)
    config = LedgerConfig.load(url="postgresql://db.example/tailrace")
    with pytest.raises(ModuleNotFoundError, match=r"tailrace\.ledger\.postgres"):
        await open_ledger(config, tmp_path, now_ms)


def test_an_owner_is_told_apart_from_all_before_it() -> None:
    assert owner_name("blue", bytes) == "blue:00000000"
    assert owner_name(None).startswith(f"{socket.gethostname()}:")
    assert owner_name("blue") != owner_name("blue")
