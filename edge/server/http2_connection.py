"""HTTP/2 (RFC 9113) on one connection: input in, events and output out.

Sans-I/O. The library h2 handles HPACK, frames and states. This module decides how much each
response may send and in which order, so that flow control reaches the source of each response.

DATA frames of responses are encoded here, and subtracted from h2's flow-control windows. Most of
them carry one token, and h2 would spend more time on each than the rest of the edge together.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field

from h2.connection import ConnectionState, H2Connection
from h2.errors import ErrorCodes
from h2.events import (
    DataReceived,
    Event,
    RemoteSettingsChanged,
    RequestReceived,
    StreamEnded,
    StreamReset,
    TrailersReceived,
    WindowUpdated,
)
from h2.exceptions import ProtocolError
from h2.stream import H2Stream
from hyperframe.frame import RstStreamFrame

from tailrace.edge.server.flood import DECAY_PER_DATA, REFUSED_POINTS
from tailrace.edge.server.hardened_h2 import (
    FRAME_POINTS,
    MAX_HEADER_BYTES,
    MAX_HEADERS,
    MAX_STREAM_ID,
    MAX_STREAMS,
    TRAILER_POINTS,
    HardenedH2Connection,
)
from tailrace.edge.server.interfaces import UNSENT_BYTES, Headers, Request, ResponseSource

MAX_CONNECTION_UNSENT_BYTES = 256 << 10
"""Maximum unsent bytes of all responses of a connection; each response may have an equal share."""
MAX_DATA_BYTES = 16 << 10
"""Maximum length of a DATA frame, so that streams take turns. Every client accepts it."""

_TARGET = re.compile(rb"\*|/[!-~]*")
_METHOD = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+")


# ---- events ----


@dataclass(frozen=True, slots=True)
class HeadReceived:
    """The head of a request arrived. A request that is `too_large` is to be answered with 431."""

    stream: Http2Stream
    request: Request
    ended: bool
    too_large: bool


@dataclass(frozen=True, slots=True)
class BodyReceived:
    """A piece of a request's body arrived; `ended` marks the last one. Trailers are dropped."""

    stream: Http2Stream
    data: bytes
    ended: bool


@dataclass(frozen=True, slots=True)
class RequestReset:
    """The client has reset a request, or violated the protocol within it."""

    stream: Http2Stream


Http2Event = HeadReceived | BodyReceived | RequestReset


class Http2Stream:
    """One request and its response: a `ResponseWriter`."""

    __slots__ = (
        *("_broken", "_connection", "_ended", "_frame_tail", "_h2", "_head", "_waiting"),
        *("received_bytes", "is_received", "source", "id", "open", "started", "unread_bytes"),
    )

    def __init__(self, connection: Http2Connection, h2: H2Stream) -> None:
        self.id = h2.stream_id
        self.open = True  # the response has not been sent completely
        # Called when the client leaves, or when more can be written.
        self.source: ResponseSource | None = None
        self.started = False
        self.is_received = False
        self.received_bytes = 0  # bytes of the request's body that have arrived
        self.unread_bytes = 0  # bytes of the body that the application has not read
        self._connection = connection
        self._h2 = h2
        self._head: list[tuple[bytes, bytes]] | None = None
        self._waiting = bytearray()
        self._ended = False
        self._broken = False
        # Type, flags and stream id of a DATA frame's header, which follow the length.
        self._frame_tail = b"\x00\x00" + self.id.to_bytes(4, "big")

    @property
    def unsent_bytes(self) -> int:
        return len(self._waiting)

    @property
    def is_closed(self) -> bool:
        """True if the response takes no more data."""
        return self._ended or self._broken or not self.open

    # ---- a ResponseWriter ----

    def start(self, status: int, headers: Headers) -> None:
        if not self.is_closed:
            self.started = True
            more = self._connection.headers()
            self._head = [(b":status", b"%d" % status), *headers, *more]
            self._connection.has_more(self)

    def write(self, data: bytes) -> None:
        if data and not self.is_closed:
            self._waiting += data
            self._connection.has_more(self)

    def end(self) -> None:
        if not self.is_closed:
            self._ended, self.source = True, None
            self._connection.has_more(self)

    def reset(self) -> None:
        """Break the response off; written data is still sent as far as the windows allow."""
        if not self.is_closed:
            self._broken, self.source = True, None
            self._connection.has_more(self)

    def writable_bytes(self) -> int:
        return self._connection.writable_bytes(self)

    # ---- the request's body ----

    def consumed(self, size: int) -> None:
        """Let the client send `size` more bytes, because as many have been read."""
        self._connection.consumed(self, size)

    # ---- output ----

    @property
    def needs_no_room(self) -> bool:
        """True if there is something to send that flow control does not limit."""
        return self._head is not None or not self._waiting

    @property
    def sendable(self) -> bool:
        """True if data is waiting and the stream's own flow-control window is open."""
        return bool(self._waiting) and self._h2.outbound_flow_control_window > 0

    def put_head(self, h2: H2Connection) -> None:
        """Send the head if it is waiting, and the end or the reset if no data waits before it."""
        ends = self._ended and not self._waiting
        if self._head is not None:
            h2.send_headers(self.id, self._head, end_stream=ends)
            self._head = None
        elif ends:
            h2.end_stream(self.id)
        if ends:
            self._finish(h2)
        elif self._broken and not (self.sendable and h2.outbound_flow_control_window > 0):
            h2.reset_stream(self.id, ErrorCodes.INTERNAL_ERROR)
            self._connection.forget(self)

    def put_data(self, h2: HardenedH2Connection, out: bytearray) -> int:
        """Append a DATA frame, as large as the windows allow; return the length of its data."""
        waiting = self._waiting
        windows = min(h2.outbound_flow_control_window, self._h2.outbound_flow_control_window)
        size = min(len(waiting), windows, MAX_DATA_BYTES)
        if size <= 0:
            return 0
        if self._ended and size == len(waiting):
            h2.send_data(self.id, bytes(waiting), end_stream=True)
            waiting.clear()
            self._finish(h2)
            out += h2.take_data()
            return size
        out += size.to_bytes(3, "big")
        out += self._frame_tail
        out += waiting if size == len(waiting) else waiting[:size]
        del waiting[:size]
        # h2 would do the same, but create an object for each frame.
        self._h2.outbound_flow_control_window -= size
        h2.outbound_flow_control_window -= size
        return size

    def _finish(self, h2: H2Connection) -> None:
        if not self.is_received:  # the response is complete: stop the rest of the request
            h2.reset_stream(self.id, ErrorCodes.NO_ERROR)
        self._connection.forget(self)

    def close(self) -> None:
        self.open = False
        self._head = None
        self._waiting.clear()


@dataclass(slots=True, eq=False)
class Http2Connection:
    """One connection with its open requests.

    `mark_dirty` is called when `take` may have output, or `drained` may have sources to return.
    `headers` are added to every response.
    """

    clock_s: Callable[[], float]
    mark_dirty: Callable[[], None]
    headers: Callable[[], Headers] = tuple
    secure: bool = True
    peer: tuple[str, int] | None = None
    closed: bool = False  # to be closed once the output of `take` has been sent
    failed: bool = False  # the connection ends because of a fault of the client
    streams: dict[int, Http2Stream] = field(default_factory=dict)
    # Streams with output that flow control does not limit.
    _heads: dict[Http2Stream, None] = field(default_factory=dict)
    # Streams with data that their flow-control windows allow.
    _bodies: dict[Http2Stream, None] = field(default_factory=dict)
    # Maps each stream that has no room for data to the time at which it became blocked.
    _blocked: dict[Http2Stream, float] = field(default_factory=dict)
    # Blocked streams that may have room again.
    _unblocked: dict[Http2Stream, None] = field(default_factory=dict)
    _leaving: bool = False
    _h2: HardenedH2Connection = field(init=False)

    def __post_init__(self) -> None:
        self._h2 = HardenedH2Connection(self.clock_s)

    # ---- input ----

    def receive(self, data: bytes) -> list[Http2Event]:
        """Handle input. A fault of the client ends its request or the connection."""
        events: list[Http2Event] = []
        if self.closed:
            return events
        try:
            for event in self._h2.receive_data(data):
                self._note(event, events)
        except ProtocolError as error:
            events += self._fail(error)
        self._end_if_idle()
        self.mark_dirty()
        return events

    def refused_at_once(self, count: int) -> list[Http2Event]:
        """Charge `count` refused requests; return the requests that end if the budget is spent."""
        if self.closed:
            return []
        try:
            self._h2.spend(count * REFUSED_POINTS)
        except ProtocolError as error:
            return self._fail(error)
        return []

    def lost(self) -> list[Http2Event]:
        """End all requests because the connection is lost."""
        self.closed = True
        left: list[Http2Event] = []
        for stream in list(self.streams.values()):
            self.forget(stream)
            left.append(RequestReset(stream))
        return left

    def _fail(self, error: ProtocolError) -> list[Http2Event]:
        self.failed = True
        if self._h2.state_machine.state is not ConnectionState.CLOSED:
            self._h2.close_connection(error.error_code)
        return self.lost()

    def _note(self, event: Event, events: list[Http2Event]) -> None:
        if isinstance(event, RequestReceived):
            self._note_request(event, events)
        elif isinstance(event, DataReceived):
            self._note_data(event, events)
        elif isinstance(event, TrailersReceived):
            self._h2.spend(TRAILER_POINTS)
        elif isinstance(event, StreamEnded):
            stream = self.streams.get(event.stream_id)
            if stream is not None and not stream.is_received:  # the body ended with trailers
                stream.is_received = True
                events.append(BodyReceived(stream, b"", ended=True))
        elif isinstance(event, StreamReset):
            stream = self.streams.get(event.stream_id)
            if stream is not None:
                self.forget(stream)
                events.append(RequestReset(stream))
        elif isinstance(event, WindowUpdated):
            stream = self.streams.get(event.stream_id)
            if stream is not None:
                self.has_more(stream)
        elif isinstance(event, RemoteSettingsChanged):
            for stream in self.streams.values():
                self.has_more(stream)

    def _note_request(self, event: RequestReceived, events: list[Http2Event]) -> None:
        h2 = self._h2.streams.get(event.stream_id)
        if h2 is None or h2.closed:
            return  # the client has reset the request in the same read
        if len(self.streams) >= MAX_STREAMS:
            self._h2.reset_stream(event.stream_id, ErrorCodes.REFUSED_STREAM)
            self._h2.spend(FRAME_POINTS[RstStreamFrame])
            return
        fields = [(bytes(name), bytes(value)) for name, value in event.headers or ()]
        request = _request(fields, "https" if self.secure else "http", self.peer)
        if request is None:
            self._h2.reset_stream(event.stream_id, ErrorCodes.PROTOCOL_ERROR)
            self._h2.spend(FRAME_POINTS[RstStreamFrame])
            return
        stream = Http2Stream(self, h2)
        stream.is_received = event.stream_ended is not None
        self.streams[stream.id] = stream
        size = sum(len(name) + len(value) + 32 for name, value in fields)
        too_large = size > MAX_HEADER_BYTES or len(fields) > MAX_HEADERS
        events.append(HeadReceived(stream, request, stream.is_received, too_large))

    def _note_data(self, event: DataReceived, events: list[Http2Event]) -> None:
        data, size = event.data or b"", event.flow_controlled_length or 0
        stream = self.streams.get(event.stream_id)
        # The application never reads padding, nor data of a stream that has ended. So return flow-
        # control credit for these bytes now.
        unread = size if stream is None else size - len(data)
        if unread:
            self._h2.acknowledge_received_data(unread, event.stream_id)
        if stream is None:
            return
        stream.unread_bytes += len(data)
        stream.received_bytes += len(data)
        stream.is_received = event.stream_ended is not None
        events.append(BodyReceived(stream, bytes(data), stream.is_received))

    def consumed(self, stream: Http2Stream, size: int) -> None:
        size = min(size, stream.unread_bytes)
        stream.unread_bytes -= size
        if size and not self.closed:
            self._h2.acknowledge_received_data(size, stream.id)
            self.mark_dirty()

    # ---- output ----

    def writable_bytes(self, stream: Http2Stream) -> int:
        share = MAX_CONNECTION_UNSENT_BYTES // max(len(self.streams), 1)
        room = min(UNSENT_BYTES, share) - stream.unsent_bytes
        if room < 1 and stream.open and stream not in self._blocked:
            self._blocked[stream] = self.clock_s()
            self.mark_dirty()
        return room

    @property
    def blocked_since(self) -> float | None:
        """The time (`clock_s`) at which the longest-blocked stream became blocked, or None."""
        return next(iter(self._blocked.values()), None)

    def stalled(self, since: float) -> list[Http2Stream]:
        """Return the streams that became blocked at the time `since` or earlier."""
        return [stream for stream, at in self._blocked.items() if at <= since]

    @property
    def body_bytes(self) -> int:
        """Number of body bytes that have arrived for all open requests."""
        return sum(stream.received_bytes for stream in self.streams.values())

    def has_more(self, stream: Http2Stream) -> None:
        """Note that a stream may have something to send."""
        if not stream.open:
            return
        if stream.needs_no_room or stream.is_closed:
            self._heads[stream] = None
        if stream.sendable:
            self._bodies[stream] = None
        self.mark_dirty()

    def take(self, most: int) -> bytes:
        """Return the output to send, with about `most` bytes of response bodies.

        Streams take turns with one DATA frame each.
        """
        h2 = self._h2
        self._put_heads()
        out = h2.take_data()
        while self._bodies and most > 0 and h2.outbound_flow_control_window > 0:
            most -= self._take_turns(most, out)
        if self._heads or not self.streams:
            self._put_heads()
            self._end_if_idle()
            out += h2.take_data()
        return bytes(out)

    @property
    def has_more_bodies(self) -> bool:
        """True if `take` has more body data that the flow-control windows allow."""
        return bool(self._bodies) and self._h2.outbound_flow_control_window > 0

    def _put_heads(self) -> None:
        if not self._heads:
            return
        heads, self._heads = self._heads, {}
        for stream in heads:
            if stream.open:
                stream.put_head(self._h2)

    def _take_turns(self, most: int, out: bytearray) -> int:
        """Append one frame of each stream up to `most` bytes; return the number of bytes."""
        h2 = self._h2
        turn, self._bodies = self._bodies, {}
        again: dict[Http2Stream, None] = {}
        left: dict[Http2Stream, None] = {}
        sent = 0
        for stream in turn:
            if sent >= most or h2.outbound_flow_control_window <= 0:
                left[stream] = None
                continue
            if not stream.open:
                continue
            size = stream.put_data(h2, out)
            sent += size
            if h2.flood.points and (not stream.unsent_bytes or size >= MAX_DATA_BYTES // 16):
                h2.flood.decay(DECAY_PER_DATA)
            if stream in self._blocked:
                self._unblocked[stream] = None
            if stream.sendable:
                again[stream] = None
            elif stream.is_closed and stream.open:
                self._heads[stream] = None
        self._bodies = left | again
        return sent

    def drained(self) -> list[ResponseSource]:
        """Return the sources whose streams were blocked and are writable again."""
        if not self._unblocked:
            return []
        relieved, self._unblocked = self._unblocked, {}
        sources = []
        for stream in relieved:
            if stream.open and stream in self._blocked and self.writable_bytes(stream) >= 1:
                del self._blocked[stream]
                if stream.source is not None:
                    sources.append(stream.source)
        return sources

    def abort(self, stream: Http2Stream) -> None:
        """End a response at once and drop its unsent data."""
        if stream.open and not self.closed:
            self._h2.reset_stream(stream.id, ErrorCodes.CANCEL)
            self.forget(stream)
            self.mark_dirty()

    def forget(self, stream: Http2Stream) -> None:
        """Forget a stream whose response has been sent or dropped."""
        if self.streams.pop(stream.id, None) is None:
            return
        stream.close()
        self._blocked.pop(stream, None)
        # The other responses now have larger shares of the unsent bytes.
        self._unblocked.update(dict.fromkeys(self._blocked))
        self.consumed(stream, stream.unread_bytes)

    # ---- the end ----

    def go_away(self) -> None:
        """Send GOAWAY; requests that are open or on their way are still answered."""
        if not (self._leaving or self.closed):
            self._leaving = True
            self._h2.say_go_away(MAX_STREAM_ID)
            self._end_if_idle()
            self.mark_dirty()

    def _end_if_idle(self) -> None:
        if (self._leaving or self._h2.client_leaves) and not (self.streams or self.closed):
            self.closed = True
            self._h2.say_go_away(self._h2.highest_inbound_stream_id)


def _request(
    fields: list[tuple[bytes, bytes]], scheme: str, peer: tuple[str, int] | None
) -> Request | None:
    """Return the request with these fields; None if its target or method is not valid."""
    pseudo = {name: value for name, value in fields if name.startswith(b":")}
    target, method = pseudo.get(b":path", b""), pseudo[b":method"]
    if _TARGET.fullmatch(target) is None or _METHOD.fullmatch(method) is None:
        return None
    path, _, query = target.partition(b"?")
    headers = [(name, value) for name, value in fields if not name.startswith(b":")]
    if b":authority" in pseudo and not any(name == b"host" for name, _ in headers):
        headers.insert(0, (b"host", pseudo[b":authority"]))
    return Request(
        method=method.decode("ascii"),
        path=path,
        query=query,
        headers=headers,
        scheme=scheme,
        peer=peer,
        http_version="2",
    )
