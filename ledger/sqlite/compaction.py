"""Compaction: compresses plain segments into cold ones, in the background.

Each commit replaces one run of consecutive plain segments by a cold one.

An ended stream is compressed when it was not read for some time. A running stream with many records
is compressed, too, except for its last COLD_FRAMES records. Compaction runs on the event loop, some
milliseconds at a time. A cold segment replaces plain ones only after it was decompressed again and
found equal to them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import structlog

from tailrace.ledger.errors import Damaged
from tailrace.ledger.sqlite.encoding import (
    COLD_CODINGS,
    Unpacked,
    pack_cold,
    unpack_cold,
    unpack_segment,
)
from tailrace.ledger.sqlite.group import GroupCommit
from tailrace.ledger.sqlite.open_streams import Residents
from tailrace.ledger.sqlite.retention import RetentionSettings
from tailrace.ledger.sqlite.storage import SegmentRow, Storage

COLD_FRAMES = 1_024
"""Maximum records of a cold segment: a read of one record must decompress the whole segment."""
COLD_BYTES = 128 * 1024
"""Maximum bytes of the plain segments that one cold segment replaces.

A larger plain segment is never compressed.
"""
RUN_SEGMENTS = 32
"""Maximum plain segments that one commit replaces, which takes about a millisecond."""
STREAMS_AT_ONCE = 64
"""Maximum ended streams to look up at a time."""
RUNS_PER_SWEEP = 4_096
"""Maximum cold segments per sweep, so that expiry is not delayed for long."""

log = structlog.get_logger("ledger")


# ---- which plain segments become one cold one ----


@dataclass(slots=True)
class SegmentRun:
    """Consecutive plain segments of a stream; `beyond` is the index after the last one."""

    beyond: int
    rows: list[SegmentRow] = field(default_factory=list)

    @property
    def bytes(self) -> int:
        return sum(len(row.records) for row in self.rows)

    def takes(self, row: SegmentRow) -> bool:
        follows = row.first == self.beyond and len(self.rows) < RUN_SEGMENTS
        fits = (
            sum(each.length for each in self.rows) + row.length <= COLD_FRAMES
            and self.bytes + len(row.records) <= COLD_BYTES
        )
        return not self.rows or (follows and fits)

    def unpacked(self) -> Unpacked:
        """Return the records of the segments.

        Raises:
            Damaged: A segment is damaged; the error names its first index.
        """
        records = Unpacked([], [], [])
        for row in self.rows:
            where = f"segment at index {row.first}"
            found = unpack_segment(row, where=where)
            if len(found.frames) != row.length:
                raise Damaged(f"{where} has {len(found.frames)} frames, not {row.length}")
            records.frames.extend(found.frames)
            records.ids.extend(found.ids)
            records.extras.extend(found.extras)
        return records


def take_run(rows: Sequence[SegmentRow], at: int, until: int | None) -> SegmentRun:
    """Return the first run of plain segments in `rows`, from index `at` up to `until`.

    Cold segments before the run are skipped. Without rows the run is empty and ends at `at`.
    """
    run = SegmentRun(at)
    for row in rows:
        beyond = row.first + row.length
        if row.coding in COLD_CODINGS or not row.length:
            if run.rows:
                break
        elif (until is not None and beyond > until) or not run.takes(row):
            break
        else:
            run.rows.append(row)
        run.beyond = beyond
    return run


# ---- packing ----


class Compactor:
    """The compaction of a ledger; each `sweep` compresses all streams that have become cold."""

    def __init__(
        self,
        residents: Residents,
        storage: Storage,
        commits: GroupCommit,
        settings: RetentionSettings,
        now_ms: Callable[[], int],
    ) -> None:
        self._residents = residents
        self._storage = storage
        self._maintenance = storage.maintenance
        self._commits = commits
        self._settings = settings
        self._now_ms = now_ms
        # The index up to which each running stream has been compressed, by sid.
        self._packed_until: dict[int, int] = {}
        self._made = 0

    async def sweep(self) -> int:
        """Compress streams that have become cold; return the number of cold segments made."""
        self._made = 0
        before = self._now_ms() - int(self._settings.cold_after_s * 1000)
        while self._made < RUNS_PER_SWEEP:
            ended = await self._maintenance.to_pack(before, STREAMS_AT_ONCE)
            if not ended:
                break
            for sid in ended:
                await self._pack_stream(sid, None)
            await asyncio.sleep(0)  # let waiting commits run; they may remove streams
        await self._pack_running(self._residents.long_running(2 * COLD_FRAMES))
        if self._made:
            log.info("ledger.packed", segments=self._made)
        return self._made

    async def _pack_running(self, running: list[tuple[int, int]]) -> None:
        known = self._packed_until
        self._packed_until = {sid: known[sid] for sid, _ in running if sid in known}
        for sid, stored in running:
            if stored - known.get(sid, 0) >= 2 * COLD_FRAMES:
                await self._pack_stream(sid, stored - COLD_FRAMES)

    async def _pack_stream(self, sid: int, until: int | None) -> None:
        """Compress a stream's plain segments.

        `until` is None for an ended stream. In a running stream only records before the index
        `until` are compressed.
        """
        residents = self._residents
        residents.packing = sid
        name, reached = f"number {sid}", until or 0
        try:
            row = await self._storage.stream_by_sid(sid)
            if row is None or sid in residents.removing:
                return
            name = row.id.hex()
            reached = await self._pack_runs(sid, name, until)
        except Damaged as error:
            # Damaged segments are left alone: readers get the error, and can read other records.
            log.error("stream.damaged", stream=name, error=error.message)
        if until is not None:
            self._packed_until[sid] = reached
        elif residents.packing == sid:
            self._commits.forming.commit.cold.append(sid)
            await self._commits.commit()

    async def _pack_runs(self, sid: int, name: str, until: int | None) -> int:
        """Compress a stream run by run; return the index up to which it is compressed now."""
        at = 0 if until is None else self._packed_until.get(sid, 0)
        while self._residents.packing == sid:
            found = await self._storage.segments(sid, at, RUN_SEGMENTS)
            run = take_run([row for row in found if row.first >= at], at, until)
            if run.rows:
                await self._pack(run, name)
            elif run.beyond == at:
                break
            at = run.beyond
        return at

    async def _pack(self, run: SegmentRun, name: str) -> None:
        """Replace a run by a cold segment if that is smaller and the stream still exists."""
        sid = run.rows[0].sid
        packed = _packed(run, name)
        await self._maintenance.wait_for_checkpoint()
        if packed is not None and self._residents.packing == sid:
            commit = self._commits.forming.commit
            commit.replaced.append((sid, packed.first, run.beyond))
            commit.segments.append(packed)
            await self._commits.commit()
            self._made += 1
        await asyncio.sleep(self._settings.pause_s)


def _packed(run: SegmentRun, name: str) -> SegmentRow | None:
    """Return a run as one cold segment.

    Return None if the cold segment is not smaller, or does not decompress to the same records.
    """
    if run.bytes > COLD_BYTES:
        return None
    records = run.unpacked()
    packed = pack_cold(run.rows[0].sid, run.rows[0].first, records)
    if not _gives_back(packed, records):
        log.error("stream.cannot_be_packed", stream=name, index=packed.first)
        return None
    return packed if len(packed.records) < run.bytes else None


def _gives_back(packed: SegmentRow, records: Unpacked) -> bool:
    try:
        return unpack_cold(packed, where="what was packed") == records
    except Damaged:
        return False
