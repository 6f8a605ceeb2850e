"""A child process of `tailrace up`: started again when it dies, stopped with it.

A child must not outlive its parent, however the parent ends. Its standard input is a pipe
that nobody writes to: the kernel closes it with the parent, even on SIGKILL, and
`stop_when_orphaned` in the child sees the end of file. That works wherever there are
pipes; PR_SET_PDEATHSIG is Linux only.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tailrace.ledger.errors import EXIT_USAGE, Unavailable
from tailrace.ledger.flow.backoff import Backoff

STOP_GRACE_S = 8.0  # between SIGTERM and SIGKILL
ORPHAN_GRACE_S = 8.0  # for a child whose parent is gone, before it leaves the hard way
RESTART_LEAST_S = 0.2
RESTART_MOST_S = 5.0
STEADY_S = 10.0  # a child that lived this long was healthy: its next death is a first one
START_ATTEMPTS = 3  # deaths before it ever served, until it is given up
LOG_TAIL_BYTES = 2_000  # shown when a child is given up


@dataclass(slots=True)
class Child:
    """One command that runs until cancelled; its output goes to a log file.

    Whoever sees it serve sets `proven`: from then on it is started again however often it
    dies.
    """

    name: str
    command: Sequence[str]
    log: Path
    announce: Callable[[str], None]
    pid: int | None = None
    proven: bool = False

    async def keep_running(self) -> None:
        """Run the command, and again when it ends; cancelling stops it.

        Raises Unavailable when it will not stay up.
        """
        self.log.write_bytes(b"")
        backoff = Backoff(RESTART_LEAST_S, RESTART_MOST_S)
        while True:
            born_s = time.monotonic()
            code = await self._run_once()
            if time.monotonic() - born_s >= STEADY_S:
                backoff.reset()
            doomed = not self.proven and backoff.failures + 1 >= START_ATTEMPTS
            if doomed or code == EXIT_USAGE:
                raise Unavailable(f"the {self.name} {_ended(code)}\n{self._log_tail()}")
            delay_s = backoff.next_delay_s()
            self.announce(
                f"the {self.name} {_ended(code)}; starting it again in {delay_s:.1f} s"
                f" (log: {self.log})"
            )
            await asyncio.sleep(delay_s)

    async def _run_once(self) -> int:
        """Start the command and wait for its end; it is over when this returns or raises."""
        with self.log.open("ab") as log:
            # A session of its own, so that Ctrl-C reaches the parent alone, which then
            # stops its children in order.
            process = await asyncio.create_subprocess_exec(
                *self.command,
                stdin=asyncio.subprocess.PIPE,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self.pid = process.pid
        try:
            return await process.wait()
        finally:
            self.pid = None
            if process.returncode is None:
                await _stop(process)

    def _log_tail(self) -> str:
        """The last lines of the log, indented."""
        tail = self.log.read_bytes()[-LOG_TAIL_BYTES:].decode(errors="replace")
        return "\n".join(f"  {line}" for line in tail.splitlines()) or "  (its log is empty)"


async def _stop(process: asyncio.subprocess.Process) -> None:
    process.terminate()
    try:
        async with asyncio.timeout(STOP_GRACE_S):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()


def _ended(code: int) -> str:
    if code < 0:
        return f"was ended by {signal.Signals(-code).name}"
    return f"ended with exit code {code}"


def stop_when_orphaned() -> None:
    """In a child: end this process when standard input reaches its end of file."""

    def watch() -> None:
        while os.read(sys.stdin.fileno(), 1):
            pass
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(ORPHAN_GRACE_S)
        os._exit(1)

    threading.Thread(target=watch, name="orphan-watch", daemon=True).start()
