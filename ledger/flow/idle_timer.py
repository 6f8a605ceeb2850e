"""Measure how long a peer has been silent, not counting time in which this process was stalled."""

from __future__ import annotations

LONGEST_LOOK_S = 0.5
"""Maximum seconds of silence that one check adds.

After a longer pause between two checks this process was busy or suspended, and data of the peer may
be waiting in the socket.
"""


class IdleTimer:
    """Measures the silence of one peer from `now` on; call `broken` when the peer sends anything.

    Times are in seconds, by any clock that never goes back.
    """

    def __init__(self, now: float, longest_look_s: float = LONGEST_LOOK_S) -> None:
        self._longest_look_s = longest_look_s
        self._seconds = 0.0
        self._looked_at = now

    def broken(self) -> None:
        """End the silence, because the peer has sent something."""
        self._seconds = 0.0

    def seconds(self, now: float) -> float:
        """Return the seconds of silence until `now`."""
        self._seconds += min(now - self._looked_at, self._longest_look_s)
        self._looked_at = now
        return self._seconds
