"""Reads of a stream beside appends to it."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tailrace.ledger.frame import (
    Durability,
    FinishReason,
    Frame,
    Revision,
    StreamEnd,
    Token,
    encode,
)
from tailrace.ledger.interface import Append, Ledger, NewStream, ObjectKey, Record, StreamKind
from tailrace.ledger.objects.object import ObjectRequest, ObjectResponse
from tailrace.ledger.objects.runtime import ObjectRuntime
from tailrace.origin.streams.config import StreamConfig
from tailrace.origin.streams.object import stream_class
from tailrace.origin.streams.protocol import NEXT_OFFSET, TTL
from tailrace.origin.streams.settings import StreamSettings
from tailrace.origin.streams.state import CONFIG
from tests.ledger.backends import A, PostgresBackend, token, tokens
from tests.ledger.postgres_server import PostgresServer
from tests.origin.streams.stream_world import TIMEOUT_S, StreamWorld, streams_at
from tests.origin.streams.test_live import body_of, frames_of, rest_of

pytestmark = pytest.mark.anyio

GENERATION = bytes(range(16))
NAME = GENERATION.hex()
PATIENT = StreamSettings(long_poll_s=TIMEOUT_S, sse_s=TIMEOUT_S)

pytestmark = pytest.mark.anyio

URL = "http://host/v1/stream/"
READERS = 20
APPENDS = 40


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
        stream = StreamConfig.unpack(values[CONFIG]).stream
        assert await world.status(stream.hex()) == 404
        assert stream.hex() not in str((await world.ask("GET", "a")).headers)


def now_ms() -> int:
    return time.time_ns() // 1_000_000


@asynccontextmanager
async def origin(ledger: Ledger) -> AsyncIterator[ObjectRuntime]:
    """Yield the streams of one origin."""
    classes = {"stream": stream_class(StreamSettings(long_poll_s=0.1))}
    runtime = ObjectRuntime(ledger, classes, now_ms, os.urandom)
    try:
        yield runtime
    finally:
        await runtime.close()
        await ledger.close()


async def ask(
    runtime: ObjectRuntime, method: str, name: str, body: bytes = b"", query: str = "", **more: str
) -> ObjectResponse:
    headers = (("content-type", "text/plain"), *((k.replace("_", "-"), v) for k, v in more.items()))
    request = ObjectRequest(method, f"{URL}{name}{query}", headers, body)
    return await runtime.fetch(ObjectKey("stream", name), request)


async def test_readers_on_another_origin_never_reset_the_writer(database: str) -> None:
    backend = PostgresBackend(database)
    async with origin(await backend.open()) as one, origin(await backend.open()) as other:
        assert (await ask(one, "PUT", "s")).status == 201
        writing = True

        async def read(number: int) -> None:
            query = ("?offset=-1", "?offset=now&live=long-poll", "?offset=-1&live=sse")[number % 3]
            while writing:
                answers = await ask(other, "HEAD", "s"), await ask(other, "GET", "s", query=query)
                assert {answer.status for answer in answers} <= {200, 204}
                assert other.resident == 0
                if not isinstance(answers[1].body, bytes):
                    assert await anext(answers[1].body)

        async with asyncio.TaskGroup() as group:
            for number in range(READERS):
                group.create_task(read(number))
            for index in range(APPENDS):
                assert (await ask(one, "POST", "s", b"%d," % index)).status == 204
            writing = False
        text = b"".join(b"%d," % index for index in range(APPENDS))
        assert (await ask(other, "GET", "s")).body == text


async def test_what_was_just_written_is_read_on_another_origin(database: str) -> None:
    backend = PostgresBackend(database)
    async with origin(await backend.open()) as one, origin(await backend.open()) as other:
        assert (await ask(other, "HEAD", "s")).status == 404
        await ask(one, "PUT", "s", b"a")
        assert (await ask(other, "GET", "s")).body == b"a"
        written = await ask(one, "POST", "s", b"b")
        tip = (await ask(other, "HEAD", "s")).header(NEXT_OFFSET)
        assert tip == written.header(NEXT_OFFSET)
        assert (await ask(other, "GET", "s")).body == b"ab"
        await ask(one, "DELETE", "s")
        assert (await ask(other, "GET", "s")).status == 404


async def test_what_is_not_there_leaves_nothing_behind_where_it_was_asked_for(
    database: str, postgres: PostgresServer
) -> None:
    async with origin(await PostgresBackend(database).open()) as runtime:
        for number in range(300):
            method = ("GET", "HEAD")[number % 2]
            assert (await ask(runtime, method, f"absent {number}")).status == 404
        assert postgres.execute("SELECT count(*) FROM tailrace.object", database) == [(0,)]
        assert runtime.resident == 0


async def test_reads_take_nobodys_ownership_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tailrace.ledger.sqlite.objects.MAX_OWNED", 2)
    async with streams_at(tmp_path) as world:
        await world.put("s", b"x")
        epoch = (await world.ledger.objects.claim(ObjectKey("other", "o"))).epoch
        for number in range(4):
            assert await world.status(f"absent {number}") == 404
            assert await world.text("s") == b"x"
        assert await world.ledger.objects.owns(ObjectKey("other", "o"), epoch)


async def test_a_generation_is_read_without_an_object(tmp_path: Path) -> None:
    async with streams_at(tmp_path) as world:
        new = NewStream(A, "{}", Durability.PROCESS, 60.0, kind=StreamKind.GENERATION)
        await world.ledger.create(new)
        await world.ledger.append(tokens(A, [0]))
        response = await world.ask("GET", A.hex(), query="?offset=-1&live=frames")
        assert not isinstance(response.body, bytes)
        assert await anext(response.body) == token(0).frame
        assert await world.status(A.hex()) == 200
        assert world.runtime.resident == 0


async def test_a_stream_that_reads_keep_alive_hears_of_each(tmp_path: Path) -> None:
    """Every read renews a TTL to the ms, though no reader holds the object."""
    async with streams_at(tmp_path) as world:
        await world.put("s", b"x", **{TTL.replace("-", "_"): "10"})
        for _ in range(5):
            world.clock.now += 9_999
            assert await world.text("s") == b"x"
        world.clock.now += 9_999
        assert await world.status("s") == 200  # which keeps nothing alive
        world.clock.now += 1
        assert await world.status("s", "GET") == 404
