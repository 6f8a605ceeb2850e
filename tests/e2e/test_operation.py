"""Operating an edge and an origin: SIGTERM, SIGHUP, and a new certificate."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import ssl
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

import httpx
import pytest
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed

from tailrace.ledger.errors import EXIT_FAILED, EXIT_USAGE
from tailrace.ledger.frame import (
    SCHEMA_HASH,
    Frame,
    Hello,
    Open,
    Opened,
    StreamError,
    decode,
    encode,
    split,
)
from tailrace.origin.filter import PASS, Verdict
from tailrace.up import development_certificate
from tests.e2e.cluster import Reader, request
from tests.e2e.held import HeldOrigin
from tests.e2e.processes import Edge, Origin, Process, free_port, running
from tests.e2e.sse import start

pytestmark = pytest.mark.anyio

SSE = {"Accept": "text/event-stream"}
BODY = {"model": "demo", "prompt": "Once upon a time", "ignore_eos": True, "seed": 1}
HALF = 100
"""Characters of 200 tokens."""


async def drained(edge: Edge, monkeypatch: pytest.MonkeyPatch, **settings: float) -> None:
    """Start an edge with these settings."""
    with monkeypatch.context() as patch:
        for name, value in settings.items():
            patch.setenv(f"TAILRACE_EDGE_{name.upper()}", str(value))
        await edge.ready()


async def asked_to_stop(edge: Edge) -> None:
    os.kill(edge.pid, signal.SIGTERM)
    await edge.saw("draining")


async def test_an_edge_goes_away_in_steps_and_a_second_signal_ends_it_at_once(
    tmp_path: Path, client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    origin = HeldOrigin(tmp_path / "data")
    lame, finishing, hasty = Edge(origin), Edge(origin), Edge(origin)
    async with running(origin, late=(lame, finishing, hasty)):
        await drained(lame, monkeypatch, lame_duck_s=600)
        await drained(finishing, monkeypatch, drain_s=600)
        await drained(hasty, monkeypatch, drain_s=0)

        # After the first signal it still serves; the second one ends it at once.
        await asked_to_stop(lame)
        unready = await client.get(f"{lame.url}/readyz")
        assert unready.status_code == 503
        assert "this edge is shutting down" in unready.json()["reasons"]
        served = await client.post(f"{lame.url}/v1/generate", json=BODY | {"max_tokens": 4})
        assert served.status_code == 200
        assert await lame.stop() == 0

        # Running streams end normally; new requests are refused with Retry-After.
        origin.hold(HALF)
        async with client.stream(
            "POST", f"{finishing.url}/v1/generate", json=BODY | {"max_tokens": 200}, headers=SSE
        ) as running_on:
            text = aiter(running_on.aiter_text())
            seen = await anext(text)
            await asked_to_stop(finishing)
            await finishing.saw("shutting down")
            # The connection of the stream is its last; this is another one.
            refused = await client.post(f"{finishing.url}/v1/generate", json=BODY)
            assert refused.status_code == 503
            assert int(refused.headers["Retry-After"]) >= 1
            origin.go_on()
            async for more in text:
                seen += more
        assert '"total_tokens":200' in seen and seen.count("event: end") == 1
        assert await finishing.ended() == 0

        # Streams that would take too long are handed over. Without credit this one never ends.
        wanted = Open("demo", prompt="Once", max_tokens=8, ignore_eos=True, credit=1)
        url = hasty.url.replace("http", "ws") + "/v1/ws"
        async with connect(url, compression=None, proxy=None) as socket:
            await socket.send(encode(Hello(SCHEMA_HASH, "test")) + encode(wanted, 1))
            frames = [frame async for frame in told(socket, hasty)]
        ends = [frame for frame in frames if isinstance(frame, StreamError)]
        assert {(end.code, end.retryable) for end in ends} == {("unavailable", True)}
        assert all(end.retry_after_ms is not None for end in ends)
        assert socket.close_code == 1001
        assert await hasty.ended() == 0


async def told(socket: ClientConnection, edge: Edge) -> AsyncIterator[Frame]:
    """Yield the bytes of the stream; the edge gets SIGTERM once it is open."""
    with suppress(ConnectionClosed):
        while True:
            for corr, frame in map(decode, split(await socket.recv(decode=False))):
                if isinstance(frame, Opened):
                    await asked_to_stop(edge)
                if corr == 1:
                    yield frame


class UnreadyFilter:
    """Keeps its worker from being ready until a file is there."""

    UNTIL = "TAILRACE_TEST_UNREADY_UNTIL"

    def __init__(self) -> None:
        while not Path(os.environ[self.UNTIL]).exists():
            time.sleep(0.05)

    def check(self, text: str, last: bool) -> Verdict:
        return PASS


async def test_streams_of_an_origin_that_goes_away_end_there_and_new_ones_go_to_who_is_ready(
    tmp_path: Path, client: httpx.AsyncClient
) -> None:
    """Two origins with a ledger each: what one begins, the other cannot end."""
    one, two = HeldOrigin(tmp_path / "one"), Origin(tmp_path / "two")
    edge, ready = Edge(one, two), tmp_path / "ready"
    one.environment["TAILRACE_ORIGIN_DRAIN_S"] = "600"
    two.environment["TAILRACE_ORIGIN_FILTER"] = "tests.e2e.test_operation:UnreadyFilter"
    two.environment[UnreadyFilter.UNTIL] = str(ready)

    async def began() -> str:
        """Return the id of a new stream, which is whole."""
        answer = await client.post(f"{edge.url}/v1/generate", json=request(1, 4))
        assert answer.status_code == 200
        assert answer.json()["total_tokens"] == 4
        return answer.headers["Tailrace-Stream"]

    async def told(*wanted: bool) -> None:
        """Wait until the edge knows which origins are ready."""
        while True:
            origins = (await client.get(f"{edge.url}/readyz")).json()["origins"]
            if tuple(origin["ready"] for origin in origins) == wanted:
                return
            await asyncio.sleep(0.05)

    async with running(one, late=(two, edge)):
        await two.start()
        await edge.ready()
        await told(True, False)
        for _ in range(4):
            await began()
        whole = await start(client, edge.url, request(5, 200))

        one.hold_behind(whole, 20)
        readers = [Reader(20), Reader(20)]
        async with asyncio.TaskGroup() as group:
            for reader in readers:
                group.create_task(reader.read(client, edge, request(5, 200)))
            for reader in readers:
                await reader.under_way.wait()
            ready.touch()
            await told(True, True)
            os.kill(one.pid, signal.SIGTERM)
            draining = await one.saw("origin.draining")
            await told(False, True)
            streams = [await began() for _ in range(4)]
            one.go_on()
        assert draining["streams"] >= len(readers)
        assert await one.ended() == 0
        assert [reader.reading.events for reader in readers] == [whole.events] * 2
        for stream in streams:
            found = await client.get(f"{edge.url}/v1/generate/{stream}")
            assert found.json()["state"] == "ended"


async def test_a_renewed_certificate_is_served_without_a_restart(tmp_path: Path) -> None:
    served, renewed = tmp_path / "served", tmp_path / "renewed"
    files = development_certificate(served, datetime.now(UTC))
    port = free_port()
    edge = Process(
        *("edge", "--http", "", "--https", f"127.0.0.1:{port}", "--http3"),
        *("--certificate", files.certificate, "--key", files.key, "--origin", "127.0.0.1:9"),
    )

    async def seen() -> str:
        return await asyncio.to_thread(ssl.get_server_certificate, ("127.0.0.1", port), timeout=30)

    try:
        await edge.start()
        await edge.saw("Running on https://")
        first = await seen()
        assert first == files.certificate.read_text()
        files.certificate.write_text("half a certificate")
        failed = await edge.saw("reload failed")
        assert failed["what"] == "certificate" and "BEGIN" not in json.dumps(failed)
        assert await seen() == first
        again = development_certificate(renewed, datetime.now(UTC))
        again.key.replace(files.key)
        again.certificate.replace(files.certificate)
        os.kill(edge.pid, signal.SIGHUP)
        await edge.saw("reloaded")
        assert await seen() == files.certificate.read_text() != first
    finally:
        await edge.stop()


async def test_the_next_start_removes_the_sockets_of_a_killed_origin(tmp_path: Path) -> None:
    def sockets() -> list[Path]:
        return list(tmp_path.glob("tailrace-*/worker.sock"))

    echo = "tests.origin.producers.text_producers:Echo"
    first, second = (Origin(tmp_path / "data", producer=echo) for _ in range(2))
    for origin in (first, second):
        origin.environment["TMPDIR"] = str(tmp_path)
    async with running(first):
        left = sockets()
        await first.kill()
        assert sockets() == left != []
        async with running(second):
            assert len(sockets()) == 1 and sockets() != left
    assert sockets() == []


async def test_an_origin_ends_although_a_library_has_left_a_thread(tmp_path: Path) -> None:
    place, held = "tests.origin.left_thread:Lingering", free_port()
    first, second = Origin(tmp_path / "first", held), Origin(tmp_path / "second", held)
    for origin in (first, second):
        origin.environment["TAILRACE_ORIGIN_OBJECTS"] = place
    async with running(first):
        await second.start()
        assert await second.ended() == EXIT_USAGE  # its port is taken
        assert second.count("threads.left") == 1
    assert first.count("threads.left") == 1
    assert await first.ended() == 0


async def test_an_origin_ends_although_a_job_hangs_in_a_thread(tmp_path: Path) -> None:
    origin = Origin(tmp_path / "data")
    origin.environment["TAILRACE_ORIGIN_OBJECTS"] = "tests.origin.hung_thread:Hanging"
    async with running(origin):
        assert await origin.stop() == EXIT_FAILED
    said = await origin.saw("process.does_not_end")
    assert {"hung", "MainThread"} <= set(said["threads"])
