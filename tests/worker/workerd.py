"""The Worker of wrangler-compat/ in the runtime that Cloudflare has, from its wrangler file."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import shutil
import signal
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from tailrace.edge.wrangler.jsonc import parse
from tests.e2e.processes import ROOT, STOP_TIMEOUT_S, free_port
from tests.needs import needs
from tests.npm import installed

FOLDER = ROOT / "wrangler-compat"
START_TIMEOUT_S = 60.0
BUILD_TIMEOUT_S = 60.0
NOT_LINUX = "workerd's binary is a package of its own for each system; these tests know Linux's"


def bundle(disk: Path) -> Path:
    """Return the Worker as one module, as wrangler would upload it."""
    bin_ = installed(FOLDER)
    made = disk / "worker.js"
    entry = FOLDER / "src" / "worker.ts"
    flags = ["--bundle", "--format=esm", "--target=es2024", "--external:cloudflare:*"]
    subprocess.run(
        [bin_ / "esbuild", entry, *flags, f"--outfile={made}", "--log-level=warning"],
        check=True,
        timeout=BUILD_TIMEOUT_S,
    )
    return made


def runtime() -> Path:
    """Return the program; npm is told to run no scripts, and they would only link it."""
    arch = {"x86_64": "64", "aarch64": "arm64"}.get(os.uname().machine, "")
    modules = installed(FOLDER).parent
    program = modules / "@cloudflare" / f"workerd-linux-{arch}" / "bin" / "workerd"
    if not program.exists():
        needs("no workerd for this machine", NOT_LINUX)
    return program


def capnp(config: Mapping[str, Any], script: Path, disk: Path, variables: Mapping[str, str]) -> str:
    """Return workerd's configuration for a wrangler file, with all objects on one disk."""
    classes = [each["class_name"] for each in config["durable_objects"]["bindings"]]
    bindings = [
        f"(name = {_text(each['name'])}, durableObjectNamespace = {_text(each['class_name'])})"
        for each in config["durable_objects"]["bindings"]
    ]
    bindings += [
        f"(name = {_text(name)}, text = {_text(str(value))})"
        for name, value in {**config.get("vars", {}), **variables}.items()
    ]
    flags = ", ".join(map(_text, config.get("compatibility_flags", ())))
    namespaces = ", ".join(
        f"(className = {_text(name)}, uniqueKey = {_text(_key(config['name'], name))},"
        " enableSql = true)"
        for name in classes
    )
    return f"""using Workerd = import "/workerd/workerd.capnp";
const config :Workerd.Config = (
  services = [
    (name = "worker", worker = .worker),
    (name = "disk", disk = (path = {_text(str(disk))}, writable = true)),
    (name = "internet", network = (allow = ["public", "private"])),
  ],
  sockets = [(name = "http", http = (), service = "worker")],
);
const worker :Workerd.Worker = (
  modules = [(name = "worker.js", esModule = embed {_text(script.name)})],
  compatibilityDate = {_text(config["compatibility_date"])},
  compatibilityFlags = [{flags}],
  durableObjectNamespaces = [{namespaces}],
  durableObjectStorage = (localDisk = "disk"),
  bindings = [{", ".join(bindings)}],
);
"""


def _text(value: str) -> str:
    return json.dumps(value)  # a string of Cap'n Proto has the escapes of JSON


def _key(name: str, class_name: str) -> str:
    return hashlib.sha256(f"{name}/{class_name}".encode()).hexdigest()[:32]


class Workerd:
    """A running Worker; what its objects keep lies in `disk`, and outlives `kill`.

    `variables` take the place of those of the wrangler file. It keeps its port over a restart.
    """

    built: Path | None = None
    """A folder that `make dist` made; None for the sources."""

    def __init__(self, origin_url: str, disk: Path, **variables: str) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._disk = disk
        self._variables = {"TAILRACE_ORIGIN_URL": origin_url, **variables}
        self._process: asyncio.subprocess.Process | None = None
        self._command: list[str] = []

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    async def __aenter__(self) -> Self:
        await asyncio.to_thread(self._configure)
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.kill()

    def _configure(self) -> None:
        self._disk.mkdir(parents=True, exist_ok=True)
        objects = self._disk / "objects"
        objects.mkdir(exist_ok=True)
        config = parse(((self.built or FOLDER) / "wrangler.jsonc").read_text())
        assert isinstance(config, dict)
        if self.built is None:
            script = bundle(self._disk)
        else:
            script = Path(shutil.copy(self.built / config["main"], self._disk))
        said = capnp(config, script, objects, self._variables)
        file = self._disk / "worker.capnp"
        file.write_text(said)
        self._command = [str(runtime()), "serve", str(file), "config", "--experimental"]
        self._command += ["-s", f"http=127.0.0.1:{self.port}"]

    async def start(self) -> None:
        """Once more, on the same disk and port, after `kill`."""
        reads, writes = os.pipe()
        try:
            self._process = await asyncio.create_subprocess_exec(
                *self._command,
                f"--control-fd={writes}",
                pass_fds=(writes,),
                stdin=asyncio.subprocess.DEVNULL,
            )
        finally:
            os.close(writes)
        with os.fdopen(reads, "rb") as control:
            async with asyncio.timeout(START_TIMEOUT_S):
                line = await asyncio.to_thread(control.readline)
        assert b'"listen"' in line, f"workerd does not listen: {line!r}"

    async def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        if self._process is None or self._process.returncode is not None:
            return
        self._process.send_signal(signal.SIGKILL)
        async with asyncio.timeout(STOP_TIMEOUT_S):
            await self._process.wait()
