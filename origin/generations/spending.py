"""Reads from the ledger how many tokens the API keys with a budget have used."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from tailrace.ledger.interface import Ledger
from tailrace.ledger.usage import DAY_MS, UsageCounts, UsageQuery, month_start_ms
from tailrace.origin.core.budgets import Budgets

REFRESH_S = 10.0
"""Interval in seconds at which the sums of tokens per key are read again."""
LATE_DAYS = 1
"""Number of days before today whose sums are read again: another origin's clock may be behind, and
rows of streams that ended at midnight may come late."""


class SpendingReader:
    """Keeps the token sums in `budgets` up to date.

    `clock` is the core's clock, and `now_ms` returns Unix time.
    """

    def __init__(
        self,
        ledger: Ledger,
        budgets: Budgets,
        clock: Callable[[], float],
        now_ms: Callable[[], int],
    ) -> None:
        self._ledger = ledger
        self._budgets = budgets
        self._clock, self._now_ms = clock, now_ms
        self._reading = asyncio.Lock()
        self._refreshed_s = clock()

    async def know(self, key: str) -> None:
        """Read how many tokens a key has used on each day of this month, unless that is known."""
        async with self._reading:
            if not self._budgets.knows(key):
                await self._read(key, month_start_ms(self._now_ms()) // DAY_MS)

    async def refresh(self) -> None:
        """If REFRESH_S have passed, read the latest sums of all keys in use again."""
        if self._clock() - self._refreshed_s < REFRESH_S:
            return
        async with self._reading:
            for key in self._budgets.stale(self._clock()):
                await self._read(key, self._now_ms() // DAY_MS - LATE_DAYS)
        self._refreshed_s = self._clock()

    async def _read(self, key: str, from_day: int) -> None:
        self._budgets.begin(key)
        query = UsageQuery(("day",), max(0, from_day) * DAY_MS, where={"key": key})
        sums = await self._ledger.usage(query)
        self._budgets.learn(key, from_day, sums.by_day(tokens_of), self._clock())


def tokens_of(counts: UsageCounts) -> int:
    """Return the tokens that count towards a budget: those of prompts and of outputs."""
    return counts.prompt_tokens + counts.output_tokens
