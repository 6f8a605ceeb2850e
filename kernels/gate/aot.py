"""The ahead-of-time gate: compiles every kernel at its real shapes for sm_90 and checks it.

`python -m tailrace.kernels.gate.aot` needs no GPU. For sm_80, sm_89, sm_100 and sm_120 it compiles
a sample of the variants. A kernel that needs more than 48 KiB of shared memory is compiled for each
of the four, in the variant that needs most. Of the other kernels of a folder that multiply with the
same instructions, each architecture gets one, in rotation, so that every kernel is compiled for at
least one of the four. `--every` compiles all variants. On these architectures a kernel may spill a
few registers, up to a limit in `kernels.gate.targets`. If Triton's ptxas does not know an
architecture, a warning on standard error names it.

The gate fails on a kernel that does not compile, spills registers, adds floats atomically, lacks an
instruction that it was written for, needs more shared memory than the machine has, or that is
launched somewhere but has no variant. It also fails on a dependent launch that, before its wait,
ends or accesses memory in a way that `kernels.dependent_triton` forbids, and on a decode step of
more than five launches per layer. The last line of its output is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from tailrace.kernels.gate.aot_gate import Compiled, Gate, identity, sampled
from tailrace.kernels.gate.aot_report import Progress, print_report, print_targets
from tailrace.kernels.gate.machine_code import Binary, read_machine_code
from tailrace.kernels.gate.targets import OTHERS, SM_90
from tailrace.kernels.processes import ProcessError, Processes

READ_AT_ONCE = 32
"""Number of binaries that one call of the disassembler reads, while others are compiled."""


Described = dict[str, Any]
"""A variant as the JSON object in which a compiler process lists it."""


class _Compiler:
    """Compiles variants in worker processes and reads their machine code."""

    def __init__(self, processes: Processes, variants: list[Described], progress: Progress) -> None:
        self._processes = processes
        self._variants = variants
        self._progress = progress

    def compile(self, groups: list[list[int]]) -> list[Compiled]:
        """Compile the first variant of each group of identical variants, in the given order.

        Returns the compilations in that order. Binaries are disassembled while others are compiled,
        READ_AT_ONCE of one architecture at a time.
        """
        uses = [[self._variants[place] for place in group] for group in groups]
        missing = Counter(group[0]["arch"] for group in uses)
        compiled: dict[int, Compiled] = {}
        unread: dict[int, dict[int, Binary]] = {arch: {} for arch in missing}
        answers = self._processes.answers([str(group[0]) for group in groups])
        for done, (at, answer) in enumerate(answers, 1):
            arch = uses[at][0]["arch"]
            missing[arch] -= 1
            if isinstance(answer, ProcessError):
                compiled[at] = Compiled(uses[at], None, str(answer))
            else:
                unread[arch][at] = Binary(**answer)
            waiting = unread[arch]
            if waiting and (len(waiting) == READ_AT_ONCE or not missing[arch]):
                codes = zip(waiting, read_machine_code([*waiting.values()]), strict=True)
                compiled |= {at: Compiled(uses[at], asdict(code)) for at, code in codes}
                waiting.clear()
            self._progress.show(done, len(groups))
        return [compiled[at] for at in range(len(groups))]


def grouped(variants: list[Described], only: str, arch: int) -> list[list[int]]:
    """Group the indices of an architecture's identical variants whose names contain `only`."""
    chosen: dict[str, list[int]] = {}
    wanted = [
        (place, variant)
        for place, variant in enumerate(variants)
        if variant["arch"] == arch
        and only in f"{variant['kernel']} {variant['module']} {variant['name']}"
    ]
    for place, variant in wanted:
        chosen.setdefault(variant["key"], []).append(place)
    for _, variant in wanted:
        # An ordinary launch is the same code as its dependent twin without the wait, so it is
        # enough to compile and check the dependent one.
        if variant["key"] in chosen and variant["twin"] in chosen.keys() - {variant["key"]}:
            chosen[variant["twin"]] += chosen.pop(variant["key"])
    return list(chosen.values())


def compile_all(package: str, only: str, jobs: int, progress: Progress, every: bool) -> Gate:
    """Compile all variants for sm_90; for other architectures a sample, or all if `every` is set.

    Identical variants are compiled once. Raises ProcessError if the variants cannot be listed.
    """
    processes = Processes(jobs, "tailrace.kernels.gate.aot_worker", package)
    contents = processes.greeting
    variants: list[Described] = contents["variants"]
    compiler = _Compiler(processes, variants, progress)
    try:
        compiled = compiler.compile(grouped(variants, only, SM_90.arch))
        groups: list[list[int]] = []
        for target in OTHERS:
            own = grouped(variants, only, target.arch)
            if not every:
                names = {identity(variants[place]) for group in own for place in group}
                wanted = sampled(compiled, target, names)
                own = [g for g in own if any(identity(variants[place]) in wanted for place in g)]
            groups += own
        elsewhere = compiler.compile(groups)
    finally:
        processes.close()
    launched = [] if only else contents["launched"]
    return Gate(contents["triton"], compiled, launched, elsewhere, contents["unknown"])


def main(arguments: list[str] | None = None, clock: Callable[[], float] = time.monotonic) -> int:
    """Run the gate and return the exit status: 0 if it passes, 1 otherwise."""
    parser = argparse.ArgumentParser(
        prog="python -m tailrace.kernels.gate.aot", description=__doc__
    )
    parser.add_argument("--json", action="store_true", help="print only the line of JSON")
    parser.add_argument(
        "--only", default="", metavar="NAME", help="compile only kernels whose name contains NAME"
    )
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), metavar="N")
    parser.add_argument(
        "--package", default="tailrace.kernels", help="package with the *_triton modules"
    )
    parser.add_argument(
        "--every", action="store_true", help="compile all variants for every architecture"
    )
    chosen = parser.parse_args(arguments)
    begun = clock()
    try:
        progress = Progress(quiet=chosen.json)
        gate = compile_all(chosen.package, chosen.only, max(1, chosen.jobs), progress, chosen.every)
    except ProcessError as error:
        print(f"error: the kernels cannot be listed:\n{error}", file=sys.stderr)
        return 1
    offenders = gate.offenders() or ([] if gate.compiled else ["nothing was compiled"])
    if not chosen.json:
        print_report(gate.compiled)
        print_targets(gate.by_target())
    for name in gate.unknown:
        print(f"warning: {name} is unknown to Triton's ptxas: not compiled", file=sys.stderr)
    for offender in offenders:
        print(f"error: {offender}", file=sys.stderr)
    print(json.dumps({**gate.summary(), "seconds": round(clock() - begun, 1)}))
    return 1 if offenders else 0


if __name__ == "__main__":
    sys.exit(main())
