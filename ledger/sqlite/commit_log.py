"""The commit log: one row per group commit, until its records are in segments.

A tail that is large, old or ended becomes a segment, in the transaction of some commit, and the log
before the oldest tail is pruned. Recovery rebuilds the tails from the remaining rows.

A damaged row affects only the streams in it. Each of them has a hole in place of the row's records:
reading in the hole raises `Damaged`, earlier records can be read, and the stream continues or is
ended after the hole. The head of the row names the streams. If the head is damaged, too, every
unfinished stream may have lost records, except the streams that have a record in a later row. A
hole then covers as many indexes as the row could have had records.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice

import structlog

from tailrace.ledger.errors import Damaged, damaged_stream
from tailrace.ledger.interface import StreamKind
from tailrace.ledger.sqlite.encoding import (
    PLAIN,
    Entry,
    column,
    pack_batch,
    pack_segment,
    places_of,
    unpack_batch,
)
from tailrace.ledger.sqlite.group import Group
from tailrace.ledger.sqlite.open_streams import Residents
from tailrace.ledger.sqlite.storage import Commit, SegmentRow, Storage
from tailrace.ledger.sqlite.tail import MAX_TAIL_BATCHES, SEGMENT_BYTES, Tail
from tailrace.ledger.wire.codec import PREFIX_BYTES

SEGMENT_COMMITS = 64
"""Number of commits over which storing the due tails as segments is spread.

Each commit stores its share of the due tails, so that those of short streams cannot pile up.
"""
MAX_DUE_FOR_AGE = 4 * SEGMENT_COMMITS
"""Maximum number of due tails for which MAX_TAIL_BATCHES alone makes further tails due.

If more tails are due, a tail becomes due at twice that age, so that commits stay short.
"""

PRUNE_ROWS = 64
"""Number of log rows that are pruned together."""
PRUNE_BYTES = 512 * 1024
"""Total bytes of log rows from which on they are pruned, even if fewer than PRUNE_ROWS."""
MAX_PRUNE_ROWS = 4 * PRUNE_ROWS
"""Maximum rows that one commit prunes."""
LOG_ROWS_AT_ONCE = 64
"""Maximum log rows in memory during recovery."""

log = structlog.get_logger("ledger")


class LogRows:
    """Bookkeeping of log rows, which have consecutive numbers."""

    def __init__(self) -> None:
        self._pruned = 1  # all rows before this number are deleted
        self._prunable = 1  # all rows before this number may be deleted
        self._prunable_bytes = 0
        self._sizes: deque[int] = deque()  # bytes of each row from number `_prunable` on

    def add(self, seq: int, size: int) -> None:
        """Add row `seq` of `size` bytes. The first row that is added need not be row 1."""
        if not self._sizes and self._prunable == self._pruned:
            self._pruned = self._prunable = seq
        self._sizes.append(size)

    def prune(self, oldest: int, *, all_: bool) -> int | None:
        """Choose a batch of rows to delete; return the number of the first row that stays.

        None means to delete no row now. `oldest` is the number of the first row that is needed.
        With `all_` the batch may have fewer than PRUNE_ROWS rows.
        """
        sizes, end = self._sizes, min(oldest, self._pruned + MAX_PRUNE_ROWS)
        while self._prunable < end and sizes and self._prunable_bytes < PRUNE_BYTES:
            self._prunable_bytes += sizes.popleft()
            self._prunable += 1
        rows = self._prunable - self._pruned
        if rows < PRUNE_ROWS and self._prunable_bytes < PRUNE_BYTES and not (all_ and rows):
            return None
        self._pruned, self._prunable_bytes = self._prunable, 0
        return self._pruned


class Log:
    """The log and the segments that replace it; `GroupCommit` calls its methods for each commit."""

    def __init__(self, residents: Residents, now_ms: Callable[[], int]) -> None:
        self._residents = residents
        self._now_ms = now_ms
        self._rows = LogRows()
        self._seq = 0
        # The tails of the last group, and their sids as an encoded column.
        self._packed: tuple[list[Tail], bytes] = ([], b"")
        self.stores_all = False
        """True if the next commit stores all due tails, not only a small share of them."""
        self.closes = False
        """True if the ledger is closing, so that the next commits delete all prunable rows."""

    def begin(self, rows: Sequence[int], sizes: Sequence[int]) -> None:
        """Continue after the rows that recovery has found, with their sizes in bytes."""
        unstored = self._residents.unstored
        self._residents.due_tails = {sid: tail for sid, tail in unstored.items() if tail.is_due}
        for seq, size in zip(rows, sizes, strict=True):
            self._rows.add(seq, size)
            self._seq = seq

    def begin_anew(self, group: Group, segments: Sequence[SegmentRow]) -> None:
        """Empty the log with the commit of `group`: all of its records become segments.

        This is done after recovery has found damaged rows. `segments` are those that recovery has
        made from the records before holes.
        """
        group.commit.segments += segments
        self._residents.due_tails = dict(self._residents.unstored)
        self._store(len(self._residents.due_tails), group, group.commit)
        group.commit.keep_from, self._rows = self._seq + 1, LogRows()

    def prepare(self, group: Group) -> None:
        """Add the group's log row to its commit. `tidy` adds what can also be stored later."""
        if not group.tails:
            return
        commit, unstored = group.commit, self._residents.unstored
        due_tails = self._residents.due_tails
        self._seq += 1
        commit.seq = self._seq
        group.reached = dict(zip(group.tails, group.indexes, strict=True))
        for tail in group.reached:
            if tail.sid not in unstored and not tail.gone:
                tail.oldest_seq = commit.seq
                unstored[tail.sid] = tail
            # The condition of `Tail.is_due`, inlined for speed.
            if (tail.unstored_bytes >= SEGMENT_BYTES or tail.end_accepted) and not tail.gone:
                due_tails[tail.sid] = tail
        # Most groups have the same streams as the group before; then its encoded column is used.
        if group.tails != self._packed[0]:
            self._packed = group.tails, column([tail.sid for tail in group.tails])
        columns = group.indexes, group.frames, group.ids, group.extras
        commit.log = pack_batch(self._packed[1], *columns)
        self._rows.add(self._seq, len(commit.log))

    def tidy(self, group: Group, commit: Commit) -> None:
        """Add to `commit` the segments that it stores and the log rows that it deletes."""
        self._note_aged(self._seq)
        # Store the accepted records of all due tails as segments if `stores_all` is set; otherwise
        # only of one in SEGMENT_COMMITS due tails, so that the commit stays short.
        due = len(self._residents.due_tails)
        if not self.stores_all:
            due = -(-due // SEGMENT_COMMITS)
        self.stores_all = False
        if due:
            self._store(due, group, commit)
        unstored = self._residents.unstored
        oldest = next(iter(unstored.values())).oldest_seq if unstored else self._seq + 1
        if (keep_from := self._rows.prune(oldest, all_=self.closes)) is not None:
            commit.keep_from = keep_from

    def _note_aged(self, seq: int) -> None:
        due_tails = self._residents.due_tails
        for tail in self._residents.unstored.values():
            old = MAX_TAIL_BATCHES * (1 + (len(due_tails) >= MAX_DUE_FOR_AGE))
            if seq - tail.oldest_seq < old:
                return
            due_tails[tail.sid] = tail

    def _store(self, due: int, group: Group, commit: Commit) -> None:
        """Add segments of the first `due` entries of `due_tails` to `commit`."""
        now, residents = self._now_ms(), self._residents
        for sid in list(islice(residents.due_tails, due)):
            tail = residents.due_tails.pop(sid)
            residents.unstored.pop(sid, None)
            if tail.accepted > tail.stored:
                commit.segments += tail.segments()
                group.segmented.append((tail, tail.accepted))
                if tail.end_accepted and (usage := tail.usage()) is not None:
                    commit.usage.append(usage)
            if tail.end_accepted:
                commit.ended.append((now + tail.ttl_ms, sid))

    def release(self, group: Group) -> None:
        """Release a stored group to its readers."""
        for tail, last in group.reached.items():
            if last >= tail.released:
                tail.released = last + 1
                try:
                    for watcher in tuple(tail.watchers):
                        watcher()
                except Exception:  # noqa: BLE001 - wake each again, and log the failure
                    tail.wake()
        for tail, until in group.segmented:
            tail.was_stored(until)
            if tail.end_accepted and tail.idle:
                self._residents.forget(tail)
        for tail in group.taken_over:
            tail.in_commit -= 1


class Recovery:
    """One pass over the log that rebuilds the tails.

    `rows` are the numbers of the log rows, and `sizes` their sizes in bytes. If `damaged` is true,
    the caller must store `segments` before it deletes the log rows.
    """

    def __init__(self, storage: Storage, residents: Residents) -> None:
        self._storage = storage
        self._residents = residents
        # Tails by sid; None if the stream was removed, or its row in the table `stream` is damaged.
        self._tails: dict[int, Tail | None] = {}
        # Maximum number of records that a log row with a damaged head may have had.
        self._reach = 0
        # Sids of streams that have a record after the last row with a damaged head. That record
        # shows which records of the stream were lost, so such a stream needs no further hole.
        self._shown: set[int] = set()
        self._holes: dict[int, Tail] = {}
        self.damaged = False
        self.rows: list[int] = []
        self.sizes: list[int] = []
        self.segments: list[SegmentRow] = []

    async def run(self) -> None:
        self.rows = await self._storage.log_rows()
        for begin in range(0, len(self.rows), LOG_ROWS_AT_ONCE):
            some = self.rows[begin : begin + LOG_ROWS_AT_ONCE]
            blobs = await self._storage.log(some)
            if len(blobs) != len(some):
                raise Damaged(
                    f"{self._storage.name}: not all log rows of {some[0]} to {some[-1]} are found",
                    hint="the file is damaged; restore it from a backup",
                )
            for seq, blob in zip(some, blobs, strict=True):
                await self._read(seq, blob)
        if self._reach:
            await self._doubt()
        for tail in self._holes.values():
            # An empty segment records where the stream continues after its hole, because the log
            # rows will be deleted.
            empty = pack_segment((), ())
            self.segments.append(SegmentRow(tail.sid, tail.stored, 0, PLAIN, empty))

    async def _read(self, seq: int, blob: bytes) -> None:
        try:
            entries = list(unpack_batch(blob, where=f"{self._storage.name}: log row {seq}"))
        except Damaged as error:
            if not isinstance(blob, bytes):
                raise  # SQLite returned no blob: a page is damaged, and may hide later rows, too
            await self._lose(blob, error)
            entries = []
        self.sizes.append(len(blob))
        for entry in entries:
            await self._replay(seq, entry)

    async def _tail(self, sid: int) -> Tail | None:
        if sid not in self._tails:
            self._residents.last_sid = max(self._residents.last_sid, sid)
            self._tails[sid] = None
            try:
                row = await self._storage.stream_by_sid(sid)
                if row is not None:
                    self._tails[sid] = await self._residents.adopt(row)
            except Damaged as error:  # readers of this stream get the same error
                log.error("stream.damaged", error=error.message)
        return self._tails[sid]

    async def _replay(self, seq: int, entry: Entry) -> None:
        tail = await self._tail(entry.sid)
        self._shown.add(entry.sid)
        if tail is None or entry.at < tail.accepted:
            return  # the stream was removed, or the record is in a segment already
        if entry.at != tail.accepted:
            if not self._reach:
                jump = f"the log jumps from index {tail.accepted} to {entry.at}"
                raise damaged_stream(tail.info.stream, jump)
            self._skip(tail, entry.at)
        tail.accept(tail.epoch, entry.at, *entry.record)
        tail.released = tail.accepted
        if tail.sid not in self._residents.unstored:
            tail.oldest_seq = seq
            self._residents.unstored[tail.sid] = tail

    # ---- damage ----

    async def _lose(self, blob: bytes, error: Damaged) -> None:
        self.damaged = True
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
        """Leave a hole in a stream: its tail continues at index `until`.

        The records before the hole become segments.
        """
        lost = f"the records from index {tail.accepted} to {until - 1} are lost"
        log.error("stream.damaged", stream=tail.info.stream.hex(), error=lost)
        if tail.accepted > tail.stored:
            self.segments += tail.segments()
        tail.skip(until)
        self._residents.unstored.pop(tail.sid, None)
        self._holes[tail.sid] = tail
