"""The tails of a ledger, rebuilt from its log.

A row of the log that has rotted costs the streams that it was about and no other. Of each of
them what the row held is a hole now: reading there is `Damaged`, what lies before it is read,
and the stream goes on, or is ended, behind it. Which streams these are says the head of the
row; where that has rotted too, it may have been about any stream that has not ended, unless a
later row shows that nothing of it is missing, and about as many records of it as may have fitted.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import structlog

from ledger.errors import Damaged, damaged_stream
from ledger.interface import StreamKind
from ledger.sqlite.record import Entry, pack_segment, places_of, unpack_batch
from ledger.sqlite.storage import SegmentRow, Storage, StreamRow
from ledger.sqlite.tail import Tail
from ledger.wire.codec import PREFIX_BYTES

LOG_ROWS_AT_ONCE = 64
"""Rows of the log that are in memory at a time."""

log = structlog.get_logger("ledger")


Adopt = Callable[[StreamRow], Awaitable[Tail]]
"""Gives the tail of a stored stream, as far as segments reach."""


class Recovery:
    """One pass over the log, which has `rows` of `sizes` bytes.

    `unstored` are the tails of which segments do not hold all, in the order of their oldest log
    row, by sid. Where rows are `damaged`, `segments` must be stored before those go.
    """

    def __init__(self, storage: Storage, adopt: Adopt) -> None:
        self._storage = storage
        self._adopt = adopt
        self._tails: dict[int, Tail | None] = {}  # None: it is gone, or its row is damaged
        self._reach = 0  # records that a row whose head has rotted may have held
        self._shown: set[int] = set()  # sids that a row behind the last such row is about
        self._holes: dict[int, Tail] = {}
        self._damaged_rows = 0
        self.rows: list[int] = []
        self.sizes: list[int] = []
        self.unstored: dict[int, Tail] = {}
        self.segments: list[SegmentRow] = []
        self.last_sid = 0

    @property
    def damaged(self) -> bool:
        return self._damaged_rows > 0

    async def run(self) -> None:
        self.rows = await self._storage.log_rows()
        for begin in range(0, len(self.rows), LOG_ROWS_AT_ONCE):
            some = self.rows[begin : begin + LOG_ROWS_AT_ONCE]
            blobs = await self._storage.log(some)
            if len(blobs) != len(some):
                raise Damaged(
                    f"{self._storage.name}: not all log rows of {some[0]} to {some[-1]} are found",
                    hint="the file is damaged; restore it from a copy",
                )
            for seq, blob in zip(some, blobs, strict=True):
                await self._read(seq, blob)
        if self._reach:
            await self._doubt()
        for tail in self._holes.values():
            # An empty segment holds the place behind a hole, whatever becomes of the log.
            self.segments.append(SegmentRow(tail.sid, tail.stored, 0, 0, pack_segment((), ())))

    async def _read(self, seq: int, blob: bytes) -> None:
        try:
            entries = list(unpack_batch(blob, where=f"{self._storage.name}: log row {seq}"))
        except Damaged as error:
            if not isinstance(blob, bytes):
                raise  # a page of zeros, behind which SQLite finds no row any more
            await self._lose(blob, error)
            entries = []
        self.sizes.append(len(blob))
        for entry in entries:
            await self._replay(seq, entry)

    async def _tail(self, sid: int) -> Tail | None:
        if sid not in self._tails:
            self.last_sid = max(self.last_sid, sid)
            self._tails[sid] = None
            try:
                for row in await self._storage.streams_by_sid([sid]):
                    self._tails[sid] = await self._adopt(row)
            except Damaged as error:  # it can be read no more, and so need not be recovered
                log.error("stream.damaged", error=error.message)
        return self._tails[sid]

    async def _replay(self, seq: int, entry: Entry) -> None:
        tail = await self._tail(entry.sid)
        self._shown.add(entry.sid)
        if tail is None or entry.at < tail.accepted:
            return  # it was removed, or a segment holds it already
        if entry.at != tail.accepted:
            if not self._reach:
                jump = f"the log jumps from index {tail.accepted} to {entry.at}"
                raise damaged_stream(tail.info.stream, jump)
            self._skip(tail, entry.at)
        tail.accept(tail.epoch, entry.at, *entry.record)
        tail.released = tail.accepted
        if tail.sid not in self.unstored:
            tail.oldest_seq = seq
            self.unstored[tail.sid] = tail

    # ---- damage ----

    async def _lose(self, blob: bytes, error: Damaged) -> None:
        self._damaged_rows += 1
        places = places_of(blob)
        log.error("ledger.log_row_damaged", error=error.message, records=places and len(places))
        if places is None:
            self._reach = max(self._reach, len(blob) // PREFIX_BYTES)
            self._shown.clear()
        for sid, index in places or ():
            tail = await self._tail(sid)
            if tail is not None and index >= tail.accepted:
                self._skip(tail, index + 1)

    async def _doubt(self) -> None:
        for kind in StreamKind:
            for sid, _ in await self._storage.unfinished(kind):
                tail = None if sid in self._shown else await self._tail(sid)
                if tail is not None and not tail.end_accepted:
                    self._skip(tail, tail.accepted + self._reach)

    def _skip(self, tail: Tail, until: int) -> None:
        """Go on with a tail at index `until`; what it has so far becomes segments."""
        lost = f"the records from index {tail.accepted} to {until - 1} are lost"
        log.error("stream.damaged", stream=tail.info.stream.hex(), error=lost)
        if tail.accepted > tail.stored:
            self.segments += tail.segments()
        tail.skip(until)
        self.unstored.pop(tail.sid, None)
        self._holes[tail.sid] = tail
