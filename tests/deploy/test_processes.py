"""The processes that deploy/ describes, started without an engine, and read as a client."""

from __future__ import annotations

import asyncio
import re
import shlex
import shutil
import ssl
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import curl_cffi
import httpx
import pytest
from curl_cffi import CurlHttpVersion

from tests.deploy.files import DEPLOY, blocks, by_systemd, compose, service, unit
from tests.deploy.machine import Machine, ready
from tests.e2e.processes import free_port
from tests.e2e.sse import SSE, TIMEOUT, start, text_of
from tests.e2e.test_behind_proxy import nginx
from tests.needs import needs

pytestmark = pytest.mark.anyio

REQUEST: dict[str, Any] = {"prompt": "Once upon a time", "max_tokens": 24, "seed": 3}


async def read(machine: Machine, key: str, certificate: Path, model: str) -> str:
    """Read a stream over HTTPS and the same one over HTTP/3; return its text."""
    headers = {"Authorization": f"Bearer {key}"}
    context = ssl.create_default_context(cafile=str(certificate))
    async with httpx.AsyncClient(verify=context, http2=True, timeout=TIMEOUT) as client:
        assert (await client.post(f"{machine.url}/v1/generate", json={})).status_code == 401
        client.headers.update(headers)
        reading = await start(client, machine.url, REQUEST | {"model": model})
        answer = await client.get(f"{machine.url}/readyz")
        assert (answer.status_code, answer.http_version) == (200, "HTTP/2")
        assert f'h3=":{machine.ports[443]}"' in answer.headers["alt-svc"]
    async with curl_cffi.AsyncSession[curl_cffi.Response]() as session:
        again = await session.get(
            f"{machine.url}/v1/generate/{reading.stream}",
            headers={**SSE, **headers},
            http_version=CurlHttpVersion.V3ONLY,
            verify=str(certificate),
            timeout=60,
        )
    assert (again.status_code, again.http_version) == (200, CurlHttpVersion.V3)
    assert text_of(again.content) == reading.text
    return reading.text


async def test_compose_serves_a_stream_over_https_and_http3(tmp_path: Path) -> None:
    machine = Machine(tmp_path / "first")
    edge = service("edge")
    certificate = machine.renew_certificate("first", "/tls")
    [key] = machine.run(["key", "add", "web"], edge.environment).splitlines()
    running = machine.start(edge)
    async with ready(machine.start(service("origin")), running, "worker.ready"):
        text = await read(machine, key, certificate, "demo")
        assert text

        for name in ("edge", "origin"):
            told = compose()["services"][name]["healthcheck"]["test"]
            assert told[:2] == ["CMD", "python"]
            check = [sys.executable, *map(machine.here, told[2:])]
            await asyncio.to_thread(subprocess.run, check, check=True)
        async with httpx.AsyncClient(timeout=TIMEOUT) as client:
            for port, metric in ((9465, "tailrace_edge_connections"), (9464, "tailrace_num_")):
                shown = await client.get(f"http://127.0.0.1:{machine.ports[port]}/metrics")
                assert metric in shown.text

        # An edge shows a renewed certificate to new connections, and reads it by itself.
        renewed = machine.renew_certificate("second", "/tls")
        await running.saw("reloaded")
        assert await read(machine, key, renewed, "demo") == text
        with pytest.raises(httpx.ConnectError):
            await read(machine, key, certificate, "demo")

        # Another deployment has this one for its upstream server.
        other = Machine(tmp_path / "other")
        certificate = other.renew_certificate("third", "/tls")
        [own] = other.run(["key", "add", "web"], edge.environment).splitlines()
        plain = f"http://127.0.0.1:{machine.ports[8080]}/v1"
        whole = compose("upstream", variables={"UPSTREAM_URL": plain, "UPSTREAM_KEY": key})
        origin = other.start(service("origin", whole))
        async with ready(origin, other.start(service("edge", whole)), "worker.ready"):
            assert await read(other, own, certificate, "demo")


async def test_units_and_guide_serve_over_a_link_with_tls(tmp_path: Path) -> None:
    if shutil.which("openssl") is None:
        needs("no openssl", "on Debian or Ubuntu: apt-get install openssl")
    machine = Machine(tmp_path)
    certificate = machine.renew_certificate("first", "/etc/tailrace/tls")
    [settings] = blocks("toml")[:1]
    file = machine.path("/etc/tailrace/tailrace.toml")
    file.write_text(machine.here(settings))
    machine.run(["config", "check", "--config", "/etc/tailrace/tailrace.toml"], {})
    demo = re.sub(r"(?m)^upstream = .*$", 'link = "tls://127.0.0.1:8470"', settings)
    linked = demo.replace("[edge]", '[edge]\norigin = ["tls://localhost:8470"]')
    file.write_text(machine.here(linked))

    [authority] = [block for block in blocks("sh") if "link-ca.key" in block]
    made = tmp_path / "authority"
    made.mkdir()
    names = {"origin": "localhost", "edge": "edge-1.internal"}
    script = authority.replace("origin-1.internal", names["origin"])
    certify = ["sh", "-ec", f"cd {made}; {script}"]
    await asyncio.to_thread(subprocess.run, certify, check=True, capture_output=True)

    started = {}
    for name, host in names.items():
        handed = tmp_path / f"credentials-{name}"
        handed.mkdir()
        files = {"link.key": f"{host}.key", "link.pem": f"{host}.pem", "link-ca.pem": "link-ca.pem"}
        for each in unit(name, "link-tls-{}.conf")["Service"]["LoadCredential"]:
            credential = each.partition(":")[0]
            shutil.copy(made / files[credential], handed / credential)
        said = unit(name, "link-tls-{}.conf")["Service"]["Environment"]
        more = dict(each.replace("%d", str(handed)).split("=", 1) for each in said)
        started[name] = machine.start(by_systemd(name), **more)
    [add] = [
        line
        for block in blocks("sh")
        for line in block.splitlines()
        if "key add web --keys" in line
    ]
    words = shlex.split(add.partition("$(")[2].removesuffix(")"))
    [key] = machine.run(words[words.index("key") :], {}).splitlines()
    async with ready(started["origin"], started["edge"], "worker.ready"):
        assert await read(machine, key, certificate, "demo")
        [backup] = [
            line for block in blocks("sh") for line in block.splitlines() if "ledger export" in line
        ]
        words = shlex.split(backup)
        machine.run(words[words.index("ledger") :], {})
    copy = machine.path("/var/lib/tailrace-origin/copy.db")
    machine.run(["ledger", "verify", "--path", str(copy)], {})


async def test_port_80_answers_challenges_and_redirects(tmp_path: Path) -> None:
    port = free_port()
    block = (DEPLOY / "port-80.conf").read_text().replace("listen 80", f"listen 127.0.0.1:{port}")
    with TemporaryDirectory() as webroot:  # the user of nginx may not enter tmp_path
        Path(webroot).chmod(0o755)
        challenge = Path(webroot, ".well-known/acme-challenge/token")
        challenge.parent.mkdir(parents=True)
        challenge.write_text("answer")
        async with (
            nginx(tmp_path, block.replace("/webroot", webroot), port),
            httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client,
        ):
            client.headers["Host"] = "edge.example"
            found = await client.get("/.well-known/acme-challenge/token")
            assert (found.status_code, found.text) == (200, "answer")
            redirect = await client.get("/v1/models?limit=1")
            assert redirect.status_code == 301
            assert redirect.headers["Location"] == "https://edge.example/v1/models?limit=1"
