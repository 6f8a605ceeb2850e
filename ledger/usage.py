"""The usage of generations: one row for each stream that has ended, and sums of such rows.

A row is made from the record of the StreamEnd (`end_usage.py`), so the log alone decides what is
counted: a StreamEnd is stored once, whoever wrote it, and however often the stream was cut, resumed
or taken over. The ledger stores the row in the same commit as the end of the stream, and keeps it
when the stream itself has expired.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from typing import NamedTuple

DAY_MS = 86_400_000
MAX_DAY = 100_000
"""The last day that `day_name` can name, in days since 1970: a day in the year 2243."""
DEFAULT_USAGE_RETENTION_S = 400 * 86_400
"""Seconds for which usage is kept by default: 400 days, so that a whole year can be billed."""


class Usage(NamedTuple):
    """The usage of one stream that has ended, as it is stored.

    `ended_ms` is the Unix time at which the end was written. `priority` is the class of the
    request, and `finish` the finish reason. Of `prompt_tokens`, `cached_tokens` were found in the
    KV cache. Of `output_tokens`, `reasoning_tokens` were reasoning, and `delivered_tokens` were
    sent to a reader; the other output tokens are unread.
    """

    stream: bytes
    ended_ms: int
    tenant: str
    key: str
    model: str
    priority: str
    finish: str
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    reasoning_tokens: int
    delivered_tokens: int

    @property
    def counts(self) -> UsageCounts:
        output, delivered = self.output_tokens, self.delivered_tokens
        return UsageCounts(
            1,
            self.prompt_tokens,
            self.cached_tokens,
            output,
            self.reasoning_tokens,
            delivered,
            output - delivered,
        )


class UsageCounts(NamedTuple):
    """The usage of several streams together; `unread_tokens` are output sent to no reader."""

    streams: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    reasoning_tokens: int = 0
    delivered_tokens: int = 0
    unread_tokens: int = 0

    def plus(self, other: Sequence[int]) -> UsageCounts:
        return UsageCounts(*map(int.__add__, self, other))


COUNTED = (
    "prompt_tokens",
    "cached_tokens",
    "output_tokens",
    "reasoning_tokens",
    "delivered_tokens",
)
"""The columns of a `Usage` that are summed."""


def delivered(usage: Usage, tokens: int) -> Usage:
    """Return a copy of the row with `delivered_tokens` raised to `tokens`.

    A higher count stays, and the new count is at most that of the output tokens.
    """
    tokens = min(max(usage.delivered_tokens, tokens), usage.output_tokens)
    return usage._replace(delivered_tokens=tokens)


# ---- sums ----

FILTERS = ("tenant", "key", "model", "priority", "finish")
"""Columns whose value a query can require of the rows that it sums."""
GROUPS = ("day", "month", *FILTERS)
"""Names by which a query can group its sums: columns, and days and months in UTC."""


@dataclass(frozen=True, slots=True)
class UsageQuery:
    """A query for sums of the usage of streams that ended from `from_ms` on, before `to_ms`.

    `by` are names of `GROUPS`; without any there is one sum. `where` maps columns of `FILTERS` to
    the value that rows must have. Both times are Unix times; `to_ms` is None for no limit.
    """

    by: tuple[str, ...] = ()
    from_ms: int = 0
    to_ms: int | None = None
    where: Mapping[str, str] | None = None

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns by which the database groups: days instead of months.

        `UsageSums` adds up the days of each month.
        """
        return tuple(dict.fromkeys("day" if name == "month" else name for name in self.by))

    @property
    def choices(self) -> list[tuple[str, str]]:
        return sorted((self.where or {}).items())


UsageRow = tuple[tuple[str, ...], UsageCounts]
"""The values of a query's `by` columns for one group, in order, and the sums of its rows."""


class UsageSums:
    """Sums of usage by the groups of a query."""

    def __init__(self, query: UsageQuery) -> None:
        self._query = query
        self._sums: dict[tuple[str, ...], UsageCounts] = {}

    def add(self, group: Sequence[int | str], counts: Sequence[int]) -> None:
        """Add the sums of one group from a database; `group` has a value for each of `columns`."""
        values = dict(zip(self._query.columns, group, strict=True))
        names = tuple(_name(values, name) for name in self._query.by)
        self.add_row(names, counts)

    def add_row(self, names: tuple[str, ...], counts: Sequence[int]) -> None:
        """Add the sums of one group from another `UsageSums` with the same query."""
        self._sums[names] = self._sums.get(names, UsageCounts()).plus(counts)

    def add_usage(self, usage: Usage) -> None:
        """Add one stream, unless the query excludes it."""
        query = self._query
        is_late = query.to_ms is not None and usage.ended_ms >= query.to_ms
        if usage.ended_ms < query.from_ms or is_late:
            return
        if any(getattr(usage, column) != value for column, value in query.choices):
            return
        day = usage.ended_ms // DAY_MS
        group = [day if name == "day" else getattr(usage, name) for name in query.columns]
        self.add(group, usage.counts)

    @property
    def rows(self) -> list[UsageRow]:
        """Return the sums, ordered by their groups."""
        return sorted(self._sums.items())

    def by_day(self, of: Callable[[UsageCounts], int]) -> dict[int, int]:
        """Return a number for each day: `of` chooses it from the day's sums.

        The query must be grouped by `day` only. The keys are days since 1970.
        """
        first = date(1970, 1, 1)
        return {
            (date.fromisoformat(day) - first).days: of(counts)
            for (day,), counts in self._sums.items()
        }

    @property
    def total(self) -> UsageCounts:
        total = UsageCounts()
        for counts in self._sums.values():
            total = total.plus(counts)
        return total


def _name(values: Mapping[str, int | str], name: str) -> str:
    if name == "month":
        return day_name(int(values["day"]))[:7]
    return day_name(int(values["day"])) if name == "day" else str(values[name])


def sql_of(query: UsageQuery, placeholder: str) -> tuple[str, list[int | str]]:
    """Return the SQL of a query for the table `usage`, and its parameters.

    Each row of its result has the values of `UsageQuery.columns`, the number of streams, the sums
    of `COUNTED`, and the unread tokens. `placeholder` is `?`, or `$` for numbered parameters.
    """
    groups = [f"ended_ms / {DAY_MS}" if each == "day" else each for each in query.columns]
    sums = [f"coalesce(sum({each}), 0)" for each in COUNTED]
    unread = "coalesce(sum(output_tokens - delivered_tokens), 0)"
    selected = ", ".join([*groups, "count(*)", *sums, unread])
    parameters: list[int | str] = [query.from_ms]
    tests = ["ended_ms >= "]
    if query.to_ms is not None:
        tests.append("ended_ms < ")
        parameters.append(query.to_ms)
    for column, value in query.choices:
        tests.append(f"{column} = ")
        parameters.append(value)
    marked = (
        f"{test}{placeholder}{at if placeholder == '$' else ''}"
        for at, test in enumerate(tests, start=1)
    )
    text = f"SELECT {selected} FROM usage WHERE {' AND '.join(marked)}"
    if groups:
        text += f" GROUP BY {', '.join(map(str, range(1, len(groups) + 1)))}"
    return text, parameters


# ---- days ----


def day_name(day: int) -> str:
    """Return the date, such as 2026-11-28, of a day that is given in days since 1970."""
    moment = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(days=min(day, MAX_DAY))
    return moment.date().isoformat()


def month_start_ms(now_ms: int) -> int:
    """Return the Unix time in ms at which the month of `now_ms` began, in UTC."""
    return int(_month_start(now_ms).timestamp() * 1000)


def next_month_ms(now_ms: int) -> int:
    """Return the Unix time in ms at which the next month begins, in UTC."""
    later = (_month_start(now_ms) + timedelta(days=32)).replace(day=1)
    return int(later.timestamp() * 1000)


def _month_start(now_ms: int) -> datetime:
    now = datetime.fromtimestamp(now_ms / 1000, UTC)
    return now.replace(day=1, hour=0, minute=0, second=0, microsecond=0)
