"""HTTP/2 (RFC 9113) on one connection: bytes in; events, and bytes within what may wait, out.

Sans-I/O, on the library h2, which knows HPACK, the frames and the states. Here is what it leaves
to its user: who may send how much and in which turn, so that flow control reaches the source of
each response.

The DATA of responses is framed here, beside h2's count of the windows: most frames carry one
token, and h2 takes longer over its frame than the edge over all the rest of its way.
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

from tailrace.edge.server.flood import FORGIVEN_PER_DATA, REFUSED_POINTS
from tailrace.edge.server.http2_library import (
    IDLE_WORK,
    MAX_HEADER_BYTES,
    MAX_HEADERS,
    MAX_STREAM_ID,
    MAX_STREAMS,
    TRAILER_POINTS,
    BoundedConnection,
)
from tailrace.edge.server.interfaces import UNSENT_BYTES, Headers, Request, ResponseSource

MAX_CONNECTION_UNSENT_BYTES = 256 << 10
"""Of all responses of a connection: where there are many, each may keep less than UNSENT_BYTES."""
MAX_DATA_BYTES = 16 << 10
"""Of one DATA frame, so that streams take turns. Every client takes frames of this size."""

_TARGET = re.compile(rb"\*|/[!-~]*")
_METHOD = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+")


# ---- what a client has done ----


@dataclass(frozen=True, slots=True)
class Asked:
    """A request's head. `too_large`: it is over the limits, and nothing but an answer is due."""

    stream: Stream
    request: Request
    ended: bool
    too_large: bool


@dataclass(frozen=True, slots=True)
class Came:
    """A piece of a request's body. `ended`: it is whole; trailers are dropped."""

    stream: Stream
    data: bytes
    ended: bool


@dataclass(frozen=True, slots=True)
class Left:
    """The client wants no more of a response, or has broken the rules within its request."""

    stream: Stream


Happened = Asked | Came | Left


class Stream:
    """One request and its response: a `ResponseWriter`."""

    __slots__ = (
        *("_broken", "_connection", "_ended", "_frame_tail", "_h2", "_head", "_waiting"),
        *("came_bytes", "came_whole", "source", "id", "open", "started", "untaken"),
    )

    def __init__(self, connection: Http2Connection, h2: H2Stream) -> None:
        self.id = h2.stream_id
        self.open = True  # not all of the response has left
        self.source: ResponseSource | None = None  # who is to hear of the client
        self.started = False
        self.came_whole = False
        self.came_bytes = 0  # of the request's body
        self.untaken = 0  # of these
        self._connection = connection
        self._h2 = h2
        self._head: list[tuple[bytes, bytes]] | None = None
        self._waiting = bytearray()
        self._ended = False
        self._broken = False
        self._frame_tail = b"\x00\x00" + self.id.to_bytes(4, "big")  # of a DATA frame's header

    @property
    def unsent_bytes(self) -> int:
        return len(self._waiting)

    @property
    def over(self) -> bool:
        """Nothing more is written."""
        return self._ended or self._broken or not self.open

    # ---- a ResponseWriter ----

    def start(self, status: int, headers: Headers) -> None:
        if not self.over:
            self.started = True
            more = self._connection.headers()
            self._head = [(b":status", b"%d" % status), *headers, *more]
            self._connection.has_more(self)

    def write(self, data: bytes) -> None:
        if data and not self.over:
            self._waiting += data
            self._connection.has_more(self)

    def end(self) -> None:
        if not self.over:
            self._ended, self.source = True, None
            self._connection.has_more(self)

    def reset(self) -> None:
        """What was written still leaves, as far as the client has room for it."""
        if not self.over:
            self._broken, self.source = True, None
            self._connection.has_more(self)

    def writable_bytes(self) -> int:
        return self._connection.writable_bytes(self)

    # ---- the request's body ----

    def taken(self, size: int) -> None:
        """So many bytes of it have been read: so many more may come."""
        self._connection.taken(self, size)

    # ---- what the connection sends ----

    @property
    def needs_no_room(self) -> bool:
        """Whether it has something to send that flow control does not bound."""
        return self._head is not None or not self._waiting

    @property
    def sendable(self) -> bool:
        """Whether something waits that its own window lets go."""
        return bool(self._waiting) and self._h2.outbound_flow_control_window > 0

    def put_head(self, h2: H2Connection) -> None:
        """The head, if it is due, and the end where nothing waits before it."""
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

    def put_data(self, h2: BoundedConnection, out: bytearray) -> int:
        """One DATA frame, as large as both windows let it be; gives how much it carries."""
        waiting = self._waiting
        windows = min(h2.outbound_flow_control_window, self._h2.outbound_flow_control_window)
        size = min(len(waiting), windows, MAX_DATA_BYTES)
        if size <= 0:
            return 0
        if self._ended and size == len(waiting):
            h2.send_data(self.id, bytes(waiting), end_stream=True)
            out += h2.take_data()
            waiting.clear()
            self._finish(h2)
            return size
        out += size.to_bytes(3, "big")
        out += self._frame_tail
        out += waiting if size == len(waiting) else waiting[:size]
        del waiting[:size]
        # As h2 does itself; it would make an object of the frame.
        self._h2.outbound_flow_control_window -= size
        h2.outbound_flow_control_window -= size
        return size

    def _finish(self, h2: H2Connection) -> None:
        if not self.came_whole:  # it has its answer: no more of the request is wanted
            h2.reset_stream(self.id, ErrorCodes.NO_ERROR)
        self._connection.forget(self)

    def close(self) -> None:
        self.open = False
        self._head = None
        self._waiting.clear()


@dataclass(slots=True, eq=False)
class Http2Connection:
    """`mark_dirty` is called when there may be something to `take`, or somebody to be `drained`.

    `headers` are those of every response.
    """

    clock_s: Callable[[], float]
    mark_dirty: Callable[[], None]
    headers: Callable[[], Headers] = tuple
    secure: bool = True
    peer: tuple[str, int] | None = None
    closed: bool = False  # when all that `take` gives has been sent, that was it
    failed: bool = False  # for what the client has done
    streams: dict[int, Stream] = field(default_factory=dict)
    _heads: dict[Stream, None] = field(default_factory=dict)  # with something that needs no room
    _bodies: dict[Stream, None] = field(default_factory=dict)  # with what their window lets go
    _starved: dict[Stream, float] = field(default_factory=dict)  # without room, and since when
    _relieved: dict[Stream, None] = field(default_factory=dict)  # of those, that may have some now
    _leaving: bool = False
    _h2: BoundedConnection = field(init=False)

    def __post_init__(self) -> None:
        self._h2 = BoundedConnection(self.clock_s)

    # ---- what comes ----

    def receive(self, data: bytes) -> list[Happened]:
        """Never raises for what a client sends: it costs the request, or the connection."""
        happened: list[Happened] = []
        if self.closed:
            return happened
        try:
            for event in self._h2.receive_data(data):
                self._note(event, happened)
        except ProtocolError as error:
            happened += self._fail(error)
        self._end_if_idle()
        self.mark_dirty()
        return happened

    def refused_at_once(self, count: int) -> list[Happened]:
        """Charge requests that cost their client nothing to make."""
        if self.closed:
            return []
        try:
            self._h2.spend(count * REFUSED_POINTS)
        except ProtocolError as error:
            return self._fail(error)
        return []

    def lost(self) -> list[Happened]:
        """The connection is gone."""
        self.closed = True
        left: list[Happened] = []
        for stream in list(self.streams.values()):
            self.forget(stream)
            left.append(Left(stream))
        return left

    def _fail(self, error: ProtocolError) -> list[Happened]:
        self.failed = True
        if self._h2.state_machine.state is not ConnectionState.CLOSED:
            self._h2.close_connection(error.error_code)
        return self.lost()

    def _note(self, event: Event, happened: list[Happened]) -> None:
        if isinstance(event, RequestReceived):
            self._note_request(event, happened)
        elif isinstance(event, DataReceived):
            self._note_data(event, happened)
        elif isinstance(event, TrailersReceived):
            self._h2.spend(TRAILER_POINTS)
        elif isinstance(event, StreamEnded):
            stream = self.streams.get(event.stream_id)
            if stream is not None and not stream.came_whole:  # by trailers
                stream.came_whole = True
                happened.append(Came(stream, b"", ended=True))
        elif isinstance(event, StreamReset):
            stream = self.streams.get(event.stream_id)
            if stream is not None:
                self.forget(stream)
                happened.append(Left(stream))
        elif isinstance(event, WindowUpdated):
            stream = self.streams.get(event.stream_id)
            if stream is not None:
                self.has_more(stream)
        elif isinstance(event, RemoteSettingsChanged):
            for stream in self.streams.values():
                self.has_more(stream)

    def _note_request(self, event: RequestReceived, happened: list[Happened]) -> None:
        h2 = self._h2.streams.get(event.stream_id)
        if h2 is None or h2.closed:
            return  # what came behind it in the same read was its reset
        if len(self.streams) >= MAX_STREAMS:
            self._h2.reset_stream(event.stream_id, ErrorCodes.REFUSED_STREAM)
            self._h2.spend(IDLE_WORK[RstStreamFrame])
            return
        fields = [(bytes(name), bytes(value)) for name, value in event.headers or ()]
        request = _request(fields, "https" if self.secure else "http", self.peer)
        if request is None:
            self._h2.reset_stream(event.stream_id, ErrorCodes.PROTOCOL_ERROR)
            self._h2.spend(IDLE_WORK[RstStreamFrame])
            return
        stream = Stream(self, h2)
        stream.came_whole = event.stream_ended is not None
        self.streams[stream.id] = stream
        size = sum(len(name) + len(value) + 32 for name, value in fields)
        too_large = size > MAX_HEADER_BYTES or len(fields) > MAX_HEADERS
        happened.append(Asked(stream, request, stream.came_whole, too_large))

    def _note_data(self, event: DataReceived, happened: list[Happened]) -> None:
        data, size = event.data or b"", event.flow_controlled_length or 0
        stream = self.streams.get(event.stream_id)
        unread = size if stream is None else size - len(data)  # all of it, or the padding
        if unread:
            self._h2.acknowledge_received_data(unread, event.stream_id)
        if stream is None:
            return
        stream.untaken += len(data)
        stream.came_bytes += len(data)
        stream.came_whole = event.stream_ended is not None
        happened.append(Came(stream, bytes(data), stream.came_whole))

    def taken(self, stream: Stream, size: int) -> None:
        size = min(size, stream.untaken)
        stream.untaken -= size
        if size and not self.closed:
            self._h2.acknowledge_received_data(size, stream.id)
            self.mark_dirty()

    # ---- what goes ----

    def writable_bytes(self, stream: Stream) -> int:
        share = MAX_CONNECTION_UNSENT_BYTES // max(len(self.streams), 1)
        room = min(UNSENT_BYTES, share) - stream.unsent_bytes
        if room < 1 and stream.open and stream not in self._starved:
            self._starved[stream] = self.clock_s()
            self.mark_dirty()
        return room

    @property
    def starved_since(self) -> float | None:
        """Since when the one has had no room that has had none for longest; None where all have."""
        return next(iter(self._starved.values()), None)

    def stalled(self, since: float) -> list[Stream]:
        """Those without room since then, or for longer."""
        return [stream for stream, at in self._starved.items() if at <= since]

    @property
    def body_bytes(self) -> int:
        """What has come of the bodies of all open requests."""
        return sum(stream.came_bytes for stream in self.streams.values())

    def has_more(self, stream: Stream) -> None:
        if not stream.open:
            return
        if stream.needs_no_room or stream.over:
            self._heads[stream] = None
        if stream.sendable:
            self._bodies[stream] = None
        self.mark_dirty()

    def take(self, most: int) -> bytes:
        """What is to be sent now: of bodies about `most` bytes, a frame of each stream in turn."""
        h2 = self._h2
        self._put_heads()
        out = h2.take_data()
        while self._bodies and most > 0 and h2.outbound_flow_control_window > 0:
            most -= self._take_turns(most, out)
        self._put_heads()
        self._end_if_idle()
        out += h2.take_data()
        return bytes(out)

    @property
    def has_more_bodies(self) -> bool:
        """Whether `take` would give more, of a connection with more room."""
        return bool(self._bodies) and self._h2.outbound_flow_control_window > 0

    def _put_heads(self) -> None:
        if not self._heads:
            return
        heads, self._heads = self._heads, {}
        for stream in heads:
            if stream.open:
                stream.put_head(self._h2)

    def _take_turns(self, most: int, out: bytearray) -> int:
        """One frame of each stream, until `most` bytes are reached; gives how many it were."""
        h2 = self._h2
        turn, self._bodies = self._bodies, {}
        again: dict[Stream, None] = {}
        left: dict[Stream, None] = {}
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
                h2.flood.forgive(FORGIVEN_PER_DATA)
            if stream in self._starved:
                self._relieved[stream] = None
            if stream.sendable:
                again[stream] = None
            elif stream.over and stream.open:
                self._heads[stream] = None
        self._bodies = left | again
        return sent

    def drained(self) -> list[ResponseSource]:
        """Whom `writable_bytes` has disappointed, and may not again."""
        if not self._relieved:
            return []
        relieved, self._relieved = self._relieved, {}
        sources = []
        for stream in relieved:
            if stream.open and stream in self._starved and self.writable_bytes(stream) >= 1:
                del self._starved[stream]
                if stream.source is not None:
                    sources.append(stream.source)
        return sources

    def abort(self, stream: Stream) -> None:
        """End a response at once; what waits is thrown away."""
        if stream.open and not self.closed:
            self._h2.reset_stream(stream.id, ErrorCodes.CANCEL)
            self.forget(stream)
            self.mark_dirty()

    def forget(self, stream: Stream) -> None:
        """Its response has left, or never will."""
        if self.streams.pop(stream.id, None) is None:
            return
        stream.close()
        self._starved.pop(stream, None)
        self._relieved.update(dict.fromkeys(self._starved))  # fewer share what may wait
        self.taken(stream, stream.untaken)

    # ---- its end ----

    def go_away(self) -> None:
        """Have the client ask elsewhere; what it has asked, and what is under way, is answered."""
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
    """What h2 has found valid, as a request; None where its target or method is none."""
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
