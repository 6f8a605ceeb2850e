"""What each stage of a cold start takes, beside the least that it could: for operators.

A launcher and a worker are started as an origin starts them, and the worker is killed and
replaced; all of that a few times. The floor of a stage is the least that it took in any of these
starts, or for the interpreter and the imports in a process that does nothing else, if that is less.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tailrace.ledger.errors import Unavailable
from tailrace.ledger.process.tasks import beside
from tailrace.origin.config import OriginConfig
from tailrace.origin.start import launcher_of, slots_of
from tailrace.origin.workers.load_spans import WorkerStart
from tailrace.origin.workers.program import program
from tailrace.origin.workers.worker_frame import Ready
from tailrace.origin.workers.worker_process import Owner, WorkerSlot, worker_environment

PROCESS, IMPORTS = "launcher", "imports"
"""Stages that a start has only where there is no launcher yet."""


@dataclass(frozen=True, slots=True)
class LoadProfile:
    """`cold` is the median of the starts with nothing there; `warm` replaced their workers."""

    cold: WorkerStart
    warm: tuple[WorkerStart, ...]
    floors_s: dict[str, float]

    @property
    def cold_s(self) -> float:
        return self.cold.ready_s - self.cold.asked_s

    @property
    def floor_s(self) -> float:
        return sum(self.floors_s.values())

    @property
    def over_floor(self) -> float:
        return self.cold_s / self.floor_s


class _Witness(Owner):
    """It only waits for its worker."""

    def __init__(self) -> None:
        self.told: asyncio.Queue[str | None] = asyncio.Queue()
        """None when the worker is ready, and why it is gone when it is."""

    async def worker_ready(self, slot: WorkerSlot, ready: Ready) -> None:
        self.told.put_nowait(None)

    async def worker_lost(self, slot: WorkerSlot) -> None:
        self.told.put_nowait(slot.fate)


async def profile(config: OriginConfig, starts: int) -> LoadProfile:
    """So many cold starts, and as many of workers that replace one that was killed.

    Raises `Unavailable` where a worker cannot start.
    """
    colds, warms = [], []
    for _ in range(starts):
        cold, warm = await _start_and_replace(config)
        colds.append(cold)
        warms.append(warm)
    colds.sort(key=lambda start: start.ready_s - start.asked_s)
    floors_s = await _floors_s(colds, warms, program(config)[0])
    return LoadProfile(colds[(len(colds) - 1) // 2], tuple(warms), floors_s)


async def _start_and_replace(config: OriginConfig) -> tuple[WorkerStart, WorkerStart]:
    launcher = launcher_of(config, [config])
    slot, witness = slots_of("", config, launcher, 0)[0], _Witness()
    slot.belong_to(witness)
    parts = [slot.keep()] if launcher is None else [slot.keep(), launcher.keep()]
    async with beside(parts):
        cold = await _start(slot, witness)
        if slot.pid is not None:
            with suppress(ProcessLookupError):
                os.kill(slot.pid, signal.SIGKILL)
        await witness.told.get()  # it is gone
        return cold, await _start(slot, witness)


async def _start(slot: WorkerSlot, witness: _Witness) -> WorkerStart:
    slot.launch()
    fate = await witness.told.get()
    if fate is not None or slot.start is None:
        raise Unavailable(f"the worker cannot start: {fate}")
    return slot.start


async def _floors_s(
    colds: Sequence[WorkerStart], warms: Sequence[WorkerStart], module: str
) -> dict[str, float]:
    """The least of each stage of a cold start; what only that one does is looked for there only."""
    floors: dict[str, float] = {}
    path = colds[0].path
    for start in (*colds, *warms):
        for stage in start.stages:
            took_s = stage.end_s - stage.begin_s
            if stage.name in floors and not (stage.name == path and start in warms):
                floors[stage.name] = min(floors[stage.name], took_s)
            elif start in colds:
                floors[stage.name] = took_s
    if PROCESS in floors:
        process = min([await _run_s("pass") for _ in colds])
        imports = min([await _run_s(f"import {_imported(module)}") for _ in colds])
        floors[PROCESS] = min(floors[PROCESS], process)
        floors[IMPORTS] = min(floors[IMPORTS], imports - process)
    return floors


def _imported(module: str) -> str:
    """With what a worker on this machine imports late."""
    has_triton = importlib.util.find_spec("triton") is not None and Path("/dev/nvidiactl").exists()
    return f"{module}, origin.models.{'gpu' if has_triton else 'cpu'}_model"


async def _run_s(code: str) -> float:
    began_s = time.monotonic()
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-c", f"{code}; import os; os._exit(0)"),
        env=worker_environment(),
    )
    await process.wait()
    return time.monotonic() - began_s
