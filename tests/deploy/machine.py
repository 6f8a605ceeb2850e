"""A machine that runs the processes that deploy/ describes, without a container engine.

Commands, variables, ports and health checks are those of the files and of the guide. Only places
differ: each port is a free one here, and each folder lies under a temporary one.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path

from tailrace.up import development_certificate
from tests.deploy.files import DEPLOY, Process
from tests.e2e.processes import Process as Running
from tests.e2e.processes import free_port

PORTS = (443, 8080, 8470, 9464, 9465)
FOLDERS = ("/etc/tailrace", "/keys", "/tls", "/var/lib/tailrace-origin", "/var/lib/tailrace")


class Machine:
    """Where the ports, folders and host names of a deployment are on this machine."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ports = {port: free_port() for port in PORTS}
        for each in FOLDERS:
            self.path(each).mkdir(parents=True, exist_ok=True)

    def path(self, there: str) -> Path:
        return self.folder / there.removeprefix("/")

    def here(self, text: str) -> str:
        """Return a word, setting or file of the deployment with the places of this machine."""
        folders = "|".join(FOLDERS)
        text = re.sub(rf"(?<![\w/])({folders})(?![\w-])", lambda m: str(self.path(m[1])), text)
        text = re.sub(r"\b(0\.0\.0\.0|origin|edge)(?=:\d)", "127.0.0.1", text)
        ports = "|".join(map(str, PORTS))
        # in an address, or in the arguments of a health check: ('127.0.0.1', 8470)
        return re.sub(rf"(?<=:)(?:{ports})\b|(?<=', )(?:{ports})\b", self._port_here, text)

    def _port_here(self, found: re.Match[str]) -> str:
        return str(self.ports[int(found[0])])

    def environment(self, said: Mapping[str, str]) -> dict[str, str]:
        return {name: self.here(value) for name, value in said.items() if name != "PATH"}

    def start(self, process: Process, **more: str) -> Running:
        command = [self.here(word) for word in process.command[1:]]
        started = Running(*command)
        started.environment = self.environment(process.environment) | more
        if command[0] == "edge":  # the default of HTTP on loopback has a port of its own here
            started.environment |= {"TAILRACE_EDGE_HTTP": self.here("127.0.0.1:8080")}
        return started

    def run(self, command: list[str], environment: Mapping[str, str]) -> str:
        """Run one of our commands that must succeed; return its standard output."""
        return subprocess.run(
            [sys.executable, "-m", "tailrace.cli", *map(self.here, command)],
            env={**os.environ, **self.environment(environment)},
            check=True,
            capture_output=True,
            text=True,
        ).stdout

    def renew_certificate(self, name: str, folder: str) -> Path:
        """Do what certbot does: make a certificate in its own folder and run the hook."""
        made = development_certificate(self.folder / f"made-{name}", datetime.now(UTC))
        lineage = self.folder / f"letsencrypt-{name}"
        lineage.mkdir()
        shutil.copy(made.certificate, lineage / "fullchain.pem")
        shutil.copy(made.key, lineage / "privkey.pem")
        told = {"RENEWED_LINEAGE": str(lineage), **self.hook_environment(folder)}
        hook = ["sh", str(DEPLOY / "certificate-to-edge.sh")]
        subprocess.run(hook, env={**os.environ, **told}, check=True)
        return made.certificate

    def hook_environment(self, folder: str) -> dict[str, str]:
        """Return the variables with which certbot's hook hands certificates to our own user."""
        self.path(folder).mkdir(exist_ok=True)
        return {"TLS_FOLDER": str(self.path(folder)), "TLS_OWNER": str(os.getuid())}

    @property
    def url(self) -> str:
        return f"https://localhost:{self.ports[443]}"


@asynccontextmanager
async def ready(origin: Running, edge: Running, first: str) -> AsyncIterator[None]:
    """Both started and connected to each other; `first` is what the origin logs when it serves."""
    try:
        await origin.start()
        await origin.saw(first)
        await edge.start()
        await edge.saw("origin link up")
        yield
        assert await edge.stop(signal.SIGTERM) == 0
        assert await origin.stop(signal.SIGTERM) == 0
    finally:
        for each in (edge, origin):
            await each.kill()
