"""Budgets of API keys: how many tokens a key may use in a UTC day and in a UTC month.

The tokens of ended streams come from the ledger, which several origins may share. The sums of a
key's tokens by day are read when the key is first seen, and again every few seconds. The tokens of
streams that have ended at this origin since then, and of those that run at this origin, are added.
So the tokens that other origins of the ledger have used in the meantime are missing for some
seconds, and the last requests before the limit may exceed it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tailrace.ledger.errors import TooManyRequests
from tailrace.ledger.frame import Caller
from tailrace.ledger.usage import DAY_MS, month_start_ms, next_month_ms

DAY_SPENT = "day_budget_spent"
MONTH_SPENT = "month_budget_spent"
IDLE_KEY_S = 600.0
"""Seconds without a request after which the token sums of an API key are forgotten."""


def has_budget(caller: Caller | None) -> bool:
    """Return True if a caller's key has a budget."""
    if caller is None:
        return False
    return caller.tokens_per_day is not None or caller.tokens_per_month is not None


@dataclass(slots=True)
class _Spending:
    """The tokens of one key.

    `by_day` has the sums that were last read from the ledger, and `since` the tokens of streams
    that have ended here since then. While the sums are read again, `reading` has the tokens of
    streams that have ended here since this reading began; otherwise it is None.
    """

    by_day: dict[int, int]
    used_s: float
    since: int = 0
    reading: int | None = None


@dataclass(slots=True)
class Spent:
    """The tokens that a key has used in the current day and month."""

    day: int
    month: int


@dataclass(slots=True)
class Budgets:
    """The spending of the keys that have a budget and were used lately.

    Times in seconds are of the core's clock; `now_ms` is Unix time.
    """

    _keys: dict[str, _Spending] = field(default_factory=dict)

    def knows(self, key: str) -> bool:
        """Return True if the token sums of a key were read from the ledger and not forgotten."""
        return key in self._keys

    def begin(self, key: str) -> None:
        """Note that the caller begins to read the token sums of a key from the ledger.

        The sums may or may not include streams that end during the reading.
        """
        if (known := self._keys.get(key)) is not None:
            known.reading = 0

    def learn(self, key: str, from_day: int, by_day: Mapping[int, int], now: float) -> None:
        """Store a key's token sums by day that were read from `from_day` on; earlier days stay."""
        known = self._keys.setdefault(key, _Spending({}, now))
        kept = {day: tokens for day, tokens in known.by_day.items() if day < from_day}
        known.by_day = kept | dict(by_day)
        known.since, known.reading = known.reading or 0, None

    def stale(self, now: float) -> list[str]:
        """Forget keys that are no longer used; return the others, whose sums must be read again."""
        self._keys = {
            key: known for key, known in self._keys.items() if now - known.used_s < IDLE_KEY_S
        }
        return list(self._keys)

    def ended(self, key: str, tokens: int) -> None:
        """Note that a stream of a key has ended at this origin, and used this number of tokens."""
        if (known := self._keys.get(key)) is not None:
            known.since += tokens
            if known.reading is not None:
                known.reading += tokens

    def spent(self, key: str, running: int, now_ms: int) -> Spent:
        """Return the tokens that a key has used, with `running` tokens of unfinished streams."""
        known = self._keys.get(key)
        if known is None:
            return Spent(running, running)
        today, first = now_ms // DAY_MS, month_start_ms(now_ms) // DAY_MS
        day = known.by_day.get(today, 0)
        month = sum(tokens for at, tokens in known.by_day.items() if first <= at <= today)
        return Spent(day + known.since + running, month + known.since + running)

    def admit(self, caller: Caller, running: int, now: float, now_ms: int) -> None:
        """Admit a request of a key with a budget.

        Raises:
            TooManyRequests: The key has used up its budget.
        """
        if (known := self._keys.get(caller.key)) is not None:
            known.used_s = now
        spent = self.spent(caller.key, running, now_ms)
        ends = (now_ms // DAY_MS + 1) * DAY_MS, next_month_ms(now_ms)
        for code, name, used, most, end_ms in (
            (MONTH_SPENT, "month", spent.month, caller.tokens_per_month, ends[1]),
            (DAY_SPENT, "day", spent.day, caller.tokens_per_day, ends[0]),
        ):
            if most is not None and used >= most:
                raise TooManyRequests(
                    f"this API key has used {used} tokens of its {most} for this {name}",
                    code=code,
                    retryable=False,
                    hint=f"the next {name} begins at 00:00 UTC; the operator can raise the budget",
                    retry_after_ms=end_ms - now_ms,
                )
