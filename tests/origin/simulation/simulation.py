"""Models, workers and requests of an origin under faults, each from a seed.

    python -m tests.origin.simulation.simulation FIRST [COUNT]

runs the seeds from FIRST on and prints, for each that breaks something, one line `SEED: what`, then
how many ran. Given COUNT 1, it prints the traceback too.

A seed draws everything: how many models there are, how large, pinned or scheduled; the policy; when
requests come and go; which loads fail, hang or take ten times as long; when workers die and fall
silent; what operators order; when the system's clock is set; and the delay of each report, so that
reports overtake each other. After a while faults stop, and everybody must be served within a bound.
Equal seeds make equal runs, in any process.
"""

from __future__ import annotations

import argparse
import sys
import traceback
from dataclasses import dataclass

from tests.origin.simulation.simulated_models import SimulatedOrigin


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run went; equal seeds have equal outcomes."""

    steps: int
    serves: int
    deaths: int


def run(seed: int) -> Outcome:
    """Play one seed; raises `Violation` or another error if the core breaks its word."""
    origin = SimulatedOrigin(seed)
    origin.run()
    return Outcome(origin.steps, origin.serves, origin.deaths)


def failure(seed: int) -> BaseException | None:
    """Return what breaks with this seed."""
    try:
        run(seed)
    except Exception as error:  # noqa: BLE001 - whatever it is, it is a finding
        return error
    return None


def main() -> None:
    """Play the seeds that the command line names."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("first", type=int)
    parser.add_argument("count", type=int, nargs="?", default=1)
    options = parser.parse_args()
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
