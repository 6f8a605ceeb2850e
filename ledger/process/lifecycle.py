"""What our long-running processes have in common: how they end, and what they leave alone."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
GC_THRESHOLDS = (50_000, 20, 100)
"""New objects until Python looks for cycles among the youngest, and looks until among older ones.

An origin's frame and its token ids, and a connection of an edge, are objects that stay and are in
few cycles. Python's usual 700 makes it look through all of them again and again: a quarter to two
fifths of the time of an append with 64 streams; pauses of 141 to 301 ms with 2,000 idle WebSockets.
"""


LAST_THREADS_S = 2.0
"""Timeout for threads that libraries have left, before the process ends without them."""


class Stop:
    """What signals, `others` too, ask of this process: to stop; by a second one, at once."""

    def __init__(self, *others: signal.Signals) -> None:
        self.asked = asyncio.Event()
        self.at_once = asyncio.Event()
        for number in (*STOP_SIGNALS, *others):
            asyncio.get_running_loop().add_signal_handler(number, self.ask)

    def ask(self) -> None:
        (self.at_once if self.asked.is_set() else self.asked).set()


def end_without_threads(status: int) -> list[str]:
    """Let no thread that a library has left keep this process alive; return their names.

    Python waits for all threads but daemons at its exit, and a thread can't be made a daemon
    later. So where there are such threads, a daemon ends the process with `status` soon.
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


def boot_id() -> bytes:
    """Of the running system, with another one after each start; empty where there is none."""
    with suppress(OSError):
        return BOOT_ID.read_bytes().strip()
    return b""


def look_less_often(thresholds: tuple[int, int, int] = GC_THRESHOLDS) -> None:
    """Have Python look for cycles less often, and never in what was loaded so far."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*thresholds)


def import_environment() -> dict[str, str]:
    """For a child that is to find our packages where this process did."""
    root = str(Path(__file__).resolve().parents[1])
    paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
