"""`tailrace ledger` as a person or a script would call it."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ledger.frame import split
from tests.ledger.ledger_files import A, B, append, editing, end, three_streams, token

pytestmark = pytest.mark.anyio

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
async def path(tmp_path: Path) -> Path:
    path = tmp_path / "ledger.db"
    await (await three_streams(path)).close()
    return path


def tailrace(*arguments: str | Path, fails: bool = False) -> str:
    """What `tailrace ledger …` prints; its error where it is to fail."""
    code = "from edge.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code, "ledger", *map(str, arguments)],
        cwd=ROOT,
        capture_output=True,
        check=False,
    )
    assert (done.returncode != 0) == fails, done.stderr.decode()
    return (done.stderr if fails and done.stderr else done.stdout).decode()


def answer(*arguments: str | Path) -> Any:
    return json.loads(tailrace(*arguments, "--json"))


async def test_status_counts_what_is_there(path: Path) -> None:
    figures = answer("status", "--path", path)
    assert (figures["streams"], figures["ended"], figures["unfinished"]) == (3, 1, 2)
    assert figures["frames"] >= 1201
    assert figures["file_bytes"] == path.stat().st_size
    assert "streams          3" in tailrace("status", "--path", path)


async def test_show_tells_of_one_stream(path: Path) -> None:
    told = answer("show", A.hex(), "--path", path)
    assert told["state"] == "ended: length"
    assert (told["frames"], told["tokens"]) == (1201, 2400)
    assert told["text"].startswith("The tide turns é…")
    assert told["recipe"] == {"model": "demo"}
    assert "unfinished" in tailrace("show", B.hex(), "--path", path)


async def test_tail_prints_from_an_index_on_and_ends_with_the_stream(path: Path) -> None:
    assert tailrace("tail", A.hex(), "--after", "1196", "--path", path) == " turns é…\n"
    lines = tailrace("tail", A.hex(), "--after", "1198", "--json", "--path", path).splitlines()
    assert [json.loads(line)["type"] for line in lines] == ["Token", "StreamEnd"]
    assert json.loads(lines[0])["ids"] == [1199, 7]


async def test_tail_follows_a_stream_that_its_owner_still_writes(tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
    ledger = await three_streams(path)
    try:
        follower = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", "from edge.cli import main; main()"),
            *("ledger", "tail", B.hex(), "--json", "--path", str(path)),
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


async def test_verify_says_whole_or_names_what_is_not_and_fails(path: Path) -> None:
    assert "3 streams (1 ended), 1206 frames, 2410 tokens: whole" in tailrace(
        "verify", "--path", path
    )
    assert answer("verify", "--path", path)["whole"] is True
    with editing(path) as file:
        file.execute("UPDATE stream SET ended = 1 WHERE id = ?", (B,))
    said = tailrace("verify", "--path", path, fails=True)
    assert B.hex() in said
    assert "has no StreamEnd" in said


async def test_export_gives_json_lines_frames_and_a_copy(path: Path, tmp_path: Path) -> None:
    lines = [json.loads(line) for line in tailrace("export", "--path", path).splitlines()]
    assert sum("kind" in line for line in lines) == 3
    assert [line["index"] for line in lines if line.get("type") and line["stream"] == B.hex()] == [
        0, 1, 2, 3, 4,
    ]  # fmt: skip
    frames = tmp_path / "b.frames"
    tailrace("export", B.hex(), "--format", "frames", "--out", frames, "--path", path)
    assert split(frames.read_bytes()) == [token(index).frame for index in range(5)]
    copy = tmp_path / "copy.db"
    tailrace("export", "--format", "copy", "--out", copy, "--path", path)
    assert answer("verify", "--path", copy)["frames"] == 1206


async def test_gc_removes_what_has_expired_and_the_file_shrinks(path: Path) -> None:
    assert answer("gc", "--dry-run", "--path", path)["expired_streams"] == 1
    assert answer("gc", "--path", path)["removed_streams"] == 1
    assert answer("status", "--path", path)["streams"] == 2


async def test_a_ledger_in_use_is_read_but_not_collected(tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
    ledger = await three_streams(path)
    try:
        assert answer("status", "--path", path)["streams"] == 3
        assert "in use by another process" in tailrace("gc", "--path", path, fails=True)
    finally:
        await ledger.close()


async def test_what_cannot_be_is_said_in_one_line(path: Path, tmp_path: Path) -> None:
    assert "there is no ledger at" in tailrace("status", "--path", tmp_path / "no.db", fails=True)
    assert "it has 32 hex digits" in tailrace("show", "x", "--path", path, fails=True)
    assert "no stream" in tailrace("show", "0" * 32, "--path", path, fails=True)
    assert "jsonl, frames or copy" in tailrace(
        "export", "--format", "xml", "--path", path, fails=True
    )
    text = tmp_path / "text.db"
    text.write_text("this is no database, whatever its name says")
    assert "not a database" in tailrace("verify", "--path", text, fails=True)
