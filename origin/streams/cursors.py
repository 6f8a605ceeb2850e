"""Cursors, which make the URLs of waiting readers change over time.

A cache in front of an edge answers all readers who wait on one URL. A cursor in the URL, counted in
intervals of time, keeps a client from getting the same cached answer for ever.
"""

from __future__ import annotations

from collections.abc import Callable

EPOCH_MS = 1_728_432_000_000
"""Start of the intervals of cursors, 2024-10-09T00:00:00Z, in Unix ms."""

INTERVAL_MS = 20_000

MAX_JITTER_S = 3600
"""Maximum seconds by which a new cursor exceeds the cursor that a client echoes, if that cursor is
of the current interval or later."""

MAX_DIGITS = 16
"""Maximum digits of a cursor; longer numbers are ignored, since no origin issues them."""

_JITTER_STEPS = MAX_JITTER_S * 1000 // INTERVAL_MS


def parse_cursor(text: str | None) -> int | None:
    """Return the cursor that a client echoes; None if there is none or it cannot be ours."""
    if text is None or len(text) > MAX_DIGITS or not (text.isascii() and text.isdigit()):
        return None
    return int(text)


def next_cursor(now_ms: int, echoed: int | None, random: Callable[[int], bytes]) -> int:
    """Return the number of the current interval, or a higher number than `echoed`.

    A client that echoes a cursor of the current interval or later gets the higher number, so that
    the URL of its next request differs.
    """
    current = max(0, now_ms - EPOCH_MS) // INTERVAL_MS
    if echoed is None or echoed < current:
        return current
    return echoed + 1 + int.from_bytes(random(4), "little") % _JITTER_STEPS
