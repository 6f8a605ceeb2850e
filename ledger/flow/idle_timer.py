"""How long a peer has said nothing, as far as one can tell who may have stood still oneself."""

from __future__ import annotations

LONGEST_LOOK_S = 0.5
"""Most that one look adds. Who stood still, busy or suspended, knows nothing of that time: what
the peer said meanwhile may lie unread in the socket."""


class Silence:
    """It counts from `now` on; `broken` whenever the peer says something."""

    def __init__(self, now: float, longest_look_s: float = LONGEST_LOOK_S) -> None:
        self._longest_look_s = longest_look_s
        self._seconds = 0.0
        self._looked_at = now

    def broken(self) -> None:
        self._seconds = 0.0

    def seconds(self, now: float) -> float:
        """Of silence until `now`."""
        self._seconds += min(now - self._looked_at, self._longest_look_s)
        self._looked_at = now
        return self._seconds
