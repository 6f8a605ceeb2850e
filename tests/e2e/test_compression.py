"""Compressed replays through real processes: cut after every event, and over a WebSocket."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest
import zstandard
from websockets.asyncio.client import connect

from tailrace.client import Client
from tailrace.ledger.frame import (
    FRAMES_TYPE,
    SCHEMA_HASH,
    Compression,
    Frame,
    Hello,
    Logged,
    Resume,
    Snapshot,
    Splitter,
    StreamEnd,
    TokenRun,
    decode,
    encode,
    split,
    tag_of,
)
from tailrace.ledger.wire.compression import unpacked
from tests.e2e.conftest import House

pytestmark = pytest.mark.anyio

TOKENS = 150
REQUEST = {
    "model": "demo",
    "prompt": "Once upon a time",
    "max_tokens": TOKENS,
    "temperature": 0.8,
    "seed": 11,
    "ignore_eos": True,
}
ZSTD = {"Accept-Encoding": "zstd"}
LINES = {"Accept": "application/x-ndjson"}
PATIENCE_S = 60.0


async def made(client: httpx.AsyncClient, url: str) -> tuple[str, list[Frame]]:
    """Start a stream, and return its id and all of its frames."""
    headers = {"Accept": FRAMES_TYPE, "Accept-Encoding": "identity"}
    got = await client.post(f"{url}/v1/generate", json=REQUEST, headers=headers)
    assert got.status_code == 200, got.text
    return got.headers["Tailrace-Stream"], [decode(raw)[1] for raw in Splitter().feed(got.content)]


async def test_a_compressed_replay_that_is_cut_after_any_event_goes_on_with_the_next(
    standing_house: House, client: httpx.AsyncClient
) -> None:
    one, two = (edge.url for edge in standing_house.edges)
    stream, frames = await made(client, one)
    whole = await lines(client, one, stream, {})
    assert [line["index"] for line in whole] == [*range(len(frames))]
    for have in range(len(whole)):
        seen: list[dict[str, Any]] = []
        path, headers = f"{one}/v1/generate/{stream}", LINES | ZSTD
        async with client.stream("GET", path, headers=headers) as response:
            assert response.headers["Content-Encoding"] == "zstd"
            async for line in response.aiter_lines():
                seen.append(json.loads(line))
                if len(seen) > have:
                    break
        assert seen + await lines(client, two, stream, {"after": have}) == whole


async def lines(
    client: httpx.AsyncClient, url: str, stream: str, params: dict[str, Any]
) -> list[dict[str, Any]]:
    got = await client.get(f"{url}/v1/generate/{stream}", headers=LINES | ZSTD, params=params)
    return [json.loads(line) for line in got.text.splitlines()]


async def test_a_replay_and_a_snapshot_are_smaller_in_every_view(
    standing_house: House, client: httpx.AsyncClient
) -> None:
    url = standing_house.edges[0].url
    stream, _ = await made(client, url)
    for accept in (FRAMES_TYPE, "text/event-stream", "application/jsonl"):
        path, headers = f"{url}/v1/generate/{stream}", {"Accept": accept}
        plain = await client.get(path, headers=headers | {"Accept-Encoding": "identity"})
        async with client.stream("GET", path, headers=headers | ZSTD) as response:
            body = b"".join([piece async for piece in response.aiter_raw()])
        decompressor = zstandard.ZstdDecompressor().decompressobj()
        got = decompressor.decompress(body)
        assert decompressor.eof
        assert len(got) - len(plain.content) in range(-2, 3)  # the time in `retry:`
        assert len(body) < len(got) / 2


async def test_the_python_client_reads_a_compressed_replay_and_resumes_it_after_a_cut(
    standing_house: House, client: httpx.AsyncClient
) -> None:
    urls = [edge.url for edge in standing_house.edges]
    stream, frames = await made(client, urls[0])
    async with Client(urls) as reader:
        reading = reader.resume(stream)
        got: list[Frame] = []
        async for frame in reading:
            got.append(frame)
            if len(got) == TOKENS // 2:
                reading.cut()
    assert got == frames
    assert reading.resumes == 1


async def test_a_replay_over_a_websocket_is_compressed_if_both_hellos_say_so(
    standing_house: House, client: httpx.AsyncClient
) -> None:
    url = standing_house.edges[0].url
    stream, frames = await made(client, url)
    address = f"{url.replace('http', 'ws', 1)}/v1/ws"
    hellos = Hello(SCHEMA_HASH, "test"), Hello(SCHEMA_HASH, "test", Compression.ZSTD)
    sizes = []
    for hello in hellos:
        raws = await read(address, hello, Resume(bytes.fromhex(stream), credit=1_000))
        sizes.append(sum(map(len, raws)))
        assert any(tag_of(raw) == TokenRun.tag for raw in raws) == (hello is hellos[1])
        shown = [decode(each)[1] for raw in raws for each in unpacked(raw)]
        assert [frame for frame in shown if isinstance(frame, Logged)] == frames
    assert sizes[1] < sizes[0] / 2
    snapshot = Resume(bytes.fromhex(stream), credit=1_000, snapshot=True)
    raws = await read(address, hellos[1], snapshot)
    [text] = [decode(each)[1] for raw in raws for each in unpacked(raw) if tag_of(raw) == 7]
    assert isinstance(text, Snapshot)
    assert text.text == "".join(getattr(frame, "text", "") for frame in frames)


async def read(address: str, hello: Hello, resume: Resume) -> list[bytes]:
    """Return the frames on the channel of a Resume as they were sent."""
    raws: list[bytes] = []
    async with asyncio.timeout(PATIENCE_S), connect(address) as socket:
        await socket.send(encode(hello) + encode(resume, 1))
        while not raws or tag_of(raws[-1]) != StreamEnd.tag:
            message = await socket.recv()
            assert isinstance(message, bytes)
            raws += [raw for raw in split(message) if raw[5] == 1]
    return raws
