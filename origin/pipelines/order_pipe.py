"""The pipes to a process of stages: orders go there, and replies come back in the same order.

Some orders are sent before the replies to earlier ones have come, so that the process need not wait
for its worker between two orders.
"""

from __future__ import annotations

import asyncio
import pickle
from collections import deque
from collections.abc import Callable
from contextlib import suppress

import structlog

from tailrace.ledger.errors import TailraceError, Unavailable
from tailrace.origin.pipelines.stage_orders import LENGTH_BYTES, Order, Reply, packed

MAX_SENT_ORDERS = 16
"""Maximum number of orders whose replies have not come yet. Further ones wait in the worker, where
those of a stream that ends are dropped."""

log = structlog.get_logger("pipeline")


class StageLost(Unavailable):
    """A stage object is lost, so all stages must run again.

    Its process has ended, or it has failed at an item that it processed in an earlier run.
    """


class StageFailed(TailraceError, code="stage_failed"):
    """A stage of kind `cpu` or `gpu` has raised an error, or took too long."""


class OrderPipe:
    """A process of stages, and the orders that it has not replied to yet, oldest first."""

    def __init__(
        self, process: asyncio.subprocess.Process, on_lost: Callable[[], None] | None = None
    ) -> None:
        """Begin to read the replies of a process, whose stdin and stdout are pipes.

        `on_lost` is called when the process has ended, unless `close` has ended it.
        """
        self.is_lost = False
        """True if the process has ended."""
        self._process = process
        self._on_lost = on_lost
        self._sent: deque[tuple[asyncio.Future[Reply], float | None]] = deque()
        self._room = asyncio.Semaphore(MAX_SENT_ORDERS)
        self._limit: asyncio.Timeout | None = None  # of the reply that is read
        self._reading = asyncio.create_task(self._read())

    async def ask(self, order: Order, limit_s: float | None) -> Reply:
        """Send an order, and return its reply; the time limit begins when the order is the oldest.

        Raises:
            StageLost: The process has ended.
            StageFailed: The stage failed, or took longer than `limit_s` seconds. The process is
                then killed.
        """
        async with self._room:
            asked = self._write(order, limit_s)
            with suppress(OSError):  # the process has ended, which the reader of its replies sees
                assert self._process.stdin is not None
                await self._process.stdin.drain()
            reply = await asked
        if reply.failure is not None:
            raise StageFailed(reply.failure)
        return reply

    def send(self, order: Order) -> None:
        """Send an order, whatever becomes of it."""
        if not self.is_lost:
            self._write(order, None).cancel()

    async def close(self) -> None:
        """End the process."""
        self._reading.cancel()
        await asyncio.gather(self._reading, return_exceptions=True)
        assert self._process.stdin is not None
        self._process.stdin.close()
        await self._end()

    def _write(self, order: Order, limit_s: float | None) -> asyncio.Future[Reply]:
        """Write an order, and return the future of its reply.

        Raises:
            StageLost: The process has ended.
        """
        if self.is_lost:
            raise _lost()
        assert self._process.stdin is not None
        data = packed(order)
        asked: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._sent.append((asked, limit_s))
        is_oldest = len(self._sent) == 1
        if is_oldest and limit_s is not None and self._limit is not None:
            self._limit.reschedule(asyncio.get_running_loop().time() + limit_s)
        self._process.stdin.write(data)
        return asked

    async def _read(self) -> None:
        """Read replies until the process has ended, or takes too long for an order."""
        try:
            while True:
                await self._read_next()
        except TimeoutError:
            late, limit_s = self._sent.popleft()
            if not late.done():
                late.set_exception(StageFailed(f"it took more than {limit_s:g} s for an item"))
        except (OSError, asyncio.IncompleteReadError):
            pass
        status = await self._end()
        log.warning("stage.process_lost", pid=self._process.pid, status=status)
        if self._on_lost is not None:
            self._on_lost()

    async def _read_next(self) -> None:
        # Reading goes on between two orders, because only a reader sees that the process has ended.
        limit_s = self._sent[0][1] if self._sent else None
        assert self._process.stdout is not None
        async with asyncio.timeout(limit_s) as self._limit:
            head = await self._process.stdout.readexactly(LENGTH_BYTES)
            data = await self._process.stdout.readexactly(int.from_bytes(head, "little"))
        asked, _ = self._sent.popleft()
        if not asked.done():  # the stream of the order may have ended
            asked.set_result(pickle.loads(data))

    async def _end(self) -> int:
        """Kill the process, fail the orders without a reply, and return its exit status."""
        self.is_lost = True
        with suppress(ProcessLookupError):
            self._process.kill()
        status = await self._process.wait()
        while self._sent:
            asked, _ = self._sent.popleft()
            if not asked.done():
                asked.set_exception(_lost())
        return status


def _lost() -> StageLost:
    return StageLost("the process of the stage was lost")
