"""Generations, read as streams."""

from pathlib import Path

import pytest

from ledger.frame import Durability, FinishReason, Frame, Revision, StreamEnd, Token, encode
from ledger.interface import Append, NewStream, ObjectKey, Record
from ledger.streams.config import Config
from ledger.streams.settings import StreamSettings
from ledger.streams.state import CONFIG
from tests.ledger.streams.stream_world import TIMEOUT_S, StreamWorld, streams_at
from tests.ledger.streams.test_live import body_of, frames_of, rest_of

pytestmark = pytest.mark.anyio

GENERATION = bytes(range(16))
NAME = GENERATION.hex()
PATIENT = StreamSettings(long_poll_s=TIMEOUT_S, sse_s=TIMEOUT_S)


async def generate(world: StreamWorld, *frames: Frame, first: int = 0) -> None:
    if first == 0:
        await world.ledger.create(NewStream(GENERATION, "", Durability.PROCESS, ttl_s=60.0))
    batch = [
        Append(GENERATION, 1, first + at, Record(encode(frame), (7,)))
        for at, frame in enumerate(frames)
    ]
    assert await world.ledger.append(batch) == []


def stop(index: int) -> StreamEnd:
    return StreamEnd(2, FinishReason.STOP, index, 1)


async def test_a_generation_reads_as_its_text(tmp_path: Path) -> None:
    async with streams_at(tmp_path) as world:
        await generate(world, Token("na", 0), Revision(0, "x", True, 1), Token("ïve", 2))
        answer = await world.ask("GET", NAME)
        assert answer.body == "naïve".encode()
        assert answer.header("content-type") == "text/plain; charset=utf-8"
        assert answer.header("stream-closed") is None
        assert answer.header("stream-next-offset") == f"{3:016d}_{0:016d}"
        assert await world.text(NAME, f"?offset={2:016d}_{0:016d}") == "ïve".encode()
        await generate(world, stop(3), first=3)
        ended = await world.ask("HEAD", NAME)
        assert (ended.status, ended.header("stream-closed")) == (200, "true")
        assert ended.header("stream-next-offset") == f"{3:016d}_{0:016d}"


async def test_a_generation_is_followed_in_every_way(tmp_path: Path) -> None:
    async with streams_at(tmp_path, settings=PATIENT) as world:
        await generate(world, Token("a", 0))
        events = body_of(await world.ask("GET", NAME, query="?offset=-1&live=sse"))
        assert b"data:a\n" in await anext(events)
        await generate(world, Token("b", 1), stop(2), first=1)
        assert b"data:b\n" in await rest_of(events)
        poll = await world.ask("GET", NAME, query="?offset=now&live=long-poll")
        assert (poll.status, poll.header("stream-closed")) == (204, "true")
        assert await frames_of(world, NAME) == [Token("a", 0), Token("b", 1), stop(2)]


async def test_nobody_writes_a_generation(tmp_path: Path) -> None:
    async with streams_at(tmp_path) as world:
        await generate(world, Token("a", 0))
        for method in ("PUT", "POST", "DELETE"):
            answer = await world.ask(method, NAME, b"x", content_type="text/plain")
            assert (answer.status, answer.header("allow")) == (405, "GET, HEAD")
        fork = await world.ask("PUT", "f", stream_forked_from=f"/v1/stream/{NAME}")
        assert fork.status == 409
        assert await world.text(NAME) == b"a"


async def test_a_name_like_a_generations_may_be_a_streams(tmp_path: Path) -> None:
    async with streams_at(tmp_path) as world:
        assert await world.status(NAME) == 404
        assert (await world.put(NAME, b"mine")).status == 201
        assert await world.text(NAME) == b"mine"


async def test_the_ledger_stream_of_an_object_is_not_read_under_its_id(tmp_path: Path) -> None:
    async with streams_at(tmp_path) as world:
        await world.put("a", b"secret")
        values = await world.ledger.objects.get(ObjectKey("stream", "a"), [CONFIG])
        stream = Config.unpack(values[CONFIG]).stream
        assert await world.status(stream.hex()) == 404
        assert stream.hex() not in str((await world.ask("GET", "a")).headers)
