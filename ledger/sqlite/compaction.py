"""What it takes to make segments cold, without a file, a loop or a clock.

It is given segments and gives back cold ones, or a dictionary: it writes nothing, and what it
holds is bounded, so that it can live in a process of its own (`compactor_process`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ledger.errors import Damaged
from ledger.interface import Record
from ledger.sqlite.cold import Packed, pack_cold, payload_of, unpack_row
from ledger.sqlite.dictionary import MAX_TRAIN_BYTES, Dictionary, Vocabulary, train
from ledger.sqlite.storage import SegmentRow

MAX_SAMPLE_BYTES = 32 * 1024 * 1024
"""Bytes of segments that are learnt from; they are held until then."""
MAX_KNOWN = 4
"""Dictionaries held at a time: some megabytes each. The oldest goes for a new one."""


class Learnt(NamedTuple):
    """A row of the table `dictionary`, from how many frames, and how many pairs it knows."""

    row: bytes
    frames: int
    pairs: int


class Compaction:
    """Learns and packs. Segments that are not whole raise `Damaged`, naming the index."""

    def __init__(self) -> None:
        self._known: dict[int, Dictionary] = {}
        self.begin()

    # ---- dictionaries ----

    def know(self, coding: int, row: bytes) -> tuple[int, ...]:
        """Take a dictionary, for segments of this coding; gives the codings it knows now."""
        self._known.pop(coding, None)
        self._known[coding] = Dictionary.unpack(row, where=f"dictionary {coding}")
        while len(self._known) > MAX_KNOWN:
            del self._known[next(iter(self._known))]
        return tuple(self._known)

    # ---- learning ----

    def begin(self) -> None:
        """Forget the samples."""
        self._samples: list[SegmentRow] = []
        self._sampled = 0
        self._vocabulary = Vocabulary()

    def sample(self, rows: Sequence[SegmentRow]) -> int:
        """Consecutive segments of a stream to learn from; gives how many frames were taken.

        None are where that would be more than `MAX_SAMPLE_BYTES`.
        """
        size = sum(len(row.records) for row in rows)
        if self._sampled + size > MAX_SAMPLE_BYTES:
            return 0
        records = self._records(rows)
        self._vocabulary.count(records)
        self._samples += rows
        self._sampled += size
        return len(records)

    def learn(self) -> Learnt:
        """Which pairs there are, and then what is left for zstd. Takes seconds."""
        pairs, frames = self._vocabulary.pairs(), self._vocabulary.frames
        untrained = Dictionary(pairs, b"", frames)
        payloads: list[bytes] = []
        size = 0
        for row in self._samples:
            payloads.append(payload_of(row.first, self._records([row]), untrained).data)
            size += len(payloads[-1])
            if size >= MAX_TRAIN_BYTES:
                break
        self.begin()
        row_of_table = Dictionary(pairs, train(payloads), frames).pack()
        return Learnt(row_of_table, frames, len(pairs))

    # ---- packing ----

    def pack(self, rows: Sequence[SegmentRow], coding: int) -> Packed | None:
        """Consecutive plain segments as a cold one, which was unpacked again and is the same.

        None where they do not come back from it.
        """
        records = self._records(rows)
        return pack_cold(rows[0].sid, rows[0].first, records, coding, self._known[coding])

    def _records(self, rows: Sequence[SegmentRow]) -> list[Record]:
        records: list[Record] = []
        for row in rows:
            known = self._known[row.coding] if row.coding else None
            where = f"segment at index {row.first}"
            unpacked = unpack_row(row, known, where=where)
            if len(unpacked.frames) != row.length:
                raise Damaged(f"{where} has {len(unpacked.frames)} frames, not {row.length}")
            records += unpacked.records()
        return records
