"""How much one reader may be sent: a place in what is numbered and a credit, nothing that grows.

Sans-I/O. Live is replay that has reached the tip: who sends holds no frames for a reader, so one
that stalls costs a few numbers, and when it comes back it reads on from its place, from
memory where the tail still has it and from storage where not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

READ_FRAMES = 256
"""Frames that one reader is given at a time, so that neighbours get their turn."""
MAX_CREDIT_FRAMES = 65_536
"""Frames that a client may ask to have in flight."""


FIRST_FRAME_BYTES = 256
"""What a frame is taken to have before one was sent."""


@dataclass(slots=True)
class Window:
    """`next` is the index that comes next, `limit` the first index without credit.

    Either end of a corr keeps one. At most `most` frames are in flight. Where there is a
    `limit_bytes`, a frame may pass while `passed_bytes`, of the frames that have, is below it: so
    one frame may exceed it, and any frame can pass, however large.
    """

    next: int
    limit: int
    most: int = MAX_CREDIT_FRAMES
    limit_bytes: int | None = None
    passed_bytes: int = 0
    frame_bytes: int = FIRST_FRAME_BYTES  # of one, going by the last that have passed

    @classmethod
    def starting(
        cls,
        start: int,
        credit: int,
        most: int = MAX_CREDIT_FRAMES,
        credit_bytes: int | None = None,
    ) -> Window:
        """Of a reader that wants index `start` next and may be sent `credit` frames."""
        return cls(start, start + min(credit, most), most, credit_bytes)

    @property
    def open(self) -> bool:
        """Whether the next frame may be sent."""
        limit_bytes = self.limit_bytes
        return self.next < self.limit and (limit_bytes is None or self.passed_bytes < limit_bytes)

    def grant(self, limit: int, limit_bytes: int | None = None) -> None:
        """Take a Credit frame: absolute, never shrinking, never above the cap."""
        self.limit = max(self.limit, min(limit, self.next + self.most))
        if limit_bytes is not None:
            self.limit_bytes = max(self.limit_bytes or 0, limit_bytes)

    def renew(self, most_bytes: int) -> bool:
        """Raise the limits if half of one has been used: a Credit is to say so then."""
        left = most_bytes if self.limit_bytes is None else self.limit_bytes - self.passed_bytes
        if self.limit - self.next > self.most // 2 and left > most_bytes // 2:
            return False
        self.limit = self.next + self.most
        self.limit_bytes = self.passed_bytes + most_bytes
        return True

    def passed(self, count: int, size: int) -> None:
        """So many frames have come, of so many bytes together."""
        self.next += count
        self.passed_bytes += size

    def passing(self, frames: Sequence[bytes]) -> Sequence[bytes]:
        """Those of the next frames that may be sent now: all of them but for their bytes."""
        if self.limit_bytes is None:
            self.next += len(frames)
            return frames
        count, size = 0, self.passed_bytes
        for frame in frames:
            if size >= self.limit_bytes:
                break
            size += len(frame)
            count += 1
        if count:
            self.frame_bytes = (size - self.passed_bytes) // count
        self.next, self.passed_bytes = self.next + count, size
        return frames if count == len(frames) else frames[:count]

    def wanted(self, released: int) -> int:
        """How many frames may be sent to it now."""
        # Comparisons: every token is asked about here, and min and max take three times as long.
        most = (self.limit if self.limit < released else released) - self.next
        if self.limit_bytes is not None:
            room = self.limit_bytes - self.passed_bytes
            # What would not fit is not fetched: the frames of a producer may be large.
            fits = room // self.frame_bytes + 1 if room > 0 else 0
            most = fits if fits < most else most
        if most > READ_FRAMES:
            return READ_FRAMES
        return most if most > 0 else 0
