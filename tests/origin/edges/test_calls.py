"""Calls over a real link; the objects are the test's."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tailrace.ledger.errors import Conflict, LedgerFailed
from tailrace.ledger.frame import (
    LINK_CODEC,
    MAX_LINK_FRAME_BYTES,
    SCHEMA_HASH,
    Answer,
    Body,
    BodyEnd,
    Call,
    Caller,
    Cancel,
    Credit,
    Detach,
    Frame,
    Header,
    Hello,
    Open,
    Resume,
    Status,
    StreamEnd,
    StreamError,
    encode,
)
from tailrace.ledger.interface import ObjectKey
from tailrace.ledger.links.cached_tokens import CACHED_TOKENS
from tailrace.ledger.links.token_count import TOKEN_COUNT
from tailrace.ledger.objects.object import ObjectRequest, ObjectResponse
from tailrace.origin.edges.calls import MAX_PIECE_BYTES
from tailrace.origin.streams.fork import TAKE
from tailrace.origin.subscriptions.index import SIGN
from tailrace.origin.subscriptions.request import INDEX_KEY
from tailrace.origin.workers.worker_frame import TokenCounts
from tests.origin.edges.test_link import Client, House, opened, serving
from tests.origin.generations.test_usage import finish

pytestmark = pytest.mark.anyio

URL = "http://edge/v1/stream/a"


@pytest.fixture
async def house(tmp_path: Path, checkpoint: Path) -> AsyncIterator[House]:
    async with serving(tmp_path, checkpoint) as made:
        yield made


def a_call(method: str = "GET", body: bytes = b"", credit: int = 16, name: str = "a") -> Call:
    return Call("stream", name, method, URL, (Header("if-none-match", "x"),), body, credit)


def answering(
    response: ObjectResponse,
) -> Callable[[ObjectRequest], Awaitable[ObjectResponse]]:
    async def answer(_request: ObjectRequest) -> ObjectResponse:
        return response

    return answer


class LiveBody:
    """A body that gives what the test puts in, and knows when it was closed."""

    def __init__(self) -> None:
        self.parts: asyncio.Queue[bytes | Exception] = asyncio.Queue()
        self.given = 0
        self.closed = asyncio.Event()

    def __aiter__(self) -> LiveBody:
        return self

    async def __anext__(self) -> bytes:
        part = await self.parts.get()
        if isinstance(part, Exception):
            raise part
        self.given += 1
        return part

    async def aclose(self) -> None:
        self.closed.set()


async def frames(client: Client, count: int) -> list[Frame]:
    return [(await client.next())[1] for _ in range(count)]


# ---- the request and the answer ----


async def test_a_call_reaches_its_object_whole_and_the_answer_comes_back(house: House) -> None:
    house.objects.answer = answering(ObjectResponse(201, (("location", URL),), b"made"))
    client = await house.greeted()
    client.send(a_call("PUT", b"\x00\xff"), 7)
    head, body, end = [await client.next() for _ in range(3)]
    [(key, request)] = house.objects.requests
    assert key == ObjectKey("stream", "a")
    assert request == ObjectRequest("PUT", URL, (("if-none-match", "x"),), b"\x00\xff")
    length = Header("content-length", "4")
    assert head == (7, Answer(201, (Header("location", URL), length)))
    assert (body, end) == ((7, Body(b"made")), (7, BodyEnd()))


@pytest.mark.parametrize("status", [204, 304])
async def test_an_answer_without_content_has_no_length(house: House, status: int) -> None:
    house.objects.answer = answering(ObjectResponse(status))
    client = await house.greeted()
    client.send(a_call("POST"), 1)
    assert await frames(client, 2) == [Answer(status), BodyEnd()]


async def test_the_length_of_what_head_leaves_out_is_the_objects_to_say(house: House) -> None:
    house.objects.answer = answering(ObjectResponse(200, (("content-length", "9"),)))
    client = await house.greeted()
    client.send(a_call("HEAD"), 1)
    assert await frames(client, 2) == [Answer(200, (Header("content-length", "9"),)), BodyEnd()]
    house.objects.answer = answering(ObjectResponse(200))
    client.send(a_call("HEAD"), 2)
    assert await frames(client, 2) == [Answer(200), BodyEnd()]


async def test_a_call_of_the_largest_body_fits_the_link(house: House) -> None:
    house.objects.answer = answering(ObjectResponse(204))
    client = await house.greeted()
    body = bytes(MAX_LINK_FRAME_BYTES - 200)
    client.send_call(a_call("POST", body), 1)
    assert await frames(client, 2) == [Answer(204), BodyEnd()]
    assert len(house.objects.requests[0][1].body) == len(body)


async def test_an_error_of_the_tree_is_the_answer(house: House) -> None:
    async def refuse(_request: ObjectRequest) -> ObjectResponse:
        raise Conflict("closed", field="stream", hint="read it")

    house.objects.answer = refuse
    client = await house.greeted()
    client.send(a_call("POST"), 1)
    [error] = await frames(client, 1)
    assert isinstance(error, StreamError)
    assert (error.code, error.status, error.hint) == ("conflict", 409, "read it")
    client.send(a_call("POST"), 1)  # the corr is free again
    assert isinstance((await frames(client, 1))[0], StreamError)


async def test_a_fault_of_the_objects_is_an_answer_too_and_tells_nothing(house: House) -> None:
    async def stumble(_request: ObjectRequest) -> ObjectResponse:
        raise ZeroDivisionError("secret")

    house.objects.answer = stumble
    client = await house.greeted()
    client.send(a_call(), 1)
    [error] = await frames(client, 1)
    assert isinstance(error, StreamError)
    assert (error.code, error.status) == ("internal", 500)
    assert "secret" not in error.message


async def test_a_failed_ledger_ends_the_origin(house: House) -> None:
    async def fail(_request: ObjectRequest) -> ObjectResponse:
        raise LedgerFailed("disk full")

    house.objects.answer = fail
    client = await house.greeted()
    client.send(a_call(), 1)
    [error] = await frames(client, 1)
    assert isinstance(error, StreamError)
    assert error.code == "ledger_failed"
    assert len(house.fatal) == 1


async def test_edges_cannot_reach_objects_of_other_classes(house: House) -> None:
    client = await house.greeted()
    client.send(Call("secret", "a", "GET", URL), 1)
    [error] = await frames(client, 1)
    assert isinstance(error, StreamError)
    assert error.status == 404
    assert house.objects.requests == []


async def test_edges_cannot_use_the_methods_that_objects_have_for_each_other(
    house: House,
) -> None:
    client = await house.greeted()
    client.send(a_call(TAKE), 1)
    client.send(Call("subscription", "jwks.json", SIGN, URL), 2)
    client.send(a_call(""), 3)
    for error in await frames(client, 3):
        assert isinstance(error, StreamError)
        assert (error.code, error.status) == ("method_not_allowed", 405)
    assert house.objects.requests == []


async def test_the_subscription_api_is_spread_over_its_objects(house: House) -> None:
    house.objects.answer = answering(ObjectResponse(204))
    client = await house.greeted()
    for corr, path in enumerate(("subscriptions/a%2Fb/claim", "jwks.json"), 1):
        client.send(Call("subscription", path, "GET", URL), corr)
        assert await frames(client, 2) == [Answer(204), BodyEnd()]
    assert [key for key, _ in house.objects.requests] == [
        ObjectKey("subscription", "a/b"),
        INDEX_KEY,
    ]
    client.send(Call("subscription", "index", "GET", URL), 3)
    [error] = await frames(client, 1)
    assert isinstance(error, StreamError)
    assert error.status == 404


async def test_a_corr_in_use_ends_the_link(house: House) -> None:
    house.objects.answer = answering(ObjectResponse(200, (), LiveBody()))
    client = await house.connected()
    client.send_raw(encode(Hello(SCHEMA_HASH, "test")) + encode(a_call(), 1) * 2)
    [error] = await client.errors_until_closed()
    assert error.code == "corr_in_use"


# ---- tokens ----


async def test_a_generation_needs_a_token_here_where_the_origin_asks_for_one(
    tmp_path: Path, checkpoint: Path
) -> None:
    async with serving(tmp_path, checkpoint, require_token=True) as house:
        house.objects.answer = answering(ObjectResponse(204))
        client = await house.greeted()
        stream = await opened(client)
        name = stream.stream.hex()
        for corr, token, status in ((2, None, 401), (3, "v1.k.x.y", 401), (4, stream.token, 204)):
            headers = (Header("tailrace-token", token),) if token else ()
            client.send(Call("stream", name, "GET", URL, headers, credit=1), corr)
            [answer] = await frames(client, 1)
            assert isinstance(answer, Answer | StreamError)
            assert answer.status == status
        assert isinstance((await frames(client, 1))[0], BodyEnd)
        client.send(a_call(name="0" * 32), 5)  # no generation: the object may answer
        assert await frames(client, 2) == [Answer(204), BodyEnd()]


# ---- bodies under credit ----


async def test_a_body_comes_in_pieces_as_far_as_the_credit_goes(house: House) -> None:
    content = bytes(range(256)) * (3 * MAX_PIECE_BYTES // 256) + b"rest"
    house.objects.answer = answering(ObjectResponse(200, (), content))
    client = await house.greeted()
    client.send(a_call(credit=2), 1)
    head, *pieces = await frames(client, 3)
    assert head == Answer(200, (Header("content-length", str(len(content))),))
    client.send(Cancel(bytes(16)), 2)  # its answer shows that no third piece came before it
    assert (await client.next())[0] == 2
    client.send(Credit(9), 1)
    pieces += await frames(client, 2)
    assert b"".join(piece.data for piece in pieces if isinstance(piece, Body)) == content
    assert [len(piece.data) for piece in pieces if isinstance(piece, Body)] == [
        *(MAX_PIECE_BYTES,) * 3,
        4,
    ]
    assert await frames(client, 1) == [BodyEnd()]


async def test_a_live_body_is_read_no_further_than_the_credit(house: House) -> None:
    body = LiveBody()
    house.objects.answer = answering(ObjectResponse(200, (("x", "y"),), body))
    for number in range(5):
        body.parts.put_nowait(b"%d" % number)
    client = await house.greeted()
    client.send(a_call(credit=1), 1)
    assert await frames(client, 2) == [Answer(200, (Header("x", "y"),)), Body(b"0")]
    client.send(Cancel(bytes(16)), 2)
    assert (await client.next())[0] == 2
    assert body.given == 2  # the piece that waits for credit, and no more
    client.send(Credit(3), 1)
    assert await frames(client, 2) == [Body(b"1"), Body(b"2")]


async def test_an_error_in_a_body_cuts_it(house: House) -> None:
    body = LiveBody()
    house.objects.answer = answering(ObjectResponse(200, (), body))
    body.parts.put_nowait(b"begun")
    body.parts.put_nowait(Conflict("gone"))
    client = await house.greeted()
    client.send(a_call(), 1)
    head, piece, error = await frames(client, 3)
    assert (head, piece) == (Answer(200), Body(b"begun"))
    assert isinstance(error, StreamError)
    assert error.code == "conflict"
    await body.closed.wait()


# ---- leaving ----


async def test_a_detached_body_is_closed(house: House) -> None:
    body = LiveBody()
    house.objects.answer = answering(ObjectResponse(200, (), body))
    client = await house.greeted()
    client.send(a_call(), 1)
    assert await frames(client, 1) == [Answer(200)]
    client.send(Detach(), 1)
    await body.closed.wait()


async def test_a_lost_link_closes_its_bodies(house: House) -> None:
    body = LiveBody()
    house.objects.answer = answering(ObjectResponse(200, (), body))
    client = await house.greeted()
    client.send(a_call(), 1)
    assert await frames(client, 1) == [Answer(200)]
    await client.leave()
    await body.closed.wait()


async def test_a_read_that_nobody_waits_for_is_stopped(house: House) -> None:
    begun, stopped = asyncio.Event(), asyncio.Event()

    async def long_poll(_request: ObjectRequest) -> ObjectResponse:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            stopped.set()
        raise AssertionError("unreachable")

    house.objects.answer = long_poll
    client = await house.greeted()
    client.send(a_call("GET"), 1)
    await begun.wait()
    client.send(Detach(), 1)
    await stopped.wait()


async def test_a_change_is_carried_out_though_its_caller_has_left(house: House) -> None:
    begun, may_end, ended = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def append(_request: ObjectRequest) -> ObjectResponse:
        begun.set()
        await may_end.wait()
        ended.set()
        return ObjectResponse(204)

    house.objects.answer = append
    client = await house.greeted()
    client.send(a_call("POST", b"data"), 1)
    await begun.wait()
    client.send(Detach(), 1)
    client.send(Cancel(bytes(16)), 2)
    assert (await client.next())[0] == 2  # the Detach has been taken
    may_end.set()
    await ended.wait()
    client.send(Cancel(bytes(16)), 3)
    assert (await client.next())[0] == 3  # and nothing came for the Call


# ---- bounds ----


async def test_a_status_is_not_an_answer(house: House) -> None:
    """A cancel beside a call: each corr has its own kind of answer."""
    house.objects.answer = answering(ObjectResponse(204))
    client = await house.greeted()
    stream = (await opened(client, corr=9)).stream
    client.send(a_call("POST"), 1)
    assert await frames(client, 2) == [Answer(204), BodyEnd()]
    house.slot.ordered.clear()
    client.send(Cancel(stream), 2)
    await house.slot.ordered.wait()
    await house.step(house.slot, house.slot.last[0], 0, None)
    assert any(isinstance(frame, Status) for frame in await frames(client, 2))


# ---- the cached tokens of a stream that has ended ----


def a_question(wanted: Frame, caller: Caller | None = None) -> Call:
    body = LINK_CODEC.encode(wanted)
    return Call(CACHED_TOKENS, "", "GET", "", body=body, credit=1, caller=caller)


async def test_the_cached_tokens_of_a_prompt_are_told_when_its_stream_has_ended(
    house: House,
) -> None:
    client = await house.greeted()
    stream = await opened(client, 1)
    client.send(a_question(Resume(stream.stream)), 2)
    [error] = await frames(client, 1)
    assert isinstance(error, StreamError) and error.code == "conflict"
    await finish(house, house.slot, house.slot.last[0], 0, TokenCounts(cached=2))
    assert isinstance((await frames(client, 1))[0], StreamEnd)
    client.send(a_question(Resume(stream.stream)), 3)
    assert await frames(client, 3) == [
        Answer(200, (Header("content-length", "1"),)),
        Body(b"2"),
        BodyEnd(),
    ]
    for wanted, caller, code in (
        (Resume(bytes(16)), None, "unknown_stream"),
        (Resume(stream.stream), Caller("acme", 0), "unknown_stream"),  # that of another tenant
        (Detach(), None, "invalid_request"),
    ):
        client.send(a_question(wanted, caller), 4)
        [error] = await frames(client, 1)
        assert isinstance(error, StreamError) and error.code == code


# ---- the count of a prompt's tokens ----

HELLO = Open(model="demo", prompt="The fox", max_tokens=9)


def a_count(wanted: Frame, caller: Caller | None = None) -> Call:
    body = LINK_CODEC.encode(wanted)
    return Call(TOKEN_COUNT, "demo", "GET", "", body=body, credit=1, caller=caller)


async def test_the_tokens_of_a_prompt_are_counted_without_a_stream(house: House) -> None:
    client = await house.greeted()
    client.send(a_count(HELLO), 1)
    _, body, end = await frames(client, 3)
    stream = await opened(client, 2, HELLO)
    assert stream.prompt_tokens > 0
    assert (body, end) == (Body(str(stream.prompt_tokens).encode()), BodyEnd())


@pytest.mark.parametrize(
    ("wanted", "caller", "code"),
    [
        (HELLO, Caller("acme", 0), "missing_right"),
        (replace(HELLO, model="gpt"), None, "unknown_model"),
        (replace(HELLO, prompt=None), None, "invalid_request"),
        (Detach(), None, "invalid_request"),
    ],
)
async def test_a_count_is_refused_as_a_stream_would_be(
    house: House, wanted: Frame, caller: Caller | None, code: str
) -> None:
    client = await house.greeted()
    client.send(a_count(wanted, caller), 1)
    [error] = await frames(client, 1)
    assert isinstance(error, StreamError) and error.code == code


async def test_the_prompts_of_a_text_worker_are_not_counted(house: House) -> None:
    house.models.readers.clear()
    client = await house.greeted()
    client.send(a_count(HELLO), 1)
    [error] = await frames(client, 1)
    assert isinstance(error, StreamError)
    assert (error.code, error.field) == ("unsupported", "model")
