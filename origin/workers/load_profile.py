"""Measures each stage of a cold start, and its floor: `tailrace model load-profile`.

It starts a fork server and a worker as an origin does, then kills and replaces the worker, and
repeats this. The floor of a stage is its shortest time in any start. The stages of the interpreter
and of the imports are also measured in a process that does nothing else; if its time is shorter, it
is the floor.
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
from tailrace.ledger.process.tasks import background
from tailrace.origin.config import OriginConfig
from tailrace.origin.start import fork_server_of, slots_of
from tailrace.origin.workers.load_spans import WorkerStart
from tailrace.origin.workers.program import program
from tailrace.origin.workers.worker_frame import Ready
from tailrace.origin.workers.worker_process import Owner, WorkerSlot, worker_environment

PROCESS, IMPORTS = "fork_server", "imports"
"""Names of the stages in which a new fork server starts its interpreter and imports modules."""


@dataclass(frozen=True, slots=True)
class LoadProfile:
    """The measured starts of workers.

    `cold` is the median cold start, and `warm` has the starts of the workers that replaced killed
    ones. `floors_s` has the floor of each stage in seconds, by the stage's name.
    """

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
    """Owner of the measured worker slot: reports when its worker is ready or has ended."""

    def __init__(self) -> None:
        self.told: asyncio.Queue[str | None] = asyncio.Queue()
        """Queue that gets None when the worker is ready, and the exit reason when it has ended."""

    async def worker_ready(self, slot: WorkerSlot, ready: Ready) -> None:
        self.told.put_nowait(None)

    async def worker_lost(self, slot: WorkerSlot) -> None:
        self.told.put_nowait(slot.exit_reason)


async def profile(config: OriginConfig, starts: int) -> LoadProfile:
    """Measure `starts` cold starts, each followed by a kill and the start of a replacement.

    Raises:
        Unavailable: A worker cannot start.
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
    fork_server = fork_server_of(config, [config])
    slot, witness = slots_of("", config, fork_server, 0)[0], _Witness()
    slot.belong_to(witness)
    slot.launch()  # before the fork server starts, so that its start counts
    parts = [slot.keep()] if fork_server is None else [slot.keep(), fork_server.keep()]
    async with background(parts):
        cold = await _started(slot, witness)
        if slot.pid is not None:
            with suppress(ProcessLookupError):
                os.kill(slot.pid, signal.SIGKILL)
        await witness.told.get()  # wait for the killed worker's end
        slot.launch()
        return cold, await _started(slot, witness)


async def _started(slot: WorkerSlot, witness: _Witness) -> WorkerStart:
    exit_reason = await witness.told.get()
    if exit_reason is not None or slot.start is None:
        raise Unavailable(f"the worker cannot start: {exit_reason}")
    return slot.start


async def _floors_s(
    colds: Sequence[WorkerStart], warms: Sequence[WorkerStart], module: str
) -> dict[str, float]:
    """Return the shortest time of each stage, in seconds.

    Replacements count only for stages that a cold start has, too. The stage of forking or spawning
    is taken from cold starts alone.
    """
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
    """Return the modules that a worker on this machine imports, comma-separated."""
    has_triton = importlib.util.find_spec("triton") is not None and Path("/dev/nvidiactl").exists()
    return f"{module}, tailrace.origin.models.{'gpu' if has_triton else 'cpu'}_model"


async def _run_s(code: str) -> float:
    began_s = time.monotonic()
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-c", f"{code}; import os; os._exit(0)"),
        env=worker_environment(),
    )
    if await process.wait() != 0:
        raise Unavailable(
            f"cannot measure imports: `python -c {code!r}` ended with exit status"
            f" {process.returncode}"
        )
    return time.monotonic() - began_s
