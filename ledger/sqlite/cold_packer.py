"""Plain segments to cold ones, in the background, a run of them with each commit.

What ended streams hold is packed when nobody has read it for a while, and of long running
ones what lies well behind their tip. Nothing is replaced before it has been unpacked again
and found the same, which the compactor does, and has matched its checksum here.

A compactor that is lost ends the sweep: nothing has happened to what it was about to pack, and
the next sweep asks another one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

import structlog

from ledger.errors import Damaged
from ledger.sqlite.cold import COLD_FRAMES, MAX_PAYLOAD_BYTES, Packed, is_whole
from ledger.sqlite.cold_reader import SegmentReader
from ledger.sqlite.cold_run import RUN_SEGMENTS, Run, take_run
from ledger.sqlite.compactor import Compactor, CompactorLost
from ledger.sqlite.dictionary_maker import DictionaryMaker
from ledger.sqlite.group import GroupCommit
from ledger.sqlite.retention import RetentionSettings
from ledger.sqlite.storage import Storage, Upkeep

STREAMS_AT_ONCE = 64
"""Ended streams that are looked up at a time."""
RUNS_PER_SWEEP = 4_096
"""Cold segments made per sweep, so that expiry is not put off for long."""
MAX_TRIES = 3
"""Compactors that a stream may cost; then it stays as it is, and others are packed."""

log = structlog.get_logger("ledger")


class Packable(Protocol):
    """What packing needs of a ledger's streams."""

    packing: int | None
    """The sid that is being packed; the ledger sets it to None when it removes the stream."""

    def exists(self, sid: int) -> bool:
        """False for a stream that is being removed."""
        ...

    def long_running(self, frames: int) -> list[tuple[int, int]]:
        """(sid, index that segments reach) of resident unended streams with so many frames."""
        ...


class ColdPacker:
    """The one packer of a ledger; `sweep` does what there is to do."""

    def __init__(
        self,
        streams: Packable,
        storage: Storage,
        upkeep: Upkeep,
        commits: GroupCommit,
        segments: SegmentReader,
        compactor: Compactor,
        settings: RetentionSettings,
        now_ms: Callable[[], int],
    ) -> None:
        self._streams = streams
        self._storage = storage
        self._upkeep = upkeep
        self._commits = commits
        self._segments = segments
        self._compactor = compactor
        self._settings = settings
        self._now_ms = now_ms
        self._maker = DictionaryMaker(storage, upkeep, commits, segments, compactor, settings)
        self._packed_until: dict[int, int] = {}  # of running streams, by sid
        self._cost: tuple[int, int] = (0, 0)  # whose run the last one was lost with, how often
        self._runs = 0

    async def sweep(self) -> int:
        """Pack what is cold; returns how many cold segments that made."""
        self._runs = 0
        try:
            await self._sweep()
        except CompactorLost as error:
            log.warning("ledger.compactor_lost", error=str(error))
        if self._runs:
            log.info("ledger.packed", segments=self._runs)
        return self._runs

    async def _sweep(self) -> None:
        before = self._now_ms() - int(self._settings.cold_after_s * 1000)
        ended = await self._upkeep.to_pack(before, STREAMS_AT_ONCE)
        running = self._streams.long_running(2 * COLD_FRAMES)
        if not ended and not running:
            return
        coding = await self._maker.current([sid for sid, _ in running])
        if coding is None:
            return
        while ended and self._runs < RUNS_PER_SWEEP:
            for sid in ended:
                await self._pack_stream(sid, coding, None)
            ended = await self._upkeep.to_pack(before, STREAMS_AT_ONCE)
        await self._pack_running(running, coding)

    async def _pack_running(self, running: list[tuple[int, int]], coding: int) -> None:
        known = self._packed_until
        self._packed_until = {sid: known[sid] for sid, _ in running if sid in known}
        for sid, stored in running:
            if stored - known.get(sid, 0) >= 2 * COLD_FRAMES:
                await self._pack_stream(sid, coding, stored - COLD_FRAMES)

    async def _pack_stream(self, sid: int, coding: int, until: int | None) -> None:
        """Pack a stream's plain segments, those before index `until` if it is running."""
        streams = self._streams
        streams.packing = sid
        rows = await self._storage.streams_by_sid([sid])
        if not rows or not streams.exists(sid):
            return
        at = 0 if until is None else self._packed_until.get(sid, 0)
        try:
            at = await self._pack_runs(sid, coding, at, until)
        except CompactorLost as error:
            if self._cost != (sid, MAX_TRIES):
                raise
            log.error("stream.cannot_be_packed", stream=rows[0].id.hex(), error=str(error))
            at = until or 0
        except Damaged as error:
            # It stays as it is, for readers to be told and for what can be saved of it.
            log.error("stream.damaged", stream=rows[0].id.hex(), error=error.message)
            at = until or 0
        if until is not None:
            self._packed_until[sid] = at
        elif streams.packing == sid:
            self._commits.forming.commit.cold.append(sid)
            await self._commits.commit()

    async def _pack_runs(self, sid: int, coding: int, at: int, until: int | None) -> int:
        """Pack from index `at` on; returns the index that was reached."""
        while self._streams.packing == sid:
            found = await self._storage.segments(sid, at, RUN_SEGMENTS)
            run = take_run([row for row in found if row.first >= at], at, until)
            if run.rows:
                await self._pack(run, coding)
            elif run.beyond == at:
                break
            at = run.beyond
        return at

    async def _pack(self, run: Run, coding: int) -> None:
        """Replace a run by a cold segment, if that is smaller and the stream still there."""
        packed = await self._packed(run, coding)
        await self._upkeep.calm()
        if packed is None or self._streams.packing != packed.row.sid:
            return
        commit = self._commits.forming.commit
        commit.replaced.append((packed.row.sid, packed.row.first, run.beyond))
        commit.segments.append(packed.row)
        await self._commits.commit()
        self._runs += 1
        self._maker.note(run.frames, packed.strange)
        await asyncio.sleep(self._settings.pause_s)

    async def _packed(self, run: Run, coding: int) -> Packed | None:
        """The cold segment of a run; None where it would not be smaller, or not the same."""
        if run.bytes > MAX_PAYLOAD_BYTES:
            return None
        try:
            dictionary = await self._segments.dictionary(coding)
            await self._maker.teach(coding)
        except Damaged as error:  # of the dictionary, for which the stream cannot be blamed
            raise CompactorLost(error.message) from error
        try:
            packed = await self._compactor.pack(run.rows, coding)
            if packed is not None and not is_whole(packed.row, dictionary):
                raise CompactorLost("a segment came back that does not match its checksum")
        except CompactorLost:
            self._blame(run.rows[0].sid)
            raise
        return packed if packed is not None and len(packed.row.records) < run.bytes else None

    def _blame(self, sid: int) -> None:
        """A compactor that had taken its dictionary was lost with a run of this stream."""
        last, ends = self._cost
        self._cost = (sid, ends + 1 if last == sid else 1)
