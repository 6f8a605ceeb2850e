"""Who learns dictionaries and packs segments for a ledger, wherever that is done.

In an origin it is a process of its own (`compactor_process`); `InlineCompactor` does the same
work on the spot, for who has no use for a process: simulations, and tests that fail the disk.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

from ledger.sqlite.cold import Packed
from ledger.sqlite.compaction import Compaction, Learnt
from ledger.sqlite.storage import SegmentRow


class CompactorLost(Exception):
    """It died, hung or talked nonsense. What was asked of it has not happened; it may be asked
    again later."""


class Compactor(Protocol):
    """`compaction.Compaction`, a question at a time. Each may raise `CompactorLost`; where
    segments are given, `Damaged`, naming the index of the first that is not whole."""

    @property
    def known(self) -> Collection[int]:
        """Codings of the dictionaries that it holds; others must be given to it first."""
        ...

    async def know(self, coding: int, row: bytes) -> None: ...

    async def begin(self) -> None: ...

    async def sample(self, rows: Sequence[SegmentRow]) -> int: ...

    async def learn(self) -> Learnt: ...

    async def pack(self, rows: Sequence[SegmentRow], coding: int) -> Packed | None: ...

    async def close(self) -> None:
        """Let go of what it holds; a question that waits for its answer is `CompactorLost`."""
        ...


class InlineCompactor:
    """Does it at once, on the event loop of who asks."""

    def __init__(self) -> None:
        self._work = Compaction()
        self.known: Collection[int] = ()

    async def know(self, coding: int, row: bytes) -> None:
        self.known = self._work.know(coding, row)

    async def begin(self) -> None:
        self._work.begin()

    async def sample(self, rows: Sequence[SegmentRow]) -> int:
        return self._work.sample(rows)

    async def learn(self) -> Learnt:
        return self._work.learn()

    async def pack(self, rows: Sequence[SegmentRow], coding: int) -> Packed | None:
        return self._work.pack(rows, coding)

    async def close(self) -> None:
        self._work = Compaction()
        self.known = ()
