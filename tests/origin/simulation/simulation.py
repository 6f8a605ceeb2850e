"""An origin under faults, each run from a seed: its models and workers, and its streams.

    python -m tests.origin.simulation.simulation FIRST [COUNT] [--processes N]

runs COUNT seeds from FIRST on. For each seed that breaks something it prints one line `SEED: what`;
the last line is JSON, with the numbers of seeds and events. Given COUNT 1, it prints the traceback
and the outcome too.

A seed is played three times. First the core of models and workers is played, in `simulated_models`,
with requests that are numbers. Then the cores of several origins are, in `simulated_cores`, which
share a ledger that is played too. Then several origins are, in `simulated_streams`, with what
carries out the commands of the cores, over one real ledger.

A seed draws everything: how many models there are, how large, pinned or scheduled; the policy; when
requests come and go; which loads fail, hang or take ten times as long; when workers die and fall
silent; what operators order; when the system's clock is set; and the delay of each report, so that
reports overtake each other; which answers of the ledger are lost; when origins die, and clients
cancel, leave and come back; which streams they branch, where, and which they delete. After a while
faults stop, and everybody must be served within a bound. Equal seeds make equal runs, in any
process.
"""

from __future__ import annotations

import argparse
import gc
import logging
import os
import sys
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context

import structlog

from tests.bench.machine import print_line
from tests.origin.simulation.simulated_cores import CoreWorld
from tests.origin.simulation.simulated_models import SimulatedModels
from tests.origin.simulation.simulated_streams import StreamWorld

CHUNK = 200
"""Number of seeds that a process plays before it reports."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run went; equal seeds have equal outcomes."""

    steps: int
    serves: int
    deaths: int
    events: int = 0
    callbacks: int = 0


def run(seed: int) -> Outcome:
    """Play one seed; raises `Violation` or another error if the core breaks its word."""
    outcome = replace(play_models(seed), events=play_cores(seed))
    return replace(outcome, callbacks=play_streams(seed))


def play_models(seed: int) -> Outcome:
    """Play the core of models and workers."""
    models = SimulatedModels(seed)
    models.run()
    return Outcome(models.steps, models.serves, models.deaths)


def play_cores(seed: int) -> int:
    """Play the cores of several origins; return the number of events."""
    return CoreWorld(seed).run()


def play_streams(seed: int) -> int:
    """Play several origins and their streams; return the number of callbacks."""
    return StreamWorld(seed).run()


def failure(seed: int, play: Callable[[int], object] = run) -> BaseException | None:
    """Return what breaks with this seed."""
    try:
        play(seed)
    except Exception as error:  # noqa: BLE001 - whatever it is, it is a finding
        return error
    return None


def play_chunk(seeds: range) -> tuple[int, int, list[str]]:
    """Play seeds one after the other; return their number, their events, and the failures."""
    events, broken = 0, []
    gc.freeze()  # the modules are never collected
    gc.disable()  # cycles are collected between seeds, which is faster
    for seed in seeds:
        try:
            outcome = run(seed)
            events += outcome.steps + outcome.events + outcome.callbacks
        except Exception as error:  # noqa: BLE001 - whatever it is, it is a finding
            broken.append(f"{seed}: {type(error).__name__}: {error}")
        gc.collect()
    gc.enable()
    return len(seeds), events, broken


def main() -> None:
    """Play the seeds that the command line names."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("first", type=int, help="first seed")
    parser.add_argument("count", type=int, nargs="?", default=1, help="number of seeds (default 1)")
    parser.add_argument(
        "--processes",
        type=int,
        default=os.cpu_count() or 1,
        help="seeds that are played at the same time (default: one for each processor)",
    )
    options = parser.parse_args()
    if options.count < 1 or options.processes < 1:
        parser.error("COUNT and --processes must be at least 1")
    quiet()
    if options.count == 1:
        sys.exit(play_one(options.first))
    began_s = time.monotonic()
    played = events = failed = 0
    last = options.first + options.count
    chunks = [range(at, min(at + CHUNK, last)) for at in range(options.first, last, CHUNK)]
    with ProcessPoolExecutor(options.processes, get_context("spawn"), quiet) as pool:
        for number, more, broken in pool.map(play_chunk, chunks):
            played, events, failed = played + number, events + more, failed + len(broken)
            for line in broken:
                print(line, flush=True)
            spent_s = time.monotonic() - began_s
            left_s = spent_s / played * (options.count - played)
            print(
                f"{played} of {options.count} seeds, {failed} failed, {left_s / 60:.0f} min left",
                file=sys.stderr,
            )
    found = {
        "first_seed": options.first,
        "seeds": played,
        "failed": failed,
        "events": events,
        "seeds_per_s": round(played / (time.monotonic() - began_s), 1),
        "processes": options.processes,
    }
    print_line(found)
    sys.exit(bool(failed))


def play_one(seed: int) -> int:
    """Play one seed and print its outcome, or the traceback; return the exit status."""
    error = failure(seed)
    if error is None:
        print(f"{seed}: {run(seed)}")
        return 0
    print(f"{seed}: {type(error).__name__}: {error}")
    traceback.print_exception(error)
    return 1


def quiet() -> None:
    """Log nothing but critical events: a seed makes thousands of warnings."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))


if __name__ == "__main__":
    main()
