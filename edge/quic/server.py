"""All QUIC connections of an edge: how they start and end, their timers, routing of datagrams.

Sans-I/O: datagrams are passed in, and sent on the path of the connection's last datagram. A client
can harm only its own connection: an exception of the library ends that connection and no other.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import inf
from typing import Protocol

import structlog

from tailrace.edge.access.connections import ConnectionLimits
from tailrace.edge.quic.http3 import Http3
from tailrace.edge.quic.interface import (
    TIMER_S,
    Address,
    Code,
    ConnectionIdIssued,
    ConnectionIdRetired,
    ConnectionTerminated,
    Datagrams,
    HandshakeCompleted,
    QuicConnection,
    QuicLibrary,
    UnroutedDatagram,
)
from tailrace.edge.server.context import ServerContext
from tailrace.edge.server.deadlines import Deadline

HANDSHAKE_TIMEOUT_S = 10.0
"""Timeout for a handshake, in seconds."""
RETRY_FROM_HANDSHAKES = 64
"""Number of open handshakes above which new clients must first prove their address (Retry)."""
FAULT_LINE_EVERY_S = 1.0
"""Minimum interval between two tracebacks in the log, in seconds, because a client may cause the
same exception again and again."""

log = structlog.get_logger("tailrace.edge")


class DatagramPath(Protocol):
    """Sends datagrams to clients from a socket, or from one local address of a socket."""

    local: tuple[str, int] | None
    """The local address, which requests report as the address of the server."""

    def send(self, datagrams: Datagrams) -> None:
        """Send datagrams. Never raises; a datagram that cannot be sent is lost."""


class Http3Client:
    """The connection of one client. Each flush of the batch sends its data (`Flushable`)."""

    def __init__(
        self,
        server: QuicServer,
        quic: QuicConnection,
        address: Address,
        path: DatagramPath,
        now: float,
    ) -> None:
        self.quic = quic
        self.path = path  # the path of the client's last datagram
        self.cids = set(quic.cids)
        self.is_established = False
        self.handshake_until = now + HANDSHAKE_TIMEOUT_S
        self.is_closed = False
        self.peer = (address[0], address[1])
        self._server = server
        self.deadline = Deadline(server.context.deadlines, partial(server.expire, self))
        self.http3 = Http3(quic, server.context, self.peer, path.local, self.mark_dirty)

    def mark_dirty(self) -> None:
        """Add the connection to the batch, whose next flush sends its datagrams."""
        if not self.is_closed:
            self._server.context.batch.mark_dirty(self)

    def flush(self) -> None:
        """Send the datagrams that wait to be sent."""
        self._server.flush(self)


class QuicServer:
    """Routes datagrams to connections; after `receive`, the caller must flush the batch."""

    def __init__(
        self,
        library: QuicLibrary,
        context: ServerContext,
        clock_s: Callable[[], float],
        limits: ConnectionLimits,
        retry_from: int = RETRY_FROM_HANDSHAKES,
    ) -> None:
        self.library = library
        self.context = context
        # Called when the last request has ended after `drain`.
        self.when_idle: Callable[[], None] = lambda: None
        self._clock_s = clock_s
        self._limits = limits
        self._retry_from = retry_from
        self._by_cid: dict[bytes, Http3Client] = {}
        self._connections: dict[Http3Client, None] = {}
        self._handshakes = 0
        self._draining = False
        self.faults = 0  # number of connections that an exception has ended
        self._fault_at = -inf

    @property
    def count(self) -> int:
        """The number of connections."""
        return len(self._connections)

    @property
    def idle(self) -> bool:
        """True if no request is open."""
        return all(connection.http3.idle for connection in self._connections)

    # ---- input ----

    def receive(self, datagram: bytes, address: Address, path: DatagramPath) -> None:
        """Pass a datagram to its connection, or begin a connection with it."""
        if not datagram:
            return
        now = self._clock_s()
        connection = self._by_cid.get(self._cid_of(datagram))
        if connection is None:
            connection = self._receive_unrouted(datagram, address, path, now)
        if connection is not None:
            connection.path = path
            self._guarded(connection, lambda: connection.quic.receive(datagram, address, now))
            self._handle(connection, now)
            connection.mark_dirty()

    def expire(self, connection: Http3Client) -> None:
        """Handle the timer of a connection: its handshake has timed out, or QUIC has work to do."""
        now = self._clock_s()
        if not connection.is_established and now >= connection.handshake_until:
            self._drop(connection)
            return
        at = connection.quic.timer()
        if at is not None and at <= now:
            self._guarded(connection, lambda: connection.quic.expire(now))
            self._handle(connection, now)
        connection.mark_dirty()  # the flush also sets the next deadline

    def flush(self, connection: Http3Client) -> None:
        """Send a connection's waiting datagrams, and set its next timer.

        A response that was blocked because too much of its data was unsent continues if it has room
        again.
        """
        if connection.is_closed:
            return
        now = self._clock_s()
        self._guarded(connection, lambda: connection.path.send(connection.quic.datagrams(now)))
        if not self._handle(connection, now):
            return
        if connection.http3.blocked:
            self._guarded(connection, connection.http3.unblock)
        self._set_deadline(connection, now)
        if self._draining and self.idle:
            self.when_idle()

    def _set_deadline(self, connection: Http3Client, now: float) -> None:
        if connection.is_closed:
            return
        at = connection.quic.timer()
        if not connection.is_established:
            at = min(connection.handshake_until, inf if at is None else at)
        if at is None:
            connection.deadline.clear()
        else:
            connection.deadline.set(max(at - now, TIMER_S))

    # ---- the end ----

    def drain(self) -> None:
        """Take no new connections and requests; open requests continue."""
        self._draining = True
        for connection in list(self._connections):
            self._guarded(connection, connection.http3.drain)

    def close(self) -> None:
        """Close every connection, and tell the clients."""
        self._draining = True
        for connection in list(self._connections):
            self._guarded(connection, partial(connection.quic.close, Code.NO_ERROR))
            self.flush(connection)
            self._drop(connection)

    # ---- connections ----

    def _cid_of(self, datagram: bytes) -> bytes:
        """Return the connection id that a datagram is addressed to (RFC 8999, 5.1 and 5.2)."""
        if datagram[0] & 0x80:
            return datagram[6 : 6 + datagram[5]] if len(datagram) > 5 else b""
        return datagram[1 : 1 + self.library.cid_bytes]

    def _receive_unrouted(
        self, datagram: bytes, address: Address, path: DatagramPath, now: float
    ) -> Http3Client | None:
        """Return the connection that a datagram begins, or answer the datagram and return None."""
        if not datagram[0] & 0x80:
            reset = self.library.stateless_reset(datagram, now)
            if reset is not None:
                path.send([(reset, address)])
            return None
        unrouted = self.library.parse(datagram)
        if unrouted is None:
            return None
        if not unrouted.known_version:
            path.send([(self.library.version_negotiation(unrouted), address)])
            return None
        if not unrouted.initial:
            return None
        original: bytes | None = unrouted.cid
        if unrouted.token:
            original = self.library.original_cid(unrouted, address, now)
        if original is None:
            path.send([(self.library.refusal(unrouted, bad_token=True), address)])
        elif self._handshakes >= self._retry_from and not unrouted.token and not self._draining:
            path.send([(self.library.retry(unrouted, address, now), address)])
        elif self._draining or not self._limits.admit(address[0]):
            path.send([(self.library.refusal(unrouted, bad_token=False), address)])
        else:
            return self._accept(unrouted, original, address, path, now)
        return None

    def _accept(
        self,
        unrouted: UnroutedDatagram,
        original: bytes,
        address: Address,
        path: DatagramPath,
        now: float,
    ) -> Http3Client:
        quic = self.library.accept(original, unrouted.cid if unrouted.token else None)
        connection = Http3Client(self, quic, address, path, now)
        connection.cids.add(unrouted.cid)
        for cid in connection.cids:
            self._by_cid[cid] = connection
        self._connections[connection] = None
        self._handshakes += 1
        return connection

    def _handle(self, connection: Http3Client, now: float) -> bool:
        """Handle the events of a connection; return True if it is still open."""
        if connection.is_closed:
            return False
        for event in connection.quic.events():
            if isinstance(event, ConnectionIdIssued):
                connection.cids.add(event.cid)
                self._by_cid[event.cid] = connection
            elif isinstance(event, ConnectionIdRetired):
                connection.cids.discard(event.cid)
                self._by_cid.pop(event.cid, None)
            elif isinstance(event, HandshakeCompleted):
                connection.is_established = True
                self._handshakes -= 1
            elif isinstance(event, ConnectionTerminated):
                self._drop(connection)
            else:
                self._guarded(connection, partial(connection.http3.handle, event, now))
        if connection.quic.is_closing:
            connection.http3.disconnected()
        return not connection.is_closed

    def _drop(self, connection: Http3Client) -> None:
        """Forget a connection, so that further datagrams for it have no connection."""
        if connection.is_closed:
            return
        connection.is_closed = True
        del self._connections[connection]
        self._limits.release(connection.peer[0])
        if not connection.is_established:
            self._handshakes -= 1
        for cid in connection.cids:
            self._by_cid.pop(cid, None)
        connection.deadline.end()
        connection.http3.disconnected()

    def _guarded(self, connection: Http3Client, act: Callable[[], object]) -> None:
        """Call `act`; an exception ends this connection, but no other."""
        if connection.is_closed:
            return
        try:
            act()
        except Exception:
            self.faults += 1
            now = self._clock_s()
            if now - self._fault_at >= FAULT_LINE_EVERY_S:
                self._fault_at = now
                log.exception("quic connection failed")
            self._drop(connection)
