"""An edge of several processes at one address: HTTP/3 goes to the right one, and one may die."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import httpx
import pytest
from aioquic.asyncio.client import connect
from aioquic.h3.connection import H3_ALPN
from aioquic.quic.configuration import QuicConfiguration

from tailrace.edge.quic.reuseport_bpf import can_route_by_connection_id
from tailrace.up import CertificateFiles, development_certificate
from tests.e2e.processes import Edge, Origin, children_of, running
from tests.e2e.sse import TIMEOUT
from tests.e2e.udp_way import UdpWay
from tests.edge.quic.fetching import Fetching

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.skipif(not can_route_by_connection_id(), reason="the kernel steers on Linux only"),
]

PROCESSES = 3
CLIENTS = 12
MOVES = 8
REQUESTS = "tailrace_edge_requests_total{"


@dataclass
class Several:
    """An edge of several processes, its origin, settings and certificate."""

    origin: Origin
    edge: Edge
    settings: Path
    files: CertificateFiles

    @asynccontextmanager
    async def client(self, port: int) -> AsyncIterator[Fetching]:
        configuration = QuicConfiguration(
            is_client=True, alpn_protocols=H3_ALPN, server_name="localhost"
        )
        configuration.load_verify_locations(str(self.files.certificate))
        async with connect(
            "127.0.0.1", port, configuration=configuration, create_protocol=Fetching
        ) as client:
            assert isinstance(client, Fetching)
            yield client


def serves(pid: int) -> bool:
    """Return True if the process is alive and not a zombie."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] != "Z"


@pytest.fixture(scope="module")
async def several(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Several]:
    folder = tmp_path_factory.mktemp("several")
    files = development_certificate(folder / "certificate", datetime.now(UTC))
    settings = folder / "tailrace.toml"
    # Each takes a free port; with a number each would have the next one.
    settings.write_text(f'[edge]\nprocesses = {PROCESSES}\nmetrics = "127.0.0.1:0"\n')
    origin = Origin(folder / "data")
    edge = Edge(origin, certificate=(files.certificate, files.key), config=settings)
    async with running(origin, edge):
        await edge.saw("origin link up", PROCESSES)
        yield Several(origin, edge, settings, files)


async def test_a_client_whose_address_changes_keeps_its_process(several: Several) -> None:
    """Each new address would be another process's with a chance of two in three."""
    async with (
        UdpWay.open(several.edge.tls_port) as way,
        several.client(way.port) as client,
    ):
        for _ in range(MOVES):
            assert b"ok" in await client.get(b"/healthz")
            way.change()


async def test_what_each_process_counts_adds_up(several: Several) -> None:
    await several.edge.saw("metrics", PROCESSES)
    ports = [event["port"] for event in several.edge.events if event.get("message") == "metrics"]
    assert len(set(ports)) == PROCESSES

    async def counted(client: httpx.AsyncClient) -> float:
        shown = [await client.get(f"http://127.0.0.1:{port}/metrics") for port in ports]
        lines = [line for answer in shown for line in answer.text.splitlines()]
        ours = [line for line in lines if line.startswith(REQUESTS) and "/version" in line]
        return sum(float(line.rpartition(" ")[2]) for line in ours)

    async with httpx.AsyncClient(trust_env=False, timeout=TIMEOUT) as client:
        assert (await client.get(f"{several.edge.url}/metrics")).status_code == 404
        before = await counted(client)
        for _ in range(CLIENTS):
            async with httpx.AsyncClient(trust_env=False, timeout=TIMEOUT) as another:
                assert (await another.get(f"{several.edge.url}/version")).status_code == 200
        async with asyncio.timeout(60):
            while await counted(client) < before + CLIENTS:
                pass
        assert await counted(client) == before + CLIENTS


async def test_one_that_is_killed_is_replaced_and_the_others_serve_on(several: Several) -> None:
    before = children_of(several.edge.pid)
    assert len(before) == PROCESSES
    os.kill(min(before), signal.SIGKILL)
    await several.edge.saw("origin link up", PROCESSES + 1)
    after = children_of(several.edge.pid)
    assert len(after) == PROCESSES and len(after & before) == PROCESSES - 1
    for _ in range(CLIENTS):
        async with several.client(several.edge.tls_port) as client:
            assert b"ok" in await client.get(b"/healthz")
    async with httpx.AsyncClient(timeout=TIMEOUT) as over_tcp:
        answers = [await over_tcp.get(f"{several.edge.url}/healthz") for _ in range(CLIENTS)]
    assert [answer.status_code for answer in answers] == [200] * CLIENTS


async def test_they_end_with_the_first_one_however_it_ends(several: Several) -> None:
    for kill in (False, True):
        edge = Edge(several.origin, config=several.settings)
        await edge.start()
        try:
            await edge.saw("origin link up", PROCESSES)
            serving = children_of(edge.pid)
            assert len(serving) == PROCESSES
        finally:
            if kill:
                await edge.kill()
            else:
                assert await edge.stop() == 0
        async with asyncio.timeout(60):
            while any(map(serves, serving)):
                await asyncio.to_thread(os.sched_yield)
