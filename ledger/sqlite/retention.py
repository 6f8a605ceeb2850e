"""Retention of a ledger file: removes expired streams in small steps that delay no producer.

An ended stream is removed when it was not used for its TTL. If generations exceed their share of
the file (`capacity.py`), the ended streams that expire soonest are removed early. One commit
removes a stream's row; many small commits, between those of producers, remove its segments.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import structlog

from tailrace.ledger.errors import LedgerFull, TailraceError
from tailrace.ledger.interface import StreamKind
from tailrace.ledger.sqlite.capacity import LONG_WAL_BYTES, MIB, Room, Shortage
from tailrace.ledger.sqlite.group import GroupCommit
from tailrace.ledger.sqlite.open_streams import Residents
from tailrace.ledger.sqlite.storage import Storage
from tailrace.ledger.usage import DEFAULT_USAGE_RETENTION_S

EXPIRE_STREAMS = 16
"""Maximum streams removed per commit, to keep each commit short."""
RECLAIM_SEGMENTS = 8
"""Segments of removed streams that one commit deletes, which takes about half a millisecond."""
VACUUM_PAGES = 16
"""Free pages that one commit returns to the file system, which takes about 0.25 ms."""
MAX_FREE_BYTES = 64 * MIB
"""Free bytes of the file beyond which free pages are returned before more segments are deleted.

SQLite searches its list of free pages, so a long list makes commits slow.
"""
KEPT_FREE_BYTES = MIB
"""Free bytes that clean-up leaves in the file for new data."""
KEPT_FREE_SHARE = 1 / 8
"""Share of the file that clean-up leaves free if this share is larger than KEPT_FREE_BYTES."""
MEASURE_BYTES = MIB
"""Bytes written between two checks of the file and its disk."""
FULL_LOOK_S = 0.5
"""Seconds between two checks of a full disk while producers are paused."""
EARLY_STREAMS = 16
"""Streams removed early before the file is measured again."""
COUNT_AGAIN_S = 5.0
"""Minimum seconds between two counts of the objects' bytes, which read all of their rows."""
_NEVER_MS = 2**63 - 1

LONG_WAL_HINT = "a program has an open read transaction on the file, so the WAL cannot restart"

log = structlog.get_logger("ledger")


@dataclass(frozen=True, slots=True)
class RetentionSettings:
    """Settings of retention: sizes in bytes, times in seconds."""

    max_stream_bytes: int = 64 * MIB
    """Maximum size of a stream. An append beyond it is refused, except for a StreamEnd."""
    max_ledger_bytes: int | None = None
    """Maximum size of the file without its free pages; None means DISK_SHARE of the disk."""
    object_share: float = 0.25
    """Share of the file that objects may use with their values and their streams."""
    cold_after_s: float = 600.0
    """Seconds without use after which an ended stream is compressed."""
    pause_s: float = 0.002
    """Seconds between two commits of clean-up, so that producers have most of the time."""
    usage_s: float = DEFAULT_USAGE_RETENTION_S
    """Seconds for which the usage of a stream is kept after its end."""
    full_disk_grace_s: float = 30.0
    """Maximum seconds for which running generations are paused because the disk is full.

    After that they can only end.
    """


class Retention:
    """Removes streams of a ledger and keeps its file within its limits."""

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
        self._making_room = asyncio.Lock()
        self._counting = asyncio.Lock()
        # Time of the last count of the objects' bytes, by the event loop's clock.
        self._counted_s = -math.inf
        self._room = Room(settings.max_ledger_bytes, settings.object_share, storage.name)
        self._shortages: dict[StreamKind, Shortage | None] = dict.fromkeys(StreamKind)
        self._wal_is_long = False
        self._grown = 0
        self._look_at_bytes = MEASURE_BYTES
        self.holds = False
        """True if running generations are paused because the disk is full."""
        self._holding = asyncio.Lock()
        self._gave_up = False  # the disk was full for the whole grace period

    # ---- space ----

    async def measure(self) -> None:
        """Measure the file and the free space on its disk; count the objects' bytes if needed."""
        if self._room.is_contested(self._maintenance.sizes()):
            await self._count_objects()
        self._look()

    async def _count_objects(self) -> None:
        async with self._counting:
            now_s = asyncio.get_running_loop().time()
            if now_s - self._counted_s >= COUNT_AGAIN_S:
                counted = await self._maintenance.object_bytes()
                unstored = self._residents.unstored_bytes(StreamKind.OBJECT)
                self._room.object_bytes = counted + unstored
                self._counted_s = now_s

    def committing(self) -> None:
        """Check the disk at a commit if much was written since the last check."""
        if self._maintenance.written_bytes >= self._look_at_bytes:
            self._look_unless_away()

    def objects_grew(self, size: int) -> None:
        """Record that objects store `size` more bytes of frames, values and streams."""
        self._room.object_bytes += size
        self._grown += size
        if self._grown >= MEASURE_BYTES:
            self._grown = 0
            self._look_unless_away()

    def _look_unless_away(self) -> None:
        with suppress(TailraceError):  # the commit must not fail; the next check reports the error
            self._look()

    def _look(self) -> None:
        sizes = self._room.sizes = self._maintenance.sizes()
        self._look_at_bytes = self._maintenance.written_bytes + MEASURE_BYTES
        if self._wal_is_long is not (sizes.wal_bytes > LONG_WAL_BYTES):
            self._wal_is_long = not self._wal_is_long
            if self._wal_is_long:
                log.warning("ledger.long_wal", wal_bytes=sizes.wal_bytes, hint=LONG_WAL_HINT)
        for kind in StreamKind:
            self._note(kind, self._room.shortage(kind))

    def _note(self, kind: StreamKind, shortage: Shortage | None) -> None:
        before, self._shortages[kind] = self._shortages[kind], shortage
        if before is None and shortage is not None:
            log.warning("ledger.refuses_streams", kind=kind.name.lower(), what=shortage.what)
        held = shortage is not None and shortage.held
        if kind is StreamKind.GENERATION:
            self._gave_up = self._gave_up and held
            self.holds = held and not self._gave_up
            held = self._gave_up
        if self.is_spent(kind) is not (held or (shortage is not None and shortage.spent)):
            self._residents.spent ^= {kind}
            self._residents.fit()

    async def until_disk_has_room(self) -> None:
        """Wait while the disk is full, at most for the grace period."""
        async with self._holding:  # one task checks the disk on behalf of all waiting producers
            if self.holds:
                await self._wait_for_disk()

    async def _wait_for_disk(self) -> None:
        loop, grace_s = asyncio.get_running_loop(), self._settings.full_disk_grace_s
        until_s = loop.time() + grace_s
        log.warning("ledger.disk_full", path=self._storage.name, held_for_s=grace_s)
        while await self._is_still_full():
            if loop.time() >= until_s:
                self._gave_up = True
                self._look_unless_away()
                log.error("ledger.disk_still_full", path=self._storage.name, held_for_s=grace_s)
                return
            await asyncio.sleep(FULL_LOOK_S)
        log.info("ledger.disk_has_room", path=self._storage.name)

    async def _is_still_full(self) -> bool:
        """Return True if the disk is still full, after a checkpoint that frees space in the WAL."""
        sizes = self._room.sizes
        if sizes is not None and sizes.unmoved_bytes <= sizes.disk_free_bytes:
            await self._maintenance.checkpoint(cut=False)
        self._look_unless_away()
        return self.holds

    def shortage(self) -> str | None:
        """Return why new generations are refused, or None.

        None is also returned if removing other streams can end the shortage.
        """
        self._look_unless_away()
        shortage = self._shortages[StreamKind.GENERATION]
        return None if shortage is None or shortage.own else f"{shortage.what}: {shortage.hint}"

    def has_room(self, kind: StreamKind) -> bool:
        """Return True if there was space for new streams of a kind at the last check."""
        return self._shortages[kind] is None

    def is_spent(self, kind: StreamKind) -> bool:
        """Return True if running streams of a kind may store only their ends, for lack of space."""
        return kind in self._residents.spent

    async def find_room(self, kind: StreamKind) -> None:
        """Check the space again; if it is short and that helps, remove ended generations early."""
        self._look()
        if not self.has_room(kind):
            await self.measure()
            if kind is StreamKind.GENERATION:
                await self._make_room()

    def require_room(self, kind: StreamKind) -> None:
        """Check that there is space for a new stream of a kind.

        Raises:
            LedgerFull: There is no space.
        """
        shortage = self._shortages[kind]
        if shortage is not None:
            raise LedgerFull(shortage.what, hint=shortage.hint)

    # ---- removing ----

    async def sweep(self) -> int:
        """Remove expired streams, and others early if space is short; return their number."""
        self._maintenance.check()
        removed = await self._remove_expired(self._now_ms())
        await self._forget_usage(self._now_ms())
        self._counted_s = -math.inf
        await self.measure()
        return removed + await self._make_room()

    async def clean_up(self) -> None:
        """Delete the segments of removed streams and return free pages to the file system."""
        self._commits.is_quiet()
        if await self._clean_up():
            # Truncating a long WAL takes many milliseconds: do it only while nothing is appended.
            await self._maintenance.checkpoint(cut=self._commits.is_quiet())
            await self._slice(reclaim=1)  # the commit of this slice finishes the checkpoint
            await self.measure()

    async def _remove_expired(self, now: int) -> int:
        removed = 0
        self._residents.sweep()
        await self._slide()
        while sids := await self._storage.expired(StreamKind.GENERATION, now, EXPIRE_STREAMS):
            # A stream in `touched` was just read, and its new expiry is stored with this commit.
            gone = [sid for sid in sids if sid not in self._residents.touched]
            await self._remove(gone)
            removed += len(gone)
        return removed

    async def _forget_usage(self, now: int) -> None:
        """Delete the usage of streams that ended before the retention time of usage."""
        before = now - int(self._settings.usage_s * 1000)
        while streams := await self._storage.old_usage(before, EXPIRE_STREAMS):
            self._commits.forming.commit.forgotten += streams
            await self._commits.commit()
            await self._pause()

    async def _remove(self, sids: Sequence[int]) -> None:
        self._residents.remove(sids, self._commits.forming.commit)
        await self._slide()
        await self._pause()

    async def _make_room(self) -> int:
        """Remove the ended streams that expire soonest until generations are below their limit.

        Remove no stream if removal cannot end the shortage.
        """
        room, kind = self._room, StreamKind.GENERATION
        async with self._making_room:
            shortage = self._shortages[kind]
            if shortage is None or not shortage.own:
                return 0
            before, removed = room.used(kind), 0
            goal = room.goal(self._residents.running_bytes())
            while goal is not None and room.used(kind) > goal and (sids := await self._soonest()):
                await self._remove(sids)
                removed += len(sids)
                await self._reclaim()
                self._look()
        if removed:
            log.warning(
                "ledger.full",
                limit_bytes=room.limit(kind),
                before_bytes=before,
                after_bytes=room.used(kind),
                streams_removed_early=removed,
            )
        return removed

    async def _soonest(self) -> list[int]:
        await self._slide()
        most = 8 * EARLY_STREAMS
        sids = await self._storage.expired(StreamKind.GENERATION, _NEVER_MS, most)
        tails = self._residents.by_sid
        unwatched = [sid for sid in sids if sid not in tails or not tails[sid].watchers]
        return unwatched[:EARLY_STREAMS]

    # ---- cleaning up ----

    async def _reclaim(self) -> None:
        while self._maintenance.sizes().garbage:
            await self._slice(reclaim=RECLAIM_SEGMENTS)

    async def _clean_up(self) -> bool:
        """Clean up in slices; return True if there was anything to do."""
        slices, stuck = 0, False
        sizes = self._maintenance.sizes()
        while True:
            kept = max(KEPT_FREE_BYTES, sizes.file_bytes * KEPT_FREE_SHARE)
            may_give = sizes.free_bytes > kept and not stuck
            gives = may_give and (not sizes.garbage or sizes.free_bytes > MAX_FREE_BYTES)
            if gives:
                await self._slice(vacuum=VACUUM_PAGES)
            elif sizes.garbage:
                await self._slice(reclaim=RECLAIM_SEGMENTS)
            else:
                return slices > 0
            slices += 1
            before, sizes = sizes, self._maintenance.sizes()
            # Do not try for ever to shrink a file that cannot shrink, such as a damaged one.
            stuck = stuck or (gives and sizes.file_bytes >= before.file_bytes)

    async def _slice(self, *, reclaim: int = 0, vacuum: int = 0) -> None:
        await self._maintenance.fetch(reclaim=reclaim, vacuum=vacuum)
        commit = self._commits.forming.commit
        commit.reclaim, commit.vacuum = max(commit.reclaim, reclaim), max(commit.vacuum, vacuum)
        await self._commits.commit()
        await self._pause()

    async def _slide(self) -> None:
        """Store the new expiries of streams that were read, with the next commit."""
        touched, self._residents.touched = self._residents.touched, {}
        self._commits.forming.commit.touched += [(ms, sid) for sid, ms in touched.items()]
        await self._commits.commit()

    async def _pause(self) -> None:
        """Pause between two commits of clean-up, so that producers can write.

        Also wait for the end of a running checkpoint, which may make every write wait for the file
        system.
        """
        await asyncio.sleep(self._settings.pause_s)
        await self._maintenance.wait_for_checkpoint()
