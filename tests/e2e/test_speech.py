"""Live speech through a pipeline: the text, and the same text whichever process is killed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.processes import Edge, Origin, running
from tests.e2e.sse import Reading, resume, start
from tests.spoken import captions, needs_espeak, say

pytestmark = [pytest.mark.anyio, needs_espeak]

PIECE_BYTES = 3_200
UTTERANCES = ("one two three", "four five six", "seven eight")
TEXT = "One two three. Four five six. Seven eight."


def speech() -> bytes:
    """Return all utterances as sound."""
    return b"".join(say(one, "en-us+f2") for one in UTTERANCES)


class House:
    """An origin with a pipeline of speech, and an edge."""

    def __init__(self, folder: Path) -> None:
        settings = folder / "tailrace.toml"
        settings.write_text(captions())
        self.origin = Origin(folder / "data", config=settings)
        self.edge = Edge(self.origin)


@pytest.fixture(scope="module")
async def house(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[House]:
    made = House(tmp_path_factory.mktemp("speech"))
    async with running(made.origin, made.edge):
        await made.origin.saw("worker.ready", 1)
        yield made


async def begin(client: httpx.AsyncClient, house: House) -> Reading:
    """Open a stream that has no frame yet."""
    request: dict[str, Any] = {"model": "captions", "prompt": ""}
    return await start(client, house.edge.url, request, stop_after=0)


async def send(
    client: httpx.AsyncClient, house: House, stream: str, pcm: bytes, offset: int, *, last: bool
) -> None:
    """Send sound in pieces of 100 ms."""
    url = f"{house.edge.url}/v1/generate/{stream}/input"
    for at in range(0, len(pcm), PIECE_BYTES):
        piece = pcm[at : at + PIECE_BYTES]
        ends = last and at + PIECE_BYTES >= len(pcm)
        params = {"offset": offset + at, "last": int(ends)}
        (await client.post(url, content=piece, params=params)).raise_for_status()


def revisions(reading: Reading) -> list[dict[str, Any]]:
    """Return all revisions, which are the only events before the end."""
    assert {event.name for event in reading.events[:-1]} == {"revision"}
    return [event.data for event in reading.events[:-1]]


async def test_speech_becomes_text_and_the_same_text_whoever_is_killed(
    house: House, client: httpx.AsyncClient
) -> None:
    pcm = speech()
    quiet = await begin(client, house)
    await send(client, house, quiet.stream, pcm, 0, last=True)
    await resume(client, house.edge.url, quiet)
    made = revisions(quiet)
    assert "".join(one["text"] for one in made if one["final"]) == TEXT
    assert len(made) > 20
    assert [one["stability"] for one in made if one["final"]] == [1.0] * 3
    assert all(0 <= one["stability"] <= 1 for one in made)

    killed = await begin(client, house)
    first, second = len(pcm) // 3 // 2 * 2, len(pcm) // 2 // 2 * 2
    await send(client, house, killed.stream, pcm[:first], 0, last=False)
    reading = asyncio.ensure_future(resume(client, house.edge.url, killed))
    await house.origin.kill_stage("captions")
    await send(client, house, killed.stream, pcm[first:second], first, last=False)
    await house.origin.replace_worker("captions")
    await send(client, house, killed.stream, pcm[second:], second, last=True)
    await reading
    assert [event.data for event in killed.events] == [event.data for event in quiet.events]


async def test_another_format_ends_the_stream_and_names_itself(
    house: House, client: httpx.AsyncClient
) -> None:
    reading = await begin(client, house)
    await send(client, house, reading.stream, b"OggS" + bytes(60), 0, last=True)
    await resume(client, house.edge.url, reading)
    assert reading.end["finish_reason"] == "failed"
    assert "voice-activity failed: the input is Ogg" in reading.end["message"]
