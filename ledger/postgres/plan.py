"""The plan of a group commit, computed from the rows that the commit has read. Sans-I/O.

Items are applied in order of arrival; a refused item changes nothing. The plan has the changes as
columns, so that a few statements store them, however many items there are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from tailrace.ledger.end_usage import usage_of
from tailrace.ledger.errors import TailraceError, unknown_stream
from tailrace.ledger.frame import StreamEnd, tag_of
from tailrace.ledger.interface import (
    Alarm,
    Append,
    NewStream,
    ObjectKey,
    ObjectWrite,
    stale_object,
    taken_id,
    why_refused,
)
from tailrace.ledger.postgres.rows import pack_ids
from tailrace.ledger.postgres.tail import StreamHead
from tailrace.ledger.usage import Usage


@dataclass(slots=True, eq=False)
class Item:
    """An append or a write to store, and the error if it was refused."""

    change: Append | ObjectWrite
    error: TailraceError | None = None


class Move(NamedTuple):
    """A stream that gets frames from index `first` on; `head` is its new state."""

    head: StreamHead
    first: int
    frames: list[bytes]


FrameRow = tuple[int, int, bytes | None, bytes, bytes]
"""A row of the table `frame`: sid, index, ids, frame, extra.

It is a plain tuple, because there are many rows and a plain tuple is created fastest.
"""


@dataclass(slots=True)
class Object:
    """An object's row, and the changes of its values and alarm."""

    oid: int
    epoch: int
    clear: bool = False
    values: dict[str, bytes | None] = field(default_factory=dict)
    alarm: Alarm | None = None
    sets_alarm: bool = False
    written: bool = False


class GroupPlan:
    """The changes of a group; `heads` and `objects` are copies of the rows that it changes."""

    def __init__(
        self,
        heads: Mapping[bytes, StreamHead],
        objects: Mapping[ObjectKey, Object] | None = None,
        new_sids: Iterator[int] | None = None,
    ) -> None:
        self.heads = {stream: head.copy() for stream, head in heads.items()}
        self.objects = dict(objects or {})
        self._new_sids = new_sids
        self.moves: dict[int, Move] = {}  # the streams with new frames, by sid
        self.rows: list[FrameRow] = []
        # Streams that objects create, as (new sid, stream).
        self.created: list[tuple[int, NewStream]] = []
        self.dropped: list[int] = []
        self.usage: list[Usage] = []  # usage rows of the generations that end with this group
        self.refused: list[tuple[Item, TailraceError]] = []

    def take(self, item: Item) -> None:
        """Add an item, or record why it is refused."""
        change = item.change
        error = self._append(change) if isinstance(change, Append) else self._write(change)
        if error is not None:
            self.refused.append((item, error))

    # ---- streams ----

    def _append(self, append: Append) -> TailraceError | None:
        head = self.heads.get(append.stream)
        if head is None:
            return unknown_stream(append.stream)
        index, sid = head.next_index, head.sid
        if append.index != index or append.epoch != head.epoch or head.ended:
            return why_refused(append.epoch, append.index, head.epoch, index, head.ended)
        frame, ids, extra = append.record
        move = self.moves.get(sid)
        if move is None:
            self.moves[sid] = Move(head, index, [frame])
        else:
            move.frames.append(frame)
        head.next_index = index + 1
        head.ended = tag_of(frame) == StreamEnd.tag
        if head.ended and extra and (usage := usage_of(append.stream, append.record)) is not None:
            self.usage.append(usage)
        self.rows.append((sid, index, pack_ids(ids), frame, extra))
        return None

    # ---- objects ----

    def _write(self, write: ObjectWrite) -> TailraceError | None:
        found = self.objects.get(write.key)
        if found is None or found.epoch != write.epoch:
            return stale_object(write.key, write.epoch)
        error = self._write_streams(write)
        if error is None:
            _write_values(write, found)
        return error

    def _write_streams(self, write: ObjectWrite) -> TailraceError | None:
        """Apply creates, appends and drops of streams; if one is refused, undo all of them."""
        heads = [self.heads[a.stream] for a in write.appends if a.stream in self.heads]
        before = [(head, head.next_index, head.ended) for head in heads]
        moves, rows, created = dict(self.moves), len(self.rows), len(self.created)
        used = len(self.usage)
        error = next(self._refusals(write), None)
        if error is not None:
            for _, new in self.created[created:]:
                del self.heads[new.stream]
            for head, next_index, ended in before:
                head.next_index, head.ended = next_index, ended
            self.moves = moves
            for head, first, frames in moves.values():
                del frames[head.next_index - first :]
            del self.rows[rows:], self.created[created:], self.usage[used:]
            return error
        for stream in write.drops:
            self._drop(stream)
        return None

    def _refusals(self, write: ObjectWrite) -> Iterator[TailraceError]:
        for new in write.creates:
            if new.stream in self.heads:
                yield taken_id()
                return
            assert self._new_sids is not None  # a group that creates streams is given new sids
            head = StreamHead(next(self._new_sids), 1, 0, False)
            self.heads[new.stream] = head
            self.created.append((head.sid, new))
        for append in write.appends:
            error = self._append(append)
            if error is not None:
                yield error

    def _drop(self, stream: bytes) -> None:
        head = self.heads.pop(stream, None)
        if head is None:
            return  # the stream is removed already
        self.moves.pop(head.sid, None)
        self.rows = [row for row in self.rows if row[0] != head.sid]
        before = len(self.created)
        self.created = [made for made in self.created if made[0] != head.sid]
        if len(self.created) == before:
            self.dropped.append(head.sid)

    # ---- results ----

    def moved(self) -> list[tuple[int, int, int, int, bool]]:
        """Return a row for each stream with new frames.

        A row has the sid, the epoch, the index of the first new frame, the index after the last
        one, and whether the stream has ended.
        """
        return [
            (head.sid, head.epoch, first, head.next_index, head.ended)
            for head, first, _ in self.moves.values()
        ]

    @property
    def touched(self) -> list[int]:
        """The sids of changed streams, which the notification to other origins names."""
        return [*self.moves, *self.dropped]


def _write_values(write: ObjectWrite, found: Object) -> None:
    found.written = True
    if write.clear:
        found.clear = True
        found.values.clear()
    found.values.update(dict.fromkeys(write.deletes))
    found.values.update(write.puts)
    if write.sets_alarm:
        found.alarm, found.sets_alarm = write.alarm, True
