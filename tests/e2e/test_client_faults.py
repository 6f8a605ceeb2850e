"""Network faults between a client and its edge: every client has the whole text at the end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from datetime import UTC, datetime
from pathlib import Path
from random import Random
from typing import Any

import curl_cffi
import httpx
import pytest
from curl_cffi import CurlHttpVersion

import tailrace.client
from tailrace import Client, Stream
from tailrace.ledger.stream_text import StreamText
from tailrace.up import development_certificate
from tests.e2e.cluster import request
from tests.e2e.fault_proxy import FaultProxy
from tests.e2e.processes import Edge, Origin, running
from tests.e2e.sse import SSE, start, text_of
from tests.e2e.udp_way import UdpWay

pytestmark = pytest.mark.anyio

SEED = 23
TOKENS = 250
READERS = 6
RESETS = 20
HOLE_S = 10.0
SILENCE_S = 2.0
"""After which a reader here takes its edge for dead; the pings of a quiet stream come slower."""
LOSS = 0.1


class Way:
    """An edge behind a proxy that breaks connections."""

    def __init__(self, folder: Path) -> None:
        files = development_certificate(folder / "certificate", datetime.now(UTC))
        self.certificate = files.certificate
        self.origin = Origin(folder / "data")
        self.edge = Edge(self.origin, certificate=(files.certificate, files.key))
        self.proxy = FaultProxy(self.edge.port)
        self.whole = ""


@pytest.fixture(scope="module")
async def way(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Way]:
    made = Way(tmp_path_factory.mktemp("faults"))
    async with made.proxy.serving(), running(made.origin, made.edge):
        async with httpx.AsyncClient(timeout=60) as client:
            made.whole = (await start(client, made.edge.url, request(SEED, TOKENS))).text
        yield made


class Progress:
    """How many pieces of text have come, of all readers."""

    def __init__(self) -> None:
        self.pieces = 0
        self._came = asyncio.Event()

    async def read(self, stream: Stream) -> str:
        text = StreamText()
        async for frame in stream:
            text.add(frame)
            self.pieces += 1
            self._came.set()
        return text.text

    async def more(self) -> None:
        """Wait for a piece that was not yet there."""
        self._came.clear()
        await self._came.wait()


async def _delayed(way: Way, _progress: Progress) -> None:
    way.proxy.delay_s = 0.03


async def _reset(way: Way, progress: Progress) -> None:
    for _ in range(RESETS):
        await progress.more()
        way.proxy.cut()


async def _half_open(way: Way, progress: Progress) -> None:
    await progress.more()
    way.proxy.abandon()


async def _hole(way: Way, progress: Progress) -> None:
    await progress.more()
    way.proxy.swallow()
    await asyncio.sleep(HOLE_S)
    way.proxy.give_way()


@pytest.mark.parametrize("fault", [_delayed, _reset, _half_open, _hole])
async def test_a_fault_between_client_and_edge_is_a_pause(
    way: Way,
    monkeypatch: pytest.MonkeyPatch,
    fault: Callable[[Way, Progress], Coroutine[Any, Any, None]],
) -> None:
    monkeypatch.setattr(tailrace.client, "SILENCE_TIMEOUT_S", SILENCE_S)
    progress = Progress()
    async with Client([f"http://{way.proxy.link}"], trust_env=False) as client:
        streams = [client.generate(**request(SEED, TOKENS)) for _ in range(READERS)]
        async with asyncio.TaskGroup() as group:
            texts = [group.create_task(progress.read(stream)) for stream in streams]
            faulty = group.create_task(fault(way, progress))
            await asyncio.wait(texts)
            faulty.cancel()
    way.proxy.delay_s = 0.0
    assert [text.result() for text in texts] == [way.whole] * READERS


async def test_a_tenth_of_all_datagrams_is_lost_and_no_token(way: Way) -> None:
    async with UdpWay.open(way.edge.tls_port, loss=LOSS, random=Random(SEED)) as lossy:
        options: dict[str, Any] = {"verify": str(way.certificate), "timeout": 120}
        answer = await asyncio.to_thread(
            lambda: curl_cffi.post(
                f"https://localhost:{lossy.port}/v1/generate",
                json=request(SEED, TOKENS),
                headers=SSE,
                http_version=CurlHttpVersion.V3ONLY,
                **options,
            )
        )
    assert (answer.http_version, answer.status_code) == (CurlHttpVersion.V3, 200)
    assert text_of(answer.content) == way.whole
    assert lossy.lost
