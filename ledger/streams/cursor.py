"""Cursors: they make the URLs of waiting readers change with time.

A cache in front of us answers one URL for all who wait on it. A cursor in the URL, counted
in intervals of time, keeps a client from being given the same cached answer for ever.
"""

from __future__ import annotations

from collections.abc import Callable

EPOCH_MS = 1_728_432_000_000
"""Intervals are counted from 2024-10-09T00:00:00Z, here in Unix ms."""
INTERVAL_MS = 20_000
MAX_JITTER_S = 3600
"""A client whose cursor is not older than ours is sent up to so much ahead."""
MAX_DIGITS = 16
"""A cursor of more digits was not ours."""

_JITTER_STEPS = MAX_JITTER_S * 1000 // INTERVAL_MS


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
