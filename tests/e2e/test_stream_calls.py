"""/v1/stream through real edges and a real origin: every view, and what survives a kill."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import curl_cffi
import httpx
import pytest
from curl_cffi import CurlHttpVersion

from tailrace.ledger.frame import Chunk, Splitter, StreamEnd, decode
from tailrace.up import development_certificate
from tests.e2e.processes import Edge, Origin
from tests.e2e.sse import TIMEOUT

pytestmark = pytest.mark.anyio

NEXT = "Stream-Next-Offset"
BYTES = {"Content-Type": "application/octet-stream"}
TEXT = {"Content-Type": "text/plain"}
MIB = 1 << 20
MAX_READER_BYTES = 4 * MIB
"""Maximum memory for a stalled reader: one read of the ledger (64 frames of 64 KiB), twice."""


@asynccontextmanager
async def streams_only(
    data: Path, edges: int = 1, certificate: tuple[Path, Path] | None = None
) -> AsyncIterator[tuple[Origin, list[Edge]]]:
    """Yield an origin that is asked for streams at once: they need no worker."""
    origin = Origin(data)
    made = [Edge(origin, certificate=certificate) for _ in range(edges)]
    try:
        await origin.start()
        await origin.saw("origin.listening")
        for edge in made:
            await edge.ready()
        yield origin, made
    finally:
        for process in (*made, origin):
            await process.stop()


async def control_events(response: httpx.Response) -> AsyncIterator[tuple[str, dict[str, Any]]]:
    """Yield the data before each control event, and that event's fields."""
    name, data, lines = "", "", list[str]()
    async for line in response.aiter_lines():
        if line.startswith("event: "):
            name = line.removeprefix("event: ")
        elif line.startswith("data:"):
            lines.append(line.removeprefix("data:"))
        elif not line and lines:
            text = "\n".join(lines)
            lines = []
            if name == "control":
                yield data, json.loads(text)
                data = ""
            else:
                data += text


# ---- every view ----


async def test_a_stream_of_bytes_is_written_and_read_in_every_view(
    tmp_path: Path, client: httpx.AsyncClient
) -> None:
    async with streams_only(tmp_path) as (_, [edge]):
        url = f"{edge.url}/v1/stream/files/b%C3%A9"
        made = await client.put(url, content=b"\x00\xff", headers=BYTES)
        assert (made.status_code, made.headers["Location"]) == (201, url)
        appended = await client.post(url, content=b"\x80" * 200_000, headers=BYTES)
        assert appended.status_code == 204
        whole = b"\x00\xff" + b"\x80" * 200_000

        read = await client.get(url, params={"offset": "-1"})
        assert (read.content, read.headers[NEXT]) == (whole, appended.headers[NEXT])
        assert read.headers["Content-Length"] == str(len(whole))
        rest = await client.get(url, params={"offset": made.headers[NEXT]})
        assert rest.content == whole[2:]
        again = await client.get(url, headers={"If-None-Match": read.headers["ETag"]})
        assert (again.status_code, again.content) == (304, b"")
        head = await client.head(url)
        assert (head.status_code, head.content, head.headers[NEXT]) == (
            200,
            b"",
            read.headers[NEXT],
        )

        tail = {"offset": read.headers[NEXT], "live": "long-poll"}
        polling = asyncio.create_task(client.get(url, params=tail))
        async with client.stream("GET", url, params={"offset": "-1", "live": "sse"}) as sse:
            assert sse.headers["Stream-SSE-Data-Encoding"] == "base64"
            events = control_events(sse)
            await anext(events)
            end = {"Stream-Closed": "true"}
            closed = await client.post(url, content=b"end", headers=BYTES | end)
            assert closed.headers["Stream-Closed"] == "true"
            _, control = await anext(events)
            assert control["streamClosed"] is True
        polled = await polling
        assert (polled.status_code, polled.content) == (200, b"end")

        frames = await client.get(url, params={"offset": "-1", "live": "frames"})
        decoded = [decode(raw)[1] for raw in Splitter().feed(frames.content)]
        assert isinstance(decoded[-1], StreamEnd)
        data = b"".join(frame.data for frame in decoded if isinstance(frame, Chunk))
        assert data == whole + b"end"
        assert (await client.delete(url)).status_code == 204
        assert (await client.get(url)).status_code == 404


async def test_http_2_and_3_carry_the_same(tmp_path: Path) -> None:
    files = development_certificate(tmp_path / "certificate", datetime.now(UTC))
    context = ssl.create_default_context(cafile=files.certificate)
    certificate = (files.certificate, files.key)
    whole = bytes(range(256)) * 2000
    async with (
        streams_only(tmp_path / "data", certificate=certificate) as (_, [edge]),
        httpx.AsyncClient(verify=context, http2=True, timeout=TIMEOUT) as two,
    ):
        url = f"{edge.tls_url}/v1/stream/shared"
        made = await two.put(url, content=whole, headers=BYTES | {"Stream-Closed": "true"})
        assert (made.http_version, made.headers["Location"]) == ("HTTP/2", url)
        assert (await two.get(url)).content == whole
        assert (await two.head(url)).content == b""
        assert await drained(two, url) == len(whole)

        three: dict[str, Any] = {
            "http_version": CurlHttpVersion.V3ONLY,
            "verify": str(files.certificate),
            "timeout": 60,
        }
        read = await asyncio.to_thread(curl_cffi.get, url, **three)
        assert read.content == whole
        live = f"{url}?offset=-1&live=frames"
        frames = await asyncio.to_thread(curl_cffi.get, live, **three)
        decoded = [decode(raw)[1] for raw in Splitter().feed(frames.content)]
        assert isinstance(decoded[-1], StreamEnd)
        headers = BYTES | {"Stream-Closed": "true"}
        again = await asyncio.to_thread(curl_cffi.put, url, data=whole, headers=headers, **three)
        assert again.status_code == 200


# ---- what survives ----


async def test_a_live_tail_goes_on_at_another_edge_when_its_own_is_killed(
    tmp_path: Path, client: httpx.AsyncClient
) -> None:
    words = [f"word{number} " for number in range(60)]
    async with streams_only(tmp_path, edges=3) as (_, [one, two, writing]):
        path = "/v1/stream/tail"
        await client.put(writing.url + path, headers=TEXT)
        heard, offset = "", "-1"
        is_killed = asyncio.Event()

        async def read(edge: Edge, until: str) -> None:
            nonlocal heard, offset
            params = {"offset": offset, "live": "sse"}
            async with client.stream("GET", edge.url + path, params=params) as response:
                async for data, control in control_events(response):
                    heard, offset = heard + data, control["streamNextOffset"]
                    if until in heard:
                        await edge.kill()
                        is_killed.set()

        async def write() -> None:
            for word in words:
                if word == "word20 ":
                    await is_killed.wait()  # the reader may be late
                answer = await client.post(writing.url + path, content=word, headers=TEXT)
                assert answer.status_code == 204
            await client.post(writing.url + path, headers={"Stream-Closed": "true"})

        appending = asyncio.create_task(write())
        with pytest.raises(httpx.TransportError):
            await read(one, "word5 ")
        assert not heard.endswith(words[-1])
        await read(two, "never")  # to the end of the stream
        await appending
        assert heard == "".join(words)


async def test_a_producer_that_sends_again_after_a_kill_is_not_written_twice(
    tmp_path: Path, client: httpx.AsyncClient
) -> None:
    async with streams_only(tmp_path) as (first, [edge]):
        url = f"{edge.url}/v1/stream/produced"
        await client.put(url, headers=TEXT)
        statuses = []

        async def post(seq: int) -> int:
            """Until it is taken: what became of a request that broke off is not known."""
            producer = {"Producer-Id": "p", "Producer-Epoch": "0", "Producer-Seq": str(seq)}
            while True:
                answer = await client.post(url, content=f"{seq},", headers=TEXT | producer)
                if answer.status_code < 500:
                    return answer.status_code
                assert answer.json()["error"]["retryable"] is True
                statuses.append(answer.json()["error"]["code"])

        assert await post(0) == 200
        await first.kill()
        second = Origin(first.data, first.port)
        await second.start()
        try:
            assert await post(0) == 204  # it was stored before the kill
            assert await post(1) == 200
            sending = asyncio.create_task(post_all(post, range(2, 100)))
            await second.saw("origin.listening")
            await until_some(client, url)
            await second.kill()  # in the middle of one of them, or between two
            third = Origin(first.data, first.port)
            await third.start()
            try:
                await sending
                whole = "".join(f"{seq}," for seq in range(100))
                assert (await client.get(url)).text == whole
            finally:
                await third.stop()
        finally:
            await second.stop()


async def post_all(post: Any, numbers: range) -> None:
    for number in numbers:
        assert await post(number) in (200, 204)


async def until_some(client: httpx.AsyncClient, url: str) -> None:
    """Wait until the thirtieth is there."""
    offset, text = "-1", ""
    while "30," not in text:
        read = await client.get(url, params={"offset": offset, "live": "long-poll"})
        text, offset = text + read.text, read.headers[NEXT]


# ---- bounds ----


def resident_bytes(process: Origin | Edge) -> int:
    """Return the memory that a process holds (proc(5), status)."""
    for line in Path(f"/proc/{process.pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no VmRSS")


async def drained(client: httpx.AsyncClient, url: str) -> int:
    """Read the frames of a closed stream to its end; the bytes in them."""
    splitter, size = Splitter(), 0
    async with client.stream("GET", url, params={"offset": "-1", "live": "frames"}) as response:
        async for data in response.aiter_bytes():
            for raw in splitter.feed(data):
                _, frame = decode(raw)
                size += len(frame.data) if isinstance(frame, Chunk) else 0
    return size


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's /proc")
async def test_readers_that_stall_hold_little_memory_and_hold_nobody_up(tmp_path: Path) -> None:
    """Six readers of 32 MiB that read nothing, beside one that reads all of it."""
    size, stalled = 32 * MIB, 6
    limits = httpx.Limits(max_connections=None)
    async with (
        streams_only(tmp_path) as (origin, [edge]),
        httpx.AsyncClient(timeout=TIMEOUT, limits=limits) as client,
    ):
        url = f"{edge.url}/v1/stream/large"
        await client.put(url, headers=BYTES)
        for _ in range(size // MIB):
            appended = await client.post(url, content=bytes(MIB), headers=BYTES)
            assert appended.status_code == 204, appended.text
        await client.post(url, headers={"Stream-Closed": "true"})
        assert await drained(client, url) == size  # warm: what reading costs is held now
        before = {process: resident_bytes(process) for process in (origin, edge)}
        requests = [
            client.build_request("GET", url, params={"offset": "-1", "live": "frames"})
            for _ in range(stalled)
        ]
        responses = [await client.send(request, stream=True) for request in requests]
        assert await drained(client, url) == size
        for process, held in before.items():
            grown = resident_bytes(process) - held
            assert grown < stalled * MAX_READER_BYTES, (
                f"{type(process).__name__} grew by {grown} bytes"
            )
        for response in responses:
            await response.aclose()


# ---- subscriptions ----


async def test_a_worker_is_woken_through_the_edge_and_after_a_kill_its_lease_still_ends(
    tmp_path: Path, client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TAILRACE_STREAMS_SUBSCRIPTIONS", "true")
    async with streams_only(tmp_path) as (first, [edge]):
        root = f"{edge.url}/v1/stream"
        await client.put(f"{root}/wake", json=[])
        wanted = {"type": "pull-wake", "pattern": "jobs/*", "wake_stream": "wake"}
        made = await client.put(
            f"{root}/__ds/subscriptions/pool", json=wanted | {"lease_ttl_ms": 1000}
        )
        assert made.status_code == 201
        await client.put(f"{root}/jobs/1", json=[{"n": 1}])
        params = {"offset": "-1", "live": "long-poll"}
        read = await client.get(f"{root}/wake", params=params)
        [wake] = read.json()
        claim = await client.post(
            f"{root}/__ds/subscriptions/pool/claim", json={"worker": "doomed"}
        )
        assert claim.json()["generation"] == wake["generation"] == 1
        await first.kill()
        second = Origin(first.data, first.port)
        try:
            await second.start()
            await second.saw("origin.listening")
            params["offset"] = read.headers[NEXT]
            [again] = (await client.get(f"{root}/wake", params=params)).json()
            assert again["generation"] == 2
        finally:
            await second.stop()
