"""HTTP/2 over real sockets: to the application and back, and what a client may not do to it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from random import Random

import httpx
import pytest
from h2.errors import ErrorCodes
from hpack import Encoder
from structlog.testing import capture_logs

from tailrace.ledger.errors import NotFound
from tailrace.ledger.frame import (
    Answer,
    Body,
    BodyEnd,
    Call,
    Detach,
    Resume,
    decode,
    encode,
    error_frame,
    split,
)
from tests.e2e.sse import after_retry
from tests.edge.scripted_origin import STREAM, ScriptedOrigin
from tests.edge.server.http2_peer import Peer
from tests.edge.server.serving import PATIENCE_S, Served, serving
from tests.edge.server.test_http2_properties import PREFACE, random_frames
from tests.needs import needs_program

pytestmark = pytest.mark.anyio

ID = STREAM.hex()
SSE = {"Accept": "text/event-stream"}
FRAMES = {"Accept": "application/vnd.tailrace.frames"}
NGHTTP2_HINT = "on Debian or Ubuntu: apt-get install nghttp2-client"


@pytest.fixture
async def origin() -> AsyncIterator[ScriptedOrigin]:
    origin = ScriptedOrigin(3)
    origin.patience_ms = 3_600_000  # an hour: it sends no heartbeats
    async with origin.listening():
        yield origin


@pytest.fixture
async def served(origin: ScriptedOrigin) -> AsyncIterator[Served]:
    async with serving(origin) as served:
        yield served


@asynccontextmanager
async def client_of(served: Served) -> AsyncIterator[httpx.AsyncClient]:
    """One that knows beforehand that it is HTTP/2."""
    url = f"http://127.0.0.1:{served.port}"
    limits = httpx.Limits(max_connections=1)
    timeout = httpx.Timeout(PATIENCE_S)
    async with httpx.AsyncClient(
        base_url=url, http1=False, http2=True, limits=limits, timeout=timeout
    ) as client:
        yield client


# ---- requests ----


async def test_every_route_answers(served: Served, origin: ScriptedOrigin) -> None:
    body = {"model": "demo", "prompt": "Once"}
    async with client_of(served) as client:
        document = await client.post("/v1/generate", json=body)
        events = await client.post("/v1/generate", json=body, headers=SSE)
        frames = await client.get(f"/v1/generate/{ID}", headers=FRAMES)
        head = await client.head(f"/v1/generate/{ID}", headers=SSE)
        missing = await client.get("/v1/nothing")
        wrong = await client.delete("/v1/generate")
        large = await client.post("/v1/generate", content=bytes(2 << 20))
        stream = await client.get("/v1/ws")
    assert document.http_version == "HTTP/2"
    assert document.json()["text"] == " w0 w1 w2"
    assert after_retry(events.text).startswith('id: 0\ndata: {"text":" w0","index":0}\n\n')
    assert [decode(raw)[1] for raw in split(frames.content)] == origin.frames
    assert (head.status_code, head.content) == (200, b"")
    answers = (missing, wrong, large, stream)
    assert [answer.status_code for answer in answers] == [404, 405, 413, 426]
    assert [answer.json()["error"]["code"] for answer in answers] == [
        "not_found",
        "method_not_allowed",
        "too_large",
        "upgrade_required",
    ]


async def test_a_body_and_the_headers_reach_the_object(
    served: Served, origin: ScriptedOrigin
) -> None:
    origin.answers = [Answer(201), Body(b"x" * 50_000), Body(b"y" * 50_000), BodyEnd()]
    body = bytes(range(256)) * 2_000
    async with client_of(served) as client:
        answer = await client.put("/v1/stream/a/b?x=1", content=body, headers={"Stream-TTL": "60"})
    assert (answer.status_code, answer.content) == (201, b"x" * 50_000 + b"y" * 50_000)
    call = next(frame for frame in origin.received if isinstance(frame, Call))
    assert (call.method, call.name, call.body) == ("PUT", "a/b", body)
    assert call.url == f"http://127.0.0.1:{served.port}/v1/stream/a/b?x=1"
    assert {header.name: header.value for header in call.headers}["stream-ttl"] == "60"


async def test_headers_that_are_too_large_are_told_so(served: Served) -> None:
    async with client_of(served) as client:
        answer = await client.get("/healthz", headers={"X-Long": "x" * 20_000})
        assert (answer.status_code, answer.json()["error"]["code"]) == (431, "headers_too_large")
        assert len(answer.headers["X-Request-Id"]) == 32
        assert (await client.get("/healthz")).status_code == 200


async def test_a_body_that_breaks_off_is_reset(served: Served, origin: ScriptedOrigin) -> None:
    origin.answers = [Answer(200), Body(b"begun"), error_frame(NotFound("gone"))]
    async with Peer.of(served) as peer:
        stream_id = peer.ask("GET", "/v1/stream/a")
        await peer.until(lambda: stream_id in peer.resets)
    assert peer.bodies == {stream_id: b"begun"}
    assert not peer.ended
    assert peer.resets == {stream_id: ErrorCodes.INTERNAL_ERROR}


async def test_a_client_that_resets_a_stream_is_detached(
    served: Served, origin: ScriptedOrigin
) -> None:
    origin.released = 1
    async with Peer.of(served) as peer:
        stream_id = peer.ask("GET", f"/v1/generate/{ID}", FRAMES)
        await peer.until(lambda: stream_id in peer.bodies)
        peer.h2.reset_stream(stream_id, ErrorCodes.CANCEL)
        health = peer.ask("GET", "/healthz")
        await peer.until(lambda: health in peer.ended)
        await origin.has_received(2)
    assert [type(frame) for frame in origin.received] == [Resume, Detach]


async def test_a_connection_that_is_lost_detaches_all_its_streams(
    served: Served, origin: ScriptedOrigin
) -> None:
    origin.released = 1
    async with Peer.of(served) as peer:
        asked = [peer.ask("GET", f"/v1/generate/{ID}", FRAMES) for _ in range(3)]
        await peer.until(lambda: len(peer.bodies) == len(asked))
    await origin.has_received(6)
    assert sum(isinstance(frame, Detach) for frame in origin.received) == 3


async def test_more_than_a_thousand_requests_beside_a_live_stream(
    served: Served, origin: ScriptedOrigin
) -> None:
    origin.released = 1
    async with Peer.of(served) as peer:
        live = peer.ask("GET", f"/v1/generate/{ID}", FRAMES)
        await peer.until(lambda: live in peer.bodies)
        for _ in range(1_001):
            health = peer.ask("GET", "/healthz")
            await peer.until(lambda asked=health: asked in peer.ended)
            assert peer.statuses[health] == "200"
        assert peer.goaway is None
        assert live not in peer.ended


# ---- readers that do not read ----


async def test_a_reader_that_does_not_read_holds_a_window_and_goes_on_when_it_does(
    served: Served, origin: ScriptedOrigin
) -> None:
    pieces = 100
    origin.answers = [Answer(200), *[Body(b"%5d" % n * 8_000) for n in range(pieces)], BodyEnd()]
    async with Peer.of(served) as peer:
        stalled = peer.ask("GET", "/v1/stream/a")
        await peer.until(lambda: len(peer.bodies.get(stalled, b"")) == 65_535, acknowledge=False)
        beside = peer.ask("GET", "/healthz")
        # For the connection; the stream's window is spent.
        peer.h2.increment_flow_control_window(1 << 20)
        await peer.until(lambda: beside in peer.ended, acknowledge=False)
        assert peer.statuses[beside] == "200"
        assert origin.bodies_sent < pieces
        assert len(peer.bodies[stalled]) == 65_535
        peer.h2.increment_flow_control_window(1 << 22)
        peer.h2.increment_flow_control_window(1 << 22, stalled)
        await peer.until(lambda: stalled in peer.ended)
    assert peer.bodies[stalled] == b"".join(b"%5d" % n * 8_000 for n in range(pieces))


async def test_a_reader_that_stalls_for_too_long_is_cut_off_and_its_neighbour_is_not(
    origin: ScriptedOrigin,
) -> None:
    origin.answers = [Answer(200), *[Body(bytes(60_000))] * 100, BodyEnd()]
    async with serving(origin, stalled_timeout_s=0.5) as served, Peer.of(served) as peer:
        stalled = peer.ask("GET", "/v1/stream/a")
        await peer.until(lambda: stalled in peer.resets, acknowledge=False)
        assert peer.resets[stalled] == ErrorCodes.CANCEL
        peer.h2.increment_flow_control_window(1 << 20)
        beside = peer.ask("GET", "/healthz")
        await peer.until(lambda: beside in peer.ended)
        while not any(isinstance(frame, Detach) for frame in origin.received):
            await origin.has_received(len(origin.received) + 1)


# ---- what takes too long, and what is wrong ----


async def test_a_body_that_does_not_come_is_not_waited_for(origin: ScriptedOrigin) -> None:
    async with serving(origin, body_timeout_s=0.2) as served, Peer.of(served) as peer:
        stream_id = peer.ask("POST", "/v1/generate", {"Content-Length": "10"}, ended=False)
        beside = peer.ask("GET", "/healthz")
        await peer.until(lambda: stream_id in peer.resets and beside in peer.ended)
        assert peer.statuses == {stream_id: "408", beside: "200"}
        assert peer.resets[stream_id] == ErrorCodes.NO_ERROR


async def test_an_answer_to_a_request_that_is_not_whole_costs_no_other(served: Served) -> None:
    """A browser sends such a request when it uploads to a path that takes no body."""
    async with Peer.of(served) as peer:
        wrong = peer.ask("POST", "/healthz", ended=False)
        peer.h2.send_data(wrong, bytes(1000))
        await peer.until(lambda: wrong in peer.ended)
        beside = peer.ask("GET", "/healthz")
        await peer.until(lambda: beside in peer.ended)
    assert peer.statuses == {wrong: "405", beside: "200"}


async def test_a_flood_ends_its_connection_and_no_other(served: Served) -> None:
    async with Peer.of(served) as peer, client_of(served) as client:
        for _ in range(20):
            for _ in range(100):
                stream_id = peer.ask("GET", "/healthz")
                peer.h2.reset_stream(stream_id)
        await peer.until(lambda: peer.goaway is not None)
        assert peer.goaway is not None
        assert peer.goaway.error_code is ErrorCodes.ENHANCE_YOUR_CALM
        assert (await client.get("/healthz")).status_code == 200


BLOCKS = [
    Encoder().encode(
        [
            *((":method", method), (":scheme", "http"), (":authority", "localhost")),
            *((":path", path), ("accept", accept)),
        ]
    )
    for method in ("GET", "POST", "HEAD", "PUT")
    for path in (f"/v1/generate/{ID}", "/v1/generate", "/v1/stream/a", "/healthz", "/v1/nothing")
    for accept in ("text/event-stream", "application/vnd.tailrace.frames")
]


def sense_and_nonsense(random: Random) -> bytes:
    """Return requests for every route, some of them reset, among frames of any kind."""
    frames = random_frames(random)
    sent = bytearray(PREFACE)
    for stream_id in range(1, 60, 2):
        if random.random() < 0.5:
            sent += next(frames)
            continue
        block, flags = random.choice(BLOCKS), random.choice((4, 5, 5))
        name = stream_id.to_bytes(4, "big")
        sent += len(block).to_bytes(3, "big") + bytes((1, flags)) + name + block
        if random.random() < 0.4:
            sent += b"\x00\x00\x04\x03\x00" + name + bytes(4)
    return bytes(sent)


async def test_nothing_is_left_of_connections_that_make_no_sense(
    served: Served, origin: ScriptedOrigin
) -> None:
    origin.released = 1
    origin.answers = [Answer(200), *[Body(bytes(3_000))] * 50, BodyEnd()]

    async def visit(seed: int) -> None:
        random = Random(seed)
        reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
        writer.write(sense_and_nonsense(random))
        with suppress(ConnectionError):
            await reader.read(random.choice((1, 100, 10_000)))
        writer.transport.abort()

    with capture_logs() as logs:
        for first in range(0, 200, 20):
            await asyncio.gather(*map(visit, range(first, first + 20)))
        async with client_of(served) as client:
            assert (await client.get("/healthz")).status_code == 200
        async with asyncio.timeout(PATIENCE_S):
            await served.context.connections.none.wait()
            await served.context.application.ended(PATIENCE_S)
    assert {line["event"] for line in logs} <= {"client gone", "request"}


async def test_a_connection_on_which_nothing_is_asked_is_closed(origin: ScriptedOrigin) -> None:
    async with serving(origin, header_timeout_s=0.2) as served, Peer.of(served) as peer:
        await peer.until(lambda: False)
        assert peer.closed
        assert peer.goaway is not None
        assert peer.goaway.error_code is ErrorCodes.NO_ERROR


async def test_a_drain_lets_what_is_under_way_come_to_its_end(
    served: Served, origin: ScriptedOrigin
) -> None:
    origin.released = 1
    async with Peer.of(served) as peer:
        stream_id = peer.ask("GET", f"/v1/generate/{ID}", FRAMES)
        await peer.until(lambda: stream_id in peer.bodies)
        for connection in served.context.connections.all():
            connection.protocol.drain()
        served.context.batch.flush()
        goaway = await peer.reader.readexactly(17)
        assert goaway[3:] == b"\x07" + bytes(5) + (2**31 - 1).to_bytes(4, "big") + bytes(4)
        origin.released = len(origin.frames)
        origin.drop_links()  # on the next one it gives what there is now
        rest = await peer.reader.read()
    assert rest.endswith(b"\x07" + bytes(5) + stream_id.to_bytes(4, "big") + bytes(4))
    assert encode(origin.frames[-1]) in rest


# ---- clients of others ----


@needs_program("nghttp", NGHTTP2_HINT)
async def test_nghttp_reads_a_stream(served: Served) -> None:
    url = f"http://127.0.0.1:{served.port}/v1/generate/{ID}"
    urls = (url, f"{url}?two", f"{url}?three")
    said = await run("nghttp", "-H", "accept: text/event-stream", *urls)
    assert said.count(b'data: {"text":" w2","index":2}') == 3


@needs_program("h2load", NGHTTP2_HINT)
async def test_h2load_gets_all_its_answers(served: Served) -> None:
    url = f"http://127.0.0.1:{served.port}"
    said = await run("h2load", "-n", "2000", "-c", "4", "-m", "100", f"{url}/healthz")
    assert b"2000 succeeded, 0 failed, 0 errored, 0 timeout" in said


async def run(*command: str) -> bytes:
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    async with asyncio.timeout(PATIENCE_S):
        said, _ = await process.communicate()
    assert process.returncode == 0
    return said
