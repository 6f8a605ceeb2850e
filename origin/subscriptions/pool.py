"""Who may deliver now: a bounded pool, in which no host keeps the others from their turn."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from ledger.errors import Unavailable

FAILURES = 3
"""Deliveries to a host, one after the other, that get no answer before it is left alone."""
FIRST_PAUSE_MS = 10_000
"""How long it is left alone at first; twice as long after each trial that fails."""
MAX_PAUSE_MS = 600_000

MAX_DELIVERIES = 256
"""Under way at the same time; a half of them for hosts whose last delivery got no answer."""
MAX_DELIVERIES_PER_HOST = 4
"""Under way to one host at the same time."""
MAX_HOSTS = 4_096
"""Hosts whose failures are remembered; the one that has failed longest ago is forgotten."""


@dataclass(frozen=True, slots=True)
class Breaker:
    """How a host has done lately. Any answer, also an error, says that it is there."""

    failures: int = 0
    """One after the other, the last deliveries."""
    until_ms: int = 0
    """It is left alone until then (Unix ms)."""

    def is_open(self, now_ms: int) -> bool:
        return now_ms < self.until_ms

    def at_once(self, most: int) -> int:
        """Deliveries that it may have at the same time: one that was left alone is on trial."""
        return 1 if self.failures >= FAILURES else most

    def after(self, *, answered: bool, now_ms: int) -> Breaker:
        """The same host after one more delivery."""
        if answered:
            return Breaker()
        failures = self.failures + 1
        if failures < FAILURES:
            return Breaker(failures)
        doublings = min(failures - FAILURES, 10)
        return Breaker(failures, now_ms + min(FIRST_PAUSE_MS << doublings, MAX_PAUSE_MS))


class Resting(Unavailable):
    """The host has not answered lately, and is left alone for now."""


@dataclass(slots=True)
class Host:
    breaker: Breaker = field(default_factory=Breaker)
    running: int = 0


@dataclass(slots=True, eq=False)
class Slot:
    """A place in the pool, or in its queue; who holds it says whether the host has answered."""

    host: str
    granted: asyncio.Future[None]
    running: bool = False
    failing: bool = False
    """The last delivery to the host had no answer."""
    answered: bool | None = None


class HostPool:
    """Slots, given in the order of coming to those whose host may have one.

    Whose host has failed comes after the others, and has half of the places at most: those
    who answer wait for none who do not.
    """

    def __init__(self, now_ms: Callable[[], int], size: int = MAX_DELIVERIES) -> None:
        self._now_ms = now_ms
        self._size = size
        self._hosts: dict[str, Host] = {}
        self._running = 0
        self._failing = 0
        self._waiting: dict[Slot, None] = {}

    @asynccontextmanager
    async def slot(self, host: str) -> AsyncIterator[Slot]:
        """A place to deliver to `host`, once there is one; Resting if it is left alone."""
        slot = Slot(host, asyncio.get_running_loop().create_future())
        self._waiting[slot] = None
        self._grant()
        try:
            await slot.granted
            yield slot
        finally:
            self._waiting.pop(slot, None)
            if slot.running:
                self._leave(slot)
                self._grant()

    def _grant(self) -> None:
        for failing in (False, True):
            for slot in tuple(self._waiting):
                host = self._hosts.setdefault(slot.host, Host())
                if failing != (host.breaker.failures > 0) or slot.granted.done():
                    continue
                if host.breaker.is_open(self._now_ms()):
                    del self._waiting[slot]
                    slot.granted.set_exception(Resting(f"{slot.host} has not answered lately"))
                elif self._has_room(host, failing=failing):
                    self._enter(slot, host, failing=failing)

    def _has_room(self, host: Host, *, failing: bool) -> bool:
        return (
            self._running < self._size
            and host.running < host.breaker.at_once(MAX_DELIVERIES_PER_HOST)
            and not (failing and self._failing >= self._size // 2)
        )

    def _enter(self, slot: Slot, host: Host, *, failing: bool) -> None:
        del self._waiting[slot]
        slot.running, slot.failing = True, failing
        self._running += 1
        self._failing += failing
        host.running += 1
        slot.granted.set_result(None)

    def _leave(self, slot: Slot) -> None:
        host = self._hosts.pop(slot.host)
        self._running -= 1
        self._failing -= slot.failing
        host.running -= 1
        if slot.answered is not None:
            host.breaker = host.breaker.after(answered=slot.answered, now_ms=self._now_ms())
        if host.running or host.breaker.failures:
            self._hosts[slot.host] = host  # the last to be forgotten
        if len(self._hosts) > MAX_HOSTS:
            idle = next((name for name, host in self._hosts.items() if not host.running), None)
            self._hosts.pop(idle or "", None)
