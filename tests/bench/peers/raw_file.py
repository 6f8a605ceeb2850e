"""The floor: a raw file and fdatasync. Nothing that survives power loss can be quicker."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

from tests.bench.bench_ledger_work import (
    Batch,
    Contender,
    Disk,
    Mode,
    Sample,
    frame,
    timed_steps,
)


class RawFile(Contender):
    """Appends a step's frames in one write, then waits for the disk; no index, no check."""

    name = "raw file + fdatasync"
    mode = Mode.POWER

    def __init__(self) -> None:
        self._file: int | None = None

    def start(self, folder: Path) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        self._file = os.open(folder / "frames", flags, 0o600)

    def append(self, batch: Batch) -> Sample:
        steps = [self._step(batch.streams, index) for index in range(batch.steps)]
        return timed_steps(steps, batch.streams * batch.steps)

    def settle(self) -> Disk:
        assert self._file is not None
        size = os.fstat(self._file).st_size
        return Disk(size, size)

    def stop(self) -> None:
        if self._file is not None:
            os.close(self._file)

    def _step(self, streams: int, index: int) -> Callable[[], None]:
        assert self._file is not None
        return partial(_write, self._file, frame(index) * streams)


def _write(file: int, data: bytes) -> None:
    if os.write(file, data) != len(data):
        raise OSError("a short write")
    getattr(os, "fdatasync", os.fsync)(file)
