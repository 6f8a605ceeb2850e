"""The ahead-of-time gate: compiles every kernel at its real shapes for sm_90 and checks it.

`python -m tailrace.kernels.gate.aot` needs no GPU. It fails on a kernel that does not compile,
spills registers, adds floats atomically, lacks an instruction that it was written for, needs more
shared memory than the machine has, or that is launched somewhere but planned nowhere. It also fails
on a dependent launch that reads, writes or ends before its wait where it must not
(`kernels.dependent_triton`), and on a decode step of more than five launches per layer. Its last
line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict

from tailrace.kernels.gate.aot_gate import Compiled, Gate
from tailrace.kernels.gate.aot_report import Progress, print_report
from tailrace.kernels.gate.machine_code import Binary, read_machine_code
from tailrace.kernels.processes import ProcessError, Processes

READ_AT_ONCE = 32
"""Number of binaries disassembled at once, while others are compiled."""


def compile_all(package: str, only: str, jobs: int, progress: Progress) -> Gate:
    """Compile all variants, identical ones once.

    Raises ProcessError if the variants cannot be listed.
    """
    processes = Processes(jobs, "tailrace.kernels.gate.aot_worker", package)
    contents = processes.greeting
    chosen: dict[str, list[int]] = {}
    wanted = [
        (place, variant)
        for place, variant in enumerate(contents["variants"])
        if only in f"{variant['kernel']} {variant['module']} {variant['name']}"
    ]
    for place, variant in wanted:
        chosen.setdefault(variant["key"], []).append(place)
    for _, variant in wanted:
        # An ordinary launch is its dependent twin without the wait, so checking one of them is
        # enough.
        if variant["key"] in chosen and variant["twin"] in chosen.keys() - {variant["key"]}:
            chosen[variant["twin"]] += chosen.pop(variant["key"])
    places = list(chosen.values())
    uses = [[contents["variants"][place] for place in some] for some in places]
    compiled: dict[int, Compiled] = {}
    unread: dict[int, Binary] = {}
    try:
        for at, answer in processes.answers([str(some[0]) for some in places]):
            if isinstance(answer, ProcessError):
                compiled[at] = Compiled(uses[at], None, str(answer))
            else:
                unread[at] = Binary(**answer)
            done = len(compiled) + len(unread)
            if unread and (len(unread) == READ_AT_ONCE or done == len(places)):
                codes = zip(unread, read_machine_code([*unread.values()]), strict=True)
                compiled |= {at: Compiled(uses[at], asdict(code)) for at, code in codes}
                unread.clear()
            progress.show(done, len(places))
    finally:
        processes.close()
    launched = [] if only else contents["launched"]
    return Gate(contents["triton"], [compiled[at] for at in range(len(places))], launched)


def main(arguments: list[str] | None = None, clock: Callable[[], float] = time.monotonic) -> int:
    """Run the gate and return the exit status: 0 if it passes, 1 otherwise."""
    parser = argparse.ArgumentParser(
        prog="python -m tailrace.kernels.gate.aot", description=__doc__
    )
    parser.add_argument("--json", action="store_true", help="the line of JSON alone")
    parser.add_argument("--only", default="", metavar="NAME", help="kernels whose name holds NAME")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), metavar="N")
    parser.add_argument(
        "--package", default="tailrace.kernels", help="where the *_triton modules lie"
    )
    chosen = parser.parse_args(arguments)
    begun = clock()
    try:
        gate = compile_all(
            chosen.package, chosen.only, max(1, chosen.jobs), Progress(quiet=chosen.json)
        )
    except ProcessError as error:
        print(f"error: the kernels cannot be listed:\n{error}", file=sys.stderr)
        return 1
    offenders = gate.offenders() or ([] if gate.compiled else ["nothing was compiled"])
    if not chosen.json:
        print_report(gate.compiled)
    for offender in offenders:
        print(f"error: {offender}", file=sys.stderr)
    print(json.dumps({**gate.summary(), "seconds": round(clock() - begun, 1)}))
    return 1 if offenders else 0


if __name__ == "__main__":
    sys.exit(main())
