"""Plain segments to cold ones, in the background, a run of them with each commit.

What ended streams hold is packed when nobody has read it for a while, and of long running
ones what lies well behind their tip. Nothing is replaced before it has been unpacked again
and found the same.

What Python does of it is done on the event loop, in pieces of about a millisecond: in a
thread it would hold the interpreter up to five at a time, several times per commit. zstd
works in a thread; it lets go of the interpreter.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

import structlog

from ledger.errors import Damaged
from ledger.interface import Record
from ledger.sqlite.cold import (
    COLD_FRAMES,
    MAX_PAYLOAD_BYTES,
    Packed,
    cold_row,
    gives_back,
    payload_of,
    unpack_row,
)
from ledger.sqlite.cold_reader import SegmentReader
from ledger.sqlite.cold_run import RUN_SEGMENTS, Run, take_run
from ledger.sqlite.dictionary_maker import DictionaryMaker
from ledger.sqlite.group import GroupCommit
from ledger.sqlite.retention import RetentionSettings
from ledger.sqlite.storage import Storage, Upkeep
from ledger.sqlite.thread import WorkThread

STREAMS_AT_ONCE = 64
"""Ended streams that are looked up at a time."""
RUNS_PER_SWEEP = 4_096
"""Cold segments made per sweep, so that expiry is not put off for long."""

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
        thread: WorkThread,
        settings: RetentionSettings,
        now_ms: Callable[[], int],
    ) -> None:
        self._streams = streams
        self._storage = storage
        self._upkeep = upkeep
        self._commits = commits
        self._segments = segments
        self._thread = thread
        self._settings = settings
        self._now_ms = now_ms
        self._maker = DictionaryMaker(storage, upkeep, commits, segments, thread, settings)
        self._packed_until: dict[int, int] = {}  # of running streams, by sid
        self._runs = 0

    async def sweep(self) -> int:
        """Pack what is cold; returns how many cold segments that made."""
        before = self._now_ms() - int(self._settings.cold_after_s * 1000)
        ended = await self._upkeep.to_pack(before, STREAMS_AT_ONCE)
        running = self._streams.long_running(2 * COLD_FRAMES)
        if not ended and not running:
            return 0
        coding = await self._maker.current([sid for sid, _ in running])
        if coding is None:
            return 0
        self._runs = 0
        while ended and self._runs < RUNS_PER_SWEEP:
            for sid in ended:
                await self._pack_stream(sid, coding, None)
            ended = await self._upkeep.to_pack(before, STREAMS_AT_ONCE)
        await self._pack_running(running, coding)
        if self._runs:
            log.info("ledger.packed", segments=self._runs)
        return self._runs

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
        dictionary = await self._segments.dictionary(coding)
        sid, first = run.rows[0].sid, run.rows[0].first
        records: list[Record] = []
        for row in run.rows:
            records += unpack_row(row, None, where=f"segment at index {row.first}").records()
        data, strange = payload_of(first, records, dictionary)
        if len(data) > MAX_PAYLOAD_BYTES:
            return None
        compressed = await self._thread.run(lambda: dictionary.compress(data))
        row = cold_row(sid, first, len(records), coding, data, compressed)
        if len(row.records) >= run.bytes or not gives_back(row, records, dictionary):
            return None
        return Packed(row, strange)
