"""How much one reader may be sent: a place in what is numbered and a credit, nothing that grows.

Sans-I/O. Live is replay that has reached the tip: who sends holds no frames for a reader, so one
that stalls costs a few numbers, and when it comes back it reads on from its place, from
memory where the tail still has it and from storage where not.
"""

from __future__ import annotations

from dataclasses import dataclass

READ_FRAMES = 256
"""Frames that one reader is given at a time, so that neighbours get their turn."""
MAX_CREDIT_FRAMES = 65_536
"""Frames that a client may ask to have in flight."""


@dataclass(slots=True)
class Window:
    """`next` is the index that comes next, `limit` the first index without credit.

    Either end of a corr keeps one. At most `most` frames are in flight.
    """

    next: int
    limit: int
    most: int = MAX_CREDIT_FRAMES

    @classmethod
    def starting(cls, start: int, credit: int, most: int = MAX_CREDIT_FRAMES) -> Window:
        """Of a reader that wants index `start` next and may be sent `credit` frames."""
        return cls(start, start + min(credit, most), most)

    @property
    def open(self) -> bool:
        """Whether the next frame may be sent."""
        return self.next < self.limit

    def grant(self, limit: int) -> None:
        """Take a Credit frame: absolute, never shrinking, never above the cap."""
        self.limit = max(self.limit, min(limit, self.next + self.most))

    def renew(self) -> int | None:
        """The limit to grant now that half of the credit has been used; None before that."""
        if self.limit - self.next > self.most // 2:
            return None
        self.limit = self.next + self.most
        return self.limit

    def wanted(self, released: int) -> int:
        """How many frames may be sent to it now."""
        # Comparisons: every token is asked about here, and min and max take three times as long.
        most = (self.limit if self.limit < released else released) - self.next
        if most > READ_FRAMES:
            return READ_FRAMES
        return most if most > 0 else 0
