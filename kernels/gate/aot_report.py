"""What people see of the ahead-of-time gate: a line of progress and a table of kernels.

Both are drawn by rich where it is installed and the output is a terminal, else plain lines.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from typing import Literal, TextIO

from kernels.gate.aot_gate import Compiled

COLUMNS = ("kernel", "compiled", "registers", "KiB", "spilled", "instructions", "step")
"""KiB: shared memory of a program. spilled: bytes. instructions: that it must have."""
PLAIN_STEPS = 25
"""Compilations between two lines of plain progress."""


def _is_rich(stream: TextIO) -> bool:
    return stream.isatty() and find_spec("rich") is not None


class Progress:
    """A line on standard error that says how far the compiling is; nothing if quiet."""

    def __init__(self, quiet: bool) -> None:
        self._quiet = quiet
        self._console = None
        if not quiet and _is_rich(sys.stderr):
            from rich.console import Console

            self._console = Console(stderr=True)

    def show(self, done: int, total: int, name: str) -> None:
        """Compilation `done` of `total` was that of `name`."""
        if self._quiet:
            return
        if self._console:
            width = max(20, self._console.width - 30)
            end = "\n" if done == total else "\r"
            self._console.print(
                f"[bold]{done:4}[/]/{total} compiled  [dim]{name[:width]:{width}}[/]",
                end=end,
                highlight=False,
                soft_wrap=True,
            )
        elif done % PLAIN_STEPS == 0 or done == total:
            print(f"{done}/{total} compiled", file=sys.stderr, flush=True)


def print_report(compiled: list[Compiled]) -> None:
    """A row for each kernel: the most of its compilations in every column."""
    kernels: dict[str, list[Compiled]] = {}
    for one in compiled:
        kernels.setdefault(one.uses[0]["kernel"], []).append(one)
    rows = [_row(name, kernels[name]) for name in sorted(kernels)]
    if _is_rich(sys.stdout):
        _print_rich(rows)
    else:
        _print_plain([COLUMNS, *rows])


def _row(name: str, compiled: list[Compiled]) -> tuple[str, ...]:
    codes = [one.code for one in compiled if one.code]
    uses = [use for one in compiled for use in one.uses]

    def most(field: str) -> int:
        return max((code[field] for code in codes), default=0)

    return (
        name.removeprefix("kernels."),
        f"{len(codes)}/{len(compiled)}",
        str(most("registers")),
        f"{most('shared_bytes') / 1024:.1f}",
        str(most("spill_bytes")),
        " ".join(sorted({mnemonic for use in uses for mnemonic in use["expects"]})),
        " ".join(sorted({use["step"] for use in uses if use["step"]})),
    )


def _print_rich(rows: list[tuple[str, ...]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table()
    for place, column in enumerate(COLUMNS):
        justify: Literal["left", "right"] = "right" if 1 <= place <= 4 else "left"
        table.add_column(column, justify=justify, overflow="fold")
    for row in rows:
        table.add_row(*row)
    Console().print(table)


def _print_plain(rows: list[tuple[str, ...]]) -> None:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(f"{cell:{w}}" for cell, w in zip(row, widths, strict=True)).rstrip())
