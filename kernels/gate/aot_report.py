"""Human-readable output of the ahead-of-time gate: progress lines and a table of kernels."""

from __future__ import annotations

import sys

from tailrace.kernels.gate.aot_gate import Compiled

COLUMNS = ("kernel", "compiled", "registers", "KiB", "spilled", "instructions", "step")
"""Column headings.

KiB: shared memory per program. spilled: bytes of spilled registers. instructions: the machine
instructions that the variants expect. step: the part of a decode step that launches the kernel.
"""
STEPS = 25
"""Number of compilations between two progress lines."""


class Progress:
    """Prints progress lines to standard error, unless it is quiet."""

    def __init__(self, quiet: bool) -> None:
        self._quiet = quiet

    def show(self, done: int, total: int) -> None:
        """Print `done` of `total` compilations, every STEPS compilations and at the end."""
        if not self._quiet and (done % STEPS == 0 or done == total):
            print(f"{done}/{total} compiled", file=sys.stderr, flush=True)


def print_report(compiled: list[Compiled]) -> None:
    """Print one row per kernel; each column has the maximum of the kernel's compilations."""
    kernels: dict[str, list[Compiled]] = {}
    for one in compiled:
        kernels.setdefault(one.uses[0]["kernel"], []).append(one)
    _print_table([COLUMNS, *(_row(name, kernels[name]) for name in sorted(kernels))])


def _row(name: str, compiled: list[Compiled]) -> tuple[str, ...]:
    codes = [one.code for one in compiled if one.code]
    uses = [use for one in compiled for use in one.uses]

    def most(field: str) -> int:
        return max((code[field] for code in codes), default=0)

    return (
        name.removeprefix("tailrace.kernels."),
        f"{len(codes)}/{len(compiled)}",
        str(most("registers")),
        f"{most('shared_bytes') / 1024:.1f}",
        str(most("spill_bytes")),
        " ".join(sorted({mnemonic for use in uses for mnemonic in use["expects"]})),
        " ".join(sorted({use["step"] for use in uses if use["step"]})),
    )


TARGET_COLUMNS = ("architecture", "compiled", "registers", "KiB", "allowed", "spilled", "lacking")
"""Column headings of the table for architectures other than sm_90; see COLUMNS.

allowed: maximum KiB of shared memory per program. lacking: number of expected instructions that the
machine code does not have.
"""


def print_targets(targets: dict[str, dict[str, int]]) -> None:
    """Print one row per architecture other than sm_90, from `Gate.by_target`."""
    if targets:
        _print_table([TARGET_COLUMNS, *(_target_row(*item) for item in targets.items())])


def _target_row(name: str, counted: dict[str, int]) -> tuple[str, ...]:
    total = counted["compilations"]
    return (
        name,
        f"{total - counted['compile_errors']}/{total}",
        str(counted["registers_max"]),
        f"{counted['shared_bytes_max'] / 1024:.1f}",
        f"{counted['shared_bytes_allowed'] / 1024:.1f}",
        str(counted["spill_bytes"]),
        str(counted["missing_instructions"]),
    )


def _print_table(rows: list[tuple[str, ...]]) -> None:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(f"{cell:{w}}" for cell, w in zip(row, widths, strict=True)).rstrip())
