"""Where a reader of a stream is: offsets, and the cursors of those who wait.

An offset is an opaque token to clients, which sorts as text. It names a frame by its index,
and a byte in it. It is nearly always at the beginning of a frame; within one it is where a
reader of text stopped between two characters. So every offset that is right for its form can
be checked against the frame that it names.

Cursors make the URLs of waiting readers change with time. A cache in front of us answers one
URL for all who wait on it. A cursor in the URL, counted in intervals of time, keeps a client
from being given the same cached answer for ever.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from ledger.errors import CallerError

BEGINNING = "-1"
"""What a client sends to read from the first byte on."""
NOW = "now"
"""What a client sends to read only what is yet to come."""

_DIGITS = 16
_FORM = re.compile(rf"([0-9]{{{_DIGITS}}})_([0-9]{{{_DIGITS}}})")

EPOCH_MS = 1_728_432_000_000
"""Intervals are counted from 2024-10-09T00:00:00Z, here in Unix ms."""
INTERVAL_MS = 20_000
MAX_JITTER_S = 3600
"""A client whose cursor is not older than ours is sent up to so much ahead."""
MAX_DIGITS = 16
"""A cursor of more digits was not ours."""

_JITTER_STEPS = MAX_JITTER_S * 1000 // INTERVAL_MS


@dataclass(frozen=True, slots=True, order=True)
class Offset:
    """Byte `byte` of the frame at `index`; as text it sorts as the pair of numbers does."""

    index: int
    byte: int = 0

    def __str__(self) -> str:
        return f"{self.index:0{_DIGITS}d}_{self.byte:0{_DIGITS}d}"


START = Offset(0)


def parse_offset(text: str, field: str = "offset") -> Offset | None:
    """The offset that a client named; None is `now`. CallerError for anything else."""
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
    """The cursor that a client echoes; None if there is none or it cannot be one of ours."""
    if text is None or len(text) > MAX_DIGITS or not (text.isascii() and text.isdigit()):
        return None
    return int(text)


def next_cursor(now_ms: int, echoed: int | None, random: Callable[[int], bytes]) -> int:
    """The interval that `now_ms` is in, or a number above `echoed` if that is not older."""
    current = max(0, now_ms - EPOCH_MS) // INTERVAL_MS
    if echoed is None or echoed < current:
        return current
    return echoed + 1 + int.from_bytes(random(4), "little") % _JITTER_STEPS
