"""Cron expressions in Cloudflare's dialect: validation and the next time.

Five fields, in UTC; Sunday is 1. If both the day of the month and the day of the week are
restricted, a date needs to match only one of them.
"""

from __future__ import annotations

import re
from calendar import monthrange
from collections.abc import Iterator
from datetime import UTC, date, datetime, time, timedelta
from typing import NamedTuple

MONTHS = "jan feb mar apr may jun jul aug sep oct nov dec".split()
DAYS = "sun mon tue wed thu fri sat".split()
SEARCHED_DAYS = 3000
"""Number of days in which the next time is searched for. Two 29ths of February can be eight years
apart: 2096 and 2104."""


class Field(NamedTuple):
    """Rules for a field of a cron expression.

    `special` is a regular expression for values that are not numbers or names, such as `L`.
    """

    name: str
    low: int
    high: int
    names: list[str]
    special: str

    def number(self, text: str) -> int:
        if text.lower() in self.names:
            return self.names.index(text.lower()) + self.low
        if not (text.isascii() and text.isdigit() and self.low <= int(text) <= self.high):
            named = f" or {self.names[0]}-{self.names[-1]}" if self.names else ""
            raise ValueError(f"{text!r} is not in {self.low}-{self.high}{named}")
        return int(text)

    def numbers(self, item: str) -> frozenset[int]:
        """Return the numbers that `item`, which is not special, selects.

        Raises:
            ValueError: The item is invalid.
        """
        span, slash, step = item.partition("/")
        if slash and not (step.isascii() and step.isdigit() and 1 <= int(step) <= self.high):
            raise ValueError(f"a step is 1-{self.high}, not {step!r}")
        if span == "*":
            return frozenset(range(self.low, self.high + 1, int(step or 1)))
        first, dash, last = span.partition("-")
        begin = self.number(first)
        end = self.number(last) if dash else self.high if slash else begin
        if end < begin:
            raise ValueError(f"{span!r} ends before it begins")
        return frozenset(range(begin, end + 1, int(step or 1)))


MINUTE = Field("minute", 0, 59, [], "")
HOUR = Field("hour", 0, 23, [], "")
DAY = Field("day of the month", 1, 31, [], r"L|LW|(?P<value>\d+)W")
MONTH = Field("month", 1, 12, MONTHS, "")
# Sunday is 1; `6L` is the last Friday of a month, `6#2` the second one.
WEEKDAY = Field("day of the week", 1, 7, DAYS, r"L|(?P<value>\w+?)(?:L|#(?P<nth>[1-5]))")
FIELDS = (MINUTE, HOUR, DAY, MONTH, WEEKDAY)


class Said(NamedTuple):
    """A parsed field of a cron expression; `is_any` is True for the field `*`."""

    numbers: frozenset[int]
    special: list[re.Match[str]]
    is_any: bool


def check(expression: str) -> None:
    """Check a cron expression.

    Raises:
        ValueError: A field is invalid, or no month has a day that the expression names.
    """
    if next_after(expression, 0) is None:
        raise ValueError("never happens: no month has such a day")


def next_after(expression: str, at_ms: int) -> int | None:
    """Return the first matching minute after `at_ms` (Unix ms), or None if there is none."""
    minutes, hours, day, months, weekday = _read(expression)
    at = datetime.fromtimestamp(at_ms / 1000, UTC)
    for after in range(SEARCHED_DAYS):
        on = at.date() + timedelta(days=after)
        if on.month not in months.numbers or not _is_day(on, day, weekday):
            continue
        for hour in sorted(hours.numbers):
            for minute in sorted(minutes.numbers):
                found = datetime.combine(on, time(hour, minute), UTC)
                if found > at:
                    return int(found.timestamp() * 1000)
    return None


def _read(expression: str) -> Iterator[Said]:
    parts = expression.split()
    if len(parts) != len(FIELDS):
        names = ", ".join(field.name for field in FIELDS)
        raise ValueError(f"has {len(parts)} fields, not five: {names}")
    for place, (field, text) in enumerate(zip(FIELDS, parts, strict=True), 1):
        try:
            yield _field(field, text)
        except ValueError as error:
            raise ValueError(f"field {place}, {field.name}: {error}") from None


def _field(field: Field, text: str) -> Said:
    numbers: set[int] = set()
    special = []
    for item in text.split(","):
        if field.special and (found := re.fullmatch(field.special, item, re.IGNORECASE)):
            if found["value"]:
                field.number(found["value"])
            special.append(found)
        else:
            numbers |= field.numbers(item)
    return Said(frozenset(numbers), special, text == "*")


def _is_day(on: date, day: Said, weekday: Said) -> bool:
    in_month = on.day in day.numbers or any(_is_special_day(on, one) for one in day.special)
    number = _weekday(on)
    in_week = number in weekday.numbers or any(_is_special_weekday(on, s) for s in weekday.special)
    if day.is_any or weekday.is_any:
        return in_month and in_week
    return in_month or in_week


def _is_special_day(on: date, special: re.Match[str]) -> bool:
    last = monthrange(on.year, on.month)[1]
    word = special[0].upper()
    if word == "L":
        return on.day == last
    wanted = last if word == "LW" else int(special["value"])
    return wanted <= last and on == _nearest_workday(on.replace(day=wanted), last)


def _nearest_workday(day: date, last: int) -> date:
    """Return the workday nearest to `day` in its month, whose last day is `last`."""
    by = {6: -1 if day.day > 1 else 2, 7: 1 if day.day < last else -2}
    return day + timedelta(days=by.get(day.isoweekday(), 0))


def _is_special_weekday(on: date, special: re.Match[str]) -> bool:
    if special["value"] is None:  # `L` without a number is Saturday
        return _weekday(on) == WEEKDAY.high
    if _weekday(on) != WEEKDAY.number(special["value"]):
        return False
    if special["nth"] is None:
        return on.day + 7 > monthrange(on.year, on.month)[1]
    return (on.day - 1) // 7 + 1 == int(special["nth"])


def _weekday(on: date) -> int:
    return on.isoweekday() % 7 + 1
