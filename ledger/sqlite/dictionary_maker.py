"""When a ledger learns a dictionary, and from what: the streams that ended last."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence

import structlog

from ledger.errors import Damaged
from ledger.interface import Record
from ledger.sqlite.cold import payload_of, unpack_row
from ledger.sqlite.cold_reader import SegmentReader
from ledger.sqlite.dictionary import Dictionary, Vocabulary, train
from ledger.sqlite.group import GroupCommit
from ledger.sqlite.retention import RetentionSettings
from ledger.sqlite.storage import SegmentRow, Storage, Upkeep
from ledger.sqlite.thread import WorkThread

MIN_TRAIN_FRAMES = 16_384
"""Fewer teach too little; until there are as many, nothing is packed."""
TRAIN_FRAMES = 524_288
"""More teach nothing more."""
TRAIN_STREAMS = 8_192
RETRAIN_FACTOR = 16
"""A dictionary from few frames is made anew after so many times as many were packed."""
MAX_STRANGE_SHARE = 0.25
"""One is as well that does not know more than this share of the frames,"""
STRANGE_FRAMES = 65_536
"""which is asked after so many frames, and when that helped, or not, after"""
PATIENCE_FACTOR = 4
"""times as many: there may be nothing to learn."""
MAX_DICTIONARIES = 64
SEGMENTS_AT_ONCE = 1
"""Segments that are learnt from in one piece: about half a millisecond."""

log = structlog.get_logger("ledger")


class DictionaryMaker:
    """Makes the dictionaries of one ledger; old ones stay while segments need them."""

    def __init__(
        self,
        storage: Storage,
        upkeep: Upkeep,
        commits: GroupCommit,
        segments: SegmentReader,
        thread: WorkThread,
        settings: RetentionSettings,
    ) -> None:
        self._storage = storage
        self._upkeep = upkeep
        self._commits = commits
        self._segments = segments
        self._thread = thread
        self._settings = settings
        self._frames = 0  # packed in this process with the newest one
        self._strange = 0  # of them, tokens that it does not know
        self._patience = STRANGE_FRAMES

    def note(self, frames: int, strange: int) -> None:
        """So many frames were packed, so many of them token frames that it does not know."""
        self._frames += frames
        self._strange += strange

    async def current(self, running: Sequence[int]) -> int | None:
        """The id of the dictionary to pack with; None while there is too little to learn from.

        `running` are the sids of long streams that may be learnt from as well.
        """
        listed = await self._upkeep.dictionaries()
        newest = listed[-1][0] if listed else None
        if newest is not None and not await self._is_outgrown(newest):
            return newest
        if len(listed) >= MAX_DICTIONARIES:
            return newest
        sids = await self._material(running)
        if sids is None:
            return newest
        made = await self._make(sids)
        unused = [old for old, needed in listed if not needed]
        number = (newest or 0) + 1
        commit = self._commits.forming.commit
        commit.dictionaries.append((number, made))
        commit.unused += unused
        await self._commits.commit()
        self._segments.forget(unused)
        self._frames = self._strange = 0
        return number

    async def _is_outgrown(self, coding: int) -> bool:
        if self._frames >= self._patience and self._strange > self._frames * MAX_STRANGE_SHARE:
            self._patience *= PATIENCE_FACTOR
            return True
        dictionary = await self._segments.dictionary(coding)
        were_few = dictionary.frames < TRAIN_FRAMES // 2
        return were_few and self._frames >= RETRAIN_FACTOR * dictionary.frames

    async def _material(self, running: Sequence[int]) -> list[int] | None:
        """Streams with enough frames between them, or None."""
        sids: list[int] = []
        frames = 0
        for sid in (*running, *await self._upkeep.newest_ended(TRAIN_STREAMS)):
            sids.append(sid)
            frames += await self._storage.covered(sid)
            if frames >= TRAIN_FRAMES:
                break
            if len(sids) % 64 == 0:
                await asyncio.sleep(0)  # each is a look into the file
        return sids if frames >= MIN_TRAIN_FRAMES else None

    async def _make(self, sids: Sequence[int]) -> bytes:
        """Learn from these streams: first which pairs there are, then what is left for zstd."""
        run = self._thread.run
        vocabulary = Vocabulary()
        async for _, records in self._samples(sids):
            vocabulary.count(records)
        pairs = await run(vocabulary.pairs)
        untrained = Dictionary(pairs, b"", vocabulary.frames)
        payloads: list[bytes] = []
        async for first, records in self._samples(sids):
            payloads.append(payload_of(first, records, untrained).data)
        trained = await run(lambda: train(payloads))
        row = await run(Dictionary(pairs, trained, vocabulary.frames).pack)
        log.info("ledger.dictionary", frames=vocabulary.frames, pairs=len(pairs), bytes=len(row))
        return row

    async def _samples(self, sids: Iterable[int]) -> AsyncIterator[tuple[int, list[Record]]]:
        """(first index, records) of stretches of these streams, up to `TRAIN_FRAMES` in all."""
        left = TRAIN_FRAMES
        for sid in sids:
            at = 0
            while left > 0:
                found = await self._storage.segments(sid, at, SEGMENTS_AT_ONCE)
                rows = [row for row in found if row.first >= at]
                if not rows:
                    break
                try:
                    records = await self._records(rows)
                except Damaged:
                    break  # its readers are told
                yield rows[0].first, records
                await asyncio.sleep(self._settings.pause_s)
                at = rows[-1].first + rows[-1].length
                left -= len(records)

    async def _records(self, rows: Sequence[SegmentRow]) -> list[Record]:
        records: list[Record] = []
        for row in rows:
            known = await self._segments.dictionary(row.coding) if row.coding else None
            records += unpack_row(row, known, where="a sample").records()
        return records
