"""A token bucket: so much a second on average, and more at once after a quiet time.

Plain arithmetic over a clock that the caller reads.
"""

from __future__ import annotations


class Bucket:
    """Fills at `rate` a second up to `most`, and is full at `now`, in seconds."""

    def __init__(self, rate: float, most: float, now: float) -> None:
        self._rate = rate
        self._most = most
        self._level = most
        self._at = now

    def set_rate(self, rate: float, most: float, now: float) -> None:
        """Fill at another rate from now on; what is in it stays, as far as there is room."""
        self._fill(now)
        self._rate, self._most = rate, most
        self._level = min(self._level, most)

    def take(self, count: float, now: float) -> float:
        """Take out `count` where there is so much, and give 0; else the seconds until there is."""
        self._fill(now)
        if self._level >= count:
            self._level -= count
            return 0.0
        return (count - self._level) / self._rate

    def level(self, now: float) -> float:
        """Return how much is in it; negative for a debt."""
        self._fill(now)
        return self._level

    def full_in_s(self, now: float) -> float:
        """Return the seconds until it is full, if nothing more is taken out."""
        self._fill(now)
        return (self._most - self._level) / self._rate

    def charge(self, count: float, now: float) -> None:
        """Take out what has been used already; it may leave a debt."""
        self._fill(now)
        self._level -= count

    def _fill(self, now: float) -> None:
        self._level = min(self._most, self._level + (now - self._at) * self._rate)
        self._at = now
