"""The times of `triggers.crons`, as Cloudflare reads them: checked, field by field."""

from __future__ import annotations

import re
from typing import NamedTuple

MONTHS = "jan feb mar apr may jun jul aug sep oct nov dec".split()
DAYS = "sun mon tue wed thu fri sat".split()


class Field(NamedTuple):
    """A field of a cron expression; `special` is what it may be besides numbers and names."""

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


FIELDS = (
    Field("minute", 0, 59, [], ""),
    Field("hour", 0, 23, [], ""),
    Field("day of the month", 1, 31, [], r"L|LW|(?P<value>\d+)W"),
    Field("month", 1, 12, MONTHS, ""),
    # Sunday is 1; `6L` is the last Friday of a month, `6#2` the second one.
    Field("day of the week", 1, 7, DAYS, r"L|(?P<value>\w+?)(?:L|#[1-5])"),
)


def check(expression: str) -> None:
    """Raises ValueError naming the field and what it may be."""
    parts = expression.split()
    if len(parts) != len(FIELDS):
        names = ", ".join(field.name for field in FIELDS)
        raise ValueError(f"has {len(parts)} fields, not five: {names}")
    for place, (field, text) in enumerate(zip(FIELDS, parts, strict=True), 1):
        try:
            for item in text.split(","):
                _check_item(field, item)
        except ValueError as error:
            raise ValueError(f"field {place}, {field.name}: {error}") from None


def _check_item(field: Field, item: str) -> None:
    if field.special and (special := re.fullmatch(field.special, item, re.IGNORECASE)):
        if value := special["value"]:
            field.number(value)
        return
    span, slash, step = item.partition("/")
    if slash and not (step.isascii() and step.isdigit() and 1 <= int(step) <= field.high):
        raise ValueError(f"a step is 1-{field.high}, not {step!r}")
    if span == "*":
        return
    first, dash, last = span.partition("-")
    begin = field.number(first)
    if dash and field.number(last) < begin:
        raise ValueError(f"{span!r} ends before it begins")
