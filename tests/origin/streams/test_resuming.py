"""The invariant of PROTOCOL.md in the Durable Streams protocol, for generations and other streams.

For every offset, the data before it and the data of a read from it are together all of the stream.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from tailrace.ledger.frame import (
    Chunk,
    FinishReason,
    Frame,
    Logged,
    Notice,
    Reasoning,
    Revision,
    Score,
    ScoredToken,
    StreamEnd,
    Token,
    TokenScores,
    ToolCall,
    encode,
    index_of,
)
from tailrace.origin.streams.chunks import piece
from tailrace.origin.streams.offsets import Offset
from tests.origin.streams.stream_world import StreamWorld, streams_at
from tests.origin.streams.test_live import PATIENT, body_of, frames_of, parsed, rest_of
from tests.origin.streams.test_read import NAME, generate

pytestmark = pytest.mark.anyio

SCORES = (TokenScores(Score(7, b" s", -0.5)),)
OUTPUT: list[Callable[[int], Logged]] = [
    lambda at: Notice("loading", "1 s", at),
    lambda at: Reasoning("hm", at),
    lambda at: Token("One", at),
    lambda at: Token(' "naïve"\n\n€', at),
    lambda at: ScoredToken(" scored", SCORES, at),
    lambda at: Revision(4, " revised", True, at),
    lambda at: Token("\n", at),
    lambda at: ToolCall(0, "call_1", "add", '{"a": 1}', at),
    lambda at: Token(" last", at),
    lambda at: StreamEnd(9, FinishReason.STOP, at, 3),
]
GENERATED = [make(at) for at, make in enumerate(OUTPUT)]
CHUNKS = ("One", " naïve\n\n€", "\n", " last")
STORED: list[Logged] = [Chunk(text.encode(), True, at) for at, text in enumerate(CHUNKS)]
STORED.append(StreamEnd(0, FinishReason.STOP, len(CHUNKS), 0))
LOGS = {NAME: GENERATED, "stored": STORED}

Read = Callable[[StreamWorld, str, Offset], Awaitable[bytes]]


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[StreamWorld]:
    """Yield a ledger with a generation and a stream of an object, which have both ended."""
    async with streams_at(tmp_path, settings=PATIENT) as made:
        await generate(made, *GENERATED)
        await made.put("stored")
        for text in CHUNKS[:-1]:
            await made.post("stored", text.encode())
        await made.post("stored", CHUNKS[-1].encode(), stream_closed="true")
        yield made


def places(log: list[Logged]) -> list[tuple[Offset, bytes]]:
    """Return every offset at which a character begins, each with the data before it."""
    found, before = [], b""
    for frame in log[:-1]:
        text = piece(encode(frame)).data.decode()
        for at in range(max(1, len(text))):
            offset = Offset(index_of(encode(frame)), len(text[:at].encode()))
            found.append((offset, before + text[:at].encode()))
        before += text.encode()
    return [*found, (Offset(len(log) - 1), before)]


async def page(world: StreamWorld, name: str, offset: Offset) -> bytes:
    return await world.text(name, f"?offset={offset}")


async def long_polls(world: StreamWorld, name: str, offset: Offset) -> bytes:
    """Read page after page, each from where the one before says that it ends."""
    data, at, is_closed = b"", str(offset), False
    while not is_closed:
        answer = await world.ask("GET", name, query=f"?offset={at}&live=long-poll")
        assert isinstance(answer.body, bytes)
        data += answer.body
        at = answer.header("stream-next-offset") or ""
        is_closed = answer.header("stream-closed") == "true"
    return data


async def events(world: StreamWorld, name: str, offset: Offset) -> bytes:
    """Read events; a reader that is cut off after any of them goes on from its offset."""
    answer = await world.ask("GET", name, query=f"?offset={offset}&live=sse")
    data, places = "", list[tuple[str, str]]()
    for kind, value in parsed(await rest_of(body_of(answer))):
        if kind == "data":
            data += value
        else:
            places.append((data, json.loads(value)["streamNextOffset"]))
    for before, at in places:
        assert before.encode() + await world.text(name, f"?offset={at}") == data.encode()
    return data.encode()


READS: dict[str, Read] = {"page": page, "long polls": long_polls, "events": events}


@pytest.mark.parametrize("name", LOGS)
@pytest.mark.parametrize("way", READS)
async def test_the_data_before_an_offset_and_from_it_are_the_whole(
    world: StreamWorld, way: str, name: str
) -> None:
    whole = await world.text(name, "?offset=-1")
    assert len(whole) > 10
    for offset, before in places(LOGS[name]):
        assert before + await READS[way](world, name, offset) == whole, offset


@pytest.mark.parametrize("name", LOGS)
async def test_the_frames_before_an_offset_and_from_it_are_the_whole(
    world: StreamWorld, name: str
) -> None:
    whole: list[Frame] = await frames_of(world, name)
    assert whole == LOGS[name]
    for index in range(len(whole)):
        assert whole[:index] + await frames_of(world, name, str(Offset(index))) == whole
