"""An origin under faults, each run from a seed: its models and workers, and its streams.

    python -m tests.origin.simulation.simulation FIRST [COUNT]

runs the seeds from FIRST on and prints, for each that breaks something, one line `SEED: what`, then
how many ran. Given COUNT 1, it prints the traceback too.

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
import logging
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace

import structlog

from tests.origin.simulation.simulated_cores import CoreWorld
from tests.origin.simulation.simulated_models import SimulatedModels
from tests.origin.simulation.simulated_streams import StreamWorld


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


def main() -> None:
    """Play the seeds that the command line names."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("first", type=int)
    parser.add_argument("count", type=int, nargs="?", default=1)
    options = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    failed = 0
    for seed in range(options.first, options.first + options.count):
        error = failure(seed)
        if error is not None:
            failed += 1
            print(f"{seed}: {type(error).__name__}: {error}", flush=True)
            if options.count == 1:
                traceback.print_exception(error)
    outcome = f", {run(options.first)}" if options.count == 1 and not failed else ""
    print(f"{options.count} ran{outcome}")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
