"""The log: one row for each group commit, until segments hold what is in it.

When a tail is large, old or ended it becomes a segment, in the transaction of some commit, and
the log before the oldest tail is pruned.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice

from ledger.sqlite.group import Group
from ledger.sqlite.record import column, pack_batch
from ledger.sqlite.residents import Residents
from ledger.sqlite.storage import Commit, SegmentRow
from ledger.sqlite.tail import MAX_TAIL_BATCHES, SEGMENT_BYTES, Tail

SEGMENT_COMMITS = 64
"""Commits over which the segments are spread that are due now. Each takes its share of them, so
that of short streams no more can pile up than come with so many commits."""
MAX_RIPE_FOR_AGE = 4 * SEGMENT_COMMITS
"""For their age alone tails become segments while fewer are due, so that no commit takes much
longer than others; only those of twice the age do in any case."""

PRUNE_ROWS = 64
"""Log rows that are pruned at once,"""
PRUNE_BYTES = 512 * 1024
"""or as many as have so many bytes, if those are fewer."""
MAX_PRUNE_ROWS = 4 * PRUNE_ROWS
"""What one commit prunes, at most, however much has become prunable."""


class LogRows:
    """Counts the rows of the log; they have consecutive numbers."""

    def __init__(self) -> None:
        self._pruned = 1  # those below it are gone
        self._prunable = 1  # those below it may go
        self._prunable_bytes = 0
        self._sizes: deque[int] = deque()  # of those from `_prunable` on

    def add(self, seq: int, size: int) -> None:
        """Row `seq` is the last one now; the first that is ever added need not be row 1."""
        if not self._sizes and self._prunable == self._pruned:
            self._pruned = self._prunable = seq
        self._sizes.append(size)

    def prune(self, oldest: int, *, all_: bool) -> int | None:
        """The number below which rows go now: many at a time, never very many, none if few.

        `oldest` is the first that is needed; `all_`: it is no matter how few they are.
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
    """What tails hold on its way to segments; see `GroupCommit` for who calls it when."""

    def __init__(self, residents: Residents, now_ms: Callable[[], int]) -> None:
        self._residents = residents
        self._now_ms = now_ms
        self._rows = LogRows()
        self._seq = 0
        self._packed: tuple[list[Tail], bytes] = [], b""  # tails, and the column of their sids
        self.closes = False
        """Whether nothing will follow, so that every row that may go goes."""

    def begin(self, rows: Sequence[int], sizes: Sequence[int]) -> None:
        """Go on behind what recovery has found; these rows have so many bytes."""
        unstored = self._residents.unstored
        self._residents.ripe = {sid: tail for sid, tail in unstored.items() if tail.ripe}
        for seq, size in zip(rows, sizes, strict=True):
            self._rows.add(seq, size)
            self._seq = seq

    def begin_anew(self, group: Group, segments: Sequence[SegmentRow]) -> None:
        """Store all that the log holds, and let its rows go, some of which are damaged."""
        group.commit.segments += segments
        self._residents.ripe = dict(self._residents.unstored)
        self._store(len(self._residents.ripe), group, group.commit)
        group.commit.keep_from, self._rows = self._seq + 1, LogRows()

    def prepare(self, group: Group) -> None:
        """Put the log row into a group's commit; everything else can be stored behind it."""
        if not group.tails:
            return
        commit, ripe, unstored = group.commit, self._residents.ripe, self._residents.unstored
        self._seq += 1
        commit.seq = self._seq
        group.reached = dict(zip(group.tails, group.indexes, strict=True))
        for tail in group.reached:
            if tail.sid not in unstored and not tail.gone:
                tail.oldest_seq = commit.seq
                unstored[tail.sid] = tail
            # `ripe`, written out
            if (tail.unstored_bytes >= SEGMENT_BYTES or tail.end_accepted) and not tail.gone:
                ripe[tail.sid] = tail
        if group.tails != self._packed[0]:  # an engine's steps are of the same streams, mostly
            self._packed = group.tails, column([tail.sid for tail in group.tails])
        commit.log = pack_batch(self._packed[1], group.indexes, group.frames, group.ids)
        self._rows.add(self._seq, len(commit.log))

    def tidy(self, group: Group, commit: Commit) -> int:
        """Put into `commit` what becomes a segment now; returns how many bytes of frames do."""
        self._note_aged(self._seq)
        # Some ripe tails, as far as they are accepted: the rest of them is in this group.
        due = -(-len(self._residents.ripe) // SEGMENT_COMMITS)
        size = self._store(due, group, commit) if due else 0
        unstored = self._residents.unstored
        oldest = next(iter(unstored.values())).oldest_seq if unstored else self._seq + 1
        if (keep_from := self._rows.prune(oldest, all_=self.closes)) is not None:
            commit.keep_from = keep_from
        return size

    def _note_aged(self, seq: int) -> None:
        ripe = self._residents.ripe
        for tail in self._residents.unstored.values():
            old = MAX_TAIL_BATCHES * (1 + (len(ripe) >= MAX_RIPE_FOR_AGE))
            if seq - tail.oldest_seq < old:
                return
            ripe[tail.sid] = tail

    def _store(self, due: int, group: Group, commit: Commit) -> int:
        """Make segments of the first `due` ripe tails; returns their bytes."""
        now, size = self._now_ms(), 0
        residents = self._residents
        for sid in list(islice(residents.ripe, due)):
            tail = residents.ripe.pop(sid)
            residents.unstored.pop(sid, None)
            if tail.accepted > tail.stored:
                commit.segments += tail.segments()
                group.segmented.append((tail, tail.accepted))
                size += tail.unstored_bytes
            if tail.end_accepted:
                commit.ended.append((now + tail.ttl_ms, sid))
        return size

    def release(self, group: Group) -> None:
        """Show a stored group to its readers."""
        for tail, last in group.reached.items():
            if last >= tail.released:
                tail.released = last + 1
                try:
                    for watcher in tail.watchers:
                        watcher()
                except Exception:  # noqa: BLE001 - each is told, again, and the failure logged
                    tail.wake()
        for tail, until in group.segmented:
            tail.was_stored(until)
            if tail.end_accepted and tail.idle:
                self._residents.forget(tail)
        for tail in group.taken_over:
            tail.in_commit -= 1
