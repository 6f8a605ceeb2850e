"""One TCP connection, with or without TLS: moves bytes between its socket and its protocol."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Awaitable, Coroutine, Generator
from types import coroutine
from typing import Any, TypeVar, cast

import structlog
from hypercorn.utils import parse_socket_addr

from tailrace.edge.errors import error_response
from tailrace.edge.server.client_hello import AlpnCheck
from tailrace.edge.server.context import TcpContext
from tailrace.edge.server.deadlines import Deadline
from tailrace.edge.server.http1 import Http1
from tailrace.edge.server.http2 import Http2
from tailrace.edge.server.input import MAX_HELD_BYTES, SLICE_BYTES
from tailrace.edge.server.interfaces import NULL_LISTENER, UNSENT_BYTES, ConnectionProtocol
from tailrace.ledger.errors import Overloaded

Result = TypeVar("Result")

TLS_HANDSHAKE_TIMEOUT_S = 10.0
CLOSE_TIMEOUT_S = 10.0
"""Time for written data to be sent after a close, in seconds; then the connection is aborted."""

LINGER_S = 2.0
"""Time in seconds for which a refused client's further input is read and dropped, so that the
client gets the response and not a TCP reset."""

log = structlog.get_logger("tailrace.edge")


@coroutine
def _begun(work: Coroutine[Any, Any, Result], waited_for: Any) -> Generator[Any, Any, Result]:
    """Finish the coroutine `work`, which has already run up to its first await, on `waited_for`."""
    try:
        yield waited_for
    except asyncio.CancelledError:
        work.close()
        raise
    result: Result = yield from work
    return result


def _no_room() -> bytes:
    """Return the HTTP/1.1 response to a connection over the limit, with a random Retry-After."""
    error = Overloaded(
        "too many connections are open at this edge, in all or from one address",
        hint="use the open connections, or try again later",
    )
    answer = error_response(error)
    fields = [*answer.raw_headers, (b"connection", b"close")]
    lines = b"".join(b"%b: %b\r\n" % field for field in fields)
    return b"HTTP/1.1 503 \r\n%b\r\n%b" % (lines, bytes(answer.body))


class Connection(asyncio.Protocol):
    """One TCP connection: the `Transport` between a socket and its protocol, with bounded buffers.

    The protocol gets the input in slices, in turn with other connections (`InputTurns`). While a
    slice waits, the socket is not read. So at most one read of the event loop is buffered, and
    MAX_HELD_BYTES more while the protocol has paused its input.

    TLS is started here and not by the listener, so that the buffers of both layers can be bounded,
    and each connection gets the current certificate.
    """

    # Without slots each connection would have a dictionary, which costs another CPU cache miss.
    __slots__ = (
        *("_address", "_admitted", "_deadline", "_early", "_ending", "_handshake", "_held"),
        *("_input", "_lost", "_reading", "_context", "_sliced", "_tls", "_transport", "_batch"),
        *("_unsent", "in_line", "peer", "secure", "server", "protocol"),
    )

    def __init__(self, context: TcpContext, tls: ssl.SSLContext | None) -> None:
        self.secure = tls is not None
        self.peer: tuple[str, int] | None = None
        self.server: tuple[str, int] | None = None
        self._context = context
        self._batch = context.batch
        self._unsent = b""  # output collected during a flush of the batch, sent at its end
        self._tls = tls
        self._transport: asyncio.Transport | None = None
        self._handshake: asyncio.Task[None] | None = None
        self._early = b""  # input that came with the last bytes of the handshake
        self._lost = False
        self._address = ""
        self._admitted = False
        self._reading = True  # the transport is reading from the socket
        self._held = False  # the protocol has paused its input
        self._ending = False  # the connection is closing: further input is dropped
        self._input = b""  # input for the protocol, which gets it in slices
        self._sliced = 0  # bytes of `_input` that the protocol has received
        self.in_line = False
        self.protocol: ConnectionProtocol = NULL_LISTENER
        # Limits how long the client may stall, or take to close the connection.
        self._deadline = Deadline(context.deadlines, self.abort)

    # ---- the transport ----

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # A cast: uvloop's transports have the interface, but not the base class.
        plain = cast(asyncio.Transport, transport)
        peer = plain.get_extra_info("peername")
        self._address = peer[0] if isinstance(peer, tuple) else ""
        self._admitted = self._context.limits.admit(self._address)
        if not self._admitted:
            if self._tls is None:
                plain.write(_no_room())
            plain.close()
            return
        if self._tls is None:
            self._begin(plain, "http/1.1")
            return
        # TLS has its own write buffer, so the transport below it should buffer nothing more.
        plain.set_write_buffer_limits(high=0)
        loop = asyncio.get_running_loop()
        shaking = loop.start_tls(
            plain,
            self,
            self._tls,
            server_side=True,
            ssl_handshake_timeout=TLS_HANDSHAKE_TIMEOUT_S,
            ssl_shutdown_timeout=CLOSE_TIMEOUT_S,
        )
        # In its first step, start_tls takes the transport over. This must precede the first read.
        waited_for = shaking.send(None)
        plain.set_protocol(AlpnCheck(plain))
        self._handshake = loop.create_task(self._shake_hands(plain, _begun(shaking, waited_for)))

    async def _shake_hands(
        self, plain: asyncio.Transport, shaking: Awaitable[asyncio.Transport | None]
    ) -> None:
        try:
            secure = await shaking
        except (OSError, asyncio.CancelledError):  # ssl.SSLError is an OSError
            plain.abort()
            self._release()
            return
        if secure is None or self._lost:
            return
        tls = secure.get_extra_info("ssl_object")
        if tls is None:  # the client left as the handshake ended; `connection_lost` follows
            secure.abort()
            self._release()
            return
        self._begin(secure, tls.selected_alpn_protocol() or "http/1.1")
        early, self._early = self._early, b""
        if early and not self._lost:
            self.data_received(early)

    def _begin(self, transport: asyncio.Transport, alpn: str) -> None:
        self._transport = transport
        # With this high-water mark, the transport calls `pause_writing` exactly when
        # `writable_bytes` falls below 1.
        transport.set_write_buffer_limits(high=UNSENT_BYTES - 1, low=UNSENT_BYTES // 4)
        sock = transport.get_extra_info("socket")
        try:
            self.peer = parse_socket_addr(sock.family, sock.getpeername())
            self.server = parse_socket_addr(sock.family, sock.getsockname())
        except OSError:  # the client has left already
            transport.abort()
            return
        self._context.connections.add(self)
        protocol = Http2 if alpn == "h2" else Http1
        self.protocol = protocol(self, self._context)

    def data_received(self, data: bytes) -> None:
        if self._transport is None:
            self._early += data
            return
        if self._ending:
            return
        self._input = self._input[self._sliced :] + data if self._input else data
        self._sliced = 0
        if not self._held:
            self._context.input.add(self)
        self._read_or_not()

    def take_slice(self) -> bool:
        """Give the protocol a slice of the input; return True if it can take another one."""
        if self._held or self._ending or not self._input:
            return False
        begin, end = self._sliced, self._sliced + SLICE_BYTES
        piece = self._input[begin:end]
        self._sliced = end
        if end >= len(self._input):
            self._input, self._sliced = b"", 0
        try:
            self.protocol.receive(piece)
        except Exception:  # a bug must not affect the other connections
            log.exception("connection failed")
            self.abort()
        self._context.batch.flush()
        self._read_or_not()
        return bool(self._input) and not self._held

    def _read_or_not(self) -> None:
        """Pause or resume reading from the socket, depending on the input that is buffered."""
        waiting = len(self._input) - self._sliced
        wanted = waiting <= MAX_HELD_BYTES if self._held else not waiting
        if wanted == self._reading or self._transport is None or self._transport.is_closing():
            return
        self._reading = wanted
        if wanted:
            self._transport.resume_reading()
        else:
            self._transport.pause_reading()

    def pause_writing(self) -> None:
        self._deadline.set(self._context.config.stalled_timeout_s)

    def resume_writing(self) -> None:
        if self._transport is None or self._transport.is_closing():
            return
        self._deadline.clear()
        self.protocol.drained()
        self._context.batch.flush()

    def connection_lost(self, exc: Exception | None) -> None:
        self._release()
        self._ending, self._input = True, b""
        if self._transport is None:
            return  # the handshake was not complete
        self._transport = None
        self._context.connections.discard(self)
        self._deadline.end()
        # The protocol refers to this connection: break the reference cycle.
        protocol, self.protocol = self.protocol, NULL_LISTENER
        protocol.disconnected()
        self._context.batch.flush()

    def _release(self) -> None:
        self._lost = True
        if self._admitted:
            self._admitted = False
            self._context.limits.release(self._address)

    # ---- a Transport ----

    def write(self, data: bytes) -> None:
        if self._unsent:
            self._unsent += data
            return
        self._unsent = data
        if self._batch.flushing:
            self._batch.pending_writes.append(self)
        else:
            self.flush()

    def flush(self) -> None:
        """Pass the collected output to the transport."""
        data, self._unsent = self._unsent, b""
        transport = self._transport
        if data and transport is not None and not transport.is_closing():
            transport.write(data)

    def writable_bytes(self) -> int:
        if self._unsent:
            self.flush()
        transport = self._transport
        return UNSENT_BYTES - transport.get_write_buffer_size() if transport is not None else 0

    def pause_reading(self) -> None:
        self._held = True

    def resume_reading(self) -> None:
        if self._held:
            self._held = False
            if self._input:
                self._context.input.add_later(self)

    def close(self, *, lingers: bool = False) -> None:
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        self.flush()
        self._deadline.set(LINGER_S if lingers else CLOSE_TIMEOUT_S)
        self._drop_input()
        if lingers and transport.can_write_eof():
            # The connection closes once the client closes its side, or at the deadline.
            transport.write_eof()
        else:
            transport.close()

    def _drop_input(self) -> None:
        """Read further input and drop it."""
        self._ending = True
        self._input, self._sliced, self._held = b"", 0, False
        self._read_or_not()

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()
