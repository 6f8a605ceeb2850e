"""Unix time that does not leap ahead, so that setting a clock ends nothing that has time left.

Retention, and the TTLs of objects, are spans of time; the system's clock may be stepped by a
day. So a step ahead is followed at once by a minute only, and then at twice the pace of time;
one back is followed at once, which lets things live longer. A restart goes on where the
process before it was, as long as the system has been up: the time in between is known then.
After another boot nothing can tell a step from a long pause, and the system's clock is believed.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import structlog

from tailrace.ledger.process.durable_file import replace_file
from tailrace.ledger.process.lifecycle import boot_id

MAX_LEAP_MS = 60_000
"""What the clock may be set ahead by at once, and by as much again in each such time."""
MARK_NAME = "clock.json"
_UPTIME = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)  # with the time of a suspend

log = structlog.get_logger("origin")


@dataclass(frozen=True, slots=True)
class ClockMark:
    """What the time was, when the system `boot` had been up for so long."""

    boot: str
    uptime_ms: int
    now_ms: int


class SteadyClock:
    """Gives Unix time in ms. `before` is a mark of this boot, of a process before this one."""

    def __init__(
        self,
        system_ms: Callable[[], int],
        uptime_ms: Callable[[], int],
        before: ClockMark | None = None,
    ) -> None:
        self._system_ms = system_ms
        self._up_ms = uptime_ms
        self._uptime = uptime_ms()
        self._now = system_ms()
        self._may_leap = MAX_LEAP_MS
        if before is not None and before.uptime_ms <= self._uptime:
            self._now, self._uptime, self._may_leap = before.now_ms, before.uptime_ms, 0

    def __call__(self) -> int:
        system, uptime = self._system_ms(), self._up_ms()
        passed, self._uptime = uptime - self._uptime, uptime
        self._may_leap = min(MAX_LEAP_MS, self._may_leap + passed)
        leap = min(system - self._now - passed, self._may_leap)
        self._may_leap -= max(0, leap)
        self._now += passed + leap
        return self._now

    @property
    def behind_ms(self) -> int:
        """How much of a step ahead it has not followed yet."""
        return self._system_ms() - self()


class KeptClock(SteadyClock):
    """The clock of this machine, in step with the processes that used the same folder before."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / MARK_NAME
        self._boot = boot_id().decode()
        super().__init__(now_ms, uptime_ms, _read(self._path, self._boot))
        self._told = False

    def keep(self) -> None:
        """Leave a mark for the next process, and tell of steps that are not followed yet."""
        behind_s = self.behind_ms // 1_000
        if self._told is not (behind_s > 0):
            self._told = not self._told
            if self._told:
                log.warning("clock.stepped", ahead_s=behind_s, hint="retention follows slowly")
            else:
                log.info("clock.followed")
        mark = ClockMark(self._boot, self._uptime, self._now)
        with suppress(OSError):  # without it the next process believes the system's clock
            # After a power cut it is another boot, of which this mark says nothing.
            replace_file(self._path, json.dumps(asdict(mark)).encode(), sync=False)


def _read(path: Path, boot: str) -> ClockMark | None:
    """The mark that a process of this boot left, if there is a whole one."""
    try:
        stored = json.loads(path.read_text())
        mark = ClockMark(str(stored["boot"]), int(stored["uptime_ms"]), int(stored["now_ms"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return mark if boot and mark.boot == boot else None


def now_ms() -> int:
    """Unix time in milliseconds, as the system has it."""
    return time.time_ns() // 1_000_000


def uptime_ms() -> int:
    """How long the system has been up, in milliseconds; no step changes it."""
    return time.clock_gettime_ns(_UPTIME) // 1_000_000
