"""How many tokens a step may take, so that it lasts about as long as it should."""

from __future__ import annotations

INCREASE_TOKENS = 8
DECREASE = 7 / 8


class BatchLimit:
    """Additive increase, multiplicative decrease (Chiu, Jain 1989), towards `seconds` a step.

    A step that took all it was allowed and was in time raises the limit by INCREASE_TOKENS, or
    doubles it while steps last less than half of the target; a step that was late lowers it to
    DECREASE of what that step took, but at most by half. This needs no model of the machine: a
    line fitted to (rows, prompt tokens, seconds) is not determined while all steps look alike,
    which is the normal case, and is wrong where long sequences make the cost a curve.

    It never falls below `least`: on a machine where even that is late, work goes on and is late.
    """

    def __init__(self, least: int, most: int, seconds: float) -> None:
        self._least = least
        self._most = most
        self._seconds = seconds
        self.tokens = least
        """What the next step may take."""

    @property
    def is_least(self) -> bool:
        return self.tokens == self._least

    def observe(self, tokens: int, seconds: float, *, full: bool) -> None:
        """A step of `tokens` took so long; `full`: the limit left something out."""
        if seconds > self._seconds:
            lower = max(int(min(tokens, self.tokens) * DECREASE), self.tokens // 2)
            self.tokens = max(self._least, lower)
        elif full:
            quick = seconds * 2 < self._seconds
            more = self.tokens * 2 if quick else self.tokens + INCREASE_TOKENS
            self.tokens = min(self._most, more)
