"""Signals, exit and garbage collection of long-running processes."""

from __future__ import annotations

import asyncio
import faulthandler
import gc
import os
import signal
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import structlog

from tailrace.ledger.errors import EXIT_FAILED

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
GC_THRESHOLDS = (50_000, 20, 100)
"""Thresholds for `gc.set_threshold`.

Frames, token ids and connections live long and are in few cycles. With Python's default of 700 new
objects the collector scans them again and again: a quarter of the time of an append with 64
streams, and pauses of 141 to 301 ms with 2,000 idle WebSockets.
"""


LAST_THREADS_S = 2.0
"""Seconds that the exit of the process waits for threads that libraries left behind."""

CLOSING_S = 30.0
"""Maximum seconds between the end of serving and the end of the process."""

log = structlog.get_logger("process")


class Stop:
    """Stop requests by signals: the first signal sets `asked`, the second sets `at_once`."""

    def __init__(self, *others: signal.Signals) -> None:
        self.asked = asyncio.Event()
        self.at_once = asyncio.Event()
        for number in (*STOP_SIGNALS, *others):
            asyncio.get_running_loop().add_signal_handler(number, self.ask)

    def ask(self) -> None:
        """Record a stop request."""
        (self.at_once if self.asked.is_set() else self.asked).set()


def end_without_threads(status: int) -> list[str]:
    """Let the process end although libraries left threads running; return these threads' names.

    At exit Python waits for all threads that are not daemons, and a running thread cannot become a
    daemon. So if there are such threads, a daemon thread ends the process with `status` after
    LAST_THREADS_S.
    """
    here = threading.current_thread()
    left = [one.name for one in threading.enumerate() if one is not here and not one.daemon]

    def end() -> None:
        time.sleep(LAST_THREADS_S)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)

    if left:
        threading.Thread(target=end, name="last-threads", daemon=True).start()
    return left


def limit_closing() -> None:
    """End the process CLOSING_S from now, unless it has ended by then.

    A call that hangs in a thread, for example in a read of a broken disk, would otherwise keep the
    process alive, although it serves nothing and no longer handles signals.
    """

    def end() -> None:
        time.sleep(CLOSING_S)
        here = threading.current_thread()
        left = [one.name for one in threading.enumerate() if one is not here]
        log.error("process.does_not_end", after_s=CLOSING_S, threads=left)
        faulthandler.dump_traceback()  # says what each thread was doing
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(EXIT_FAILED)

    threading.Thread(target=end, name="closing-limit", daemon=True).start()


def boot_id() -> bytes:
    """Return the id of this boot of the system; empty if the system does not number its boots."""
    with suppress(OSError):
        return BOOT_ID.read_bytes().strip()
    return b""


def look_less_often(thresholds: tuple[int, int, int] = GC_THRESHOLDS) -> None:
    """Run the garbage collector less often, and never on objects that exist already."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*thresholds)


def import_environment() -> dict[str, str]:
    """Return the environment for a child process that imports our packages from the same place."""
    # The path is not resolved: in a source tree `tailrace` contains links to the packages.
    root = str(Path(__file__).absolute().parents[3])
    paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
