"""The models of a pool and their schedules.

A schedule has the times of the week in which a model stays loaded, whatever the policy decides.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from datetime import datetime, time, timedelta
from math import inf
from zoneinfo import ZoneInfo

from tailrace.ledger.errors import CallerError
from tailrace.origin.pool.policies.policies import LOAD_S

DAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
RIGHT = (
    "write for instance 'mon-fri 08:00-18:00' or 'sat,sun 22:00-02:00 Europe/Berlin';"
    " the default zone is UTC"
)
_SPAN = re.compile(r"(\d\d):(\d\d)-(\d\d):(\d\d)")
MIDNIGHT = (24, 0)

LEAST_SIZE = 1e-6
"""Minimum size of a model in divisions by its size, because a model may take no memory."""


@dataclass(frozen=True, slots=True)
class OpenHours:
    """Period from `begin_s` to `end_s` (Unix s) in which a schedule keeps a model loaded."""

    begin_s: float
    end_s: float


@dataclass(frozen=True)
class Schedule:
    """A time span on some days of the week; it passes midnight if `end` is before `begin`."""

    days: frozenset[int]
    begin: time
    end: time
    zone: ZoneInfo

    @classmethod
    def parse(cls, text: str, field: str = "schedule") -> Schedule:
        """Parse `DAYS HH:MM-HH:MM [ZONE]`; raises CallerError that names the malformed part."""
        parts = text.lower().split() if text else []
        if len(parts) not in (2, 3):
            raise CallerError(f"{text!r} is not DAYS HH:MM-HH:MM [ZONE]", field=field, hint=RIGHT)
        days = frozenset(_days(parts[0], field))
        found = _SPAN.fullmatch(parts[1])
        if found is None:
            raise CallerError(f"{parts[1]!r} is not HH:MM-HH:MM", field=field, hint=RIGHT)
        hours = [int(one) for one in found.groups()]
        if (hours[0], hours[1]) == MIDNIGHT:
            raise CallerError(f"{parts[1]!r} begins at 24:00", field=field, hint="write 00:00")
        begin, end = (_time(hours[at], hours[at + 1], parts[1], field) for at in (0, 2))
        if begin == end and (hours[2], hours[3]) != MIDNIGHT:
            hint = "write 00:00-24:00 for the whole day"
            raise CallerError(
                f"{parts[1]!r} begins and ends at the same time", field=field, hint=hint
            )
        name = text.split()[2] if len(parts) == 3 else "UTC"
        try:
            zone = ZoneInfo(name)
        except (OSError, ValueError, KeyError):  # raised for an unknown or malformed name
            raise CallerError(f"unknown time zone {name!r}", field=field, hint=RIGHT) from None
        return cls(days, begin, end, zone)

    def next_hours(self, now: float) -> OpenHours:
        """Return the open hours at Unix time `now`, or else the next ones."""
        today = datetime.fromtimestamp(now, self.zone).date()
        for ahead in range(-1, 9):
            day = today + timedelta(days=ahead)
            if day.weekday() not in self.days:
                continue
            last = day if self.end > self.begin else day + timedelta(days=1)
            begin = datetime.combine(day, self.begin, self.zone).timestamp()
            end = datetime.combine(last, self.end, self.zone).timestamp()
            if now < end:
                return OpenHours(begin, end)
        return OpenHours(inf, inf)  # the schedule has no day


def _time(hour: int, minute: int, span: str, field: str) -> time:
    if (hour, minute) == MIDNIGHT:
        return time(0, 0)
    if hour > 23 or minute > 59:
        wrong = f"{hour:02}:{minute:02} in {span!r}"
        raise CallerError(f"{wrong} is not a time of day", field=field, hint="00:00 to 24:00")
    return time(hour, minute)


def _days(text: str, field: str) -> list[int]:
    if text == "daily":
        return list(range(7))
    found: list[int] = []
    for part in text.split(","):
        ends = part.split("-")
        if len(ends) > 2 or any(one not in DAYS for one in ends):
            hint = f"use daily, or {', '.join(DAYS)} with commas and hyphens"
            raise CallerError(f"{part!r} is not a day", field=field, hint=hint)
        first, last = DAYS.index(ends[0]), DAYS.index(ends[-1])
        found += [day % 7 for day in range(first, last + 7 * (last < first) + 1)]
    return found


@dataclass(frozen=True)
class PoolMember:
    """A model of the pool.

    `size` is its memory on its device, in the unit of the device's cap. `load_s` is the estimated
    time of a load, until one was measured. `shares` divides `size` among devices, for a model whose
    workers are on several.
    """

    name: str
    size: float = 1.0
    device: str = "cpu"
    load_s: float = LOAD_S
    is_pinned: bool = False
    schedules: tuple[Schedule, ...] = ()
    workers: int = 1
    shares: Mapping[str, float] = field(default_factory=dict)

    @property
    def devices(self) -> Collection[str]:
        """Names of the devices on which the model takes memory."""
        return self.shares or (self.device,)

    def on(self, device: str) -> float:
        """Return the memory that the model takes on a device; 0 if the model does not use it."""
        if self.shares:
            return self.shares.get(device, 0.0)
        return self.size if device == self.device else 0.0
