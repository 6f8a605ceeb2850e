"""All QUIC connections of an edge: whose each datagram is, and when each is to be looked at.

Sans-I/O: datagrams and the time come in, and what is to be said leaves by the way that the last
datagram of a connection came. Nothing that a client sends reaches beyond its own connection:
whatever its core raises ends it, and it alone.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count
from math import inf
from typing import Generic, Protocol, TypeVar

import structlog

from tailrace.edge.access.connections import ConnectionLimits
from tailrace.edge.quic.core import (
    Address,
    Code,
    Core,
    Cores,
    Datagrams,
    Ended,
    Established,
    Issued,
    Retired,
    Stray,
)
from tailrace.edge.quic.http3 import Http3
from tailrace.edge.server.dispatch import ServerContext

T = TypeVar("T")


class Timer(Generic[T]):
    """The deadline of one `owner`; None is never."""

    __slots__ = ("at", "owner", "standing")

    def __init__(self, owner: T) -> None:
        self.owner = owner
        self.at = inf
        self.standing: list[float] = []  # in the heap; the last is the earliest


class Timers(Generic[T]):
    """One for all. What was asked for last counts; what stands in the heap may be earlier, and is
    looked at again when it comes up: QUIC puts its deadlines off with every packet, and one that
    moves back costs one comparison."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Timer[T]]] = []
        self._order = count()  # timers are not compared

    def set(self, timer: Timer[T], at: float | None) -> None:
        timer.at = inf if at is None else at
        if timer.at < (timer.standing[-1] if timer.standing else inf):
            timer.standing.append(timer.at)
            heappush(self._heap, (timer.at, next(self._order), timer))

    def due(self, now: float) -> list[T]:
        """Those whose deadline has come; each is told once, and has none after that."""
        found = []
        while self._heap and self._heap[0][0] <= now:
            _, _, timer = heappop(self._heap)
            timer.standing.pop()
            if timer.at <= now:
                timer.at = inf
                found.append(timer.owner)
            else:
                self.set(timer, timer.at)
        return found

    @property
    def next(self) -> float | None:
        """When to call `due` again."""
        return self._heap[0][0] if self._heap else None


HANDSHAKE_TIMEOUT_S = 10.0
RETRY_FROM_HANDSHAKES = 64
"""While so many handshakes are under way a client has to show first that it is where it says."""
FAULT_LINE_EVERY_S = 1.0
"""At most so often is a fault logged with its traceback: a client may cause it again and again."""

log = structlog.get_logger("tailrace.edge")


class Way(Protocol):
    """A socket, as far as a connection needs it."""

    local: tuple[str, int] | None

    def send(self, datagrams: Datagrams) -> None:
        """Nothing raises, and what does not go is lost."""


class Connection:
    """One client. A `Flushable`: what has gathered in its core leaves once a turn of the loop."""

    def __init__(
        self, server: QuicServer, core: Core, address: Address, way: Way, now: float
    ) -> None:
        self.core = core
        self.way = way  # by which its last datagram came
        self.cids = set(core.cids)
        self.timer: Timer[Connection] = Timer(self)
        self.established = False
        self.handshake_until = now + HANDSHAKE_TIMEOUT_S
        self.over = False
        self.peer = (address[0], address[1])
        self._server = server
        self.http3 = Http3(core, server.context, self.peer, way.local, self.mark_dirty)

    def mark_dirty(self) -> None:
        if not self.over:
            self._server.context.batch.mark_dirty(self)

    def flush(self) -> None:
        self._server.flush(self)


class QuicServer:
    """Call `receive` and `expire`, and flush the turn after it."""

    def __init__(
        self,
        cores: Cores,
        context: ServerContext,
        clock_s: Callable[[], float],
        wake_at: Callable[[float], None],
        limits: ConnectionLimits,
        retry_from: int = RETRY_FROM_HANDSHAKES,
    ) -> None:
        """`wake_at` is told when `expire` is to be called; the earliest counts."""
        self.cores = cores
        self.context = context
        self.when_idle: Callable[[], None] = lambda: None  # while draining: nothing is left
        self._clock_s = clock_s
        self._wake_at = wake_at
        self._limits = limits
        self._retry_from = retry_from
        self._timers: Timers[Connection] = Timers()
        self._by_cid: dict[bytes, Connection] = {}
        self._connections: dict[Connection, None] = {}
        self._handshakes = 0
        self._draining = False
        self.faults = 0  # of ours: connections that ended by what their core raised
        self._fault_at = -inf

    @property
    def count(self) -> int:
        return len(self._connections)

    @property
    def idle(self) -> bool:
        """No request is under way."""
        return all(connection.http3.idle for connection in self._connections)

    # ---- what comes ----

    def receive(self, datagram: bytes, address: Address, way: Way) -> None:
        if not datagram:
            return
        now = self._clock_s()
        connection = self._by_cid.get(self._cid_of(datagram))
        if connection is None:
            connection = self._stray(datagram, address, way, now)
        if connection is not None:
            connection.way = way
            self._guarded(connection, lambda: connection.core.receive(datagram, address, now))
            self._handle(connection, now)
            connection.mark_dirty()

    def expire(self) -> None:
        """Look at the connections whose time has come."""
        now = self._clock_s()
        for connection in self._timers.due(now):
            if not connection.established and now >= connection.handshake_until:
                self._drop(connection)
                continue
            self._guarded(connection, lambda: self._expire(connection, now))  # noqa: B023
            self._handle(connection, now)
            connection.mark_dirty()
        if self._timers.next is not None:
            self._wake_at(self._timers.next)

    @staticmethod
    def _expire(connection: Connection, now: float) -> None:
        at = connection.core.timer()
        if at is not None and at <= now:
            connection.core.expire(now)

    def flush(self, connection: Connection) -> None:
        """Send what its core has to send, and tell those who waited for it."""
        if connection.over:
            return
        now = self._clock_s()
        self._guarded(connection, lambda: connection.way.send(connection.core.datagrams(now)))
        if not self._handle(connection, now):
            return
        if connection.http3.starved:
            self._guarded(connection, connection.http3.moved)
        at = connection.core.timer()
        if not connection.established:
            at = min(connection.handshake_until, inf if at is None else at)
        self._timers.set(connection.timer, at)
        if self._timers.next is not None:
            self._wake_at(self._timers.next)
        if self._draining and self.idle:
            self.when_idle()

    # ---- the end ----

    def drain(self) -> None:
        """No new connections and requests; those that are under way go on."""
        self._draining = True
        for connection in list(self._connections):
            self._guarded(connection, connection.http3.drain)

    def close(self) -> None:
        """End every connection, and say so to its client."""
        self._draining = True
        for connection in list(self._connections):
            self._guarded(connection, lambda: connection.core.close(Code.NO_ERROR))  # noqa: B023
            self.flush(connection)
            self._drop(connection)

    # ---- connections ----

    def _cid_of(self, datagram: bytes) -> bytes:
        """The id that it is addressed to (RFC 8999, 5.1 and 5.2)."""
        if datagram[0] & 0x80:
            return datagram[6 : 6 + datagram[5]] if len(datagram) > 5 else b""
        return datagram[1 : 1 + self.cores.cid_bytes]

    def _stray(self, datagram: bytes, address: Address, way: Way, now: float) -> Connection | None:
        """The new connection that a datagram begins; else what there is to say is said."""
        if not datagram[0] & 0x80:
            reset = self.cores.reset(datagram, now)
            if reset is not None:
                way.send([(reset, address)])
            return None
        stray = self.cores.stray(datagram)
        if stray is None:
            return None
        if not stray.known_version:
            way.send([(self.cores.versions(stray), address)])
            return None
        if not stray.initial:
            return None
        original: bytes | None = stray.cid
        if stray.token:
            original = self.cores.retried(stray, address, now)
        if original is None:
            way.send([(self.cores.refusal(stray, bad_token=True), address)])
        elif self._handshakes >= self._retry_from and not stray.token and not self._draining:
            way.send([(self.cores.retry(stray, address, now), address)])
        elif self._draining or not self._limits.admit(address[0]):
            way.send([(self.cores.refusal(stray, bad_token=False), address)])
        else:
            return self._accept(stray, original, address, way, now)
        return None

    def _accept(
        self, stray: Stray, original: bytes, address: Address, way: Way, now: float
    ) -> Connection:
        core = self.cores.accept(original, stray.cid if stray.token else None)
        connection = Connection(self, core, address, way, now)
        connection.cids.add(stray.cid)
        for cid in connection.cids:
            self._by_cid[cid] = connection
        self._connections[connection] = None
        self._handshakes += 1
        return connection

    def _handle(self, connection: Connection, now: float) -> bool:
        """Do what its core has to say; whether the connection lives on."""
        if connection.over:
            return False
        for event in connection.core.events():
            if isinstance(event, Issued):
                connection.cids.add(event.cid)
                self._by_cid[event.cid] = connection
            elif isinstance(event, Retired):
                connection.cids.discard(event.cid)
                self._by_cid.pop(event.cid, None)
            elif isinstance(event, Established):
                connection.established = True
                self._handshakes -= 1
            elif isinstance(event, Ended):
                self._drop(connection)
            else:
                self._guarded(connection, lambda: connection.http3.handle(event, now))  # noqa: B023
        if connection.core.closing:
            connection.http3.disconnected()
        return not connection.over

    def _drop(self, connection: Connection) -> None:
        """Forget it: whatever still comes for it is nobody's."""
        if connection.over:
            return
        connection.over = True
        del self._connections[connection]
        self._limits.release(connection.peer[0])
        if not connection.established:
            self._handshakes -= 1
        for cid in connection.cids:
            self._by_cid.pop(cid, None)
        self._timers.set(connection.timer, None)
        connection.http3.disconnected()

    def _guarded(self, connection: Connection, act: Callable[[], object]) -> None:
        """Do it; a fault is the end of this connection, and of nothing else."""
        if connection.over:
            return
        try:
            act()
        except Exception:  # whatever it is, only this connection suffers
            self.faults += 1
            now = self._clock_s()
            if now - self._fault_at >= FAULT_LINE_EVERY_S:
                self._fault_at = now
                log.exception("quic connection failed")
            self._drop(connection)
