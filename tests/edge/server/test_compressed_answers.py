"""Compressed responses of a real edge: every dialect, cut anywhere, live, stalled and refused."""

from __future__ import annotations

import json
import socket
from collections.abc import AsyncIterator
from random import Random
from string import ascii_letters, digits

import httpx
import pytest
import zstandard

from tailrace.edge import compressed_encoder
from tailrace.ledger.frame import FRAMES_TYPE, FinishReason, StreamEnd, Token, encode
from tests.edge.scripted_origin import STREAM, ScriptedOrigin
from tests.edge.server.serving import Client, Served, serving
from tests.edge.server.test_resuming import DIALECTS, FRAMES, Place

pytestmark = pytest.mark.anyio

ID = STREAM.hex()
PATH = f"/v1/generate/{ID}"
WORDS = 2_000
BY_HTTP = {name: read for name, read in DIALECTS.items() if name != "websocket"}
ACCEPTED = {
    "replays": "gzip, zstd;q=0.9",
    "always": "zstd, identity;q=0",
}
VIEWS = ["text/event-stream", "application/x-ndjson", FRAMES_TYPE]


@pytest.fixture(scope="module")
async def short() -> AsyncIterator[Place]:
    """Yield an edge with a stream of every kind of frame that a generation has."""
    origin = ScriptedOrigin(0)
    origin.frames, origin.released = FRAMES, len(FRAMES)
    async with (
        origin.listening(),
        serving(origin) as served,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{served.port}") as client,
    ):
        yield Place(served, client, origin)


@pytest.fixture(scope="module")
async def long() -> AsyncIterator[Place]:
    """Yield an edge with a stream of many words."""
    async with (
        ScriptedOrigin(WORDS).listening() as origin,
        serving(origin) as served,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{served.port}") as client,
    ):
        yield Place(served, client, origin)


def told(accept: str = "text/event-stream", coding: str = "zstd") -> dict[str, str]:
    return {"Accept": accept, "Accept-Encoding": coding}


@pytest.mark.parametrize("coding", ACCEPTED)
@pytest.mark.parametrize("dialect", BY_HTTP)
async def test_a_compressed_prefix_and_what_it_resumes_are_the_whole(
    short: Place, dialect: str, coding: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compressed_encoder, "MIN_REPLAY_FRAMES", 1)
    read, codings = BY_HTTP[dialect], list[str | None]()
    short.client.headers["Accept-Encoding"] = "identity"
    plain = await read(short, {})
    short.client.headers["Accept-Encoding"] = ACCEPTED[coding]

    async def note(response: httpx.Response) -> None:
        codings.append(response.headers.get("Content-Encoding"))

    short.client.event_hooks["response"] = [note]
    whole = await read(short, {})
    assert codings == ["zstd"]
    assert whole == plain
    for have in range(whole[-1].at + 1):
        prefix = [item for item in whole if item.at <= have]
        assert prefix + await read(short, {"after": have}) == whole, have


@pytest.mark.parametrize("accept", VIEWS)
@pytest.mark.parametrize("query", ["", "?snapshot=1", "?after=1500", "?tail=500"])
async def test_a_replay_is_smaller_and_the_same(long: Place, accept: str, query: str) -> None:
    plain = await long.client.get(PATH + query, headers=told(accept, "identity"))
    async with long.client.stream("GET", PATH + query, headers=told(accept)) as response:
        body = b"".join([piece async for piece in response.aiter_raw()])
    assert "Vary" not in plain.headers
    assert "Content-Encoding" not in plain.headers
    assert response.headers["Vary"] == "Accept-Encoding"
    assert response.headers["Content-Encoding"] == "zstd"
    own = {"vary", "content-encoding", "date", "x-request-id"}
    assert {name: value for name, value in response.headers.items() if name not in own} == {
        name: value for name, value in plain.headers.items() if name not in own
    }
    decompressor = zstandard.ZstdDecompressor().decompressobj()
    got = decompressor.decompress(body)
    assert decompressor.eof
    without_retry = [data.partition(b"\n\n")[2] for data in (got, plain.content)]
    if accept == VIEWS[0]:
        assert without_retry[0] == without_retry[1]
    else:
        assert got == plain.content
    assert len(body) < len(got) / 2


@pytest.mark.parametrize("query", ["?after=1990", "?tail=10"])
async def test_few_frames_are_not_compressed(long: Place, query: str) -> None:
    got = await long.client.get(PATH + query, headers=told())
    assert got.status_code == 200
    assert got.headers["Vary"] == "Accept-Encoding"
    assert "Content-Encoding" not in got.headers


async def test_documents_and_empty_answers_are_not_compressed(long: Place) -> None:
    document = await long.client.get(PATH, headers=told("application/json"))
    nothing = await long.client.get(f"{PATH}?after={WORDS}", headers=told())
    unknown = await long.client.get("/v1/generate/" + "f" * 32, headers=told())
    assert [each.status_code for each in (document, nothing, unknown)] == [200, 204, 404]
    assert not any("Content-Encoding" in each.headers for each in (document, nothing, unknown))
    head = await long.client.head(PATH, headers=told())
    assert (head.status_code, head.headers["Content-Encoding"]) == (200, "zstd")


@pytest.mark.parametrize(
    ("path", "shape"),
    [
        (PATH, ["error", "code"]),
        (f"/v1/chat/completions/{ID}?stream=true", ["error", "code"]),
        (f"/v1/responses/resp_{ID}?stream=true", ["error", "code"]),
    ],
)
async def test_a_request_that_accepts_no_coding_is_refused(
    long: Place, path: str, shape: list[str]
) -> None:
    before = len(long.origin.received)
    got = await long.client.get(path, headers=told(coding="br, *;q=0"))
    assert got.status_code == 406
    assert "Content-Encoding" not in got.headers
    found = got.json()
    for name in shape:
        found = found[name]
    assert found == "not_acceptable"
    assert len(long.origin.received) == before, "no origin is asked"


async def test_anthropics_dialect_refuses_in_its_own_shape(long: Place) -> None:
    path = f"/v1/messages/msg_{ID}?stream=true"
    got = await long.client.get(path, headers=told(coding="identity;q=0"))
    assert got.status_code == 406
    assert got.json()["type"] == "error"
    assert "identity;q=0" in got.json()["error"]["message"]


async def test_a_post_that_is_refused_for_its_coding_starts_nothing(long: Place) -> None:
    before = len(long.origin.received)
    body = {"model": "demo", "prompt": "Once"}
    got = await long.client.post(
        "/v1/generate", json=body, headers=told(coding="zstd;q=0, identity;q=0")
    )
    assert (got.status_code, got.json()["error"]["field"]) == (406, "Accept-Encoding")
    assert len(long.origin.received) == before


def asked(path: str, accept: str = FRAMES_TYPE) -> bytes:
    """Return a request that accepts zstd."""
    headers = f"Host: localhost\r\nAccept: {accept}\r\nAccept-Encoding: zstd\r\n"
    return f"GET {path} HTTP/1.1\r\n{headers}\r\n".encode()


async def body_of(client: Client, path: str, accept: str = FRAMES_TYPE) -> None:
    """Send a request that accepts zstd, and read the head of the response."""
    await client.send(asked(path, accept))
    answer = await client.reader.readuntil(b"\r\n\r\n")
    assert b"content-encoding: zstd\r\n" in answer, answer


async def chunk(client: Client) -> bytes:
    """Return the next chunk of the body."""
    size = int(await client.reader.readline(), 16)
    data = await client.reader.readexactly(size)
    assert await client.reader.readline() == b"\r\n"
    return data


@pytest.fixture
async def growing() -> AsyncIterator[tuple[ScriptedOrigin, Served]]:
    """Yield an edge with a stream that still runs: 300 of its frames exist."""
    origin = ScriptedOrigin(600)
    origin.released = 300
    async with origin.listening(), serving(origin) as served:
        yield origin, served


async def test_a_live_token_is_not_delayed(growing: tuple[ScriptedOrigin, Served]) -> None:
    origin, served = growing
    decompressor = zstandard.ZstdDecompressor().decompressobj()
    async with Client.connected(served) as client:
        await body_of(client, PATH)
        got = b""
        expected = b"".join(encode(frame) for frame in origin.frames[:300])
        while len(got) < len(expected):
            got += decompressor.decompress(await chunk(client))
        assert got == expected
        for index in range(300, 320):
            origin.release(index + 1)
            live = await chunk(client)
            assert decompressor.decompress(live) == encode(origin.frames[index])
            assert len(live) == len(encode(origin.frames[index])) + 3


async def test_a_client_that_stalls_holds_the_origin_back() -> None:
    """The words are of random letters, which zstd makes only a quarter smaller."""
    random = Random(1)
    words = ["".join(random.choices(ascii_letters + digits, k=60)) for _ in range(20_000)]
    origin = ScriptedOrigin(0)
    origin.frames = [Token(word, index) for index, word in enumerate(words)]
    origin.frames.append(StreamEnd(len(words), FinishReason.STOP, len(words), 3))
    origin.released = len(origin.frames)
    async with (
        origin.listening(),
        serving(origin) as served,
        Client.connected(served) as stalled,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{served.port}") as other,
    ):
        wire: socket.socket = stalled.writer.get_extra_info("socket")
        wire.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        stalled.reader._limit = 1024  # type: ignore[attr-defined]  # it stops reading early
        await stalled.send(asked(PATH))
        whole = await other.get(PATH, headers=told(FRAMES_TYPE))
        assert whole.content == b"".join(map(encode, origin.frames))
        assert min(origin.sent.values()) < len(words) // 2
        answer = await stalled.answer()
    assert answer.headers["content-encoding"] == "zstd"
    decompressor = zstandard.ZstdDecompressor().decompressobj()
    assert decompressor.decompress(answer.body) == whole.content
    assert decompressor.eof


async def test_errors_of_a_view_have_the_same_shape_with_and_without_compression(
    long: Place,
) -> None:
    missing = "/v1/generate/" + "e" * 32
    plain = await long.client.get(missing, headers=told(coding="identity"))
    packed = await long.client.get(missing, headers=told())
    assert json.loads(plain.content) == json.loads(packed.content)
