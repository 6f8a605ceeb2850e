"""Text for a running generation, from its request until it is durable in the log."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from random import Random

from ledger.backoff import spread_ms
from ledger.errors import Overloaded, TailraceError
from origin.workers.worker_frame import STEER_BEGINS, Steer

MAX_PENDING_STEERS = 16
"""Of one stream."""
RETRY_MS = 1_000


@dataclass(slots=True)
class Steering:
    """The Steer orders of one stream that are not known to be durable, in order.

    A worker takes them in order and says with each emission how many it has taken; the log
    marks where each begins. So what is still pending when the stream is taken over is exactly
    what the next worker is to be sent.
    """

    _pending: deque[tuple[Steer, asyncio.Future[None]]] = field(default_factory=deque)
    _in_run: int = 0  # durable, of those sent with the run
    _in_log: int | None = None  # durable, of the stream; None before it was first read

    @property
    def orders(self) -> list[Steer]:
        """What a worker that takes the stream over is to be sent."""
        return [order for order, _ in self._pending]

    def add(self, ids: Sequence[int], random: Random) -> tuple[Steer, asyncio.Future[None]]:
        """A new order, and what is done when it is durable; `Overloaded` where many wait."""
        if len(self._pending) >= MAX_PENDING_STEERS:
            raise Overloaded(
                f"{MAX_PENDING_STEERS} texts wait to be taken up by this stream",
                retry_after_ms=spread_ms(RETRY_MS, random),
            )
        order = Steer(tuple(ids))
        taken = asyncio.get_running_loop().create_future()
        self._pending.append((order, taken))
        return order, taken

    def begin(self, ids: Iterable[int]) -> None:
        """A new run is to go on after these ids of the log.

        An append whose answer was lost may have stored more than was confirmed.
        """
        found = sum(1 for id_ in ids if id_ & STEER_BEGINS)
        if self._in_log is not None:
            self._settle(found - self._in_log)
        self._in_log, self._in_run = found, 0

    def confirm(self, taken: int) -> None:
        """So many of the run's orders are durable."""
        if taken > self._in_run:
            new, self._in_run = taken - self._in_run, taken
            self._in_log = (self._in_log or 0) + new
            self._settle(new)

    def fail(self, error: TailraceError) -> None:
        """Nothing that is pending will be taken."""
        while self._pending:
            _, taken = self._pending.popleft()
            if not taken.done():
                taken.set_exception(error)

    def _settle(self, count: int) -> None:
        for _ in range(min(count, len(self._pending))):
            _, taken = self._pending.popleft()
            if not taken.done():
                taken.set_result(None)
