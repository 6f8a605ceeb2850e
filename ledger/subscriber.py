"""One reader of one stream: a cursor and a credit, and nothing that grows.

Sans-I/O. Live is replay that has reached the tip: a subscriber holds no frames, so one
that stalls costs a few numbers, and when it comes back it reads on from its cursor, from
memory where the tail still has it and from storage where not.
"""

from __future__ import annotations

from dataclasses import dataclass

READ_FRAMES = 256
"""Frames that one subscriber is given at a time, so that neighbours get their turn."""
MAX_CREDIT_FRAMES = 65_536
"""Frames that a client may ask to have in flight."""


@dataclass(slots=True)
class Subscriber:
    """`next` is the index it gets next, `limit` the first index it has no credit for."""

    next: int
    limit: int
    follow: bool = True

    @classmethod
    def starting(cls, start: int, credit: int, *, follow: bool) -> Subscriber:
        """A subscriber that wants index `start` next and may be sent `credit` frames."""
        return cls(start, start + min(credit, MAX_CREDIT_FRAMES), follow)

    def grant(self, limit: int) -> None:
        """Take a Credit frame: absolute, never shrinking, never above the cap."""
        self.limit = max(self.limit, min(limit, self.next + MAX_CREDIT_FRAMES))

    def wanted(self, released: int) -> int:
        """How many frames may be sent to it now."""
        # Comparisons: every token is asked about here, and min and max take three times as long.
        most = (self.limit if self.limit < released else released) - self.next
        if most > READ_FRAMES:
            return READ_FRAMES
        return most if most > 0 else 0

    def sent(self, count: int) -> None:
        self.next += count
