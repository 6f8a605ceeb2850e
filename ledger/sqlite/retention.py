"""What a ledger on a file keeps, and how the rest goes: in slices that no producer notices.

Ended streams go when nobody touched them for their TTL, and earlier, those that expire
soonest first, where the file has become larger than it may. A stream is gone with one
commit; what it leaves behind is taken away in many small ones, between which producers
have theirs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import structlog

from ledger.errors import LedgerFull
from ledger.interface import StreamKind
from ledger.sqlite.group import GroupCommit
from ledger.sqlite.storage import Sizes, Storage, Upkeep
from ledger.sqlite.tail import Space

MIB = 1024 * 1024

EXPIRE_STREAMS = 16
"""Streams removed per commit, to keep each one short."""
RECLAIM_SEGMENTS = 8
"""Segments of removed streams that one commit takes away: about half a millisecond."""
VACUUM_PAGES = 16
"""Free pages that one commit gives back: about half as long."""
MAX_FREE_BYTES = 64 * MIB
"""Free pages beyond it are given back before more are made: SQLite searches all of them."""
KEPT_FREE_BYTES = MIB
"""Free pages that a file may keep for what comes next,"""
KEPT_FREE_SHARE = 1 / 8
"""or this share of the file, if that is more."""
MEASURE_BYTES = MIB
"""Segments stored between two looks at the size of the file."""
DISK_SHARE = 0.8
"""What a ledger without a limit of its own may take of its disk: of what it has and is free."""
LOW_SHARE = 0.9
"""Early removal goes on down to this share of the limit, so that it is not needed at once."""
HARD_SHARE = 1.1
"""Running streams may go on up to this share of it; beyond, they can only end."""
EARLY_STREAMS = 16
"""Streams removed early before the file is measured again."""
FULL_RETRY_MS = 5_000
_NEVER_MS = 2**63 - 1

log = structlog.get_logger("ledger")


@dataclass(frozen=True, slots=True)
class RetentionSettings:
    """Limits in bytes, times in seconds."""

    max_stream_bytes: int = 64 * MIB
    """Of one stream. An append beyond it is refused; a StreamEnd never is."""
    max_ledger_bytes: int | None = None
    """Of the file without its free pages; None: `DISK_SHARE` of the disk."""
    cold_after_s: float = 600.0
    """An ended stream that nobody touched for so long is compressed."""
    pause_s: float = 0.002
    """Between two commits of clean-up, so that producers have most of the time."""


class Streams(Protocol):
    """What retention needs of a ledger's streams."""

    def sweep_memory(self) -> None: ...

    async def slide(self) -> None:
        """Store the new expiries of streams that were read, and what else is forming."""
        ...

    def remove(self, sids: Sequence[int]) -> None:
        """Put the removal of streams into the forming commit."""
        ...

    def was_touched(self, sid: int) -> bool: ...

    def is_watched(self, sid: int) -> bool: ...

    def is_quiet(self) -> bool:
        """Whether nothing was appended since it was asked last."""
        ...

    def fit(self) -> None:
        """Tell all streams how much they may still take."""
        ...


class Retention:
    """Removes streams of one ledger and keeps its file in its limits."""

    def __init__(
        self,
        streams: Streams,
        storage: Storage,
        upkeep: Upkeep | None,
        commits: GroupCommit,
        settings: RetentionSettings,
        space: Space,
        now_ms: Callable[[], int],
    ) -> None:
        self._streams = streams
        self._storage = storage
        self._upkeep = upkeep
        self._commits = commits
        self._settings = settings
        self._space = space
        self._now_ms = now_ms
        self._making_room = asyncio.Lock()
        self._limit = settings.max_ledger_bytes
        self._used = 0
        self._grown = 0

    # ---- what there is room for ----

    @property
    def full(self) -> bool:
        return self._limit is not None and self._used > self._limit

    async def measure(self) -> None:
        """Look at the file and at what is free on its disk."""
        if self._upkeep is None:
            return
        sizes = await self._upkeep.sizes()
        if self._settings.max_ledger_bytes is None:
            self._limit = int((sizes.file_bytes + sizes.disk_free_bytes) * DISK_SHARE)
        self._judge(sizes.used_bytes)

    def grew(self, size: int) -> None:
        """Segments of so many bytes have been stored."""
        self._grown += size
        if self._grown >= MEASURE_BYTES and self._upkeep is not None:
            self._grown = 0
            self._judge(self._upkeep.used_bytes())

    def _judge(self, used: int) -> None:
        self._used = used
        spent = self._limit is not None and used > self._limit * HARD_SHARE
        if spent is not self._space.spent:
            self._space.spent = spent
            self._streams.fit()

    async def find_room(self) -> None:
        """For a new stream, if need be by removing ended ones early."""
        if self._upkeep is not None and self._limit is not None:
            self._judge(self._upkeep.used_bytes())
            if self.full:
                await self._make_room()

    def require_room(self) -> None:
        """`LedgerFull` where there is none for a new stream."""
        if self.full:
            raise LedgerFull(
                f"the ledger holds {self._used} bytes, the limit is {self._limit}",
                hint="wait until streams expire, or raise ledger.max_ledger_bytes",
                retry_after_ms=FULL_RETRY_MS,
            )

    # ---- removing ----

    async def sweep(self) -> int:
        """Remove what has expired and what there is no room for; returns how many streams."""
        removed = await self._remove_expired(self._now_ms())
        if self._upkeep is None:
            return removed
        await self.measure()
        return removed + await self._make_room()

    async def clean_up(self) -> None:
        """Take away what removed streams left, and give free pages back to the file system."""
        upkeep = self._upkeep
        self._streams.is_quiet()
        if upkeep is not None and await self._clean_up(upkeep):
            # To cut a long WAL off takes many milliseconds: not while somebody appends.
            await upkeep.settle(cut=self._streams.is_quiet())
            await self._slice(reclaim=1)  # any commit will do
            await self.measure()

    async def _remove_expired(self, now: int) -> int:
        removed = 0
        self._streams.sweep_memory()
        await self._streams.slide()
        while sids := await self._storage.expired(StreamKind.GENERATION, now, EXPIRE_STREAMS):
            # One that was read a moment ago slides with this commit.
            gone = [sid for sid in sids if not self._streams.was_touched(sid)]
            await self._remove(gone)
            removed += len(gone)
        return removed

    async def _remove(self, sids: Sequence[int]) -> None:
        self._streams.remove(sids)
        await self._streams.slide()
        await self._pause()

    async def _make_room(self) -> int:
        """Remove ended streams that expire soonest until the file is well below its limit."""
        upkeep, limit = self._upkeep, self._limit
        async with self._making_room:
            if not self.full or upkeep is None or limit is None:
                return 0
            before, removed = self._used, 0
            while self._used > limit * LOW_SHARE and (sids := await self._soonest()):
                await self._remove(sids)
                removed += len(sids)
                await self._reclaim(upkeep)
                self._judge(upkeep.used_bytes())
        log.warning(
            "ledger.full",
            limit_bytes=limit,
            before_bytes=before,
            after_bytes=self._used,
            streams_removed_early=removed,
        )
        return removed

    async def _soonest(self) -> list[int]:
        await self._streams.slide()
        most = 8 * EARLY_STREAMS
        sids = await self._storage.expired(StreamKind.GENERATION, _NEVER_MS, most)
        return [sid for sid in sids if not self._streams.is_watched(sid)][:EARLY_STREAMS]

    # ---- cleaning up ----

    async def _reclaim(self, upkeep: Upkeep) -> None:
        while (await upkeep.sizes()).garbage:
            await self._slice(reclaim=RECLAIM_SEGMENTS)

    async def _clean_up(self, upkeep: Upkeep) -> bool:
        """Slice by slice; whether there was anything to do."""
        slices, stuck = 0, False
        sizes = await upkeep.sizes()
        while True:
            may_give = sizes.free_bytes > _kept_free(sizes) and not stuck
            gives = may_give and (not sizes.garbage or sizes.free_bytes > MAX_FREE_BYTES)
            if gives:
                await self._slice(vacuum=VACUUM_PAGES)
            elif sizes.garbage:
                await self._slice(reclaim=RECLAIM_SEGMENTS)
            else:
                return slices > 0
            slices += 1
            before, sizes = sizes, await upkeep.sizes()
            # A file that cannot shrink (damaged, say) must not be asked for ever.
            stuck = stuck or (gives and sizes.file_bytes >= before.file_bytes)

    async def _slice(self, *, reclaim: int = 0, vacuum: int = 0) -> None:
        if self._upkeep is not None:
            await self._upkeep.fetch(reclaim=reclaim, vacuum=vacuum)
        commit = self._commits.forming.commit
        commit.reclaim, commit.vacuum = max(commit.reclaim, reclaim), max(commit.vacuum, vacuum)
        await self._commits.commit()
        await self._pause()

    async def _pause(self) -> None:
        """Let producers have their turn, and the disk its peace where it is busy with the WAL.

        While that is moved and synced, every write may have to wait for the file system.
        """
        await asyncio.sleep(self._settings.pause_s)
        if self._upkeep is not None:
            await self._upkeep.calm()


def _kept_free(sizes: Sizes) -> float:
    return max(KEPT_FREE_BYTES, sizes.file_bytes * KEPT_FREE_SHARE)
