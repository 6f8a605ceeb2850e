"""How many rows of decoding a step may have, so that it is not late."""

from __future__ import annotations

DECREASE_DIVISOR = 8
MEAN_GAIN = 1 / 8


class RowLimit:
    """Additive increase, multiplicative decrease, as of `BatchLimit`, in rows instead of tokens.

    It is raised by a row after `patience` steps in time, one after the other, and quickly only
    while steps last less than half of the target; it begins with the `least`. Where a lowered limit
    comes about only as runs end, it is not lowered again before.

    Fewer rows are not always quicker. Where a step with hardly a row in it is late already (its
    time is that of reading the weights), there would only be fewer of them: it rises then, too.
    """

    def __init__(self, least: int, most: int, seconds: float, patience: int) -> None:
        self._least = least
        self._most = most
        self._seconds = seconds
        self._patience = patience
        self._alone: dict[bool, float] = {}  # mean seconds with `least` rows or fewer, by `chunks`
        self._in_time = 0
        self.rows = least
        """How many a step may have now."""

    def observe(self, rows: int, seconds: float, *, chunks: bool, wanted: bool) -> None:
        """A step of so many rows, and with or without `chunks` of prompts, took so long.

        `wanted`: there would have been more if they were let in.
        """
        if rows <= self._least:
            mean = self._alone.setdefault(chunks, seconds)
            self._alone[chunks] = mean + (seconds - mean) * MEAN_GAIN
        hopeless = self._alone.get(chunks, 0.0) > self._seconds
        if seconds > self._seconds and not hopeless:
            self._in_time = 0
            if rows <= self.rows:
                lower = rows - max(rows // DECREASE_DIVISOR, 1)
                self.rows = min(self.rows, max(self._least, lower))
        elif wanted and rows >= self.rows:
            self._rise(quickly=hopeless or seconds * 2 < self._seconds)

    def _rise(self, *, quickly: bool) -> None:
        self._in_time += 1
        if quickly or self._in_time >= self._patience:
            self._in_time = 0
            more = max(self.rows // DECREASE_DIVISOR, 1) if quickly else 1
            self.rows = min(self._most, self.rows + more)
