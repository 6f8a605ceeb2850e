"""Where the time of this process's start has gone: stages one after another, without gaps.

What `launch` beside this runs first begins the first one; so nothing heavy is imported here.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple


class LoadStage(NamedTuple):
    """In seconds of CLOCK_MONOTONIC, which all processes of a machine share; `size` in bytes, if
    its time depends on one."""

    name: str
    begin_s: float
    end_s: float
    size: int = 0

    @property
    def ms(self) -> float:
        return round((self.end_s - self.begin_s) * 1e3, 1)


FORKED, SPAWNED = "fork", "spawn"
"""How a worker's process began, and the stage of its start until it runs our code."""

COMPILE = "compile"
"""The stage whose progress is in kernels, and which a worker stays in for minutes, once."""


@dataclass(frozen=True, slots=True)
class WorkerStart:
    """One start, from being asked for until the worker was heard to be ready."""

    path: str
    asked_s: float
    ready_s: float
    stages: tuple[LoadStage, ...]

    @property
    def attributed(self) -> float:
        """How much of its time lies in a stage."""
        took = self.ready_s - self.asked_s
        return sum(stage.end_s - stage.begin_s for stage in self.stages) / took if took else 1.0


class LoadSpans:
    """`enter` ends one stage and begins the next."""

    def __init__(self, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._clock_s = clock_s
        self._stages: list[LoadStage] = []

    def begin(self, name: str) -> None:
        """Forget what was: in a process that was forked, that is another one's."""
        self._stages.clear()
        self.enter(name)

    def enter(self, name: str, size: int = 0) -> None:
        """Nothing, while the stage has the same name."""
        if self._stages and self._stages[-1].name == name:
            return
        self.close()
        now = self._clock_s()
        self._stages.append(LoadStage(name, now, now, size))

    def close(self) -> tuple[LoadStage, ...]:
        """All of them, the last one up to now."""
        if self._stages:
            self._stages[-1] = self._stages[-1]._replace(end_s=self._clock_s())
        return tuple(self._stages)


OF_THIS_PROCESS = LoadSpans()
