"""Alarms: when one that failed is tried again, and the loop that wakes objects.

At least once, as Cloudflare documents it for Durable Objects: an alarm stays stored until
its handler has succeeded, is tried again after 2, 4, 8, 16, 32 and 64 s, and then dropped.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple, Protocol

import structlog

from ledger.errors import TailraceError
from ledger.interface import Alarm, ObjectKey, ObjectStore

MAX_ALARMS_AT_ONCE = 64
"""Alarm handlers that run at the same time; the others wait, earliest first. Those of classes
with a number of their own do not count."""
POLL_MS = 5_000
"""The store is looked at so often even if nothing wakes the loop: another origin that shares
it may have set an alarm and died."""
HORIZON_MS = 2**62
"""A Unix time that no alarm is after."""

log = structlog.get_logger("objects")


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How often a failed alarm is tried again, and after how many ms: not a `Backoff`, since
    Cloudflare documents the very delays."""

    first_ms: int = 2_000  # and twice as long each time
    most: int = 6

    def delay_ms(self, retry: int) -> int:
        """How long after a failure the retry number `retry` (1, 2, …) begins."""
        return self.first_ms << max(0, min(retry, self.most) - 1)

    def after(self, alarm: Alarm, now_ms: int) -> Alarm | None:
        """What a failed alarm becomes; None when it has been tried often enough."""
        retry = alarm.retries + 1
        return None if retry > self.most else Alarm(now_ms + self.delay_ms(retry), retry)


class Timer(Protocol):
    """How the loop waits; tests give one that they move by hand."""

    async def wait(self, wake: asyncio.Event, until_ms: int) -> None:
        """Until `wake` is set or it is `until_ms` (Unix time)."""


class LoopTimer:
    """Waits with the timers of the event loop."""

    def __init__(self, now_ms: Callable[[], int]) -> None:
        self._now_ms = now_ms

    async def wait(self, wake: asyncio.Event, until_ms: int) -> None:
        try:
            async with asyncio.timeout(max(0, until_ms - self._now_ms()) / 1000):
                await wake.wait()
        except TimeoutError:
            return


class Held(NamedTuple):
    """An alarm that failed and could not even be stored as failed: not before `until_ms`."""

    alarm: Alarm
    until_ms: int
    times: int


class Alarms:
    """Starts the handlers of due alarms; `ring` runs one and raises what it raises."""

    def __init__(
        self,
        store: ObjectStore,
        ring: Callable[[ObjectKey], Coroutine[None, None, None]],
        now_ms: Callable[[], int],
        wake: asyncio.Event,
        policy: RetryPolicy,
        at_once: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        self._store = store
        self._ring = ring
        self._now_ms = now_ms
        self._wake = wake
        self._policy = policy
        self._at_once = at_once  # by class, of those that have a number of their own
        self._running: dict[ObjectKey, asyncio.Task[None]] = {}
        self._held: dict[ObjectKey, Held] = {}

    async def start_due(self) -> int:
        """Start what is due; returns when to look again, in Unix ms."""
        # What runs or is held is still stored, so it takes up places in the answer.
        limit = MAX_ALARMS_AT_ONCE + sum(self._at_once.values())
        limit += len(self._running) + len(self._held)
        try:
            rows = await self._store.due(HORIZON_MS, limit)
        except TailraceError as error:
            log.warning("alarms.unknown", error=str(error))
            return self._now_ms() + self._policy.first_ms
        now = self._now_ms()
        self._forget_held(dict(rows))
        again = now + POLL_MS
        for key, alarm in rows:
            at_ms = max(alarm.at_ms, self._held[key].until_ms if key in self._held else 0)
            if at_ms > now:
                again = min(again, at_ms)
            elif key not in self._running and self._has_place(key.kind):
                self._start(key, alarm)
        return again

    async def ended(self) -> None:
        """Wait for the handlers that run now."""
        if self._running:
            await asyncio.wait(self._running.values())

    def _has_place(self, kind: str) -> bool:
        if kind in self._at_once:
            return sum(key.kind == kind for key in self._running) < self._at_once[kind]
        shared = sum(key.kind not in self._at_once for key in self._running)
        return shared < MAX_ALARMS_AT_ONCE

    def _start(self, key: ObjectKey, alarm: Alarm) -> None:
        task = self._running[key] = asyncio.get_running_loop().create_task(self._ring(key))

        def ended(task: asyncio.Task[None]) -> None:
            del self._running[key]
            self._wake.set()
            error = None if task.cancelled() else task.exception()
            if error is not None:
                log.warning("alarm.failed", kind=key.kind, name=key.name, error=repr(error))
                self._hold(key, alarm)

        task.add_done_callback(ended)

    def _hold(self, key: ObjectKey, alarm: Alarm) -> None:
        """Come back to this very alarm later; one that was stored as failed is another."""
        times = self._held[key].times + 1 if key in self._held else 1
        until_ms = self._now_ms() + self._policy.delay_ms(times)
        self._held[key] = Held(alarm, until_ms, times)

    def _forget_held(self, stored: dict[ObjectKey, Alarm]) -> None:
        self._held = {
            key: held for key, held in self._held.items() if stored.get(key) == held.alarm
        }
