"""Positions of readers, and the data there: offsets, cursors, messages and pages.

An offset is an opaque token to clients, which sorts as text. It names a frame by its index, and a
byte in it. It is nearly always at the beginning of a frame; inside a frame it is where a reader of
text stopped between two characters. So every well-formed offset can be checked against the frame
that it names.

Cursors make the URLs of waiting readers change over time. A cache in front of us answers all
readers who wait on one URL. A cursor in the URL, counted in intervals of time, keeps a client from
getting the same cached answer for ever.

A message is a run of Chunks, the last of which is marked. A page is the content of one answer, from
an offset to a limit.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tailrace.ledger.errors import CallerError
from tailrace.ledger.frame import Chunk, FinishReason, ScoredToken, StreamEnd, Token, decode, encode
from tailrace.ledger.interface import Record

BEGINNING = "-1"
"""Offset for reading from the first byte."""
NOW = "now"
"""Offset for reading only future data."""

_DIGITS = 16
_FORM = re.compile(rf"([0-9]{{{_DIGITS}}})_([0-9]{{{_DIGITS}}})")

EPOCH_MS = 1_728_432_000_000
"""Start of the intervals of cursors, 2024-10-09T00:00:00Z, in Unix ms."""
INTERVAL_MS = 20_000
MAX_JITTER_S = 3600
"""Maximum seconds by which a cursor is moved ahead of one that is as new as ours."""
MAX_DIGITS = 16
"""Maximum digits of a cursor; longer ones are not ours."""

_JITTER_STEPS = MAX_JITTER_S * 1000 // INTERVAL_MS

CHUNK_BYTES = 64 * 1024
"""Maximum data bytes per Chunk: small enough for frames that share a connection."""

MAX_PAGE_BYTES = 1024 * 1024
"""Maximum bytes of a page; the frame or JSON value that reaches it is completed."""
MAX_PAGE_FRAMES = 1024
"""Maximum frames of a page; decoding them blocks the process for some ms."""
FIRST_FRAMES = 64
"""Frames that are read first, before their size is known: 4 MiB at most."""


@dataclass(frozen=True, slots=True, order=True)
class Offset:
    """Byte `byte` of the frame at `index`; as text it sorts like the pair of numbers."""

    index: int
    byte: int = 0

    def __str__(self) -> str:
        return f"{self.index:0{_DIGITS}d}_{self.byte:0{_DIGITS}d}"


START = Offset(0)


def parse_offset(text: str, field: str = "offset") -> Offset | None:
    """Return the offset that a client sent; None is `now`. Raises CallerError for anything else."""
    if text == NOW:
        return None
    if text == BEGINNING:
        return START
    match = _FORM.fullmatch(text)
    if match is None:
        raise CallerError(
            "not an offset",
            code="bad_offset",
            field=field,
            hint=f"{BEGINNING}, {NOW}, or what Stream-Next-Offset said",
        )
    return Offset(int(match[1]), int(match[2]))


def parse_cursor(text: str | None) -> int | None:
    """Return the cursor that a client echoes; None if there is none or it cannot be ours."""
    if text is None or len(text) > MAX_DIGITS or not (text.isascii() and text.isdigit()):
        return None
    return int(text)


def next_cursor(now_ms: int, echoed: int | None, random: Callable[[int], bytes]) -> int:
    """Return the interval of `now_ms`, or a number above `echoed` if that is not older."""
    current = max(0, now_ms - EPOCH_MS) // INTERVAL_MS
    if echoed is None or echoed < current:
        return current
    return echoed + 1 + int.from_bytes(random(4), "little") % _JITTER_STEPS


class FramePiece(NamedTuple):
    """Bytes that a frame adds to its stream; `last` if it ends a message."""

    data: bytes
    last: bool


def chunks(messages: Iterable[bytes], index: int) -> list[Record]:
    """Return the records of these messages, none of them empty, from `index` on."""
    records: list[Record] = []
    for message in messages:
        for at in range(0, len(message), CHUNK_BYTES):
            data = message[at : at + CHUNK_BYTES]
            chunk = Chunk(data, at + CHUNK_BYTES >= len(message), index + len(records))
            records.append(Record(encode(chunk), ()))
    return records


def end(index: int) -> Record:
    return Record(encode(StreamEnd(0, FinishReason.STOP, index, 0)), ())


def piece(raw: bytes) -> FramePiece:
    """Return what a logged frame adds: a Chunk its data, a Token its text, any other nothing."""
    _, frame = decode(raw)
    if isinstance(frame, Chunk):
        return FramePiece(frame.data, frame.last)
    return FramePiece(frame.text.encode() if isinstance(frame, Token | ScoredToken) else b"", True)


def renumbered(raw: bytes, index: int) -> bytes:
    """Return the same Chunk or StreamEnd at another index, for readers of a fork."""
    _, frame = decode(raw)
    if isinstance(frame, Chunk):
        return encode(Chunk(frame.data, frame.last, index))
    assert isinstance(frame, StreamEnd)  # streams of objects have no other frames
    return encode(StreamEnd(frame.total_tokens, frame.finish_reason, index, frame.prompt_tokens))


@dataclass(frozen=True, slots=True)
class Tip:
    """The end of a stream; `index` is that of its next frame with data."""

    index: int
    closed: bool

    @property
    def offset(self) -> Offset:
        return Offset(self.index)


@dataclass(frozen=True, slots=True)
class Page:
    """Data between two offsets: one element per message of JSON, else one per frame.

    `up_to_date`: there was no more data. `closed`: there will be no more.
    """

    start: Offset
    next: Offset
    data: tuple[bytes, ...]
    up_to_date: bool
    closed: bool

    def __bool__(self) -> bool:
        return any(self.data)

    def back(self, size: int) -> Offset | None:
        """Return the offset `size` bytes, at least 1, before the page's end.

        None before its start.
        """
        index = self.next.index
        for data in reversed(self.data):
            index -= 1
            if size <= len(data):
                skipped = self.start.byte if index == self.start.index else 0
                return Offset(index, skipped + len(data) - size)
            size -= len(data)
        return None


def no_such_offset(offset: Offset, why: str) -> CallerError:
    return CallerError(
        f"no position {offset}: {why}",
        code="bad_offset",
        field="offset",
        hint="what Stream-Next-Offset said",
    )


class PageBuilder:
    """Builds a page; takes raw frames in order, from `first_index` on, until it is `full`.

    Raises CallerError if the frames show that `start` is no position of the stream.
    """

    def __init__(self, start: Offset, tip: Tip, *, json: bool) -> None:
        if start.index > tip.index or (start.index == tip.index and start.byte):
            raise no_such_offset(start, "the stream has not come so far")
        if json and start.byte:
            raise no_such_offset(start, "a JSON value has no parts")
        self._start, self._tip, self._json = start, tip, json
        # A JSON value may have many frames: the previous one must be seen to end before `start`.
        looks_back = json and 0 < start.index < tip.index
        self.first_index = self._at = start.index - 1 if looks_back else start.index
        self._data: list[bytes] = []
        self._open: list[bytes] = []  # pieces of a JSON value that has not ended yet
        self._bytes = 0

    @property
    def full(self) -> bool:
        if self._at == self._tip.index:
            return True
        enough = self._bytes >= MAX_PAGE_BYTES or len(self._data) >= MAX_PAGE_FRAMES
        return enough and not self._open

    @property
    def wants(self) -> int:
        """Return the number of frames to feed next, from the size of those so far."""
        there, taken = self._tip.index - self._at, self._at - self.first_index
        room = (MAX_PAGE_BYTES - self._bytes) * taken // max(1, self._bytes)
        return min(there, max(FIRST_FRAMES, min(room, MAX_PAGE_FRAMES)))

    def feed(self, frames: Sequence[bytes]) -> None:
        """Take frames; those beyond a full page are ignored."""
        for raw in frames:
            if self.full:
                return
            self._take(raw)
            self._at += 1

    def _take(self, raw: bytes) -> None:
        data, last = piece(raw)
        if self._at < self._start.index:
            if not last:
                raise no_such_offset(self._start, "it is within a JSON value")
            return
        if self._at == self._start.index and self._start.byte:
            if self._start.byte >= len(data):
                raise no_such_offset(self._start, "its frame is shorter")
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
        # An offset inside a frame advances only when there is data after it.
        end = Offset(self._at) if self._at > self._start.index else self._start
        up_to_date = self._at == self._tip.index
        closed = up_to_date and self._tip.closed
        return Page(self._start, end, tuple(self._data), up_to_date, closed)
