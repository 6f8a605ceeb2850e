"""A child process of `tailrace up`: restarted when it dies, and stopped with its parent.

A child must not outlive its parent, even if the parent is killed. The child's standard input is a
pipe to which nothing is written. When the parent ends, even by SIGKILL, the kernel closes the pipe,
and `stop_when_orphaned` in the child reads an end of file. Unlike PR_SET_PDEATHSIG, which only
Linux has, this works on every system.
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

STOP_GRACE_S = 8.0  # seconds that a child has to stop after SIGTERM, before it gets SIGKILL
ORPHAN_GRACE_S = 8.0  # seconds that an orphaned child has to stop before it ends itself at once
RESTART_LEAST_S = 0.2
RESTART_MOST_S = 5.0
# A child that has run for this many seconds counts as healthy: its restart delay is reset.
STEADY_S = 10.0
# A child that has never served and ends this many times is not started again.
START_ATTEMPTS = 3
LOG_TAIL_BYTES = 2_000  # bytes from the end of the child's log that the final error shows


@dataclass(slots=True)
class Child:
    """A command that runs until `keep_running` is cancelled; its output goes to a log file.

    The caller sets `proven` once the child serves requests. From then on the child is restarted
    without a limit; before that, only START_ATTEMPTS times.
    """

    name: str
    command: Sequence[str]
    log: Path
    announce: Callable[[str], None]
    pid: int | None = None
    proven: bool = False

    async def keep_running(self) -> None:
        """Run the command, and restart it when it ends; cancelling this call stops the command.

        Raises Unavailable if the command ends too often at the start, or rejects its settings.
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
        """Start the command, wait until it has ended, and return its exit code.

        If this call is cancelled, it stops the command first.
        """
        with self.log.open("ab") as log:
            # In a new session Ctrl-C does not reach the child. The parent gets it, and stops its
            # children one after another.
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
    """Start a thread that ends this process when its standard input is closed.

    A child calls this: its standard input is closed when its parent ends.
    """

    def watch() -> None:
        while os.read(sys.stdin.fileno(), 1):
            pass
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(ORPHAN_GRACE_S)
        os._exit(1)

    threading.Thread(target=watch, name="orphan-watch", daemon=True).start()
