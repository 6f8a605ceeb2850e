"""Joins the text frames of a stream into words, sentences and so on, for one reader. Sans-I/O.

Nothing that is stored changes: a piece of text is a view of consecutive frames. A piece always ends
with a whole frame, so a reader that has lost its connection resumes after the last piece that it
has, and gets all text behind it.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from tailrace.edge.generate.snapshot import Folded, as_snapshot
from tailrace.ledger.frame import TAG_OFFSET, Reasoning, Token, decode, encode
from tailrace.ledger.text_units import ENDS, Unit, unsettled_from

MAX_GROUP_CHARS = 4_096
"""Maximum, and default, number of characters and of frames after which held text is sent. It bounds
the memory for the held text of one response: 16 KiB of UTF-8, and the last frame."""
MAX_GROUP_MS = 60_000
"""Maximum, and default, time in milliseconds for which text is held."""

_GROUPED = (Token.tag, Reasoning.tag)


@dataclass(frozen=True, slots=True)
class Grouping:
    """A reader's choice of when held text is sent: at the first of these events.

    Attributes:
        by: Text is sent when this unit is complete; None if the other two alone decide.
        ms: Text is sent when its first frame has waited for this many milliseconds.
        chars: Text is sent when it has this many characters.
    """

    by: Unit | None = None
    ms: int = MAX_GROUP_MS
    chars: int = MAX_GROUP_CHARS


class _Held(NamedTuple):
    """A frame whose text is held."""

    raw: bytes
    frame_index: int
    chars: int


class FrameGrouper:
    """Joins consecutive Tokens, and consecutive Reasoning frames, into fewer frames.

    A unit is complete when the first character behind it is known. The piece then ends with the
    last frame that ends within the white space behind the unit. If no frame ends there, it ends
    with the frame that has the end of the unit, and the beginning of the next unit. So no complete
    unit is held.

    A piece of one frame is that frame, unchanged. A frame that alone has `chars` characters is
    not joined with others.
    """

    def __init__(self, grouping: Grouping, folded: Folded = as_snapshot) -> None:
        """Begin without text; `folded` makes the frame that replaces several."""
        self._end = None if grouping.by is None else ENDS[grouping.by]
        self._most = grouping.chars
        self._folded = folded
        self._held: list[_Held] = []
        self._text = ""  # the text of all frames in `_held`
        self._searched = 0  # no end of a unit begins in `_text` before this position
        self._reasoning = False

    @property
    def first_held(self) -> int | None:
        """The index of the oldest held frame; None if no frame is held."""
        return self._held[0].frame_index if self._held else None

    def add(self, raw: bytes) -> list[bytes]:
        """Take the next frame; return the frames to send, which may include it."""
        frame = decode(raw)[1] if raw[TAG_OFFSET] in _GROUPED else None
        if not isinstance(frame, Token | Reasoning) or len(frame.text) >= self._most:
            return [*self.release(), raw]
        reasoning = isinstance(frame, Reasoning)
        done = [] if reasoning is self._reasoning else self.release()
        self._reasoning = reasoning
        self._held.append(_Held(raw, frame.index, len(frame.text)))
        self._text += frame.text
        done += self._complete()
        is_full = len(self._text) >= self._most or len(self._held) >= MAX_GROUP_CHARS
        return [*done, *self.release()] if is_full else done

    def release(self) -> list[bytes]:
        """Return all held text: one frame, or none."""
        return [self._cut(len(self._held))] if self._held else []

    def _complete(self) -> list[bytes]:
        """Return the pieces whose unit is complete."""
        done: list[bytes] = []
        if self._end is None:
            return done
        while (found := self._end.search(self._text, self._searched)) is not None:
            done.append(self._cut(self._frames_until(found.end())))
        self._searched = unsettled_from(self._text)
        return done

    def _frames_until(self, end: int) -> int:
        """Return the number of held frames in the piece with a unit; the next one begins at `end`.

        `end` is a position in the held text.
        """
        ends = list(accumulate(each.chars for each in self._held))
        count = bisect_right(ends, end)
        unit_chars = len(self._text[:end].rstrip())
        return count if count and ends[count - 1] >= unit_chars else count + 1

    def _cut(self, count: int) -> bytes:
        """Return one frame with the text of the first `count` held frames, which leave."""
        frames, self._held = self._held[:count], self._held[count:]
        chars = sum(each.chars for each in frames)
        text, self._text = self._text[:chars], self._text[chars:]
        self._searched = 0
        if count == 1:
            return frames[0].raw
        first, last = frames[0].frame_index, frames[-1].frame_index
        return encode(self._folded(first, text, last, self._reasoning))
