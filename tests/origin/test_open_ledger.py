import socket
import sys
from pathlib import Path

import pytest

from ledger.errors import ConfigError
from ledger.sqlite.ledger import SqliteLedger
from origin.config import LedgerConfig
from origin.open_ledger import open_ledger, owner_name

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


async def test_without_the_driver_it_is_said_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [*sys.modules]:
        if name.startswith("ledger.postgres.ledger"):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "psycopg", None)
    config = LedgerConfig.load(url="postgresql://db.example/tailrace")
    with pytest.raises(ConfigError, match=r"pip install 'tailrace\[postgres\]'"):
        await open_ledger(config, tmp_path, now_ms)


def test_an_owner_is_told_apart_from_all_before_it() -> None:
    assert owner_name("blue", bytes) == "blue:00000000"
    assert owner_name(None).startswith(f"{socket.gethostname()}:")
    assert owner_name("blue") != owner_name("blue")
