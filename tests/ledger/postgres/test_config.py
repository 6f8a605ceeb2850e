"""Settings and servers that cannot work: the error says what is wrong and what to do."""

import asyncio
import shutil
from pathlib import Path

import psycopg
import pytest

from tailrace.ledger.errors import ConfigError, LedgerFailed, TailraceError
from tailrace.ledger.postgres.ledger import PostgresLedger
from tailrace.ledger.postgres.schema import SCHEMA_VERSION
from tests.ledger.backends import A, Clock, new, tokens
from tests.ledger.postgres_server import PostgresServer

pytestmark = pytest.mark.anyio


async def refused(dsn: str) -> TailraceError:
    """Return the error with which opening fails."""
    with pytest.raises(TailraceError) as raised:
        await PostgresLedger.open(dsn, Clock(), owner="one")
    return raised.value


@pytest.mark.parametrize(
    "dsn", ["nonsense", "postgresql://host:port/x", "hast=localhost", "host=/tmp port=seven"]
)
async def test_what_is_no_dsn_is_a_setting(dsn: str) -> None:
    error = await refused(dsn)
    assert isinstance(error, ConfigError)
    assert error.field == "ledger.url"
    assert error.hint


@pytest.mark.parametrize(
    "dsn",
    [
        "postgresql://user:hunter2@[::1/x",
        "postgresql://user:hunter2@host:99999999/x",
        "password=hunter2 nonsense",
    ],
)
async def test_a_password_is_never_shown(dsn: str) -> None:
    error = await refused(dsn)
    assert isinstance(error, ConfigError)
    shown: BaseException | None = error
    while shown is not None:
        assert "hunter2" not in f"{shown} {shown!r}"
        shown = shown.__cause__


async def test_a_database_or_role_that_is_not_there_is_a_setting(
    database: str, postgres: PostgresServer
) -> None:
    for dsn in (
        postgres.dsn("no_such_database"),
        database.replace("user=postgres", "user=nobody_of_that_name"),
    ):
        error = await refused(dsn)
        assert isinstance(error, ConfigError)
        assert "does not exist" in error.message
        assert error.hint is not None and "database" in error.hint


async def test_a_server_that_is_away_is_worth_another_try(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tailrace.ledger.postgres.server.OPEN_TIMEOUT_S", 0.1)
    error = await refused(f"host={tmp_path} user=postgres dbname=postgres")
    assert isinstance(error, LedgerFailed)
    assert error.retryable
    assert error.hint == "is the server running?"


async def test_a_standby_alone_is_worth_another_try(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be promoted any moment."""
    monkeypatch.setattr("tailrace.ledger.postgres.server.OPEN_TIMEOUT_S", 0.1)
    server = PostgresServer.make()
    try:
        standby = server.standby()
        try:
            error = await refused(standby.dsn())
        finally:
            standby.stop()
    finally:
        server.stop()
    assert isinstance(error, LedgerFailed)
    assert error.retryable


@pytest.mark.parametrize("value", ["off", "local", "remote_write"])
async def test_a_server_that_acknowledges_too_early_is_refused(
    database: str, postgres: PostgresServer, value: str
) -> None:
    name = database.rpartition("=")[2]
    postgres.execute(f"ALTER DATABASE {name} SET synchronous_commit = {value}")
    try:
        error = await refused(database)
    finally:
        postgres.execute(f"ALTER DATABASE {name} RESET synchronous_commit")
    assert isinstance(error, ConfigError)
    assert f"synchronous_commit is '{value}'" in error.message
    assert error.hint is not None and "synchronous_commit = on" in error.hint


async def test_a_server_without_fsync_is_refused() -> None:
    server = PostgresServer.make()
    try:
        server.kill()
        server.start(fsync="off")
        error = await refused(server.dsn())
    finally:
        server.stop()
    assert isinstance(error, ConfigError)
    assert "fsync is off" in error.message


async def test_a_server_that_is_too_old_is_refused(
    database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tailrace.ledger.postgres.schema.MIN_SERVER_VERSION", 99_00_00)
    error = await refused(database)
    assert isinstance(error, ConfigError)
    assert "too old" in error.message
    assert error.hint == "use version 99 or newer"


async def test_a_ledger_of_a_newer_version_is_left_alone(
    database: str, postgres: PostgresServer
) -> None:
    ledger = await PostgresLedger.open(database, Clock(), owner="one")
    await ledger.create(new())
    await ledger.append(tokens(A, range(3)))
    await ledger.close()
    postgres.execute(f"UPDATE tailrace.version SET version = {SCHEMA_VERSION + 1}", database)
    error = await refused(database)
    assert isinstance(error, ConfigError)
    assert f"of version {SCHEMA_VERSION + 1}, not {SCHEMA_VERSION}" in error.message
    assert error.hint is not None and "another release" in error.hint
    assert postgres.execute("SELECT count(*) FROM tailrace.frame", database) == [(3,)]


async def test_a_role_without_rights_is_told_which(database: str, postgres: PostgresServer) -> None:
    postgres.execute("CREATE ROLE guest LOGIN")
    try:
        empty = await refused(database.replace("user=postgres", "user=guest"))
        ledger = await PostgresLedger.open(database, Clock(), owner="one")
        await ledger.close()
        full = await refused(database.replace("user=postgres", "user=guest"))
    finally:
        postgres.execute("DROP ROLE guest")
    for error in (empty, full):
        assert isinstance(error, ConfigError)
        assert "permission denied" in error.message
        assert error.hint is not None and "CREATE on the database" in error.hint


async def test_an_open_that_fails_leaves_no_connection(
    database: str, postgres: PostgresServer
) -> None:
    ledger = await PostgresLedger.open(database, Clock(), owner="one")
    await ledger.close()
    postgres.execute("UPDATE tailrace.version SET version = 99", database)
    await refused(database)
    name = database.rpartition("=")[2]
    left = f"SELECT count(*) = 0 FROM pg_stat_activity WHERE datname = '{name}'"
    await asyncio.to_thread(postgres.until, f"SELECT ({left})::int")


async def test_the_servers_settings_for_the_role_do_not_break_the_ledger(
    database: str, postgres: PostgresServer
) -> None:
    """A statement timeout would cut commits short, a search path hide the tables."""
    name = database.rpartition("=")[2]
    for setting in ("statement_timeout = 1", "search_path = nowhere", "enable_indexscan = off"):
        postgres.execute(f"ALTER DATABASE {name} SET {setting}")
    try:
        ledger = await PostgresLedger.open(database, Clock(), owner="one")
        await ledger.create(new())
        assert await ledger.append(tokens(A, range(2000))) == []
        await ledger.close()
    finally:
        postgres.execute(f"ALTER DATABASE {name} RESET ALL")


def test_the_programs_are_found_or_the_reason_says_how_to_get_them() -> None:
    if shutil.which("postgres") is None and not Path("/usr/lib/postgresql").is_dir():
        with pytest.raises((pytest.skip.Exception, pytest.fail.Exception), match="apt-get install"):
            PostgresServer(Path())
    else:
        assert (PostgresServer(Path()).bin / "initdb").exists()
        assert psycopg.pq.version() > 0
