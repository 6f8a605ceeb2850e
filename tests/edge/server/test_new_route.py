"""A streaming route as a user of the framework adds it: one endpoint, one encoder, no other file.

It gets back-pressure, resumption behind a lost link, detachment from its stream, limits, metrics
and the way past ASGI, on HTTP/1.1, HTTP/2 and HTTP/3.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from typing import cast

import pytest
from aioquic.asyncio.client import connect
from aioquic.h3.connection import H3_ALPN
from aioquic.quic.configuration import QuicConfiguration
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tailrace.edge.access.keys import KeyRing, Limits
from tailrace.edge.access.middleware import caller_of
from tailrace.edge.generate.encoders import NativeEncoder
from tailrace.edge.generate.routes import resume_request
from tailrace.edge.stream_answer import StreamAnswer
from tailrace.ledger.flow.backoff import Backoff
from tailrace.ledger.frame import Credit, Detach, Resume, Token, decode
from tailrace.up import CertificateFiles, development_certificate
from tests.edge.access.test_authenticator import KEY, api_key
from tests.edge.quic.fetching import Fetching
from tests.edge.scripted_origin import STREAM, ScriptedOrigin, until
from tests.edge.server.detached import detached
from tests.edge.server.http2_peer import Peer
from tests.edge.server.serving import Client, Served, serving

pytestmark = pytest.mark.anyio

WORDS = 12_000
PATH = f"/shout/{STREAM.hex()}"
ALL = "".join(f" W{n}" for n in range(WORDS)).encode()

# ---- what a user of the framework writes ----


class Capitals(NativeEncoder):
    """An encoder that sends the text of a stream in capitals."""

    media_type = "text/plain"

    def frames(self, frames: list[bytes]) -> bytes:
        told = [decode(raw)[1] for raw in frames]
        return "".join(each.text for each in told if isinstance(each, Token)).upper().encode()

    def keepalive(self) -> bytes:
        return b" "


async def shout(request: Request) -> Response:
    """GET /shout/{id}: a stream in capitals."""
    after = request.query_params.getlist("after")
    wanted = resume_request(request.path_params["id"], after, None, None, caller_of(request))
    return StreamAnswer(wanted, Capitals())


# ---- what it gets ----


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> CertificateFiles:
    return development_certificate(tmp_path_factory.mktemp("certificate"), datetime.now(UTC))


@pytest.fixture
async def origin() -> AsyncIterator[ScriptedOrigin]:
    async with ScriptedOrigin(WORDS).listening() as origin:
        yield origin


@pytest.fixture
async def served(origin: ScriptedOrigin, certificate: CertificateFiles) -> AsyncIterator[Served]:
    files = {"certificate": certificate.certificate, "key": certificate.key}
    async with serving(origin, https=("127.0.0.1:0",), **files) as served:
        routes = served.edge.starlette.router.routes
        routes.insert(0, Route("/shout/{id}", shout, methods=["GET"]))
        yield served


def get(path: str = PATH, headers: str = "") -> bytes:
    return f"GET {path} HTTP/1.1\r\nHost: localhost\r\n{headers}\r\n".encode()


def value(served: Served, name: str, **labels: str) -> float:
    metrics = served.edge.starlette.state.metrics
    return metrics.registry.get_sample_value(f"tailrace_edge_{name}", labels) or 0.0


def requests(served: Served, protocol: str) -> float:
    labels = {"route": "/shout/{id}", "method": "GET", "status": "200", "protocol": protocol}
    return value(served, "requests_total", **labels)


async def test_it_streams_past_asgi_over_http_1_1_and_is_counted(served: Served) -> None:
    with detached() as sources:
        async with Client.connected(served) as client:
            await client.send(get())
            answer = await client.answer()
    assert (answer.status, answer.body, len(sources)) == (200, ALL, 1)
    assert answer.headers["content-type"] == "text/plain"
    assert answer.headers["tailrace-stream"] == STREAM.hex()
    assert requests(served, "h1") == 1
    assert value(served, "time_to_first_byte_seconds_count", route="/shout/{id}") == 1


async def test_the_same_over_http_2(served: Served) -> None:
    with detached() as sources:
        async with Peer.of(served) as peer:
            stream = peer.ask("GET", PATH)
            await peer.until(lambda: stream in peer.ended)
    assert (peer.statuses[stream], bytes(peer.bodies[stream]), len(sources)) == ("200", ALL, 1)
    assert requests(served, "h2") == 1


async def test_the_same_over_http_3(served: Served, certificate: CertificateFiles) -> None:
    configuration = QuicConfiguration(
        is_client=True, alpn_protocols=H3_ALPN, server_name="localhost"
    )
    configuration.load_verify_locations(str(certificate.certificate))
    with detached() as sources:
        async with connect(
            "127.0.0.1",
            served.quic_port,
            configuration=configuration,
            create_protocol=Fetching,
        ) as connected:
            client = cast(Fetching, connected)
            await client.get(PATH.encode())
            await until(lambda: len(client.body) >= len(ALL))
            await until(lambda: requests(served, "h3") == 1)
    assert (client.body, len(sources)) == (ALL, 1)


async def test_a_client_that_does_not_read_holds_the_origin_back(
    served: Served, origin: ScriptedOrigin
) -> None:
    with socket.socket() as stalled:
        stalled.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        stalled.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(stalled, ("127.0.0.1", served.port))
        await loop.sock_sendall(stalled, get())
        await until(lambda: value(served, "streams", protocol="h1", state="stalled") == 1)
        await until(lambda: any(isinstance(each, Credit) for each in origin.received))
        assert max(origin.sent.values()) < WORDS
        body = b""
        while not body.endswith(b"0\r\n\r\n"):
            body += await loop.sock_recv(stalled, 65_536)
    assert value(served, "stalls_total", protocol="h1") >= 1
    assert body.count(b"W") == WORDS


async def test_a_lost_link_is_a_pause_and_the_client_resumes_where_it_is(
    served: Served, origin: ScriptedOrigin
) -> None:
    served.context.link.origins[0]._backoff = Backoff(0, 0)
    origin.released = 100
    async with Client.connected(served) as client:
        await client.send(get())
        await client.reader.readuntil(b" W99")
        origin.released = WORDS + 1
        origin.drop_links()
        rest = b""
        while not rest.endswith(b"0\r\n\r\n"):
            rest += await client.reader.read(65_536)
        assert rest.count(b"W") == WORDS - 100
        await client.send(get(f"{PATH}?after={WORDS - 3}"))
        assert (await client.answer()).body == f" W{WORDS - 2} W{WORDS - 1}".encode()
        await client.send(get(f"{PATH}?after={WORDS}"))
        assert (await client.answer()).status == 204


async def test_a_client_that_leaves_is_detached_from_its_stream(
    served: Served, origin: ScriptedOrigin
) -> None:
    origin.released = 100
    async with Client.connected(served) as client:
        await client.send(get())
        await client.reader.readuntil(b" W99")
    await until(lambda: any(isinstance(each, Detach) for each in origin.received))
    await until(lambda: requests(served, "h1") == 1)


async def test_keys_are_asked_for_and_a_stream_counts_until_it_ends(
    served: Served, origin: ScriptedOrigin
) -> None:
    authenticator = served.context.rules.authenticator
    authenticator.ring = KeyRing([api_key()], {"acme": Limits(max_concurrent=1)})
    with_key = f"Authorization: Bearer {KEY}\r\n"
    origin.released = 100
    async with Client.connected(served) as first, Client.connected(served) as second:
        await second.send(get())
        assert (await second.answer()).error == "no_key"
        await first.send(get(headers=with_key))
        await first.reader.readuntil(b" W99")
        assert not served.context.application.tasks
        await second.send(get(headers=with_key))
        assert (await second.answer()).error == "too_many_requests"
    [asked] = [each for each in origin.received if isinstance(each, Resume)]
    assert asked.caller is not None and asked.caller.tenant == "acme"
    await until(lambda: not authenticator._under_way)
