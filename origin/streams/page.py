"""A page is the content of one answer to a reader, from an offset to a limit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tailrace.origin.streams.chunks import piece
from tailrace.origin.streams.offsets import Offset, no_such_offset

MAX_PAGE_BYTES = 1024 * 1024
"""Maximum bytes of a page; the frame or JSON value that reaches it is completed."""

MAX_PAGE_FRAMES = 1024
"""Maximum frames of a page; decoding them blocks the process for some ms."""

FIRST_FRAMES = 64
"""Number of frames in the first read for a page, when their sizes are not known: at most 4 MiB."""


@dataclass(frozen=True, slots=True)
class Tip:
    """The end of a stream; `index` is the index that its next frame with data will have."""

    index: int
    closed: bool

    @property
    def offset(self) -> Offset:
        return Offset(self.index)


@dataclass(frozen=True, slots=True)
class Page:
    """Data between two offsets: one element per message of JSON, else one per frame.

    `up_to_date`: the stream had no more data when it was read. `closed`: it will never have more.
    """

    start: Offset
    next: Offset
    data: tuple[bytes, ...]
    up_to_date: bool
    closed: bool

    def __bool__(self) -> bool:
        return any(self.data)

    def back(self, size: int) -> Offset | None:
        """Return the offset that is `size` bytes (at least 1) before the end of the page.

        The result is None if that is before the start of the page.
        """
        index = self.next.index
        for data in reversed(self.data):
            index -= 1
            if size <= len(data):
                skipped = self.start.byte if index == self.start.index else 0
                return Offset(index, skipped + len(data) - size)
            size -= len(data)
        return None


class PageBuilder:
    """Builds a page; takes raw frames in order, from `first_index` on, until it is `full`.

    Raises CallerError if the frames show that `start` is no position of the stream.
    """

    def __init__(self, start: Offset, tip: Tip, *, json: bool) -> None:
        if start.index > tip.index or (start.index == tip.index and start.byte):
            raise no_such_offset(start, "the stream ends before it")
        if json and start.byte:
            raise no_such_offset(start, "a JSON value has no parts")
        self._start, self._tip, self._json = start, tip, json
        # A JSON value may span frames: the frame before `start` shows if the last value has ended.
        looks_back = json and 0 < start.index < tip.index
        self.first_index = self._at = start.index - 1 if looks_back else start.index
        self._data: list[bytes] = []
        self._open: list[bytes] = []  # chunks so far of a JSON value whose end was not read yet
        self._bytes = 0

    @property
    def full(self) -> bool:
        if self._at == self._tip.index:
            return True
        enough = self._bytes >= MAX_PAGE_BYTES or len(self._data) >= MAX_PAGE_FRAMES
        return enough and not self._open

    @property
    def wants(self) -> int:
        """Return how many frames to feed next, estimated from the sizes of the frames so far."""
        there, taken = self._tip.index - self._at, self._at - self.first_index
        room = (MAX_PAGE_BYTES - self._bytes) * taken // max(1, self._bytes)
        return min(there, max(FIRST_FRAMES, min(room, MAX_PAGE_FRAMES)))

    def feed(self, frames: Sequence[bytes]) -> None:
        """Add frames to the page; frames for which it has no room are ignored."""
        for raw in frames:
            if self.full:
                return
            self._take(raw)
            self._at += 1

    def _take(self, raw: bytes) -> None:
        data, last = piece(raw)
        if self._at < self._start.index:
            if not last:
                raise no_such_offset(self._start, "the offset is within a JSON value")
            return
        if self._at == self._start.index and self._start.byte:
            if self._start.byte >= len(data):
                raise no_such_offset(self._start, "the frame at this offset is shorter")
            data = data[self._start.byte :]
        self._bytes += len(data)
        if not self._json:
            self._data.append(data)
            return
        self._open.append(data)
        if last:
            self._data.append(b"".join(self._open))
            self._open.clear()

    def page(self) -> Page:
        """Return the page; call it when the builder is `full` or there are no more frames."""
        # Without new frames the page ends where it began, even if `start` is inside a frame.
        end = Offset(self._at) if self._at > self._start.index else self._start
        up_to_date = self._at == self._tip.index
        closed = up_to_date and self._tip.closed
        return Page(self._start, end, tuple(self._data), up_to_date, closed)
