"""Segments back to records, plain and cold, for the readers of a ledger."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from ledger.sqlite.cold import Unpacked, unpack_cold, unpack_row
from ledger.sqlite.dictionary import Dictionary, Parsing
from ledger.sqlite.record import segment_frames
from ledger.sqlite.storage import SegmentRow, Upkeep

REMEMBERED = 8
"""Unpacked cold segments that are kept for the next read: each about 120 KB."""
PAIRS_AT_ONCE = 256
"""Pairs of a dictionary that are parsed in one turn of the event loop: about half a millisecond."""


class SegmentReader:
    """Remembers the dictionaries, and the last cold segments that were unpacked."""

    def __init__(self, upkeep: Upkeep | None) -> None:
        self._upkeep = upkeep
        self._dictionaries: dict[int, Dictionary] = {}
        self._unpacked: dict[tuple[int, int, int], Unpacked] = {}

    async def load(self, codings: Iterable[int]) -> None:
        """Have the dictionaries that these segments need."""
        for coding in codings:
            if coding and coding not in self._dictionaries:
                await self.dictionary(coding)

    async def dictionary(self, coding: int) -> Dictionary:
        """A dictionary by its id; `Damaged` if it is not whole."""
        known = self._dictionaries.get(coding)
        if known is None:
            row = b"" if self._upkeep is None else await self._upkeep.dictionary(coding)
            known = self._dictionaries[coding] = await parse(row, where=f"dictionary {coding}")
        return known

    def forget(self, codings: Iterable[int]) -> None:
        for coding in codings:
            self._dictionaries.pop(coding, None)

    def frames(self, row: SegmentRow, *, where: str) -> list[bytes]:
        """The frames of a segment; `Damaged`, naming `where`, if it is not whole."""
        if row.coding == 0:
            return segment_frames(row.records, where=where)
        return self._cold(row, where).frames

    def unpack(self, row: SegmentRow, *, where: str) -> Unpacked:
        """The same with their ids."""
        return self._cold(row, where) if row.coding else unpack_row(row, None, where=where)

    def _cold(self, row: SegmentRow, where: str) -> Unpacked:
        key = (row.sid, row.first, row.coding)
        found = self._unpacked.get(key)
        if found is None:
            found = unpack_cold(row, self._dictionaries[row.coding], where=where)
            self._unpacked[key] = found
            if len(self._unpacked) > REMEMBERED:
                del self._unpacked[next(iter(self._unpacked))]
        return found


async def parse(row: bytes, *, where: str) -> Dictionary:
    """The dictionary of a row; `Damaged`, naming `where`, if it is not whole.

    Piece by piece on the event loop: a thread would take the interpreter from it for longer.
    """
    parsing = Parsing(row, where=where)
    while True:
        found = parsing.advance(PAIRS_AT_ONCE)
        if found is not None:
            return found
        await asyncio.sleep(0)
