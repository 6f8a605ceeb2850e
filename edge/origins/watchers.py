"""Clients that only watch: what they are told of readiness, and when.

Sans-I/O. A change is told to all at once; else each gets a Heartbeat every few seconds, one client
after another, for thousands at the same moment would have all others wait.
"""

from __future__ import annotations

from itertools import islice

from tailrace.edge.origins.relay import Sink
from tailrace.ledger.frame import Heartbeat, encode

HEARTBEAT_EVERY_S = 4.0
"""They are owed one every 5 s."""


class Watchers:
    """Give it what is known of readiness; it gives the frames that are to be delivered."""

    def __init__(self) -> None:
        self._sinks: dict[Sink, None] = {}  # who has had no Heartbeat for longest comes first
        self._heartbeat: Heartbeat | None = None
        self._owed = 0.0  # how many sinks are owed the next one
        self._beat_at: float | None = None

    def watch(self, sink: Sink) -> list[tuple[Sink, bytes]]:
        self._sinks[sink] = None
        return [] if self._heartbeat is None else [(sink, encode(self._heartbeat))]

    def forget(self, sink: Sink) -> None:
        self._sinks.pop(sink, None)

    def heard(self, heartbeat: Heartbeat | None) -> list[tuple[Sink, bytes]]:
        """None: nothing is known of any origin any more."""
        last, self._heartbeat = self._heartbeat, heartbeat
        if heartbeat is None:
            self._beat_at = None
            return []
        if last is not None and (last.ready, last.reasons) == (heartbeat.ready, heartbeat.reasons):
            return []
        raw = encode(heartbeat)
        return [(sink, raw) for sink in self._sinks]

    def beat(self, now: float) -> list[tuple[Sink, bytes]]:
        """The last Heartbeat, for those whose turn it is by now."""
        if self._heartbeat is None:
            return []
        passed = 0.0 if self._beat_at is None else now - self._beat_at
        self._beat_at = now
        self._owed += len(self._sinks) * min(passed / HEARTBEAT_EVERY_S, 1.0)
        turns = list(islice(self._sinks, int(self._owed)))
        self._owed -= len(turns)
        raw = encode(self._heartbeat)
        for sink in turns:
            del self._sinks[sink]
            self._sinks[sink] = None
        return [(sink, raw) for sink in turns]

    def all(self) -> list[Sink]:
        return list(self._sinks)
