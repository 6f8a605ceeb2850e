"""Gathers writes, so that each callback of the event loop flushes once for all of its streams.

Sans-I/O: nothing here knows a socket or an event loop.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import structlog

FLUSHED_TOGETHER = 8
"""Number of connections whose data is encoded before any of it is sent. Alternating Python and
send() evicts the CPU caches each time; larger groups only add latency."""
READS_PER_SAMPLE = 8
"""Sample one in this many link reads for the latency histogram."""

log = structlog.get_logger("tailrace.edge")


class Flushable(Protocol):
    """An object that gathers data until its flush, so that one link read causes one write."""

    def flush(self) -> None:
        """Write the gathered data. Must not block and must not raise."""


@dataclass(slots=True)
class FlushBatch:
    """The streams and connections that one event loop callback changed, flushed at its end.

    A read of a link brings frames for many streams, and the streams of one HTTP/2 connection leave
    in one write. So a stream that gets a frame is marked dirty. At the end of the read, dirty
    streams are flushed: they write to their writers, which mark the connection that they share as
    dirty, and connections are flushed after them. There is no other turn of the event loop between
    the read and the write.

    The code that begins such a callback (a read of a link or of a connection, a deadline, a send
    of the application) calls `flush` at its end.

    With a `clock_s`, `observe` gets the seconds from the beginning of a link read to the end of the
    flush that follows. This is measured for one in `READS_PER_SAMPLE` of the reads that make
    something dirty.
    """

    dirty: dict[Flushable, None] = field(default_factory=dict)
    pending_writes: list[Flushable] = field(default_factory=list)  # empty unless `flushing`
    flushing: bool = False
    clock_s: Callable[[], float] | None = None
    observe: Callable[[float], None] = lambda _seconds: None
    _began_s: float | None = None  # start of the link read that is timed
    _untimed: int = 0  # link reads to skip before the next one is timed

    def begin(self) -> None:
        """Note the time at which a read of a link begins, if this read is measured."""
        if self._untimed:
            self._untimed -= 1
        elif self.clock_s is not None:
            self._began_s = self.clock_s()

    def mark_dirty(self, each: Flushable) -> None:
        """Have `each` flushed at the end of this callback."""
        self.dirty[each] = None

    def flush(self) -> None:
        """Flush everything that is dirty, in order, until nothing is dirty any more.

        A nested call does nothing: the outer one continues.
        """
        if self.flushing:
            return
        self.flushing = True
        changed = bool(self.dirty)
        try:
            while self.dirty:
                dirty, self.dirty = list(self.dirty), {}
                for begin in range(0, len(dirty), FLUSHED_TOGETHER):
                    _flush(dirty[begin : begin + FLUSHED_TOGETHER])
                    pending_writes, self.pending_writes = self.pending_writes, []
                    _flush(pending_writes)
        finally:
            self.flushing = False
            if self._began_s is not None:
                self._measure(self._began_s, changed)

    def _measure(self, began_s: float, changed: bool) -> None:
        self._began_s = None
        if changed and self.clock_s is not None:
            self.observe(self.clock_s() - began_s)
            self._untimed = READS_PER_SAMPLE - 1


def _flush(some: list[Flushable]) -> None:
    for each in some:
        try:
            each.flush()
        except Exception:  # a fault in one connection must not stop the others
            log.exception("flush failed")
