"""A Unix clock without large jumps ahead, so that nothing expires early if the clock is set.

Retention and the TTLs of objects are durations, but the system's clock may be stepped, even by a
day. After a step ahead, this clock jumps by at most a minute and then runs at twice the normal
speed until it has caught up. It follows a step back at once, which only makes things live longer.
After a restart of the process, the clock continues from the previous process. After a reboot of
the system a step cannot be told from a long downtime, so the system's clock is used.
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
"""Limit in ms on how far this clock jumps ahead at once to follow the system's clock. Each
millisecond that passes allows one more millisecond of jumps, up to this limit."""
MARK_NAME = "clock.json"
# CLOCK_BOOTTIME also counts while the system is suspended.
_UPTIME = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)

log = structlog.get_logger("origin")


@dataclass(frozen=True, slots=True)
class ClockMark:
    """A reading of the clock: it showed `now_ms` when the system had been up for `uptime_ms`.

    `boot` identifies the boot of the system, because uptimes of different boots are not comparable.
    """

    boot: str
    uptime_ms: int
    now_ms: int


class SteadyClock:
    """A callable that returns Unix time in ms.

    With `before`, a reading that an earlier process in the same boot stored, the clock continues
    from that reading.
    """

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
        self._behind = 0
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
        self._behind = system - self._now
        return self._now

    @property
    def behind_ms(self) -> int:
        """Milliseconds that this clock still has to catch up after a step ahead."""
        self()
        return self._behind


class KeptClock(SteadyClock):
    """A steady clock whose reading is stored in the data folder, so that it survives restarts."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / MARK_NAME
        self._boot = boot_id().decode()
        super().__init__(now_ms, uptime_ms, _read(self._path, self._boot))
        self._told = False

    def keep(self) -> None:
        """Store a reading for the next process; log if the clock lags or has caught up."""
        behind_s = self.behind_ms // 1_000
        if self._told is not (behind_s > 0):
            self._told = not self._told
            if self._told:
                log.warning(
                    "clock.stepped",
                    ahead_s=behind_s,
                    hint="streams and objects expire late until this clock has caught up",
                )
            else:
                log.info("clock.caught_up")
        mark = ClockMark(self._boot, self._uptime, self._now)
        with suppress(OSError):  # if this fails, the next process uses the system's clock
            # Not synced, because the reading is worthless after a power cut, which ends this boot.
            replace_file(self._path, json.dumps(asdict(mark)).encode(), sync=False)


def _read(path: Path, boot: str) -> ClockMark | None:
    """Return the reading in a file; None if it is invalid or from an earlier boot."""
    try:
        stored = json.loads(path.read_text())
        mark = ClockMark(str(stored["boot"]), int(stored["uptime_ms"]), int(stored["now_ms"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return mark if boot and mark.boot == boot else None


def now_ms() -> int:
    """Return the system's Unix time in milliseconds."""
    return time.time_ns() // 1_000_000


def uptime_ms() -> int:
    """Return the system's uptime in milliseconds; steps of the clock do not change it."""
    return time.clock_gettime_ns(_UPTIME) // 1_000_000
