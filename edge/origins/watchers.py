"""Heartbeats for clients: which clients get them, and when.

Sans-I/O. A change of readiness is sent to all clients at once. Otherwise each client gets a
Heartbeat every few seconds, one after another, because thousands at once would delay all streams.
"""

from __future__ import annotations

from itertools import islice

from tailrace.edge.origins.sink import Sink
from tailrace.ledger.frame import Heartbeat, encode

HEARTBEAT_EVERY_S = 4.0
"""Interval between two Heartbeats to a client, in seconds; the protocol promises at most 5."""


class Watchers:
    """The clients that get Heartbeats; decides which clients get one now."""

    def __init__(self) -> None:
        self._sinks: dict[Sink, None] = {}  # sinks with the oldest Heartbeat come first
        self._heartbeat: Heartbeat | None = None
        self._owed = 0.0  # number of Heartbeats that are due, including a fraction
        self._beat_at: float | None = None

    def watch(self, sink: Sink) -> list[tuple[Sink, bytes]]:
        """Add a client, and return the last Heartbeat for it."""
        self._sinks[sink] = None
        return [] if self._heartbeat is None else [(sink, encode(self._heartbeat))]

    def forget(self, sink: Sink) -> None:
        """Remove a client."""
        self._sinks.pop(sink, None)

    def heard(self, heartbeat: Heartbeat | None) -> list[tuple[Sink, bytes]]:
        """Handle the origins' merged Heartbeat, or None if no origin is connected any more."""
        last, self._heartbeat = self._heartbeat, heartbeat
        if heartbeat is None:
            self._beat_at = None
            return []
        if last is not None and (last.ready, last.reasons) == (heartbeat.ready, heartbeat.reasons):
            return []
        raw = encode(heartbeat)
        return [(sink, raw) for sink in self._sinks]

    def beat(self, now: float) -> list[tuple[Sink, bytes]]:
        """Return the last Heartbeat for the clients whose turn has come."""
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
        """Return all clients."""
        return list(self._sinks)
