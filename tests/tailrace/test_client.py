"""The client against edges whose every answer is scripted, over real loopback sockets."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from base64 import b64encode
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import pytest
import zstandard

from tailrace.client import Client, Group, SamplingSettings, Stream
from tailrace.ledger.errors import CallerError, NotFound, SchemaMismatch, TailraceError
from tailrace.ledger.frame import (
    SAMPLING,
    SCHEMA_HASH,
    FinishReason,
    Frame,
    Logged,
    Opened,
    Snapshot,
    StreamEnd,
    Token,
    encode,
    error_frame,
)

pytestmark = pytest.mark.anyio

ID = "ab" * 16
FRAMES: list[Logged] = [*(Token(f" {n}", n) for n in range(4))]
FRAMES.append(StreamEnd(4, FinishReason.STOP, 4, 1))


def body(*frames: Frame) -> bytes:
    return b"".join(encode(frame) for frame in frames)


def ok(data: bytes, headers: str = "") -> bytes:
    """Return a 200 whose body ends when the connection does."""
    head = f"HTTP/1.1 200\r\nTailrace-Stream: {ID}\r\nTailrace-Token: v1.t\r\n{headers}\r\n"
    return head.encode() + data


def opened_at(first: int) -> str:
    """Return the header of an answer that begins at this index."""
    opened = Opened(bytes.fromhex(ID), len(FRAMES), "v1.t", "demo", 1, first=first)
    return f"Tailrace-Opened: {b64encode(encode(opened)).decode()}\r\n"


def refused(status: int, code: str, *, retryable: bool, headers: str = "") -> bytes:
    error = {"error": {"code": code, "message": "no", "retryable": retryable}}
    document = json.dumps(error)
    return (
        f"HTTP/1.1 {status}\r\nContent-Length: {len(document)}\r\n{headers}\r\n{document}".encode()
    )


@dataclass
class Request:
    """Request line, headers and body that an edge got."""

    line: str
    headers: dict[str, str]
    body: bytes = b""


@dataclass
class ScriptedEdge:
    """Answers each connection's request with the next of `answers`, then hangs up.

    An answer of None leaves the client waiting.
    """

    answers: list[bytes | None]
    requests: list[Request] = field(default_factory=list)
    url: str = ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        line, *fields = head.strip().split("\r\n")
        headers = dict(field.lower().split(": ", 1) for field in fields)
        sent = await reader.readexactly(int(headers.get("content-length", "0")))
        self.requests.append(Request(line, headers, sent))
        answer = self.answers.pop(0)
        if answer is None:
            writer.write(ok(body(FRAMES[0])))
            await reader.read()
        else:
            writer.write(answer)
        writer.close()


@asynccontextmanager
async def edges(*scripts: list[bytes | None]) -> AsyncIterator[list[ScriptedEdge]]:
    async with AsyncExitStack() as stack:
        served = [ScriptedEdge(script) for script in scripts]
        for edge in served:
            server = await asyncio.start_server(edge.serve, "127.0.0.1", 0)
            stack.callback(server.close)
            port = server.sockets[0].getsockname()[1]
            edge.url = f"http://127.0.0.1:{port}"
        yield served


async def read(
    served: list[ScriptedEdge],
    begin: Callable[[Client], Stream] = lambda client: client.generate(prompt="Once"),
    patience_s: float = 60,
) -> tuple[list[Logged], list[str], Stream]:
    """Return all frames of a stream, and the states that the client went through."""
    states: list[str] = []
    urls = [edge.url for edge in served]

    def on_state(state: str, _detail: str) -> None:
        states.append(state)

    async with Client(urls, on_state=on_state, patience_s=patience_s) as client:
        stream = begin(client)
        logged: list[Logged] = []
        async for frame in stream:
            assert isinstance(frame, Logged)  # no snapshot was asked for
            logged.append(frame)
        return logged, states, stream


def test_a_caller_may_say_all_of_sampling() -> None:
    assert {*SamplingSettings.__annotations__} == {*SAMPLING}


async def test_an_unbroken_stream_is_read_to_its_end() -> None:
    async with edges([ok(body(*FRAMES))]) as served:
        frames, states, stream = await read(served)
    assert frames == FRAMES
    assert states == ["connecting", "open", "ended"]
    assert (stream.id, stream.token, stream.resumes) == (ID, "v1.t", 0)
    assert stream.end == FRAMES[-1]


@pytest.mark.parametrize(
    ("begin", "query"),
    [
        (lambda client: client.resume(ID, tail=3), "tail=3"),
        (lambda client: client.resume(ID, since=datetime.fromtimestamp(9e8, UTC)), "since="),
    ],
)
async def test_a_tail_that_was_cut_goes_on_by_its_index(
    begin: Callable[[Client], Stream], query: str
) -> None:
    cut = ok(body(FRAMES[2]), opened_at(2))
    async with edges([refused(503, "x", retryable=True), cut, ok(body(*FRAMES[3:]))]) as served:
        frames, _, stream = await read(served, begin)
        lines = [request.line for request in served[0].requests]
    assert frames == FRAMES[2:]
    assert stream.next_index == len(FRAMES)
    assert [query in line for line in lines] == [True, True, False]
    assert "after=2" in lines[2]


@pytest.mark.parametrize(
    ("group", "query"),
    [
        ("sentence", "group=sentence"),
        ({"by": "word", "ms": 200, "chars": 80}, "group=word&group_ms=200&group_chars=80"),
    ],
)
async def test_grouped_text_is_requested_again_after_a_cut(group: Group, query: str) -> None:
    piece = Snapshot(0, "a piece", 2)
    async with edges([ok(body(piece)), ok(body(*FRAMES[3:]))]) as served:
        async with Client([served[0].url]) as client:
            got = [frame async for frame in client.generate(prompt="Once", group=group)]
        first, second = served[0].requests
    assert got == [piece, *FRAMES[3:]]
    assert json.loads(first.body)["group"] == group
    assert f"?after=2&{query} " in second.line


@pytest.mark.parametrize(
    "places",
    [
        {"after": 1, "tail": 1},
        {"tail": 1, "since": datetime.now(UTC)},
        {"since": datetime(2026, 1, 1)},
    ],
)
async def test_a_place_to_begin_that_makes_no_sense_is_refused(places: dict[str, Any]) -> None:
    async with Client(["http://127.0.0.1:1"]) as client:
        with pytest.raises(CallerError):
            client.resume(ID, **places)


async def test_an_edge_with_another_schema_is_not_read() -> None:
    async with edges([ok(body(*FRAMES), f"Tailrace-Schema: {'0' * 16}\r\n")]) as served:
        with pytest.raises(SchemaMismatch, match=SCHEMA_HASH.hex()):
            await read(served)
    own = f"Tailrace-Schema: {SCHEMA_HASH.hex()}\r\n"
    async with edges([ok(body(*FRAMES), own)]) as served:
        frames, _, _ = await read(served)
    assert frames == FRAMES


def compressed(data: bytes) -> bytes:
    """Return the answer of an edge that compresses a body, which may be cut."""
    return ok(data, "Content-Encoding: zstd\r\n")


async def test_a_compressed_body_is_read_and_resumed_wherever_it_was_cut() -> None:
    whole = zstandard.compress(body(*FRAMES))
    async with edges([compressed(whole)]) as served:
        frames, states, _ = await read(served)
        [request] = served[0].requests
    assert frames == FRAMES
    assert states == ["connecting", "open", "ended"]
    assert "zstd" in request.headers["accept-encoding"]
    blocks = zstandard.ZstdCompressor().compressobj()
    cut = blocks.compress(body(*FRAMES[:2])) + blocks.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK)
    rest = zstandard.compress(body(*FRAMES[2:]))
    async with edges([compressed(cut)], [compressed(rest)]) as served:
        frames, _, stream = await read(served)
        [request] = served[1].requests
    assert frames == FRAMES
    assert stream.resumes == 1
    assert "after=1" in request.line


async def test_a_body_that_is_not_what_its_coding_says_is_read_from_another_edge() -> None:
    async with edges([compressed(b"no zstd")], [ok(body(*FRAMES))]) as served:
        frames, states, _ = await read(served)
    assert frames == FRAMES
    assert "waiting" in states


async def test_a_body_that_was_cut_is_resumed_on_the_next_edge() -> None:
    cut = ok(body(*FRAMES[:2]) + encode(FRAMES[2])[:5])
    async with edges([cut], [ok(body(*FRAMES[2:]))]) as served:
        frames, states, stream = await read(served)
        [request] = served[1].requests
    assert frames == FRAMES
    assert stream.resumes == 1
    assert states == ["connecting", "open", "waiting", "connecting", "resumed", "ended"]
    assert request.line == f"GET /v1/generate/{ID}?after=1 HTTP/1.1"
    assert request.headers["tailrace-token"] == "v1.t"


async def test_a_post_without_an_answer_is_sent_again_with_its_key() -> None:
    async with edges([b"", ok(body(*FRAMES))]) as served:
        frames, _, stream = await read(served)
        first, second = served[0].requests
    assert frames == FRAMES
    assert stream.resumes == 0
    assert first.line == second.line == "POST /v1/generate HTTP/1.1"
    assert first.headers["idempotency-key"] == second.headers["idempotency-key"] != ""


@pytest.mark.parametrize(
    "busy",
    [
        refused(503, "overloaded", retryable=True, headers="Retry-After: 0\r\n"),
        b"HTTP/1.1 502\r\nContent-Length: 0\r\n\r\n",
        ok(body(error_frame(TailraceError("bye", code="unavailable", retryable=True)))),
    ],
)
async def test_what_may_succeed_later_is_tried_again(busy: bytes) -> None:
    async with edges([busy, ok(body(*FRAMES))]) as served:
        frames, states, _ = await read(served)
    assert frames == FRAMES
    assert "waiting" in states


async def test_what_cannot_succeed_is_raised() -> None:
    async with edges([refused(404, "not_found", retryable=False)]) as served:
        with pytest.raises(NotFound):
            await read(served)


async def test_patience_has_an_end() -> None:
    async with edges([b""]) as served:
        with pytest.raises(TailraceError) as caught:
            await read(served, patience_s=0)
    assert caught.value.code == "edge_unreachable"


async def test_a_wait_that_would_outlast_the_patience_is_not_begun() -> None:
    busy = refused(503, "overloaded", retryable=True, headers="Retry-After: 3600\r\n")
    async with edges([busy]) as served:
        with pytest.raises(TailraceError) as caught:
            await read(served)
    assert caught.value.code == "overloaded"


async def test_cutting_resumes_after_the_last_frame_that_was_given() -> None:
    async with edges([ok(body(*FRAMES))], [ok(body(*FRAMES[2:]))]) as served:
        async with Client([edge.url for edge in served]) as client:
            stream = client.generate(prompt="Once")
            frames = []
            async for frame in stream:
                frames.append(frame)
                if frame.index == 1:
                    stream.cut()
        assert served[1].requests[0].line.endswith("?after=1 HTTP/1.1")
    assert frames == FRAMES
    assert stream.resumes == 1


async def test_a_cut_wakes_a_reader_that_waits_for_a_frame() -> None:
    async with (
        edges([None, ok(body(*FRAMES[1:]))]) as served,
        Client([served[0].url]) as client,
    ):
        stream = client.generate(prompt="Once")
        assert await anext(stream) == FRAMES[0]
        # Runs as soon as the read below has to wait, and nothing but the cut can end it.
        asyncio.get_running_loop().call_soon(stream.cut)
        assert await anext(stream) == FRAMES[1]


async def test_a_stream_of_which_nothing_is_left_ends_at_once() -> None:
    nothing = b"HTTP/1.1 204\r\n\r\n"
    async with edges([nothing]) as served:
        frames, states, _ = await read(served, lambda client: client.resume(ID, after=4))
        assert served[0].requests[0].line.endswith("?after=4 HTTP/1.1")
    assert frames == []
    assert states == ["connecting", "ended"]


async def test_cancel_is_sent_until_it_is_answered() -> None:
    document = json.dumps({"id": ID, "state": "ended", "next_index": 3})
    answer = f"HTTP/1.1 200\r\nContent-Length: {len(document)}\r\n\r\n{document}".encode()
    async with edges([b"", answer]) as served, Client([served[0].url]) as client:
        status = await client.cancel(ID, "v1.t")
    assert status.next_index == 3
    assert [request.line for request in served[0].requests] == [
        f"POST /v1/generate/{ID}/cancel HTTP/1.1"
    ] * 2


def answered(status: str, document: object) -> bytes:
    text = json.dumps(document)
    return f"HTTP/1.1 {status}\r\nContent-Length: {len(text)}\r\n\r\n{text}".encode()


async def test_a_steer_is_sent_again_while_it_was_surely_not_taken() -> None:
    said = answered("200 OK", {"id": ID, "state": "running", "next_index": 3})
    script: list[bytes | None] = [refused(503, "unavailable", retryable=True), said]
    async with edges(script) as served, Client([served[0].url]) as client:
        status = await client.steer(ID, " but", "v1.t")
    assert status.next_index == 3
    assert [request.line for request in served[0].requests] == [
        f"POST /v1/generate/{ID}/steer HTTP/1.1"
    ] * 2


@pytest.mark.parametrize("answer", [b"", refused(503, "outcome_unknown", retryable=True)])
async def test_a_steer_that_may_have_been_taken_is_not_sent_again(answer: bytes) -> None:
    async with edges([answer]) as served, Client([served[0].url]) as client:
        with pytest.raises(TailraceError) as error:
            await client.steer(ID, " but")
    assert error.value.code == "outcome_unknown"
    assert len(served[0].requests) == 1


async def test_a_stream_is_steered_with_its_token() -> None:
    said = answered("200 OK", {"id": ID, "state": "running", "next_index": 3})
    async with (
        edges([ok(body(*FRAMES)), said]) as served,
        Client([served[0].url]) as client,
    ):
        stream = client.generate(prompt="x")
        with pytest.raises(CallerError, match="has not begun"):
            await stream.steer(" but")
        await anext(stream)
        await stream.steer(" but")
    assert served[0].requests[1].headers["tailrace-token"] == "v1.t"


@pytest.mark.parametrize("urls", [[], ["127.0.0.1:8080"]])
def test_an_edge_is_a_url(urls: list[str]) -> None:
    with pytest.raises(CallerError):
        Client(urls)


def test_the_client_needs_nothing_of_the_server() -> None:
    script = (
        "import sys\n"
        "for name in ('starlette', 'hypercorn', 'uvloop', 'pydantic', 'structlog', 'apsw'):\n"
        "    sys.modules[name] = None\n"
        "import tailrace.client\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


async def test_after_a_failed_send_the_next_bytes_follow_those_that_are_stored() -> None:
    def stored(size: int) -> bytes:
        return answered("200 OK", {"id": ID, "bytes": size, "complete": False})

    # Of the 6 bytes of the second send 4 were stored before the edge refused the rest.
    script: list[bytes | None] = [
        *(stored(0), stored(3), refused(413, "input_too_large", retryable=False)),
        *(stored(7), stored(7), stored(9)),
    ]
    async with edges(script) as served, Client([served[0].url]) as client:
        stream = client.resume(ID)
        assert await stream.send(b"abc") == 3
        with pytest.raises(TailraceError):
            await stream.send(b"defghi")
        assert await stream.send(b"") == 7
        assert await stream.send(b"hi") == 9
    sent = [(one.line.split()[1].partition("?")[2], one.body) for one in served[0].requests]
    assert sent == [
        ("offset=0&last=0", b""),
        ("offset=0&last=0", b"abc"),
        ("offset=3&last=0", b"defghi"),
        ("offset=0&last=0", b""),
        ("offset=7&last=0", b""),
        ("offset=7&last=0", b"hi"),
    ]
