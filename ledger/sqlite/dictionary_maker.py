"""When a ledger learns a dictionary, and from what: the streams that ended last."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress

import structlog

from ledger.errors import Damaged
from ledger.sqlite.cold_reader import SegmentReader, parse
from ledger.sqlite.compactor import Compactor, CompactorLost
from ledger.sqlite.group import GroupCommit
from ledger.sqlite.retention import RetentionSettings
from ledger.sqlite.storage import SegmentRow, Storage, Upkeep

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
SEGMENTS_AT_ONCE = 32
"""Segments of a stream that are read to learn from them,"""
SAMPLE_BYTES = 256 * 1024
"""and what is sent of them at once. A segment with more is not learnt from: it holds no text."""

log = structlog.get_logger("ledger")


class DictionaryMaker:
    """Makes the dictionaries of one ledger; old ones stay while segments need them."""

    def __init__(
        self,
        storage: Storage,
        upkeep: Upkeep,
        commits: GroupCommit,
        segments: SegmentReader,
        compactor: Compactor,
        settings: RetentionSettings,
    ) -> None:
        self._storage = storage
        self._upkeep = upkeep
        self._commits = commits
        self._segments = segments
        self._compactor = compactor
        self._settings = settings
        self._frames = 0  # packed in this process with the newest one
        self._strange = 0  # of them, tokens that it does not know
        self._patience = STRANGE_FRAMES
        self._wanted = 0  # frames to learn from that are still to come

    def note(self, frames: int, strange: int) -> None:
        """So many frames were packed, so many of them token frames that it does not know."""
        self._frames += frames
        self._strange += strange

    async def current(self, running: Sequence[int]) -> int | None:
        """The id of the dictionary to pack with; None while there is too little to learn from.

        `running` are the sids of long streams that may be learnt from as well. Raises
        `CompactorLost`.
        """
        listed = await self._upkeep.dictionaries()
        last = listed[-1][0] if listed else 0
        newest = last or None
        try:
            if newest is not None and not await self._is_outgrown(newest):
                return newest
        except Damaged as error:
            log.error("ledger.dictionary_damaged", error=error.message)
            newest = None
        if len(listed) >= MAX_DICTIONARIES:
            return newest
        sids = await self._material(running)
        if sids is None:
            return newest
        made = await self._make(sids)
        unused = [old for old, needed in listed if not needed]
        number = last + 1
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

    async def teach(self, coding: int) -> None:
        """Have the compactor know a dictionary."""
        if coding not in self._compactor.known:
            await self._compactor.know(coding, await self._upkeep.dictionary(coding))

    async def _make(self, sids: Sequence[int]) -> bytes:
        """Learn from these streams, and look whether what was learnt is whole."""
        await self._compactor.begin()
        self._wanted = TRAIN_FRAMES
        for sid in sids:
            with suppress(Damaged):  # its readers are told
                await self._sample(sid)
        learnt = await self._compactor.learn()
        try:
            await parse(learnt.row, where="what was learnt")
        except Damaged as error:
            raise CompactorLost(error.message) from error
        log.info(
            "ledger.dictionary", frames=learnt.frames, pairs=learnt.pairs, bytes=len(learnt.row)
        )
        return learnt.row

    async def _sample(self, sid: int) -> None:
        """Have the compactor look at a stream, until it has seen enough."""
        at = 0
        while self._wanted > 0:
            found = await self._storage.segments(sid, at, SEGMENTS_AT_ONCE)
            rows = _first([row for row in found if row.first >= at])
            if not rows:
                break
            for coding in {row.coding for row in rows if row.coding}:
                await self.teach(coding)
            if sum(len(row.records) for row in rows) <= SAMPLE_BYTES:
                taken = await self._compactor.sample(rows)
                self._wanted = self._wanted - taken if taken else 0
            at = rows[-1].first + rows[-1].length
            await asyncio.sleep(self._settings.pause_s)


def _first(rows: Sequence[SegmentRow]) -> list[SegmentRow]:
    """As many of them as may be sent at once, and of one coding; one at least."""
    size = 0
    for count, row in enumerate(rows):
        size += len(row.records)
        if count and (size > SAMPLE_BYTES or row.coding != rows[0].coding):
            return list(rows[:count])
    return list(rows)
