"""`tailrace usage` as a person or a script would call it, on each kind of ledger."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tailrace.ledger.frame import Durability
from tailrace.ledger.interface import Append, NewStream
from tailrace.ledger.record_extra import EndUsage
from tailrace.ledger.usage import DAY_MS, UsageCounts
from tests.ledger.ledger_files import SECRET, A, B, Place, PostgresPlace, SqlitePlace
from tests.ledger.postgres_server import PostgresServer
from tests.ledger.test_behaviour_usage import end

pytestmark = pytest.mark.anyio

ROOT = Path(__file__).resolve().parents[2]
COMMAND = (sys.executable, "-c", "from tailrace.cli import main; main()", "usage")
ROWS = {
    A: EndUsage(5 * DAY_MS, "acme", "0123456789ab", "demo", "standard", 1, 2, 9),
    B: EndUsage(40 * DAY_MS, "other", "", "demo", "batch", 0, 0, 4),
}


@pytest.fixture(scope="module")
def postgres() -> Iterator[PostgresServer]:
    server = PostgresServer.make()
    try:
        yield server
    finally:
        server.stop()


@pytest.fixture(params=["sqlite", "postgres"])
async def place(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    """Yield each kind of ledger in turn, with two streams that have ended."""
    made: Place
    if request.param == "sqlite":
        made = SqlitePlace(tmp_path)
        await fill(made)
        yield made
        return
    with request.getfixturevalue("postgres").database() as dsn:
        made = PostgresPlace(dsn)
        await fill(made)
        yield made


async def fill(place: Place) -> None:
    ledger = await place.open()
    try:
        for stream, used in ROWS.items():
            await ledger.create(NewStream(stream, "{}", Durability.PROCESS, 60))
            assert await ledger.append([Append(stream, 1, 0, end(0, used))]) == []
    finally:
        await ledger.close()


def usage(place: Place, *arguments: str, status: int = 0) -> str:
    """Return what `tailrace usage …` prints: its error if it is to fail."""
    where = (
        ("--path", str(place.place)) if isinstance(place.place, Path) else ("--url", place.place)
    )
    done = subprocess.run(
        [*COMMAND, *where, *arguments], cwd=ROOT, env=os.environ, capture_output=True, check=False
    )
    assert done.returncode == status, done.stderr.decode()
    assert SECRET not in done.stdout.decode() + done.stderr.decode()
    return (done.stderr if status else done.stdout).decode()


async def test_a_script_gets_one_document(place: Place) -> None:
    told = json.loads(usage(place, "--by", "month,tenant", "--json"))
    assert told["by"] == ["month", "tenant"]
    assert [(row["month"], row["tenant"], row["output_tokens"]) for row in told["usage"]] == [
        ("1970-01", "acme", 9),
        ("1970-02", "other", 9),
    ]
    assert told["total"] == UsageCounts(2, 10, 1, 18, 2, 13, 5)._asdict()


async def test_a_person_gets_a_table_with_a_total(place: Place) -> None:
    lines = usage(place, "--by", "day,key").splitlines()
    heads = "day key streams prompt cached output reasoning delivered unread"
    assert lines[0].split() == heads.split()
    assert lines[1].split() == "1970-01-06 0123456789ab 1 5 1 9 2 9 0".split()
    assert lines[2].split() == "1970-02-10 - 1 5 0 9 0 4 5".split()
    assert lines[3].split() == "total 2 10 1 18 2 13 5".split()


async def test_days_and_columns_choose_rows(place: Place) -> None:
    one = json.loads(usage(place, "--from", "1970-01-07", "--json"))
    assert [row["day"] for row in one["usage"]] == ["1970-02-10"]
    other = json.loads(usage(place, "--to", "1970-01-06", "--json"))
    assert [row["day"] for row in other["usage"]] == ["1970-01-06"]
    assert json.loads(usage(place, "--tenant", "nobody", "--json"))["usage"] == []
    assert json.loads(usage(place, "--by", "", "--json"))["usage"][0]["streams"] == 2


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (("--by", "day,weather"), "by: usage cannot be grouped by 'weather' (use day, month,"),
        (("--by", "day,day"), "by: 'day' is given twice"),
        (("--from", "28.11.2026"), "from: '28.11.2026' is not a day (write it as 2026-11-28"),
        (("--from", "2026-02-30"), "from: '2026-02-30' is not a day"),
        (("--from", "1970-03-01", "--to", "1970-02-01"), "to: 1970-02-01 is before 1970-03-01"),
        (("--from", "2199-01-01"), "from: 2199-01-01 is in the future"),
    ],
)
def test_a_query_that_makes_no_sense_is_refused(
    arguments: tuple[str, ...], error: str, tmp_path: Path
) -> None:
    assert f"error: {error}" in usage(SqlitePlace(tmp_path), *arguments, status=2)
