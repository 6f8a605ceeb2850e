"""Interleavings of append, take over, resume, expire, delete and crash, each from a seed.

    python -m tests.ledger.simulation.simulation FIRST [COUNT]

runs the seeds from FIRST on and prints, for each that breaks something, one line
`SEED: what`, then how many ran. Given COUNT 1, it prints the traceback too.

A seed draws everything: the limits of the ledger, how many streams there are and how
durable, who appends, takes over, reads, deletes and when, the order of callbacks, how long
the disk takes, when it fails, when the process or the machine dies. Equal seeds make equal
runs, in any process. While lives end in crashes only safety is asked for; in the last one
faults stop, and everybody must finish (TigerBeetle's simulator tells the two apart so).
"""

from __future__ import annotations

import argparse
import contextlib
import traceback
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random
from types import ModuleType

import tailrace.ledger.flow.credit_window
import tailrace.ledger.sqlite.commit_log
import tailrace.ledger.sqlite.group
import tailrace.ledger.sqlite.ledger
import tailrace.ledger.sqlite.replay
import tailrace.ledger.sqlite.retention
import tailrace.ledger.sqlite.tail
from tests.ledger.simulation.simulated_loop import SimulatedLoop
from tests.ledger.simulation.simulated_process import Process
from tests.ledger.simulation.simulated_storage import Crash
from tests.ledger.simulation.simulated_world import Violation, World

MAX_STEPS = 20_000
"""Callbacks of a life in which all must finish; a few hundred are usual."""
CRASH_STEPS = 500
MAX_CRASHES = 3
_LIMITS: list[tuple[ModuleType, str, tuple[int, ...]]] = [
    (tailrace.ledger.sqlite.tail, "SEGMENT_BYTES", (1, 60, 200)),
    (tailrace.ledger.sqlite.commit_log, "MAX_TAIL_BATCHES", (3, 10, 600)),
    (tailrace.ledger.sqlite.commit_log, "MAX_DUE_FOR_AGE", (1, 4, 256)),
    (tailrace.ledger.sqlite.commit_log, "SEGMENT_COMMITS", (1, 2, 64)),
    (tailrace.ledger.sqlite.commit_log, "PRUNE_ROWS", (1, 3, 64)),
    (tailrace.ledger.sqlite.commit_log, "LOG_ROWS_AT_ONCE", (1, 3, 64)),
    (tailrace.ledger.sqlite.replay, "READ_SEGMENTS", (1, 2, 64)),
    (tailrace.ledger.sqlite.retention, "EXPIRE_STREAMS", (1, 2, 64)),
    (tailrace.ledger.sqlite.group, "MAX_FORMING_BYTES", (30, 200, 10_000)),
    (tailrace.ledger.flow.credit_window, "READ_FRAMES", (1, 3, 256)),
]


@dataclass(slots=True)
class Outcome:
    """Outcome of a run; `digest` is over the position of every step and every byte of the log."""

    steps: int = 0
    crashes: int = 0
    digest: int = 0


def run(seed: int) -> Outcome:
    """Run one interleaving; raises `Violation` or another error if the ledger breaks a promise."""
    world, outcome = World(seed), Outcome()
    random = world.random
    with _small_limits(random):
        for _ in range(random.randint(0, MAX_CRASHES)):
            _live(world, outcome, steps=random.randint(10, CRASH_STEPS))
            world.crash(random.choice(list(Crash)))
            outcome.crashes += 1
        _live(world, outcome, steps=None)
    return outcome


def _live(world: World, outcome: Outcome, steps: int | None) -> None:
    """Run one process until it crashes after `steps` callbacks, or to its end."""
    loop = SimulatedLoop(world.random)
    process = Process(world, loop, calm=steps is None)
    try:
        ended = loop.run(process.live(), MAX_STEPS if steps is None else steps)
    except BaseException:
        if world.disk.violation is not None:
            raise world.disk.violation from None  # the cause; what came to light is its effect
        raise
    finally:
        loop.abandon()
        outcome.steps += loop.steps
    if world.disk.violation is not None:
        raise world.disk.violation
    if loop.errors:
        raise Violation(f"an error went nowhere: {loop.errors[0]}")
    if steps is None and not ended:
        raise Violation(f"not everybody has finished after {MAX_STEPS} steps")
    logs = b"".join(commit.log for commit in world.disk.commits)
    outcome.digest = zlib.crc32(logs + b"%d" % loop.steps, outcome.digest)


@contextlib.contextmanager
def _small_limits(random: Random) -> Iterator[None]:
    """Return limits so small that a handful of frames reaches them."""
    before = [getattr(module, name) for module, name, _ in _LIMITS]
    for module, name, values in _LIMITS:
        setattr(module, name, random.choice(values))
    try:
        yield
    finally:
        for (module, name, _), value in zip(_LIMITS, before, strict=True):
            setattr(module, name, value)


def failure(seed: int) -> BaseException | None:
    """Return what breaks with this seed."""
    try:
        run(seed)
    except Exception as error:  # noqa: BLE001 - whatever it is, it is a finding
        return error
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("first", type=int)
    parser.add_argument("count", type=int, nargs="?", default=1)
    options = parser.parse_args()
    for seed in range(options.first, options.first + options.count):
        error = failure(seed)
        if error is not None:
            print(f"{seed}: {type(error).__name__}: {error}", flush=True)
            if options.count == 1:
                traceback.print_exception(error)
    outcome = f", {run(options.first)}" if options.count == 1 and error is None else ""
    print(f"{options.count} ran{outcome}")


if __name__ == "__main__":
    main()
