"""The work of every contender, and the samples of it.

Closed loop: a step is one frame for each stream, submitted together; the next step
begins when all of it is acknowledged. So what a step takes is what its last append waits.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cache
from pathlib import Path
from time import perf_counter
from typing import NamedTuple

from tailrace.ledger.frame import Token, encode

FRAME_BYTES = 18
LONG_FRAMES = 50_000
_TEXT = " tokens"


class Mode(Enum):
    """Kinds of failure that an acknowledged frame survives."""

    PROCESS = "process"
    POWER = "power"


@dataclass(frozen=True, slots=True)
class Batch:
    """`streams` new streams, numbered from `first` on, that get `steps` frames each."""

    first: int
    streams: int
    steps: int

    @property
    def numbers(self) -> range:
        return range(self.first, self.first + self.streams)


class Sample(NamedTuple):
    """A measured batch: seconds in all, and for each wait for an acknowledgement."""

    appends: int
    seconds: float
    waits: Sequence[float]


class Disk(NamedTuple):
    """Bytes that the frames so far take: as they were appended, and once compacted."""

    appended: int
    compacted: int


class Missing(Exception):
    """A peer that is not here. The message says how to get it."""


class Contender(ABC):
    """A way to store frames. Call `start` first, and `stop` last, even after an error."""

    name: str
    mode: Mode
    max_steps = 500
    """Steps that fit into the time of a run; a slow one says so by a smaller number."""

    @abstractmethod
    def start(self, folder: Path) -> None:
        """Begin in an empty folder; raises `Missing`."""

    @abstractmethod
    def append(self, batch: Batch) -> Sample: ...

    def settle(self) -> Disk | None:
        """Compact what lies on disk, and forget what lies in memory where that can be."""
        return None

    @abstractmethod
    def stop(self) -> None: ...


class Replayer(Contender):
    """A contender that can also read the frames."""

    reads = True
    """True if it shall; another of the same kind may do it for both."""

    @abstractmethod
    def load(self, number: int, count: int) -> None:
        """Store a stream of `count` frames, as quickly as may be; not measured."""

    @abstractmethod
    def replay(self, number: int, count: int) -> float:
        """Seconds to have all `count` frames of a stream in hand, as `list[bytes]`."""


@cache
def frame(index: int) -> bytes:
    """Return a token frame of `FRAME_BYTES`: the text is shorter where the index is longer."""
    for length in range(len(_TEXT), 0, -1):
        raw = encode(Token(_TEXT[:length], index))
        if len(raw) == FRAME_BYTES:
            return raw
    raise ValueError(f"no frame of {FRAME_BYTES} bytes has index {index}")


def timed_steps(steps: Sequence[Callable[[], None]], appends: int) -> Sample:
    """Run the steps one after the other; each returns once it is acknowledged."""
    waits = []
    began = last = perf_counter()
    for run in steps:
        run()
        now = perf_counter()
        waits.append(now - last)
        last = now
    return Sample(appends, last - began, waits)


def check_replay(frames: Sequence[bytes], count: int) -> None:
    """Check that the frames are the appended ones, outside of the measured time."""
    if list(frames) != [frame(index) for index in range(count)]:
        raise ValueError(f"replay gave {len(frames)} frames, or others than the {count} appended")


def folder_bytes(folder: Path) -> int:
    """Bytes that the files of a folder take; holes in a sparse file take none."""
    total = 0
    for root, _, names in os.walk(folder):
        for name in names:
            found = os.stat(os.path.join(root, name))
            total += min(found.st_size, found.st_blocks * 512)
    return total


def percentile(values: Sequence[float], share: float) -> float:
    """Return the value that `share` of the others do not exceed (nearest rank)."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]
