"""The real processes, started as a user starts them, for tests that cut and kill them."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Self

START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 60.0
"""Timeout for a process to stop, in seconds; it takes one second on an idle machine."""
ROOT = Path(__file__).resolve().parents[2]


# Each port is handed out once, and below the range from which the kernel draws its own; test
# processes beside each other (pytest-xdist: gw0, gw1, ...) have ranges of their own.
_ports = itertools.count(
    20_000 + 2_000 * int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:]) + os.getpid() % 1_000
)


def free_port() -> int:
    """Return a port that is free for TCP and UDP now, and was not given before."""
    for port in _ports:
        with socket.socket() as tcp, socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp:
            try:
                tcp.bind(("127.0.0.1", port))
                udp.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise AssertionError("unreachable: the counter does not end")


class Process:
    """A `tailrace` command; its JSON log lines are events to wait for."""

    def __init__(self, *command: object) -> None:
        # Like `tailrace up`: the process ends with the test run, however that ends.
        self.command = [sys.executable, "-m", "tailrace.cli", *map(str, command), "--until-eof"]
        self.environment: dict[str, str] = {}
        self.folder = ROOT  # the checkout whose code runs
        self.events: list[dict[str, Any]] = []
        self._news = asyncio.Condition()
        self._process: asyncio.subprocess.Process | None = None
        self._reading: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    async def start(self) -> Self:
        self._process = await asyncio.create_subprocess_exec(
            *self.command,
            cwd=self.folder,
            env={**os.environ, "PYTHONUNBUFFERED": "1", **self.environment},
            stdin=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        self._reading = asyncio.create_task(self._read())
        return self

    async def _read(self) -> None:
        assert self._process is not None and self._process.stderr is not None
        while line := await self._process.stderr.readline():
            try:
                event = json.loads(line)
            except ValueError:
                event = {"message": line.decode(errors="replace").rstrip()}
            async with self._news:
                self.events.append(event)
                self._news.notify_all()
        async with self._news:
            self.events.append({"message": "process.ended"})
            self._news.notify_all()

    async def saw(self, message: str, count: int = 1) -> dict[str, Any]:
        """Wait for the `count`-th event whose message starts so; fails if the process ends."""

        def seen() -> list[dict[str, Any]]:
            return [e for e in self.events if str(e.get("message", "")).startswith(message)]

        async with asyncio.timeout(START_TIMEOUT_S), self._news:
            await self._news.wait_for(
                lambda: len(seen()) >= count or self.events[-1:] == [{"message": "process.ended"}]
            )
        assert len(seen()) >= count, f"{self.command} ended: {self.events}"
        return seen()[count - 1]

    @property
    def is_up(self) -> bool:
        return self._process is not None and self._process.returncode is None

    def count(self, message: str) -> int:
        """Return how often it has logged that."""
        return sum(event.get("message") == message for event in self.events)

    async def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        await self.stop(signal.SIGKILL)

    async def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Send a signal and wait for the end; returns the exit status."""
        if self._process is None:
            return 0
        if self._process.returncode is None:
            self._process.send_signal(number)
        return await self.ended()

    async def ended(self) -> int:
        """Wait until the process has ended, and return its exit status."""
        assert self._process is not None and self._reading is not None
        async with asyncio.timeout(STOP_TIMEOUT_S):
            await self._process.wait()
            await self._reading
        assert self._process.returncode is not None
        return self._process.returncode


def children_of(pid: int) -> set[int]:
    """Return the processes that a process has started."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return {int(each) for each in children.split()}


class Origin(Process):
    """A `tailrace origin`; its folder `data` outlives it, so that a second one can continue."""

    def __init__(self, data: Path, port: int | None = None, **flags: object) -> None:
        self.data = data
        self.port = port or free_port()
        self.link = f"127.0.0.1:{self.port}"
        more = [part for name, value in flags.items() for part in (f"--{name}", value)]
        super().__init__("origin", "--link", self.link, "--data", data, *more)

    async def ready(self) -> Self:
        await self.start()
        await self.saw("worker.ready")
        return self

    def worker_pid(self, model: str | None = None) -> int:
        """Return the process of the worker that became ready last, of all or of one model."""
        ready = [event for event in self.events if event.get("message") == "worker.ready"]
        return int([one["pid"] for one in ready if model in (None, one["model"])][-1])

    def stage_pid(self, pipeline: str) -> int:
        """Return a process of a stage of a pipeline."""
        return min(children_of(self.worker_pid(pipeline)))

    async def replace_worker(self, model: str) -> None:
        """SIGKILL the worker of a model, and wait until another worker is ready."""
        count = self.count("worker.ready")
        os.kill(self.worker_pid(model), signal.SIGKILL)
        await self.saw("worker.ready", count + 1)

    async def kill_stage(self, pipeline: str) -> None:
        """SIGKILL a process of a pipeline's stage, and wait until its worker has seen it."""
        count = self.count("stage.process_lost")
        os.kill(self.stage_pid(pipeline), signal.SIGKILL)
        await self.saw("stage.process_lost", count + 1)

    async def kill_worker(self) -> None:
        """SIGKILL the worker, and wait until the supervisor has seen it."""
        lost = sum(event.get("message") == "worker.lost" for event in self.events)
        os.kill(self.worker_pid(), signal.SIGKILL)
        await self.saw("worker.lost", lost + 1)


class Edge(Process):
    """`tailrace edge`, with TLS and HTTP/3 if given a certificate and its key.

    Of several origins it uses all; `links` is another way to them.
    """

    def __init__(
        self,
        *origins: Origin,
        certificate: tuple[Path, Path] | None = None,
        config: Path | None = None,
        links: str | None = None,
    ) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        links = links or ",".join(origin.link for origin in origins)
        self.origins = len(origins)
        flags: list[object] = ["--http", f"127.0.0.1:{self.port}", "--origin", links]
        flags.append("--operator-without-key")
        if config is not None:
            flags += ["--config", config]
        if certificate is not None:
            self.tls_port = free_port()
            self.tls_url = f"https://localhost:{self.tls_port}"
            flags += ["--https", f"127.0.0.1:{self.tls_port}"]
            flags += ["--certificate", certificate[0], "--key", certificate[1]]
        super().__init__("edge", *flags)

    async def ready(self) -> Self:
        await self.start()
        await self.saw("Running on http://")
        await self.saw("origin link up", self.origins)
        return self


@asynccontextmanager
async def running(
    *processes: Origin | Edge, late: Sequence[Origin | Edge] = ()
) -> AsyncIterator[None]:
    """Yield all of them ready, in this order; stopped at the end, in the reverse one.

    Those in `late` are started by the test, and stopped with the others.
    """
    started: list[Process] = list(late)
    try:
        for process in processes:
            started.append(process)
            await process.ready()
        yield
    finally:
        for done in reversed(started):
            await done.stop()
