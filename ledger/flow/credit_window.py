"""Credit-based flow control of one reader: its position and its limits. Sans-I/O.

A sender buffers no frames for a reader. A reader that stalls costs a few numbers, and later
continues from its position: from memory if the tail still has the frames, otherwise from storage.
So a live reader is a replay that has reached the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

READ_FRAMES = 256
"""Maximum number of frames for one reader at a time, so that other readers get their turn."""
MAX_CREDIT_FRAMES = 65_536
"""Maximum number of frames in flight to one reader."""


FIRST_FRAME_BYTES = 256
"""Assumed size of a frame in bytes, before one was sent."""


@dataclass(slots=True)
class Window:
    """The flow-control window of one channel; both of its ends keep one.

    `next` is the next index to send, `limit` the first index without credit. At most `most` frames
    are in flight. `passed_bytes` is the size of the frames sent so far. With a `limit_bytes`, the
    next frame may be sent while `passed_bytes` is below that limit. So only the last frame can
    exceed the limit, and a frame of any size can be sent.
    """

    next: int
    limit: int
    most: int = MAX_CREDIT_FRAMES
    limit_bytes: int | None = None
    passed_bytes: int = 0
    frame_bytes: int = FIRST_FRAME_BYTES  # average size of the last frames sent

    @classmethod
    def starting(
        cls,
        start: int,
        credit: int,
        most: int = MAX_CREDIT_FRAMES,
        credit_bytes: int | None = None,
    ) -> Window:
        """Create the window of a reader at index `start` with credit for `credit` frames."""
        return cls(start, start + min(credit, most), most, credit_bytes)

    def begin_at(self, first: int) -> None:
        """Move an unused window forward to index `first`, with the same credit."""
        if first > self.next:
            self.limit += first - self.next
            self.next = first

    @property
    def open(self) -> bool:
        """True if the next frame may be sent."""
        limit_bytes = self.limit_bytes
        return self.next < self.limit and (limit_bytes is None or self.passed_bytes < limit_bytes)

    def grant(self, limit: int, limit_bytes: int | None = None) -> None:
        """Apply a Credit frame. Limits are absolute, never shrink, and never exceed `most`."""
        self.limit = max(self.limit, min(limit, self.next + self.most))
        if limit_bytes is not None:
            self.limit_bytes = max(self.limit_bytes or 0, limit_bytes)

    def renew(self, most_bytes: int) -> bool:
        """Raise both limits if half of either one is used. Return True if a Credit must be sent."""
        left = most_bytes if self.limit_bytes is None else self.limit_bytes - self.passed_bytes
        if self.limit - self.next > self.most // 2 and left > most_bytes // 2:
            return False
        self.limit = self.next + self.most
        self.limit_bytes = self.passed_bytes + most_bytes
        return True

    def passed(self, count: int, size: int) -> None:
        """Record `count` received frames of `size` bytes in total."""
        self.next += count
        self.passed_bytes += size

    def passing(self, frames: Sequence[bytes]) -> Sequence[bytes]:
        """Advance past the frames that may be sent now and return them.

        The caller has limited their number with `wanted`, so here only the byte limit can leave
        out some of them.
        """
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
        """Return how many of the frames before index `released` may be sent now."""
        # Not min() and max(): they take three times as long, and this runs for every token.
        most = (self.limit if self.limit < released else released) - self.next
        if self.limit_bytes is not None:
            room = self.limit_bytes - self.passed_bytes
            # Estimate how many frames the byte limit allows. Frames may be large, so fetching more
            # than these would be wasted work.
            fits = room // self.frame_bytes + 1 if room > 0 else 0
            most = fits if fits < most else most
        if most > READ_FRAMES:
            return READ_FRAMES
        return most if most > 0 else 0
