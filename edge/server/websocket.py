"""The WebSocket (RFC 6455) of one session, without ASGI.

Input is rare; wsproto parses it, and no extensions are used. Output is each message of the session
behind a header of a few bytes, written in the callback that brought the frames. The size of an
incoming message is counted as its pieces arrive, and a message that is too large is not kept.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence
from functools import partial
from hashlib import sha1

from wsproto.connection import Connection, ConnectionType
from wsproto.events import BytesMessage, CloseConnection, Ping, Pong, TextMessage
from wsproto.frame_protocol import CloseReason

from tailrace.edge.access.authenticator import PROTOCOLS
from tailrace.edge.access.operators import sees_details
from tailrace.edge.access.rules import Admission
from tailrace.edge.json_messages import message_of
from tailrace.edge.origins.sink import with_corr_bytes
from tailrace.edge.server.context import TcpContext
from tailrace.edge.server.deadlines import Deadline
from tailrace.edge.server.flood import EMPTY_POINTS, SMALL_PIECE_BYTES, FloodBudget
from tailrace.edge.server.interfaces import Headers, Request, Transport
from tailrace.edge.session import (
    MAX_MESSAGE_BYTES,
    SMALL_BYTES,
    Session,
    ToOrigin,
    none_detached,
)
from tailrace.edge.telemetry.request_metrics import RequestMetrics
from tailrace.ledger.frame import Credit, Detach, split

SESSION_PATH = b"/v1/ws"
SUBPROTOCOL = "tailrace"
"""The subprotocol that the edge selects. A page that sends its API key as a subprotocol must offer
this one too, because browsers require that the server selects one of those offered."""
JSON_SUBPROTOCOL = "tailrace.json"
"""The subprotocol with which every frame is a text message of JSON. It is selected if it is offered
before `tailrace`, or without it."""
HELLO_TIMEOUT_S = 10.0
"""Timeout for the client's Hello, in seconds."""
PING_INTERVAL_S = 20.0
"""Interval between two pings, in seconds."""
MISSED_PINGS = 2
"""Number of unanswered pings after which the connection is closed."""
_GUID = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
_BINARY = 0x82  # first byte of a frame that holds a whole binary message
_TEXT = 0x81  # first byte of a frame that holds a whole text message
_HEADERS = tuple(bytes((_BINARY, size)) for size in range(SMALL_BYTES + 1))


def accepts(request: Request) -> bytes | None:
    """Return the Sec-WebSocket-Accept value for a handshake; None if the handshake is not valid."""
    fields = {name: value.strip() for name, value in request.headers}
    key = fields.get(b"sec-websocket-key", b"")
    try:
        is_key = len(base64.b64decode(key, validate=True)) == 16
    except (binascii.Error, ValueError):
        is_key = False
    asked = [part.strip() for part in fields.get(b"connection", b"").lower().split(b",")]
    if (
        not is_key
        or b"upgrade" not in asked
        or fields.get(b"upgrade", b"").lower() != b"websocket"
        or fields.get(b"sec-websocket-version") != b"13"
        or request.method != "GET"
    ):
        return None
    return base64.b64encode(sha1(key + _GUID, usedforsecurity=False).digest())


class WebSocket:
    """The `ConnectionProtocol` of one client's session, and the `Sink` of its streams."""

    __slots__ = (
        *("_came", "_closed", "_deadline", "_done", "_metrics", "_flood", "_is_json"),
        *(
            "_link",
            "_missed",
            "_parts",
            "_protocol",
            "_session",
            "_size",
            "_stalled",
            "_batch",
            "_transport",
        ),
    )
    protocol = "ws"

    def __init__(
        self,
        transport: Transport,
        context: TcpContext,
        asked: Request,
        accepted: bytes,
        admission: Admission,
        headers: Headers,
    ) -> None:
        """Answer the opening handshake `asked`; `headers` are added to the response."""
        config = context.config
        path = SESSION_PATH.decode()
        self._metrics = RequestMetrics(context.counts, self.protocol, "GET", path, asked.headers)
        self._metrics.answered(101)
        self._metrics.address = admission.head.address
        self._stalled = False  # frames wait until the client reads more
        self._done = partial(context.rules.done, admission)
        self._transport = transport
        self._batch = context.batch
        self._link = context.link
        self._flood = FloodBudget(context.deadlines.clock_s)
        subprotocol = chosen_subprotocol(admission.head.values(PROTOCOLS))
        self._is_json = subprotocol == JSON_SUBPROTOCOL
        self._session = Session(
            config.max_streams_per_connection,
            caller=admission.caller,
            priority=admission.priority,
            detached=partial(context.link.left_by, self),
            unread=context.link.unread,
            speaks_json=self._is_json,
            sees_details=sees_details(admission.head, "1.1", admission.caller, config),
            failed=self._metrics.failed,
            spend=self._flood.spend,
        )
        self._protocol = Connection(ConnectionType.SERVER)
        self._came: list[bytes] = []  # frames from the link, until the next flush
        self._parts: list[bytes] = []  # pieces of an incomplete message
        self._size = 0
        self._missed = 0
        self._closed = False
        self._deadline = Deadline(context.deadlines, self._overdue)
        self._deadline.set(HELLO_TIMEOUT_S)
        fields = [
            (b"upgrade", b"websocket"),
            (b"connection", b"Upgrade"),
            (b"sec-websocket-accept", accepted),
            *headers,
            *self._metrics.headers,
        ]
        if subprotocol is not None:
            fields.append((b"sec-websocket-protocol", subprotocol.encode()))
        lines = b"".join(b"%b: %b\r\n" % field for field in fields)
        transport.write(b"HTTP/1.1 101 \r\n%b\r\n" % lines)
        self._link.watch(self)
        self._batch.mark_dirty(self)

    @property
    def address(self) -> str:
        """The client's address."""
        return self._metrics.address

    @property
    def is_stalled(self) -> bool:
        """True while frames wait because the client does not read."""
        return self._stalled

    # ---- from the client ----

    def receive(self, data: bytes) -> None:
        if self._closed:
            return
        self._missed = 0
        self._protocol.receive_data(data)
        for event in self._protocol.events():  # wsproto turns invalid input into CloseConnection
            self._take(event)
            if self._closed or self._session.close is not None:
                break
        self._batch.mark_dirty(self)
        if self._session.congested:
            self._transport.pause_reading()

    def _take(self, event: object) -> None:
        if isinstance(event, BytesMessage | TextMessage):
            self._gather(event)
        elif isinstance(event, Ping):
            # A client that does not read gets no Pong, because Pongs would only pile up.
            if self._transport.writable_bytes() > 0:
                self._transport.write(self._protocol.send(event.response()))
            self._session.charge(EMPTY_POINTS)
        elif isinstance(event, CloseConnection):
            self._transport.write(self._protocol.send(event.response()))
            self._end()
        else:
            assert isinstance(event, Pong), event
            self._session.charge(EMPTY_POINTS)

    def _gather(self, event: BytesMessage | TextMessage) -> None:
        """Add a piece of a message, unless the message is too large or of the wrong type."""
        is_text = isinstance(event, TextMessage)
        data = event.data.encode() if isinstance(event, TextMessage) else bytes(event.data)
        size = len(data)
        least = 1 if event.message_finished else SMALL_PIECE_BYTES
        if event.frame_finished and size < least:
            self._session.charge(EMPTY_POINTS)
        self._size += size
        if self._size > MAX_MESSAGE_BYTES or is_text is not self._is_json:
            # Drop the pieces: the session needs only the type and the length of a message to create
            # the error.
            self._parts.clear()
            unread = bytes(self._size)
            self._session.receive(unread.decode() if is_text else unread)
            return
        self._parts.append(data)
        if event.message_finished:
            message = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
            self._parts, self._size = [], 0
            self._forward(self._session.receive(message.decode() if is_text else message))

    def _forward(self, frames: list[ToOrigin]) -> None:
        for corr, frame in frames:
            if isinstance(frame, Credit):
                self._link.credit(self, corr, frame)
            elif isinstance(frame, Detach):
                self._link.detach(self, corr)
            else:
                self._link.ask(self, corr, frame)

    # ---- to the client ----

    def deliver(self, raw: bytes) -> None:
        # Do not touch the session before the flush: with many connections, its attributes would
        # leave the CPU's caches again before they are used.
        self._came.append(raw)
        self._batch.dirty[self] = None

    def deliver_run(self, run: list[bytes], corr: bytes) -> None:
        self._came += with_corr_bytes(run, corr)
        self._batch.dirty[self] = None

    def flush(self) -> None:
        """Send the session's frames as far as the client has room."""
        if self._closed:
            return
        session, transport, came = self._session, self._transport, self._came
        room = transport.writable_bytes()
        if (
            len(came) == 1
            and not self._is_json
            and (raw := session.pass_on(came[0], room)) is not None
        ):
            came.clear()
            transport.write(_HEADERS[len(raw)] + raw)
            return
        for raw in came:
            session.deliver(raw)
        came.clear()
        room = self._write(room)
        # A snapshot is written only when all of its frames have arrived from the origin, and the
        # origin needs further credit to send them.
        self._forward(session.credits())
        if session.has_frames and not self._stalled:
            self._metrics.stalled()
        self._stalled = session.has_frames
        if session.close is not None and room > 0:
            closing = CloseConnection(CloseReason(session.close.code), session.close.reason)
            transport.write(self._protocol.send(closing))
            self._end()

    def _write(self, room: int) -> int:
        """Write waiting messages until `writable_bytes` is below 1; return the last of its values.

        Only after a value below 1 is `drained` called once there is room again.
        """
        session = self._session
        while room > 0:
            # A message holds as many frames as fit, or a single frame that is larger than the room.
            data = b""
            while room > 0 and (message := session.next_message(room)) is not None:
                data += self._encoded(message)
                room -= len(message)
            if not data:
                break
            self._transport.write(data)
            self._forward(session.credits())
            if not session.congested:
                self._transport.resume_reading()
            room = self._transport.writable_bytes()
        return room

    def _encoded(self, frames: bytes) -> bytes:
        """Return frames as one binary message, or as a text message of JSON for each."""
        if not self._is_json:
            return _header(len(frames)) + frames
        texts = [message_of(raw).encode() for raw in split(frames)]
        return b"".join([_header(len(text), _TEXT) + text for text in texts])

    def drained(self) -> None:
        self._batch.mark_dirty(self)

    def disconnected(self) -> None:
        if not self._closed:
            self._leave()

    def _leave(self) -> None:
        self._closed = True
        self._deadline.end()
        self._link.forget(self)
        self._session.detached = none_detached  # break a reference cycle with this object
        self._done()
        self._metrics.ended()

    def drain(self) -> None:
        """Do nothing: at shutdown, the link sends an error to the session and its streams."""

    # ---- time ----

    def _overdue(self) -> None:
        """Handle the timeout for Hello, or send a ping; drop a client that missed several pings."""
        self._session.time_out()
        if self._session.close is not None:
            self._batch.mark_dirty(self)
            self._deadline.clear()
            return
        if self._missed >= MISSED_PINGS:
            self._transport.abort()
            return
        self._missed += 1
        if self._transport.writable_bytes() > 0:
            self._transport.write(self._protocol.send(Ping()))
        self._deadline.set(PING_INTERVAL_S)

    # ---- the end ----

    def _end(self) -> None:
        """Close the connection after the last message; further input is dropped."""
        self._leave()
        self._transport.close(lingers=True)


def chosen_subprotocol(offered: Sequence[str]) -> str | None:
    """Return the first subprotocol offered that the edge speaks; None if there is none."""
    return next((each for each in offered if each in (SUBPROTOCOL, JSON_SUBPROTOCOL)), None)


def _header(size: int, first: int = _BINARY) -> bytes:
    """Return the header of a message in one frame (RFC 6455, 5.2), whose first byte is `first`."""
    if size <= SMALL_BYTES:
        return bytes((first, size))
    if size < 1 << 16:
        return bytes((first, 126)) + size.to_bytes(2)
    return bytes((first, 127)) + size.to_bytes(8)
