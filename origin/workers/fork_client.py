"""The supervisor's side of the fork server: starts it, restarts it, and asks it for workers.

This needs Linux, where the supervisor can adopt the forked workers. On other systems, and if the
fork server reports that it must not be forked, each worker is spawned and imports its modules
itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence

import structlog

from tailrace.ledger.flow.backoff import Backoff
from tailrace.origin.workers.fork_server import MAX_ORDER_BYTES, ForkMessage
from tailrace.origin.workers.load_spans import LoadStage

PR_SET_CHILD_SUBREAPER = 36
"""Option of prctl(2) that makes orphaned descendants of this process its children."""
RESTART_MIN_S = 0.05
RESTART_MAX_S = 30.0
"""Bounds in seconds of the wait before the fork server is restarted.

The wait doubles with each fork server in a row that ended before it was ready."""
FORK_TIMEOUT_S = 30.0
"""Timeout in seconds for a worker from the fork server; afterwards the worker is spawned."""
ORPHANS_S = 1.0
"""Interval in seconds between two attempts to reap the children of a dead worker."""

log = structlog.get_logger("fork_server")


class ForkedProcess:
    """A forked worker, which this process has adopted.

    The class has those methods of `asyncio.subprocess.Process` that slots use.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._ended = asyncio.Event()
        # The pid cannot belong to another process: a child keeps it until it is waited for.
        self._pidfd = os.pidfd_open(pid)
        asyncio.get_running_loop().add_reader(self._pidfd, self._reap)

    async def wait(self) -> int:
        """Return the exit status, or the negative number of the signal that ended the process."""
        await self._ended.wait()
        assert self.returncode is not None
        return self.returncode

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def send_signal(self, number: int, /) -> None:
        """Send a signal; raises ProcessLookupError if the process has ended."""
        if self.returncode is not None:
            raise ProcessLookupError(self.pid)
        os.kill(self.pid, number)

    def _reap(self) -> None:
        asyncio.get_running_loop().remove_reader(self._pidfd)
        os.close(self._pidfd)
        # Kill the worker's children, which are in its process group. The group's id cannot be
        # reused before the worker is reaped.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        _, status = os.waitpid(self.pid, 0)
        self.returncode = os.waitstatus_to_exitcode(status)
        self._ended.set()
        self._reap_group()

    def _reap_group(self) -> None:
        """Reap the dead worker's children, which this process has adopted, until none is left."""
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-self.pid, os.WNOHANG)[0]:
                pass
            asyncio.get_running_loop().call_later(ORPHANS_S, self._reap_group)


ChildProcess = asyncio.subprocess.Process | ForkedProcess
"""The process of a worker, forked or spawned."""


class ForkServer:
    """Keeps one fork server running for workers that run `module` with `settings`.

    Attributes:
        refusal: Why workers cannot be forked and must be spawned; empty if they can be forked.
        stages: The stages in which the latest fork server started.
    """

    def __init__(self, module: str, settings: str, environment: Mapping[str, str]) -> None:
        self.refusal = "" if sys.platform == "linux" else f"it needs Linux, not {sys.platform}"
        self.stages: tuple[LoadStage, ...] = ()
        self._command = (module, settings)
        self._environment = environment
        self._process: asyncio.subprocess.Process | None = None
        self._socket: socket.socket | None = None
        self._waiting: ForkedProcess | None = None
        # Set while a forked worker waits for its arguments, and for good once there is a `refusal`.
        self._settled = asyncio.Event()

    @property
    def pid(self) -> int | None:
        """The pid of the fork server; None while none runs."""
        return None if self._process is None else self._process.pid

    async def keep(self) -> None:
        """Run a fork server, and restart it, until cancelled or until it refuses to fork."""
        backoff = Backoff(RESTART_MIN_S, RESTART_MAX_S)
        while not self.refusal:
            if await self._one_life():
                backoff.reset()
            if not self.refusal:
                await asyncio.sleep(backoff.next_delay_s())
        log.warning(
            "fork_server.refused", reason=self.refusal, hint="each worker imports its own modules"
        )
        self._settled.set()
        await asyncio.Event().wait()

    async def fork(
        self, *argv: str, environment: Mapping[str, str] | None = None
    ) -> ForkedProcess | None:
        """Return a forked worker that runs with these arguments, or None if it must be spawned.

        `environment` has variables that are set in the worker before its program begins.
        """
        try:
            async with asyncio.timeout(FORK_TIMEOUT_S):
                while self._waiting is None and not self.refusal:
                    await self._settled.wait()
        except TimeoutError:
            # If the fork server was ready once, it hangs now, so end it. If it was never ready, it
            # may still be importing.
            if self.stages:
                self._end()
        worker, self._waiting = self._waiting, None
        if worker is None or self._socket is None:
            return None
        if not self.refusal:
            self._settled.clear()
        try:
            order = {"argv": argv, "environment": dict(environment or {})}
            self._socket.send(json.dumps(order).encode())
        except OSError as error:
            log.warning("fork_server.no_answer", error=f"{type(error).__name__}: {error}")
            self._end()
            return None
        return worker

    async def _one_life(self) -> bool:
        """Run a fork server until it ends; return True if it was ready to fork."""
        if ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1) != 0:
            # Forked workers then end at once, because the supervisor is not their parent.
            log.warning("fork_server.no_subreaper")
        asked_s = time.monotonic()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        with ours, theirs:
            fd = theirs.fileno()
            command = "tailrace.origin.workers.fork_server", str(fd), *self._command
            self._process = process = await spawn(*command, env=self._environment, fds=(fd,))
            theirs.close()
            was_ready = False
            try:
                while (said := await _message(ours)) is not None and not said.refusal:
                    if not was_ready:
                        self._ready(process.pid, said, asked_s)
                    was_ready, self._socket = True, ours
                    self._waiting = ForkedProcess(said.pid)
                    self._settled.set()
                self.refusal = said.refusal if said is not None else ""
            finally:
                # The worker that waits for its order needs no kill: it exits when its pipe from the
                # fork server closes.
                self._socket = self._process = self._waiting = None
                self._settled.clear()
                kill(process)
                await process.wait()
            log.warning("fork_server.lost", pid=process.pid, exit=process.returncode)
            return was_ready

    def _ready(self, pid: int, said: ForkMessage, asked_s: float) -> None:
        self.stages = LoadStage("fork_server", asked_s, said.stages[0].begin_s), *said.stages
        took_s = self.stages[-1].end_s - asked_s
        log.info("fork_server.ready", pid=pid, rss_kib=said.rss_kib, pss_kib=said.pss_kib, s=took_s)

    def _end(self) -> None:
        """Kill the fork server; `keep` starts another one."""
        if self._process is not None:
            kill(self._process)


async def _message(fork_server: socket.socket) -> ForkMessage | None:
    """Return the fork server's next message, or None if it has ended."""
    try:
        data = await asyncio.get_running_loop().sock_recv(fork_server, MAX_ORDER_BYTES)
    except OSError:
        return None
    if not data:
        return None
    said = json.loads(data)
    return ForkMessage(**said | {"stages": tuple(LoadStage(**stage) for stage in said["stages"])})


async def spawn(
    module: str, *argv: str, env: Mapping[str, str], fds: Sequence[int] = ()
) -> asyncio.subprocess.Process:
    """Spawn a process that runs a worker's module, or the fork server, through `bootstrap`."""
    return await asyncio.create_subprocess_exec(
        *(
            sys.executable,
            "-P",
            "-m",
            "tailrace.origin.workers.bootstrap",
            str(os.getpid()),
            module,
            *argv,
        ),
        env=env,
        stdin=asyncio.subprocess.DEVNULL,
        pass_fds=fds,
    )


def kill(process: ChildProcess) -> None:
    """Kill a process unless it has ended."""
    with contextlib.suppress(ProcessLookupError):
        process.kill()
