"""QUIC over real sockets: both address families, the documented probe, and a stop."""

from __future__ import annotations

import asyncio
import errno
import re
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from aioquic.asyncio.client import connect
from aioquic.h3.connection import H3_ALPN
from aioquic.quic.configuration import QuicConfiguration

from tailrace.edge.access.connections import ConnectionLimits
from tailrace.edge.flush import FlushBatch
from tailrace.edge.quic.aioquic_library import AioquicLibrary
from tailrace.edge.quic.listen import (
    IPV6_MTU_DISCOVER,
    MAX_SEGMENTS,
    MTU_DISCOVER,
    PMTUDISC_PROBE,
    QuicListener,
    UdpSocket,
    can_segment,
    end_of_segments,
)
from tailrace.edge.server.context import ServerContext
from tailrace.edge.server.deadlines import Deadlines
from tailrace.up import CertificateFiles
from tests.edge.quic.fetching import Fetching
from tests.edge.quic.net import OPEN, Replies

pytestmark = pytest.mark.anyio

SHORT_S = 0.05
DEPLOY = Path(__file__).resolve().parents[3] / "docs/deploy.md"


def bound(host: str) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    made = socket.socket(family, socket.SOCK_DGRAM)
    made.bind((host, 0))
    return made


class Listening:
    """A listener, not started, and its routes."""

    def __init__(self, files: CertificateFiles, *hosts: str) -> None:
        self.files = files
        self.routes = Replies()
        self.sockets = [bound(host) for host in hosts]
        self.ports = [each.getsockname()[1] for each in self.sockets]
        batch = self.batch = FlushBatch()
        context = ServerContext(
            batch,
            self.routes,
            list,
            Deadlines(asyncio.get_running_loop(), batch.flush),
            30.0,
            300.0,
        )
        library = AioquicLibrary(files.certificate, files.key)
        limits = ConnectionLimits(100, 100)
        self.listener = QuicListener(self.sockets, library, context, limits)

    @asynccontextmanager
    async def client(self, host: str = "127.0.0.1", at: int = 0) -> AsyncIterator[Fetching]:
        configuration = QuicConfiguration(
            is_client=True, alpn_protocols=H3_ALPN, server_name="localhost"
        )
        configuration.load_verify_locations(str(self.files.certificate))
        async with connect(
            host, self.ports[at], configuration=configuration, create_protocol=Fetching
        ) as client:
            assert isinstance(client, Fetching)
            yield client


@asynccontextmanager
async def listening(files: CertificateFiles, *hosts: str) -> AsyncIterator[Listening]:
    made = Listening(files, *(hosts or ("127.0.0.1",)))
    made.listener.start()
    try:
        yield made
    finally:
        await made.listener.stop(0)


def has_ipv6() -> bool:
    try:
        bound("::1").close()
    except OSError:
        return False
    return True


async def test_both_families_are_served_by_one_server(certificate: CertificateFiles) -> None:
    hosts = ("127.0.0.1", "::1") if has_ipv6() else ("127.0.0.1",)
    async with listening(certificate, *hosts) as served:
        for at, host in enumerate(hosts):
            async with served.client(host, at) as client:
                assert await client.get(b"/f") == b"GET /f 0"
        peers = [request.peer[0] for request in served.routes.requests if request.peer]
        assert peers == list(hosts)


@pytest.mark.skipif(sys.platform != "linux", reason="other systems call it otherwise")
async def test_no_datagram_is_cut_on_its_way() -> None:
    options = {"127.0.0.1": MTU_DISCOVER, "::1": IPV6_MTU_DISCOVER}
    for host in options if has_ipv6() else ("127.0.0.1",):
        end = UdpSocket(bound(host))
        assert end._socket.getsockopt(*options[host]) == PMTUDISC_PROBE
        end.close()


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have one loopback address")
async def test_a_server_that_listens_everywhere_answers_from_where_it_was_asked(
    certificate: CertificateFiles,
) -> None:
    hosts = ("0.0.0.0", "::") if has_ipv6() else ("0.0.0.0",)
    async with listening(certificate, *hosts) as served:
        async with served.client("127.0.0.2") as client:  # not what the kernel would choose
            assert await client.get(b"/e") == b"GET /e 0"
        if has_ipv6():
            async with served.client("::1", 1) as client:
                assert await client.get(b"/six") == b"GET /six 0"


async def test_the_probe_of_the_documentation_finds_quic(certificate: CertificateFiles) -> None:
    (probe,) = re.findall(r"```python\n(import os, socket\n.*?)```", DEPLOY.read_text(), re.DOTALL)
    async with listening(certificate) as served:
        there = probe.replace('("edge.example", 443)', repr(("127.0.0.1", served.ports[0])))
        program = (sys.executable, "-c", there)
        asked = await asyncio.create_subprocess_exec(*program, stdout=asyncio.subprocess.PIPE)
        output, _ = await asked.communicate()
    assert output == b"QUIC answers\n"


async def test_a_stop_waits_for_what_is_under_way_and_then_says_so(
    certificate: CertificateFiles,
) -> None:
    async with listening(certificate) as served, served.client() as client:
        asking = asyncio.create_task(client.get(OPEN))
        while not served.routes.streams:
            await asyncio.wait({asking}, timeout=SHORT_S)
        stopping = asyncio.create_task(served.listener.stop(60))
        await asyncio.wait({asking}, timeout=SHORT_S)
        assert not stopping.done()
        writer = served.routes.streams[0].writer
        writer.write(b"the rest")
        writer.end()
        served.batch.flush()
        assert await asking == b"the rest"
        await stopping
        async with asyncio.timeout(60):
            await client.wait_closed()


TO, ELSEWHERE = ("127.0.0.1", 9), ("127.0.0.1", 10)


@pytest.mark.parametrize(
    ("sizes", "count"),
    [
        ([1200], 1),
        ([1200, 1200, 1200], 3),
        ([1200, 1200, 700, 700], 3),
        ([700, 1200], 1),
        ([100] * 100, MAX_SEGMENTS),
        ([1400] * 64, 46),
    ],
)
def test_datagrams_of_one_length_leave_as_one_piece(sizes: list[int], count: int) -> None:
    assert end_of_segments([(bytes(size), TO) for size in sizes], 0) == count


def test_a_piece_is_for_one_address() -> None:
    assert end_of_segments([(b"a", TO), (b"b", TO), (b"c", ELSEWHERE)], 0) == 2


@pytest.mark.parametrize("refused", [None, errno.EIO, errno.EINVAL])
async def test_what_leaves_as_one_piece_comes_as_it_was(refused: int | None) -> None:
    """The kernel may refuse a piece: a device cannot cut it, or a way is too narrow for one."""
    with socket.socket(type=socket.SOCK_DGRAM) as client:
        bound = socket.socket(type=socket.SOCK_DGRAM)
        for each in (client, bound):
            each.bind(("127.0.0.1", 0))
        sent = [bytes([n]) * 900 for n in range(20)] + [b"the last"]
        end = UdpSocket(bound)
        if refused is not None:
            end._socket = Refusing(bound, refused)  # type: ignore[assignment]
        end.send([(data, client.getsockname()) for data in sent])
        client.settimeout(5)
        assert [client.recv(4096) for _ in sent] == sent
        assert end._can_segment == (can_segment(bound) and refused != errno.EIO)
        bound.close()


class Refusing:
    """A socket that sends no pieces."""

    def __init__(self, bound: socket.socket, error: int) -> None:
        self.sendto = bound.sendto
        self._error = error

    def sendmsg(self, *_arguments: object) -> int:
        raise OSError(self._error, "refused")
