"""The guide's commands of certbot, run against Pebble, an ACME server (RFC 8555).

Pebble asks for the challenges on a port of this machine, and gets all names from a DNS server that
answers 127.0.0.1. The edge then serves what certbot's hook handed to it, over HTTP/2 and HTTP/3.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shlex
import signal
import ssl
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory

import curl_cffi
import httpx
import pytest
from curl_cffi import CurlHttpVersion, CurlOpt

from tailrace.up import development_certificate
from tests.deploy.files import DEPLOY, blocks, by_systemd, service
from tests.deploy.machine import Machine
from tests.e2e.processes import free_port
from tests.e2e.test_behind_proxy import nginx, program, proxy

pytestmark = pytest.mark.anyio

HOST = "edge.example"
CERTBOT_TIMEOUT_S = 120.0


@dataclass(frozen=True)
class AcmeServer:
    """A Pebble that runs; it validates challenges at `http_port`."""

    directory: str
    authority: Path
    """The certificate that Pebble's own HTTPS has."""
    root: Path
    """The root of the certificates that it issues."""
    http_port: int


@asynccontextmanager
async def pebble(folder: Path) -> AsyncIterator[AcmeServer]:
    """Run Pebble, and the DNS server that it asks."""
    api, management, dns, http_port = (free_port() for _ in range(4))
    own = development_certificate(folder, datetime.now(UTC))
    settings = {
        "listenAddress": f"127.0.0.1:{api}",
        "managementListenAddress": f"127.0.0.1:{management}",
        "certificate": str(own.certificate),
        "privateKey": str(own.key),
        "httpPort": http_port,
        "tlsPort": free_port(),
    }
    (folder / "pebble.json").write_text(json.dumps({"pebble": settings}))
    names = (program("pebble-challtestsrv"), "-dns01", f"127.0.0.1:{dns}", "-defaultIPv6", "")
    others = [word for name in ("http01", "https01", "tlsalpn01") for word in (f"-{name}", "")]
    managed = free_port()
    server = (program("pebble"), "-config", str(folder / "pebble.json"))
    async with (
        proxy(*names, *others, "-management", f"127.0.0.1:{managed}", port=managed),
        proxy(
            *server,
            *("-strict", "-dnsserver", f"127.0.0.1:{dns}"),
            port=management,
            # By default Pebble refuses 5 % of all nonces; certbot ends at the second one in a row.
            environment={"PEBBLE_VA_NOSLEEP": "1", "PEBBLE_WFE_NONCEREJECT": "0"},
        ),
    ):
        context = ssl.create_default_context(cafile=str(own.certificate))
        async with httpx.AsyncClient(verify=context) as client:
            answer = await client.get(f"https://localhost:{management}/roots/0")
        root = folder / "root.pem"
        root.write_text(answer.raise_for_status().text)
        yield AcmeServer(f"https://localhost:{api}/dir", own.certificate, root, http_port)


class Certbot:
    """The certbot of this machine, with its folders in `folder` and Pebble as its server."""

    def __init__(self, folder: Path, server: AcmeServer) -> None:
        places = ("config", "work", "logs")
        self.flags = [word for each in places for word in (f"--{each}-dir", str(folder / each))]
        self.flags += ["--http-01-port", str(server.http_port), "--server", server.directory]
        self.environment = {"REQUESTS_CA_BUNDLE": str(server.authority)}

    async def run(self, *words: str) -> None:
        process = await asyncio.create_subprocess_exec(
            *(program("certbot"), *words, *self.flags),
            env={**os.environ, **self.environment},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        try:
            async with asyncio.timeout(CERTBOT_TIMEOUT_S):
                said, _ = await process.communicate()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        assert process.returncode == 0, said.decode()


def documented(method: str) -> str:
    """Return the arguments for certbot of the command in docs/deploy.md with that flag."""
    [line] = [line for block in blocks("sh") for line in block.splitlines() if method in line]
    return line[line.index("certonly") :]


async def served(port: int, root: Path) -> str:
    """Return the serial number of the edge's certificate; `root` is all that the client trusts."""
    context = ssl.create_default_context(cafile=str(root))
    _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context, server_hostname=HOST)
    shown = writer.get_extra_info("peercert")
    writer.close()
    await writer.wait_closed()
    assert shown["subjectAltName"] == (("DNS", HOST),)
    options = {CurlOpt.RESOLVE: [f"{HOST}:{port}:127.0.0.1"]}
    for version in (CurlHttpVersion.V2TLS, CurlHttpVersion.V3ONLY):
        async with curl_cffi.AsyncSession[curl_cffi.Response](curl_options=options) as session:
            answer = await session.get(
                f"https://{HOST}:{port}/healthz", http_version=version, verify=str(root), timeout=60
            )
        assert answer.status_code == 200
    return str(shown["serialNumber"])


@pytest.mark.parametrize("method", ["webroot", "standalone"])
async def test_an_edge_serves_what_certbot_gets_and_renews(method: str, tmp_path: Path) -> None:
    machine = Machine(tmp_path / "machine")
    hook = str(DEPLOY / "certificate-to-edge.sh")
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(pebble(tmp_path))
        certbot = Certbot(tmp_path / "certbot", server)
        places = {
            "/usr/local/lib/tailrace/certificate-to-edge.sh": hook,
            "TLS_OWNER=tailrace": f"TLS_OWNER={os.getuid()}",
        }
        edge_process = by_systemd("edge")
        if method == "webroot":
            edge_process = service("edge")
            certbot.environment |= machine.hook_environment("/tls")
            webroot = stack.enter_context(TemporaryDirectory())  # for nginx's user, too
            Path(webroot).chmod(0o755)
            block = (DEPLOY / "port-80.conf").read_text().replace("/webroot", webroot)
            block = block.replace("listen 80", f"listen 127.0.0.1:{server.http_port}")
            await stack.enter_async_context(nginx(tmp_path, block, server.http_port))
            places = {"/webroot": webroot, "/certificate-to-edge.sh": hook}
        else:
            [settings] = blocks("toml")[:1]
            machine.path("/etc/tailrace/tls").mkdir()
            machine.path("/etc/tailrace/tailrace.toml").write_text(machine.here(settings))
        pattern = "|".join(map(re.escape, places))
        command = re.sub(pattern, lambda found: places[found[0]], documented(f"--{method}"))
        await certbot.run(*shlex.split(machine.here(command)))

        machine.run(["key", "add", "web"], edge_process.environment)
        # On loopback, where Machine has it, an edge takes no name that it is not told.
        edge = machine.start(edge_process, TAILRACE_EDGE_HOSTS=HOST)
        try:
            await edge.start()
            await edge.saw("Running on https://", 2)  # over TCP and QUIC
            first = await served(machine.ports[443], server.root)
            # The sidecar's and the timer's command; it is not due yet, and would else wait minutes.
            await certbot.run("renew", "--force-renewal", "--no-random-sleep-on-renew")
            await edge.saw("reloaded")
            assert await served(machine.ports[443], server.root) != first
            assert await edge.stop(signal.SIGTERM) == 0
        finally:
            await edge.kill()
