"""Of what a worker died: by what it said last, by its exit status, by what the kernel counted.

Imported by workers, whose exceptions are torch's, and by the supervisor, which has none of it.
"""

from __future__ import annotations

import signal
from contextlib import suppress
from enum import StrEnum
from pathlib import Path

VMSTAT = Path("/proc/vmstat")
OOM_COUNT = "oom_kill"

# How libraries name what has no class of its own, in lower case.
_OF_MEMORY = ("out of memory", "can't allocate memory", "not enough memory", "cannot allocate")
_OF_DEVICE = ("cuda error", "cublas", "cudnn", "triton error", "device-side assert", "nvrtc")


class Death(StrEnum):
    """A kind; its value is a label of metrics, and a word in logs."""

    START = "start"
    """It could not load, and said why."""
    MEMORY = "out_of_memory"
    """Of the device or the machine; the kernel may have killed it."""
    DEVICE = "device"
    """CUDA, or what is built on it, failed: nothing more can be done in that process."""
    HUNG = "hung"
    KILLED = "killed"
    """By a SIGKILL that was not the kernel's for want of memory."""
    CRASHED = "crashed"
    """By another signal, or an exception."""
    EXITED = "exited"
    """By itself, and it had no reason to."""
    SPOKE_WRONGLY = "bad_frame"

    @classmethod
    def of(cls, word: str) -> Death:
        """As a worker says it; whatever else it says, it has crashed."""
        return next((kind for kind in cls if kind.value == word), cls.CRASHED)


def kind_of(error: BaseException, *, starting: bool) -> Death:
    """What an exception means for the process that it ends."""
    text = f"{type(error).__name__}: {error}".lower()
    if isinstance(error, MemoryError) or any(word in text for word in _OF_MEMORY):
        return Death.MEMORY
    if type(error).__name__ == "AcceleratorError" or any(word in text for word in _OF_DEVICE):
        return Death.DEVICE
    return Death.START if starting else Death.CRASHED


def kind_of_exit(status: int | None, oom_kills: int) -> Death:
    """By its exit status, and how many processes the kernel has killed for memory meanwhile."""
    if status == -signal.SIGKILL:
        return Death.MEMORY if oom_kills else Death.KILLED
    if status is None:
        return Death.HUNG
    return Death.EXITED if status == 0 else Death.CRASHED


def count_oom_kills() -> int:
    """Of the whole machine so far; 0 where that is not counted."""
    with suppress(OSError, ValueError):
        for line in VMSTAT.read_text("ascii").splitlines():
            name, _, count = line.partition(" ")
            if name == OOM_COUNT:
                return int(count)
    return 0
