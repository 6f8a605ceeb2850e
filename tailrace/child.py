"""A child process of `tailrace up`: restarted when it dies, and stopped with its parent.

A child must not outlive its parent, however the parent ends. The child's standard input is a pipe
to which nothing is written: the kernel closes it when the parent ends, even by SIGKILL, and
`stop_when_orphaned` in the child sees the end of file. That works wherever there are pipes;
PR_SET_PDEATHSIG exists on Linux only.
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

STOP_GRACE_S = 8.0  # seconds between SIGTERM and SIGKILL
ORPHAN_GRACE_S = 8.0  # seconds for an orphaned child to stop before it exits at once
RESTART_LEAST_S = 0.2
RESTART_MOST_S = 5.0
# seconds of life after which a child counts as healthy, so that its back-off starts over
STEADY_S = 10.0
START_ATTEMPTS = 3  # deaths before it first served, after which it is given up
LOG_TAIL_BYTES = 2_000  # bytes of the log that are shown when a child is given up


@dataclass(slots=True)
class Child:
    """A command that runs until cancelled; its output goes to a log file.

    The caller sets `proven` when it sees the child serve: from then on the child is restarted
    however often it dies.
    """

    name: str
    command: Sequence[str]
    log: Path
    announce: Callable[[str], None]
    pid: int | None = None
    proven: bool = False

    async def keep_running(self) -> None:
        """Run the command, and restart it when it ends; cancelling stops it.

        Raises Unavailable if it keeps ending.
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
        """Start the command and wait for its end; it has ended when this returns or raises."""
        with self.log.open("ab") as log:
            # A session of its own, so that Ctrl-C reaches only the parent, which then stops its
            # children in order.
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
        """Return the last lines of the log, indented."""
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
    """End this process when standard input reaches its end of file; called in a child."""

    def watch() -> None:
        while os.read(sys.stdin.fileno(), 1):
            pass
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(ORPHAN_GRACE_S)
        os._exit(1)

    threading.Thread(target=watch, name="orphan-watch", daemon=True).start()
