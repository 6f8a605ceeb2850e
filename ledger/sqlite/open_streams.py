"""The streams of a ledger file that are in memory, and their tails."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from tailrace.ledger.branch import Part
from tailrace.ledger.errors import unknown_stream
from tailrace.ledger.frame import Durability
from tailrace.ledger.interface import NewStream, StreamInfo, StreamKind, taken_id
from tailrace.ledger.sqlite.storage import Commit, Storage, StreamRow
from tailrace.ledger.sqlite.tail import Tail


class Residents:
    """The tails in memory, by stream id and by sid; `get` loads other streams from storage."""

    def __init__(
        self,
        storage: Storage,
        max_stream_bytes: int,
        now_ms: Callable[[], int],
    ) -> None:
        self._storage = storage
        self._max_stream_bytes = max_stream_bytes
        self._now_ms = now_ms
        self._loading = asyncio.Lock()
        self.removing: set[int] = set()  # sids of streams that a commit in flight removes
        self.touched: dict[int, int] = {}  # expiries that are not stored yet (Unix ms), by sid
        # Kinds of streams for which no space is left: streams of these kinds can only end.
        self.spent: set[StreamKind] = set()
        self.tails: dict[bytes, Tail] = {}
        self.by_sid: dict[int, Tail] = {}
        # Tails with records in the log, by sid, ordered by their oldest log row.
        self.unstored: dict[int, Tail] = {}
        self.due_tails: dict[int, Tail] = {}  # tails that are due to become segments, by sid
        self.last_sid = 0
        # Sid of the stream that is being compacted; None if there is none or it was removed.
        self.packing: int | None = None

    # ---- loading, adding and removing ----

    async def get(self, stream: bytes) -> Tail:
        """Return the tail of a stream, after loading it from storage if necessary.

        Raises:
            NotFound: There is no such stream.
        """
        tail = self.tails.get(stream)
        if tail is None:
            async with self._loading:
                tail = self.tails.get(stream)
                if tail is None:
                    row = await self._storage.stream_by_id(stream)
                    if row is None or row.sid in self.removing:
                        raise unknown_stream(stream)
                    tail = await self.adopt(row)
                    self._fit(tail)
        tail.used = True
        return tail

    async def adopt(self, row: StreamRow) -> Tail:
        """Create the tail of a stored stream; it begins after the stream's last segment."""
        covered, size = await self._storage.covered(row.sid), 0
        if not row.ended:  # only streams without an end have a limit on their bytes
            size = await self._storage.maintenance.stored_bytes(row.sid)
        parts = await self._storage.parts(row.sid)
        tail = self._keep(row, covered, parts)
        tail.stored_bytes = size
        return tail

    async def refuse_taken(self, stream: bytes) -> None:
        """Check that a stream id is free.

        Raises:
            Conflict: There is a stream with this id.
        """
        row = None if stream in self.tails else await self._storage.stream_by_id(stream)
        if stream in self.tails or (row is not None and row.sid not in self.removing):
            raise taken_id()

    def add(self, new: NewStream, commit: Commit, parts: tuple[Part, ...] = ()) -> Tail:
        """Add a new stream to a commit; a branch has `parts`."""
        self.last_sid += 1
        now, ttl_ms = self._now_ms(), int(new.ttl_s * 1000)
        row = StreamRow(
            sid=self.last_sid,
            id=new.stream,
            kind=int(new.kind),
            epoch=1,
            ended=0,
            durability=int(new.durability),
            recipe=new.recipe,
            created_ms=now,
            ttl_ms=ttl_ms,
            expires_ms=now + ttl_ms,
            idempotency_key=new.idempotency_key,
            request_hash=new.request_hash,
        )
        commit.streams.append(row)
        commit.parts += [(row.sid, part) for part in parts]
        if new.identity:
            commit.answers.append((new.identity, row.sid))
        tail = self._keep(row, 0, parts)
        self._fit(tail)
        return tail

    def drop(self, tail: Tail, commit: Commit) -> None:
        """Add the removal of a stream to a commit, and wake its watchers."""
        self.remove([tail.sid], commit)
        tail.wake()

    def remove(self, sids: Sequence[int], commit: Commit) -> None:
        """Evict streams now, and add the removal of their rows to a commit."""
        # If this commit was to create one of these streams, it must not insert the rows any more.
        commit.streams = [row for row in commit.streams if row.sid not in sids]
        commit.parts = [part for part in commit.parts if part[0] not in sids]
        commit.answers = [answer for answer in commit.answers if answer[1] not in sids]
        commit.removed += sids
        self.removing.update(sids)
        if self.packing in sids:
            self.packing = None
        for sid in sids:
            if sid in self.by_sid:
                self._count(self.by_sid[sid], commit)
                self.forget(self.by_sid[sid])

    def _count(self, tail: Tail, commit: Commit) -> None:
        """Add the usage of a removed stream to a commit, if the stream's end is not in a segment.

        Usage is usually stored with the segment that has the StreamEnd.
        """
        if tail.end_accepted and tail.accepted > tail.stored and (usage := tail.usage()):
            commit.usage.append(usage)

    def forget(self, tail: Tail) -> None:
        if self.tails.get(tail.info.stream) is tail:
            del self.tails[tail.info.stream]
        tail.gone = True
        for index in (self.by_sid, self.unstored, self.due_tails):
            index.pop(tail.sid, None)

    def _keep(self, row: StreamRow, covered: int, parts: tuple[Part, ...]) -> Tail:
        covered = max(covered, parts[-1].end if parts else 0)
        info = StreamInfo(
            row.id,
            row.epoch,
            covered,
            bool(row.ended),
            Durability(row.durability),
            row.recipe,
            row.created_ms,
            StreamKind(row.kind),
        )
        tail = Tail.at(row.sid, info, row.ttl_ms)
        tail.parts = parts
        self.tails[row.id] = self.by_sid[row.sid] = tail
        return tail

    # ---- retention and space ----

    def touch(self, tail: Tail) -> None:
        """Restart the retention of a stream that was read."""
        if not tail.ended or tail.info.kind is StreamKind.OBJECT:
            return  # only ended streams expire, and streams of objects never do
        self.touched[tail.sid] = self._now_ms() + tail.ttl_ms

    def sweep(self) -> None:
        """Evict unused tails, and postpone the expiry of watched streams.

        A tail is unused if it was neither read nor appended to since the last sweep; its records
        become a segment first.

        The tail of an idle watched stream stays, but without frames: most likely its readers have
        read all of them, and a reader that is behind reads from storage.
        """
        for tail in list(self.by_sid.values()):
            if tail.watchers:
                self.touch(tail)
            if tail.was_used():
                continue
            if tail.idle:
                self.forget(tail)
            elif tail.accepted > tail.stored:
                self.due_tails[tail.sid] = tail
            else:
                tail.was_stored(tail.stored)

    def fit(self) -> None:
        """Update the size limit of all streams in memory."""
        for tail in self.by_sid.values():
            self._fit(tail)

    def _fit(self, tail: Tail) -> None:
        tail.fit(self._max_stream_bytes, spent=tail.info.kind in self.spent)

    def long_running(self, frames: int) -> list[tuple[int, int]]:
        """Return running streams that have at least `frames` frames in segments.

        The result has the sid of each, and the index after its last segment.
        """
        tails = self.by_sid.values()
        return [(t.sid, t.stored) for t in tails if t.stored >= frames and not t.end_accepted]

    def running_bytes(self) -> int:
        """Return the bytes that running generations have in segments."""
        return sum(
            tail.stored_bytes
            for tail in self.by_sid.values()
            if tail.info.kind is StreamKind.GENERATION and not tail.end_accepted
        )

    def unstored_bytes(self, kind: StreamKind) -> int:
        """Return the total bytes of frames that streams of a kind do not have in segments yet."""
        tails = self.by_sid.values()
        return sum(tail.unstored_bytes for tail in tails if tail.info.kind is kind)
