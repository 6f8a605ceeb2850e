"""Slices of a weight's rows, so that work on a whole weight needs little memory at a time."""

from __future__ import annotations

from collections.abc import Iterator

SLICE_ELEMENTS = 1 << 22
"""Maximum elements of a slice: 16 MiB of fp32, and some copies of it while it is quantised."""


def row_slices(rows: int, columns: int) -> Iterator[slice]:
    """Yield slices that cover `rows` rows of `columns` elements, of at least one row each."""
    step = max(1, SLICE_ELEMENTS // columns)
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))
