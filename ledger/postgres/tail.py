"""Tails of streams in PostgreSQL: watchers and the last frames in memory.

Readers in this process see frames before `released`. The tables may have more if another origin
appends; the listener then advances the tail. The last frames stay in memory, so that a hundred live
readers cost one read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from tailrace.ledger.branch import Part
from tailrace.ledger.errors import LedgerFailed, unknown_stream
from tailrace.ledger.frame import Durability, StreamEnd, tag_of
from tailrace.ledger.interface import StreamInfo, StreamKind
from tailrace.ledger.postgres.server import Pool
from tailrace.ledger.postgres.statements import STREAM

TAIL_FRAMES = 256
"""Number of frames to which a tail in memory is trimmed.

It is also the maximum number of new frames that one query reads for a stream.
"""
TAIL_BYTES = 64 * 1024
"""Bytes of frames to which a tail in memory is trimmed."""
IDLE_SWEEPS = 10
"""Number of calls of `Residents.sweep` without use after which a tail is evicted."""


def went_back(lost: str) -> LedgerFailed:
    """Return the error for a database that has lost acknowledged data.

    The operator must restart the origin: only at its start does an origin read from the tables what
    it otherwise knows from memory.
    """
    return LedgerFailed(
        f"PostgreSQL no longer has {lost}, which it had acknowledged",
        hint="the database was restored from a backup, or a standby without the newest data was"
        " promoted; restart this origin to continue with the data that is left",
    )


@dataclass(slots=True)
class StreamHead:
    """The row of a stream in the table `head`."""

    sid: int
    epoch: int
    next_index: int
    ended: bool

    def copy(self) -> StreamHead:
        return StreamHead(self.sid, self.epoch, self.next_index, self.ended)

    def check_not_before(self, known: StreamHead) -> None:
        """Check that the tables still have what this process has seen.

        Raises:
            LedgerFailed: The database has lost data that this process has seen.
        """
        if self.sid == known.sid and (
            self.next_index < known.next_index
            or self.epoch < known.epoch
            or self.ended < known.ended
        ):
            raise went_back(f"the frame with index {known.next_index - 1} of a stream")


@dataclass(slots=True)
class PostgresTail:
    """The tail of a stream. `frames[0]` has index `first`; `expires_ms` is the stored expiry."""

    info: StreamInfo
    head: StreamHead
    ttl_ms: int
    expires_ms: int
    first: int
    frames: list[bytes] = field(default_factory=list)
    size: int = 0  # total bytes of `frames`
    unused: int = 0  # number of sweeps since the last use
    gone: bool = False
    parts: tuple[Part, ...] = ()  # where the inherited records of a branch are
    # A dict used as a set that keeps the order of insertion.
    watchers: dict[Callable[[], None], None] = field(default_factory=dict)

    @property
    def released(self) -> int:
        return self.head.next_index

    def wake(self) -> None:
        for watcher in tuple(self.watchers):
            watcher()

    def take(self, start: int, limit: int) -> list[bytes] | None:
        """Return frames from `start` on, or None if they are not in memory."""
        begin = start - self.first
        if begin < 0:
            return None
        return self.frames[begin : begin + limit]

    def advance(self, head: StreamHead, start: int, frames: Sequence[bytes]) -> None:
        """Update this tail from the tables; wake its watchers if there is anything new.

        `head` is the stored head, and `frames` are its last frames, from index `start` on. A head
        that is older than the known one is ignored.
        """
        known = self.head
        ahead = head.next_index > known.next_index
        news = ahead or (head.ended and not known.ended)
        # Index, end and epoch never go back, so only larger values are taken from `head`.
        if ahead:
            self._keep(start, frames, head.next_index)
            known.next_index = head.next_index
        if head.ended:
            known.ended = True
        if head.epoch > known.epoch:
            known.epoch = head.epoch
        if news:
            self.wake()

    def _keep(self, start: int, frames: Sequence[bytes], until: int) -> None:
        """Append frames to those in memory.

        If there is a gap between the frames in memory and the new frames, only the new ones stay.
        """
        end = self.first + len(self.frames)
        if start + len(frames) != until:
            self.first, self.frames, self.size = until, [], 0
            return
        if start > end:
            self.first, self.frames, self.size, end = start, [], 0, start
        new = frames[end - start :]
        self.frames += new
        self.size += sum(map(len, new))
        self._trim()

    def _trim(self) -> None:
        """Trim the frames in memory to the limits, once they exceed twice the limits.

        So trimming is rare.
        """
        if len(self.frames) <= 2 * TAIL_FRAMES and self.size <= 2 * TAIL_BYTES:
            return
        count, size = 0, 0
        for frame in reversed(self.frames):
            if count == TAIL_FRAMES or size + len(frame) > TAIL_BYTES:
                break
            count, size = count + 1, size + len(frame)
        dropped = len(self.frames) - count
        del self.frames[:dropped]
        self.first, self.size = self.first + dropped, size

    def snapshot(self) -> StreamInfo:
        """Return the stream as a reader sees it now."""
        head = self.head
        return replace(self.info, epoch=head.epoch, next_index=head.next_index, ended=head.ended)


class Residents:
    """Tails by stream id and by sid. A tail may be behind the tables, but never ahead of them."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._tails: dict[bytes, PostgresTail] = {}
        self._by_sid: dict[int, PostgresTail] = {}
        self.get, self.by_sid = self._tails.get, self._by_sid.get

    def watched(self) -> Iterator[PostgresTail]:
        return (tail for tail in list(self._by_sid.values()) if tail.watchers)

    async def look_up(self, stream: bytes) -> PostgresTail:
        """Return the tail of a stream, updated from the tables.

        Raises:
            NotFound: There is no such stream.
        """
        known = self._tails.get(stream)
        before = known.head.copy() if known is not None else None
        rows = await self._pool.rows(STREAM, stream)
        known = self._tails.get(stream)
        if not rows:
            if known is not None:
                self.lose(known)
            raise unknown_stream(stream)
        [(sid, kind, durability, recipe, created_ms, *state, sources, ends)] = rows
        epoch, at, ended, ttl_ms, expires_ms = state
        head = StreamHead(sid, epoch, at, ended)
        if before is not None:
            head.check_not_before(before)
        if known is not None and known.head.sid == sid:
            known.unused = 0
            known.expires_ms = max(known.expires_ms, expires_ms)
            known.advance(head, at, ())
            return known
        info = StreamInfo(
            stream,
            epoch,
            at,
            ended,
            Durability(durability),
            bytes(recipe).decode(),
            created_ms,
            StreamKind(kind),
        )
        if known is not None:
            self.lose(known)
        parts = tuple(map(Part, sources, ends))
        tail = PostgresTail(info, head, ttl_ms, expires_ms, first=at, parts=parts)
        self._tails[stream] = self._by_sid[sid] = tail
        return tail

    async def note_read(self, tail: PostgresTail, start: int, frames: Sequence[bytes]) -> None:
        """Update a tail after a read of records: advance `released` to the last of `frames`.

        If a released frame was not found, look the stream up, because it may have been deleted.
        """
        if frames:
            ended = tag_of(frames[-1]) == StreamEnd.tag
            head = StreamHead(tail.head.sid, tail.head.epoch, start + len(frames), ended)
            tail.advance(head, start, frames)
        elif start < tail.released:
            await self.look_up(tail.info.stream)

    def lose(self, tail: PostgresTail) -> None:
        """Remove the tail of a deleted stream and wake its watchers."""
        self._tails.pop(tail.info.stream, None)
        self._by_sid.pop(tail.head.sid, None)
        tail.gone = True
        tail.wake()

    def sweep(self) -> None:
        """Evict each stream's tail that has no watchers and was not used in IDLE_SWEEPS calls."""
        for tail in list(self._by_sid.values()):
            tail.unused += 1
            if tail.unused > IDLE_SWEEPS and not tail.watchers:
                del self._by_sid[tail.head.sid], self._tails[tail.info.stream]
