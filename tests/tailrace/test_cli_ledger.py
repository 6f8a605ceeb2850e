"""`tailrace ledger` as a person or a script would call it, on each kind of ledger."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tailrace.commands.ledger import _readable
from tailrace.ledger.frame import split
from tests.ledger.ledger_files import (
    SECRET,
    A,
    B,
    Place,
    PostgresPlace,
    SqlitePlace,
    append,
    end,
    three_streams,
    token,
)
from tests.ledger.postgres_server import PostgresServer

pytestmark = pytest.mark.anyio

ROOT = Path(__file__).resolve().parents[2]
COMMAND = (sys.executable, "-c", "from tailrace.cli import main; main()", "ledger")


@pytest.fixture(scope="module")
def postgres() -> Iterator[PostgresServer]:
    server = PostgresServer.make()
    try:
        yield server
    finally:
        server.stop()


@pytest.fixture(params=["sqlite", "postgres"])
def empty(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    """Yield each kind of place in turn, without a ledger."""
    if request.param == "sqlite":
        yield SqlitePlace(tmp_path)
        return
    with request.getfixturevalue("postgres").database() as dsn:
        yield PostgresPlace(dsn)


@pytest.fixture
async def ledger(empty: Place) -> Place:
    await (await three_streams(empty)).close()
    return empty


@pytest.fixture
async def file(tmp_path: Path) -> Path:
    place = SqlitePlace(tmp_path)
    await (await three_streams(place)).close()
    return place.place


def where(place: Path | str) -> tuple[str, str]:
    """Return the option that names the ledger."""
    return ("--path", str(place)) if isinstance(place, Path) else ("--url", place)


def tailrace(*arguments: str | Path, fails: bool = False, **environment: str) -> str:
    """Return what `tailrace ledger …` prints; its error where it is to fail. Never a password."""
    done = subprocess.run(
        [*COMMAND, *map(str, arguments)],
        cwd=ROOT,
        env=os.environ | environment,
        capture_output=True,
        check=False,
    )
    assert (done.returncode != 0) == fails, done.stderr.decode()
    said = done.stdout.decode() + done.stderr.decode()
    assert "Traceback" not in said
    assert SECRET not in said
    assert "s3cret" not in said
    return (done.stderr if fails and done.stderr else done.stdout).decode()


def on(ledger: Place, *arguments: str | Path, fails: bool = False) -> str:
    return tailrace(*arguments, *where(ledger.place), fails=fails)


def answer(ledger: Place, *arguments: str | Path) -> Any:
    return json.loads(on(ledger, *arguments, "--json"))


async def test_status_counts_what_is_there(ledger: Place) -> None:
    figures = answer(ledger, "status")
    assert (figures["streams"], figures["ended"], figures["unfinished"]) == (3, 1, 2)
    assert (figures["objects"], figures["alarms"]) == (1, 0)
    assert figures["frames"] >= 1201
    assert figures["bytes_per_frame"] > 10
    assert "streams          3" in on(ledger, "status")


async def test_status_tells_of_the_file(file: Path) -> None:
    figures = json.loads(tailrace("status", "--json", "--path", file))
    assert figures["ledger"] == str(file)
    assert figures["file_bytes"] == file.stat().st_size


async def test_show_tells_of_one_stream(ledger: Place) -> None:
    told = answer(ledger, "show", A.hex())
    assert told["state"] == "ended: length"
    assert (told["frames"], told["tokens"]) == (1201, 2400)
    assert told["text"].startswith("The tide turns é…")
    assert told["recipe"] == {"model": "demo"}
    assert told["stored_bytes"] >= told["frame_bytes"]
    assert "unfinished" in on(ledger, "show", B.hex())


def test_durations_are_no_dates() -> None:
    assert _readable("created_ms", 1_000) == "1970-01-01T00:00:01+00:00"
    assert _readable("next_expiry_ms", 2_000) == "1970-01-01T00:00:02+00:00"
    for name in ("queue_ms", "first_ms", "whole_ms", "gap_p50_ms", "ttl_ms"):
        assert _readable(name, 1_234) == "1,234 ms"


async def test_tail_prints_from_an_index_on_and_ends_with_the_stream(ledger: Place) -> None:
    assert on(ledger, "tail", A.hex(), "--after", "1196") == " turns é…\n"
    lines = on(ledger, "tail", A.hex(), "--after", "1198", "--json").splitlines()
    assert [json.loads(line)["type"] for line in lines] == ["Token", "StreamEnd"]
    assert json.loads(lines[0])["ids"] == [1199, 7]
    assert on(ledger, "tail", B.hex(), "--no-follow") == "The tide turns é…\n"


async def test_tail_follows_a_stream_that_its_owner_still_writes(empty: Place) -> None:
    ledger = await three_streams(empty)
    try:
        follower = await asyncio.create_subprocess_exec(
            *(*COMMAND, "tail", B.hex(), "--json", *where(empty.place)),
            cwd=ROOT,
            stdout=asyncio.subprocess.PIPE,
        )
        assert follower.stdout is not None
        seen = [json.loads(await follower.stdout.readline()) for _ in range(5)]
        await append(ledger, B, [token(5), end(6)])
        seen += [json.loads(line) async for line in follower.stdout]
        assert await follower.wait() == 0
    finally:
        await ledger.close()
    assert [line["index"] for line in seen] == list(range(7))


async def test_verify_says_whole_or_names_what_is_not_and_fails(ledger: Place) -> None:
    assert "3 streams (1 ended), 1206 frames, 2410 tokens: whole" in on(ledger, "verify")
    assert answer(ledger, "verify")["whole"] is True
    ledger.mark_ended(B)
    said = on(ledger, "verify", fails=True)
    assert B.hex() in said
    assert "has no StreamEnd" in said


async def test_export_gives_json_lines_and_frames(ledger: Place, tmp_path: Path) -> None:
    lines = [json.loads(line) for line in on(ledger, "export").splitlines()]
    assert sum("kind" in line for line in lines) == 3
    assert [line["index"] for line in lines if line.get("type") and line["stream"] == B.hex()] == [
        0, 1, 2, 3, 4,
    ]  # fmt: skip
    frames = tmp_path / "b.frames"
    on(ledger, "export", B.hex(), "--format", "frames", "--out", frames)
    assert split(frames.read_bytes()) == [token(index).frame for index in range(5)]


async def test_a_file_is_copied_and_a_database_is_not(ledger: Place, tmp_path: Path) -> None:
    copy = tmp_path / "copy.db"
    if isinstance(ledger.place, str):
        said = on(ledger, "export", "--format", "copy", "--out", copy, fails=True)
        assert "pg_dump --schema=tailrace" in said
        assert not copy.exists()
        return
    on(ledger, "export", "--format", "copy", "--out", copy)
    assert json.loads(tailrace("verify", "--json", "--path", copy))["frames"] == 1206


async def test_gc_removes_what_has_expired(ledger: Place) -> None:
    assert answer(ledger, "gc", "--dry-run")["expired_streams"] == 1
    assert answer(ledger, "gc")["removed_streams"] == 1
    assert answer(ledger, "status")["streams"] == 2
    assert answer(ledger, "verify")["whole"] is True


async def test_a_file_in_use_is_read_but_not_collected(tmp_path: Path) -> None:
    place = SqlitePlace(tmp_path)
    ledger = await three_streams(place)
    try:
        assert answer(place, "status")["streams"] == 3
        assert "in use by another process" in on(place, "gc", fails=True)
    finally:
        await ledger.close()


async def test_a_file_that_is_behind_is_named_until_it_is_accepted(tmp_path: Path) -> None:
    place = SqlitePlace(tmp_path)
    await (await three_streams(place)).close()
    os.truncate(place.place, 0)
    assert "it is empty, but had commits" in on(place, "verify", fails=True)
    assert "will continue with what" in tailrace("accept", "--path", place.place)
    assert "it is empty" not in on(place, "verify", fails=True)


async def test_a_shared_ledger_is_collected_beside_its_origins(postgres: PostgresServer) -> None:
    """A running origin keeps its streams, and is told which ones were removed."""
    with postgres.database() as dsn:
        place = PostgresPlace(dsn)
        ledger = await three_streams(place)
        try:
            told = await asyncio.to_thread(answer, place, "gc")
            assert told["removed_streams"] == 1
            assert await ledger.unfinished() == []
            await append(ledger, B, [token(5), end(6)])
            assert (await ledger.info(B)).epoch == 1
            figures = await asyncio.to_thread(answer, place, "status")
            assert (figures["origins"], figures["unfinished"]) == (1, 1)
        finally:
            await ledger.close()


async def test_the_ledger_is_named_by_the_settings_or_the_environment(
    postgres: PostgresServer, tmp_path: Path, file: Path
) -> None:
    with postgres.database() as dsn:
        place = PostgresPlace(dsn)
        await (await three_streams(place)).close()
        settings = tmp_path / "tailrace.toml"
        settings.write_text(f"[ledger]\nurl = {json.dumps(place.place)}\n")
        # Otherwise autovacuum may make the tables larger between the two commands.
        postgres.execute("VACUUM", dsn)
        said = json.loads(tailrace("status", "--json", "--config", settings))
        assert (said["streams"], "partitions" in said) == (3, True)
        assert "dbname=" in said["ledger"]
        assert said == json.loads(tailrace("status", "--json", TAILRACE_LEDGER_URL=place.place))
        on_file = tailrace("status", "--json", "--path", file, TAILRACE_LEDGER_URL=place.place)
        assert json.loads(on_file)["ledger"] == str(file)
        told = tailrace("gc", "--json", "--path", file, TAILRACE_LEDGER_URL=place.place)
        assert json.loads(told)["removed_streams"] == 1
        told = tailrace("gc", "--json", TAILRACE_LEDGER_URL=place.place)
        assert json.loads(told)["removed_streams"] == 1


async def test_what_cannot_be_is_said_in_one_line(ledger: Place) -> None:
    assert "a stream id has 32 hex digits" in on(ledger, "show", "x", fails=True)
    assert "no stream" in on(ledger, "show", "0" * 32, fails=True)
    assert "jsonl, frames or copy" in on(ledger, "export", "--format", "xml", fails=True)
    both = ("--path", "x", "--url", "postgresql://x")
    assert "not both" in tailrace("status", *both, fails=True)


async def test_what_is_no_ledger_is_said_and_not_made_into_one(
    empty: Place, tmp_path: Path
) -> None:
    for command in ("status", "verify", "gc"):
        assert "there is no ledger" in on(empty, command, fails=True)
    text = tmp_path / "text.db"
    text.write_text("this is no database, whatever its name says")
    assert "not a database" in tailrace("verify", "--path", text, fails=True)


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://me:s3cret@/x?host=/nowhere",
        "postgresql://me:s3cret%zz@db.example/x",
    ],
)
@pytest.mark.parametrize("command", ["status", "gc"])
def test_a_url_that_cannot_work_is_not_quoted(command: str, url: str) -> None:
    assert "ledger.url" in tailrace(command, "--url", url, fails=True) or "nowhere" in url
    tailrace(command, TAILRACE_LEDGER_URL=url, fails=True)
