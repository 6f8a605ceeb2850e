"""Snapshots: one frame that holds all text of a stream so far, for readers that join late.

A replay of 50,000 tokens is 50,000 frames. A reader that only wants the text gets one frame in
place of these, and then the frames that follow, without a gap. Frames are merged while they arrive
from the origin, so that an edge holds only their text in memory. Sans-I/O.
"""

from __future__ import annotations

from collections.abc import Callable

from tailrace.ledger.frame import (
    CLOSING,
    TAG_OFFSET,
    Frame,
    Opened,
    Reasoning,
    Revision,
    ScoredToken,
    Snapshot,
    Token,
    decode,
    encode,
    tag_of,
)

MAX_SNAPSHOT_BYTES = 1_000_000
"""Maximum length of the text in one snapshot, in bytes, because a frame has at most 1 MiB. A longer
text is sent as several snapshots."""
_SIZE_AT, _TEXT_AT = 9, 10
"""Byte offsets of a Token's text length and text in its encoded frame."""
_SHORT_BYTES = 1 << 7
"""From this number of bytes on, a text has a length field of more than one byte."""

Folded = Callable[[int, str, int, bool], Frame]
"""A function that makes the one frame that replaces several. Its arguments are the index of the
first replaced frame, the whole text, the index of the last one, and True for reasoning."""


def as_snapshot(first: int, text: str, index: int, reasoning: bool) -> Frame:
    """Return a Snapshot, for clients that read frames or `/v1/generate`'s events."""
    return Snapshot(first, text, index, reasoning)


def as_text(first: int, text: str, index: int, reasoning: bool) -> Frame:
    """Return a Token or Reasoning with the whole text, for encoders that ignore gaps in indexes."""
    return Reasoning(text, index) if reasoning else Token(text, index)


class SnapshotFolder:
    """Merges the text frames of a stream, which are added in order.

    Consecutive frames of text become one frame. Every other frame stays as it is, and ends the text
    before it. A final Revision counts as text, and the interim Revisions that it replaces are
    dropped. No Revision replaces any other text. A Revision that replaces frames from before the
    first added frame stays as it is, because the client already has those frames.
    """

    def __init__(self, folded: Folded = as_snapshot, corr: int = 0) -> None:
        """Begin without frames; merged frames get the correlation id `corr`."""
        self._folded = folded
        self._corr = corr
        self._begin: int | None = None  # index of the first frame that was added
        self._first = self._last = 0  # indexes of the first and last frame in `_pieces`
        self._pieces: list[bytes] = []
        self._bytes = 0
        self._reasoning = False
        # Interim Revisions after the text, with their raw frames; a final one may replace them.
        self._interims: list[tuple[Revision, bytes]] = []

    @property
    def held_bytes(self) -> int:
        """The size of the text and of the frames that were not returned yet, in bytes."""
        return self._bytes + sum(len(raw) for _, raw in self._interims)

    def add(self, raw: bytes, index: int) -> list[bytes]:
        """Take the next frame; return the merged frames that it completes."""
        if self._begin is None:
            self._begin = index
        # A fast path for nearly all frames: Tokens with a short text are not decoded.
        if raw[TAG_OFFSET] == Token.tag and raw[_SIZE_AT] < _SHORT_BYTES:
            before = self.finish() if self._interims or self._reasoning else []
            text = raw[_TEXT_AT : _TEXT_AT + raw[_SIZE_AT]]
            return before + self._extend(text, index, index, reasoning=False)
        _, frame = decode(raw)
        if isinstance(frame, Revision) and frame.replaces >= self._begin:
            return self._revise(frame, raw)
        done: list[bytes] = []
        if isinstance(frame, Token | ScoredToken | Reasoning):
            reasoning = isinstance(frame, Reasoning)
            if self._interims or reasoning is not self._reasoning:
                done = self.finish()
            done += self._extend(frame.text.encode(), index, index, reasoning)
            return done
        return [*self.finish(), raw]

    def finish(self) -> list[bytes]:
        """Return the merged frames for all added frames that were not returned yet."""
        done = [raw for _, raw in self._interims]
        if self._pieces:
            text = b"".join(self._pieces).decode()
            frame = self._folded(self._first, text, self._last, self._reasoning)
            done.insert(0, encode(frame, self._corr))
        self._pieces, self._bytes, self._interims = [], 0, []
        self._reasoning = False
        return done

    def _revise(self, frame: Revision, raw: bytes) -> list[bytes]:
        if not frame.final:
            self._interims.append((frame, raw))
            return []
        kept = [each for each in self._interims if each[0].index < frame.replaces]
        first = frame.index - (len(self._interims) - len(kept))
        self._interims = kept
        done = self.finish() if kept or self._reasoning else []
        return done + self._extend(frame.text.encode(), first, frame.index, reasoning=False)

    def _extend(self, text: bytes, first: int, last: int, reasoning: bool) -> list[bytes]:
        done = self.finish() if self._bytes + len(text) > MAX_SNAPSHOT_BYTES else []
        if not self._pieces:
            self._first, self._reasoning = first, reasoning
        self._pieces.append(text)
        self._bytes += len(text)
        self._last = last
        return done


class SnapshotMerge:
    """Merges the frames that existed when a stream was opened. Later frames stay as they are."""

    def __init__(self, folded: Folded = as_snapshot, corr: int = 0) -> None:
        self._folder = SnapshotFolder(folded, corr)
        self._next = 0  # index of the next frame to be merged
        self.end = 0
        """The index after the last frame to be merged."""

    def begin(self, opened: Opened) -> None:
        """Note how many frames the stream has now: these will be merged."""
        self._next, self.end = opened.first, opened.next_index

    @property
    def is_due(self) -> bool:
        """True while some of the frames to be merged have not arrived yet."""
        return self._next < self.end

    @property
    def held_bytes(self) -> int:
        """The size of the text and of the frames that were not returned yet, in bytes."""
        return self._folder.held_bytes

    def add(self, frames: list[bytes]) -> list[bytes]:
        """Take the stream's next frames; return those that are complete, merged or as they are."""
        if not self.is_due:
            return frames
        ready: list[bytes] = []
        for at, raw in enumerate(frames):
            if tag_of(raw) in CLOSING:  # an error or the stream's last frame, which is not merged
                self._next = self.end
            if self._next == self.end:
                return [*ready, *self._folder.finish(), *frames[at:]]
            ready += self._folder.add(raw, self._next)
            self._next += 1
        return [*ready, *self._folder.finish()] if self._next == self.end else ready
