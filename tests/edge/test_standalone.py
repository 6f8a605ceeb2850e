"""`tailrace.edge:app` on Hypercorn as it comes: a process, over HTTP/1.1, HTTP/2 and HTTP/3."""

from __future__ import annotations

import asyncio
import socket
import ssl
from datetime import UTC, datetime
from pathlib import Path
from typing import cast

import httpx
import pytest
from aioquic.asyncio.client import connect
from aioquic.h3.connection import H3_ALPN
from aioquic.quic.configuration import QuicConfiguration

from tailrace.up import CertificateFiles, development_certificate
from tests.e2e.processes import free_port
from tests.edge.quic.fetching import Fetching
from tests.edge.scripted_origin import STREAM, ScriptedOrigin
from tests.edge.server.stock_hypercorn import START_S, hypercorn, ready

pytestmark = pytest.mark.anyio

WORDS = 20
EVENTS = {"Accept": "text/event-stream"}
BODY = {"model": "demo", "prompt": "Once"}


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> CertificateFiles:
    return development_certificate(tmp_path_factory.mktemp("certificate"), datetime.now(UTC))


def trusting(certificate: CertificateFiles) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=str(certificate.certificate))


@pytest.mark.parametrize("worker", ["asyncio", "uvloop"])
async def test_the_same_application_streams_on_hypercorn_over_every_protocol(
    tmp_path: Path, certificate: CertificateFiles, worker: str
) -> None:
    plain, secure = free_port(), free_port()
    flags = (
        *("-k", worker, "--bind", f"127.0.0.1:{secure}", "--insecure-bind", f"127.0.0.1:{plain}"),
        *("--quic-bind", f"127.0.0.1:{secure}"),
        *("--certfile", str(certificate.certificate), "--keyfile", str(certificate.key)),
    )
    async with (
        ScriptedOrigin(WORDS).listening() as origin,
        hypercorn(tmp_path, *flags, origin=f"127.0.0.1:{origin.port}"),
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{plain}", trust_env=False) as old,
        httpx.AsyncClient(
            base_url=f"https://localhost:{secure}",
            http2=True,
            http1=False,
            verify=trusting(certificate),
            trust_env=False,
        ) as new,
    ):
        await ready(old)
        for client, version in ((old, "HTTP/1.1"), (new, "HTTP/2")):
            answer = await client.post("/v1/generate", json=BODY, headers=EVENTS)
            assert (answer.http_version, answer.status_code) == (version, 200)
            assert answer.text.count("data: ") == WORDS + 1
            rest = await client.get(f"/v1/generate/{STREAM.hex()}?after=9", headers=EVENTS)
            assert rest.text.count("data: ") == WORDS + 1 - 10
        counted = (await old.get("/metrics")).text
        assert 'route="/v1/generate",method="POST",status="200",protocol="h2"' in counted or (
            'method="POST",protocol="h2",route="/v1/generate",status="200"' in counted
        )
        configuration = QuicConfiguration(
            is_client=True, alpn_protocols=H3_ALPN, server_name="localhost"
        )
        configuration.load_verify_locations(str(certificate.certificate))
        async with connect(
            "127.0.0.1", secure, configuration=configuration, create_protocol=Fetching
        ) as quic:
            assert await cast(Fetching, quic).get(b"/healthz") == b'{"ok":true}'


async def test_a_setting_that_is_wrong_ends_the_start_and_is_named(tmp_path: Path) -> None:
    async with hypercorn(tmp_path, "-b", f"127.0.0.1:{free_port()}", origin="nowhere") as process:
        async with asyncio.timeout(START_S):
            _, said = await process.communicate()
    assert b"edge.origin" in said and b"HOST:PORT" in said


async def test_without_keys_nobody_elsewhere_is_answered(tmp_path: Path) -> None:
    """The settings say loopback, and the server listens for everybody."""
    address = elsewhere()
    if address is None:
        pytest.skip("this machine has no address but loopback's")
    port = free_port()
    async with (
        ScriptedOrigin(WORDS).listening() as origin,
        hypercorn(tmp_path, "-b", f"0.0.0.0:{port}", origin=f"127.0.0.1:{origin.port}"),
        httpx.AsyncClient(trust_env=False) as client,
    ):
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", trust_env=False) as here:
            await ready(here)
        answer = await client.get(f"http://{address}:{port}/healthz")
    assert answer.status_code == 503
    assert "edge.http" in answer.json()["error"]["hint"]


def elsewhere() -> str | None:
    """Return an address of this machine that others may reach."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # nothing is sent
        except OSError:
            return None
        address: str = probe.getsockname()[0]
    return None if address.startswith("127.") else address
