"""How a process of ours is told to end."""

from __future__ import annotations

import asyncio
import signal

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


def stop_signal(*others: signal.Signals) -> asyncio.Event:
    """Is set when the process is asked to stop, as it is by `others` too."""
    stopped = asyncio.Event()
    for number in (*STOP_SIGNALS, *others):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    return stopped
