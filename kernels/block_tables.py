"""The block tables of running sequences, kept on the device; only changed cells are sent.

A captured graph reads a table at a fixed address. Sending all tables with each step would be 2 MB
for 256 sequences of 131,072 positions, while in most steps one sequence in 64 gets a page.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tailrace.kernels.one_copy import move_into

NO_PAGE = -1
"""Page id that fills a block table after the sequence's last page. A kernel that reads it reports a
fault, so that it cannot read another sequence's keys by mistake."""
MAX_CELLS_PER_TABLE = 8
"""Maximum changed cells of one table that are sent with a step's inputs; if more have changed, they
are sent in a copy of their own."""

_UNWRITTEN = -1


@dataclass(slots=True)
class _Held:
    pages: Sequence[int]
    """The list of pages. This reference keeps it alive, so that no other list can get the same
    `id`."""
    slot: int
    count: int
    """Number of this list's pages that are on the device; _UNWRITTEN if the slot still holds the
    pages of another list."""


class BlockTables:
    """Block tables in `slots` slots on the device; the `id` of a list of pages names a sequence.

    tables: int32 [slots, pages], at an address that never changes. A list may grow between two
    steps, but the pages that it had must not change. The table of a list that has shrunk, or is
    new, is written as a whole. If no slot is free, a new list gets the least recently used one. No
    method waits for the device.
    """

    def __init__(self, slots: int, pages: int, device: torch.device) -> None:
        # One cell more than the tables have: padding entries write to it.
        self._cells = torch.full((slots * pages + 1,), NO_PAGE, dtype=torch.int32, device=device)
        self.tables = self._cells[:-1].view(slots, pages)
        self.padding = slots * pages
        """Index of the additional cell, which belongs to no table."""
        self._pages = pages
        self._held: dict[int, _Held] = {}
        self._free = list(range(slots - 1, -1, -1))
        self._counts = [0] * slots
        """Number of cells at the start of each slot that may differ from NO_PAGE."""

    def place(
        self, tables: Sequence[Sequence[int]], most: int
    ) -> tuple[list[int], list[tuple[int, int]]]:
        """Return each table's slot, and up to `most` changed cells as pairs (cell index, page id).

        The caller must write these cells with `put` before a kernel reads the tables. A change of
        one table that does not fit into `most`, or has more than MAX_CELLS_PER_TABLE cells, is
        copied to the device by this method itself, in stream order, and is not returned. Pages
        beyond the width of the tables are dropped. Raises ValueError for more distinct tables than
        slots.
        """
        for table in tables:
            if (held := self._held.pop(id(table), None)) is not None:
                self._held[id(table)] = held  # put at the end: it is now the most recently used
        wanted = {id(table) for table in tables}
        slots: list[int] = []
        cells: list[tuple[int, int]] = []
        for table in tables:
            held = self._held.get(id(table)) or self._take(table, wanted)
            slots.append(held.slot)
            if len(table) != held.count:
                cells += self._change(held, most - len(cells))
        return slots, cells

    def put(self, indices: Tensor, pages: Tensor) -> None:
        """Write changed cells: int64 indices and int32 pages, [n] on the device."""
        self._cells.index_copy_(0, indices, pages)

    def _take(self, table: Sequence[int], wanted: set[int]) -> _Held:
        if not self._free:
            oldest = next((key for key in self._held if key not in wanted), None)
            if oldest is None:
                raise ValueError(f"tables: {len(wanted)}, expected at most {len(self._held)}")
            self._free.append(self._held.pop(oldest).slot)
        held = self._held[id(table)] = _Held(table, self._free.pop(), count=_UNWRITTEN)
        return held

    def _change(self, held: _Held, room: int) -> list[tuple[int, int]]:
        """Copy a large change of a slot to the device, or return a small one as cells to write."""
        used = min(len(held.pages), self._pages)
        grown = 0 <= held.count < len(held.pages)
        first = min(held.count, self._pages) if grown else 0
        last = max(used, self._counts[held.slot])
        held.count, self._counts[held.slot] = len(held.pages), used
        changed = [*held.pages[first:used], *[NO_PAGE] * (last - used)]
        if len(changed) <= min(room, MAX_CELLS_PER_TABLE):
            start = held.slot * self._pages + first
            return [(start + at, page) for at, page in enumerate(changed)]
        there = self.tables[held.slot, first:last]
        move_into(there, torch.tensor(changed, dtype=torch.int32))
        return []
