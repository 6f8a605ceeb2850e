"""Slices of a weight's rows, so that quantising a whole weight needs little additional memory."""

from __future__ import annotations

from collections.abc import Iterator

SLICE_ELEMENTS = 1 << 22
"""Maximum elements of a slice: 16 MiB as fp32. Quantising needs a few copies of a slice."""


def row_slices(rows: int, columns: int) -> Iterator[slice]:
    """Yield slices, of at least one row each, that cover `rows` rows of `columns` elements."""
    step = max(1, SLICE_ELEMENTS // columns)
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))
