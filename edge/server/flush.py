"""Flushing once for each callback of the event loop, however many streams it has touched.

Sans-I/O: nothing here knows a socket or an event loop.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import structlog

FLUSHED_TOGETHER = 8
"""Connections that are encoded before the data of any is sent. Alternating Python and send() evicts
the CPU caches each time; larger groups only add latency."""
READS_A_TIMED_ONE = 8
"""Sample one in this many link reads for the latency histogram."""

log = structlog.get_logger("tailrace.edge")


class Flushable(Protocol):
    """An object that gathers data until its flush, so that one read makes one write."""

    def flush(self) -> None:
        """Write the gathered data. Must not block and must not raise."""


@dataclass(slots=True)
class FlushBatch:
    """One callback of the event loop: what it has touched is flushed once, at its end.

    A read of the link brings frames for many streams, and the streams of one HTTP/2 connection
    leave in one write. So a sink that gets a frame is dirty, flushed when the read is through,
    and writes to its writer, which touches the connection that it shares; that is flushed then.
    Whoever begins such a callback (a link's read, a connection's, a deadline, the application's
    send) calls `flush` at its end. No further turn of the loop passes between read and write. What
    connections have got by then they send a few after another, each in one piece.

    With a `clock_s`, what was written is timed when all of it has been, since the read of the link
    that brought it; `wrote` is told the seconds and of how many writes. That is done for one in
    `READS_A_TIMED_ONE`: of a frame that comes alone it took a twentieth of all that the frame
    costs. What had to wait for its client's room is timed whenever it leaves.
    """

    dirty: dict[Flushable, None] = field(default_factory=dict)
    pending_writes: list[Flushable] = field(default_factory=list)  # only while `flushing`
    flushing: bool = False
    clock_s: Callable[[], float] | None = None
    wrote: Callable[[float, int], None] = lambda _seconds, _writes: None
    read_s: float = 0.0  # when the link was read that this is about; 0: it is about none
    writes: int = 0  # of what that read brought, each for one client
    late: list[float] = field(default_factory=list)  # when what came that had no room till now
    _untimed: int = 0  # so many more reads before the next that is timed

    def begin(self) -> None:
        """A link is read."""
        if self._untimed:
            self._untimed -= 1
        elif self.clock_s is not None:
            self.read_s = self.clock_s()

    def mark_dirty(self, who: Flushable) -> None:
        self.dirty[who] = None

    def flush(self) -> None:
        """Flush all that was dirty, in order, and what that touches; not within another one."""
        if self.flushing:
            return
        self.flushing = True
        try:
            while self.dirty:
                dirty, self.dirty = list(self.dirty), {}
                for begin in range(0, len(dirty), FLUSHED_TOGETHER):
                    _flush(dirty[begin : begin + FLUSHED_TOGETHER])
                    pending_writes, self.pending_writes = self.pending_writes, []
                    _flush(pending_writes)
        finally:
            self.flushing = False
            if self.read_s or self.late:
                self._measure()
                self.read_s = 0.0
            self.writes = 0

    def since(self) -> float:
        """When what is dealt with now has come, for `late`."""
        return self.read_s or (self.clock_s() if self.clock_s is not None else 0.0)

    def _measure(self) -> None:
        late, self.late = self.late, []
        if self.clock_s is None:
            return
        now = self.clock_s()
        if self.read_s and self.writes:
            self.wrote(now - self.read_s, self.writes)
            self._untimed = READS_A_TIMED_ONE - 1
        for since in late:
            self.wrote(now - since, 1)


def _flush(some: list[Flushable]) -> None:
    for who in some:
        try:
            who.flush()
        except Exception:  # one client's fault must not keep the rest from theirs
            log.exception("flush failed")
