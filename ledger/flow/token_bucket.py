"""A token bucket: an average rate, with bursts after a quiet time. Sans-I/O."""

from __future__ import annotations


class TokenBucket:
    """A bucket that fills at `rate` per second up to `most`; full at `now` (in seconds)."""

    def __init__(self, rate: float, most: float, now: float) -> None:
        self._rate = rate
        self._most = most
        self._level = most
        self._at = now

    def set_rate(self, rate: float, most: float, now: float) -> None:
        """Change rate and capacity. The level stays, up to the new capacity."""
        self._fill(now)
        self._rate, self._most = rate, most
        self._level = min(self._level, most)

    def take(self, count: float, now: float) -> float:
        """Take `count` and return 0, or return the seconds until the level is high enough."""
        self._fill(now)
        if self._level >= count:
            self._level -= count
            return 0.0
        return (count - self._level) / self._rate

    def level(self, now: float) -> float:
        """Return the level; negative for a debt."""
        self._fill(now)
        return self._level

    def full_in_s(self, now: float) -> float:
        """Return the seconds until the bucket is full if nothing more is taken."""
        self._fill(now)
        return (self._most - self._level) / self._rate

    def charge(self, count: float, now: float) -> None:
        """Take what has been used already, even if that leaves a debt."""
        self._fill(now)
        self._level -= count

    def _fill(self, now: float) -> None:
        self._level = min(self._most, self._level + (now - self._at) * self._rate)
        self._at = now
