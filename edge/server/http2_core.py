"""HTTP/2 (RFC 9113) on one connection: bytes in; events, and bytes within what may wait, out.

Sans-I/O, on the library h2, which knows HPACK, the frames and the states. Here is what it leaves
to its user, or does not do: flow control that reaches the source of each response, faults of one
request that cost that request alone, and bounds on what a client may have us do for nothing.

The DATA of responses is framed here, beside h2's count of the windows: most frames carry one
token, and h2 takes longer over its frame than the edge over all the rest of its way.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from h2.config import H2Configuration
from h2.connection import ConnectionState, H2Connection
from h2.errors import ErrorCodes
from h2.events import (
    DataReceived,
    Event,
    RemoteSettingsChanged,
    RequestReceived,
    StreamEnded,
    StreamReset,
    WindowUpdated,
)
from h2.exceptions import FlowControlError, NoSuchStreamError, ProtocolError
from h2.settings import SettingCodes, Settings
from h2.stream import H2Stream
from hpack.exceptions import HPACKError
from hyperframe.frame import (
    DataFrame,
    Frame,
    GoAwayFrame,
    HeadersFrame,
    PingFrame,
    PriorityFrame,
    RstStreamFrame,
    SettingsFrame,
    WindowUpdateFrame,
)

from edge.server.outlet import UNSENT_BYTES, Handler, Headers, Request

MAX_CONNECTION_UNSENT_BYTES = 256 << 10
"""Of all responses of a connection: where there are many, each may keep less than UNSENT_BYTES."""
MAX_STREAMS = 256
"""Open requests of one connection; those beyond are refused one by one, and may be tried again."""
MAX_HEADER_BYTES = 16 << 10
"""Of a request's header fields, as RFC 9113, 6.5.2 counts them; 431 beyond."""
MAX_HEADERS = 100
MAX_READ_HEADER_BYTES = 64 << 10
"""Of header fields that are read to be refused; a client that sends more is left, and so is one
that sends so many bytes of a header block without its end."""
MAX_DATA_BYTES = 16 << 10
"""Of one DATA frame, so that streams take turns. Every client takes frames of this size."""
CONNECTION_WINDOW_BYTES = 1 << 20
"""Of all request bodies of a connection that may come before what came has been read."""
MAX_TABLE_BYTES = 4096
"""Of header fields that are remembered here for a client's sake, however many it allows."""
MAX_CLOSED_STREAMS = 1024
"""Streams that are remembered after their end, for what was under way to them then."""
MAX_STREAM_ID = 2**31 - 1
MAX_IDLE_WORK = 1000.0
"""How much a client may have us do for nothing. Frames count that ask for nothing and carry
nothing; it is forgiven with time, and for what it lets us send."""
FORGIVEN_PER_S = 100.0
FORGIVEN_PER_DATA = 0.5
IDLE_WORK: dict[type[Frame], float] = {
    PingFrame: 2.0,
    PriorityFrame: 1.0,
    RstStreamFrame: 5.0,
    SettingsFrame: 10.0,
    WindowUpdateFrame: 0.2,
}
"""What a frame counts as; of the others a DATA frame without data, and an unknown one."""
OTHER_IDLE_WORK = 1.0

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
    """One request and its response: an `Outlet`."""

    __slots__ = (
        "_broken",
        "_connection",
        "_ended",
        "_frame_tail",
        "_h2",
        "_head",
        "_waiting",
        "came_whole",
        "handler",
        "id",
        "open",
        "untaken",
    )

    def __init__(self, connection: Http2Connection, h2: H2Stream) -> None:
        self.id = h2.stream_id
        self.open = True  # not all of the response has left
        self.handler: Handler | None = None  # who is to hear of the client
        self.came_whole = False
        self.untaken = 0  # bytes of the request's body
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

    # ---- an Outlet ----

    def start(self, status: int, headers: Headers) -> None:
        if not self.over:
            self._head = [(b":status", b"%d" % status), *headers]
            self._connection.has_more(self)

    def write(self, data: bytes) -> None:
        if data and not self.over:
            self._waiting += data
            self._connection.has_more(self)

    def end(self) -> None:
        if not self.over:
            self._ended, self.handler = True, None
            self._connection.has_more(self)

    def reset(self) -> None:
        """What was written still leaves, as far as the client has room for it."""
        if not self.over:
            self._broken, self.handler = True, None
            self._connection.has_more(self)

    def room(self) -> int:
        return self._connection.room(self)

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
        elif self._broken and not self.sendable:
            h2.reset_stream(self.id, ErrorCodes.INTERNAL_ERROR)
            self._connection.forget(self)

    def put_data(self, h2: H2Connection, out: bytearray) -> int:
        """One DATA frame, as large as both windows let it be; gives how much it carries."""
        waiting = self._waiting
        windows = min(h2.outbound_flow_control_window, self._h2.outbound_flow_control_window)
        size = min(len(waiting), windows, MAX_DATA_BYTES)
        if size <= 0:
            return 0
        if self._ended and size == len(waiting):
            h2.send_data(self.id, bytes(waiting), end_stream=True)
            out += h2.data_to_send()
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


class Http2Connection:
    """`touched` is called when there may be something to `take`, or somebody has `drained`."""

    def __init__(
        self,
        clock_s: Callable[[], float],
        touched: Callable[[], None],
        *,
        secure: bool = True,
        peer: tuple[str, int] | None = None,
    ) -> None:
        self.closed = False  # when all that `take` gives has been sent, that was it
        self.streams: dict[int, Stream] = {}
        self._touched = touched
        self._scheme = "https" if secure else "http"
        self._peer = peer
        self._heads: dict[Stream, None] = {}  # streams with something that needs no room
        self._bodies: dict[Stream, None] = {}  # streams with something that their window lets go
        self._starved: dict[Stream, None] = {}  # that had no room when asked
        self._relieved: dict[Stream, None] = {}  # of those, that may have some now
        self._leaving = False
        self._h2 = _Connection(clock_s)
        self._h2.begin()

    # ---- what comes ----

    def receive(self, data: bytes) -> list[Happened]:
        """Never raises for what a client sends: it costs the request, or the connection."""
        happened: list[Happened] = []
        if self.closed:
            return happened
        try:
            for event in self._h2.receive_data(data):
                self._note(event, happened)
            self._h2.check_header_block()
        except ProtocolError as error:
            happened += self._fail(error)
        self._end_if_idle()
        self._touched()
        return happened

    def lost(self) -> list[Happened]:
        """The connection is gone."""
        self.closed = True
        left: list[Happened] = []
        for stream in list(self.streams.values()):
            self.forget(stream)
            left.append(Left(stream))
        return left

    def _fail(self, error: ProtocolError) -> list[Happened]:
        if self._h2.state_machine.state is not ConnectionState.CLOSED:
            self._h2.close_connection(error.error_code)
        return self.lost()

    def _note(self, event: Event, happened: list[Happened]) -> None:
        if isinstance(event, RequestReceived):
            self._note_request(event, happened)
        elif isinstance(event, DataReceived):
            self._note_data(event, happened)
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
        request = _request(fields, self._scheme, self._peer)
        if request is None:
            self._h2.reset_stream(event.stream_id, ErrorCodes.PROTOCOL_ERROR)
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
        if not data and event.stream_ended is None:
            self._h2.spend(OTHER_IDLE_WORK)
        stream.untaken += len(data)
        stream.came_whole = event.stream_ended is not None
        happened.append(Came(stream, bytes(data), stream.came_whole))

    def taken(self, stream: Stream, size: int) -> None:
        size = min(size, stream.untaken)
        stream.untaken -= size
        if size and not self.closed:
            self._h2.acknowledge_received_data(size, stream.id)
            self._touched()

    # ---- what goes ----

    def room(self, stream: Stream) -> int:
        share = MAX_CONNECTION_UNSENT_BYTES // max(len(self.streams), 1)
        room = min(UNSENT_BYTES, share) - stream.unsent_bytes
        if room < 1 and stream.open:
            self._starved[stream] = None
        return room

    def has_more(self, stream: Stream) -> None:
        if not stream.open:
            return
        if stream.needs_no_room:
            self._heads[stream] = None
        if stream.sendable:
            self._bodies[stream] = None
        elif stream.over:
            self._heads[stream] = None  # it may have to be broken off
        self._touched()

    def take(self, most: int) -> bytes:
        """What is to be sent now: of bodies about `most` bytes, a frame of each stream in turn."""
        h2 = self._h2
        self._put_heads()
        out = bytearray(h2.data_to_send())
        while self._bodies and most > 0 and h2.outbound_flow_control_window > 0:
            most -= self._take_turns(most, out)
        self._put_heads()
        self._end_if_idle()
        out += h2.data_to_send()
        return bytes(out)

    def _put_heads(self) -> None:
        heads, self._heads = self._heads, {}
        for stream in heads:
            if stream.open:
                stream.put_head(self._h2)

    def _take_turns(self, most: int, out: bytearray) -> int:
        """One frame of each stream, until `most` bytes are reached; gives how many it were."""
        h2 = self._h2
        turns = iter(self._bodies)
        again: list[Stream] = []
        sent = 0
        for stream in turns:
            if not stream.open:
                continue
            size = stream.put_data(h2, out)
            sent += size
            if not stream.unsent_bytes or size >= MAX_DATA_BYTES // 16:
                h2.forgive(FORGIVEN_PER_DATA)
            if stream in self._starved:
                self._relieved[stream] = None
            if stream.sendable:
                again.append(stream)
            elif stream.over and stream.open:
                self._heads[stream] = None
            if sent >= most or h2.outbound_flow_control_window <= 0:
                break
        self._bodies = dict.fromkeys((*turns, *again))
        return sent

    def drained(self) -> list[Handler]:
        """Whom `room` has disappointed, and may not again."""
        relieved, self._relieved = self._relieved, {}
        handlers = []
        for stream in relieved:
            if stream.open and stream in self._starved:
                del self._starved[stream]
                if self.room(stream) >= 1 and stream.handler is not None:
                    handlers.append(stream.handler)
        return handlers

    def forget(self, stream: Stream) -> None:
        """Its response has left, or never will."""
        if self.streams.pop(stream.id, None) is None:
            return
        stream.close()
        self._starved.pop(stream, None)
        self._relieved.update(self._starved)  # fewer share what may wait
        self.taken(stream, stream.untaken)

    # ---- its end ----

    def go_away(self) -> None:
        """Have the client ask elsewhere; what it has asked, and what is under way, is answered."""
        if not (self._leaving or self.closed):
            self._leaving = True
            self._h2.say_go_away(MAX_STREAM_ID)
            self._end_if_idle()
            self._touched()

    def _end_if_idle(self) -> None:
        if (self._leaving or self._h2.client_leaves) and not (self.streams or self.closed):
            self.closed = True
            self._h2.say_go_away(self._h2.highest_inbound_stream_id)


class _TooMuchForNothing(ProtocolError):
    error_code = ErrorCodes.ENHANCE_YOUR_CALM


class _Connection(H2Connection):
    """h2's, with what a client may do held within bounds, and its faults within their stream."""

    MAX_CLOSED_STREAMS = MAX_CLOSED_STREAMS

    def __init__(self, clock_s: Callable[[], float]) -> None:
        super().__init__(
            H2Configuration(
                client_side=False,
                header_encoding=None,
                validate_outbound_headers=False,
                normalize_outbound_headers=False,
            )
        )
        self.client_leaves = False  # it has sent GOAWAY
        self._clock_s = clock_s
        self._idle_work = 0.0
        self._forgiven_at = clock_s()

    def begin(self) -> None:
        self.local_settings = Settings(
            client=False,
            initial_values={
                SettingCodes.MAX_CONCURRENT_STREAMS: MAX_STREAMS,
                SettingCodes.MAX_HEADER_LIST_SIZE: MAX_HEADER_BYTES,
            },
        )
        self.initiate_connection()
        self.increment_flow_control_window(
            CONNECTION_WINDOW_BYTES - self.local_settings.initial_window_size
        )
        # To h2 a request too many or too large ends the connection. It is let through, to be
        # refused by itself: a client may have sent it before it knew the limits.
        self.local_settings[SettingCodes.MAX_CONCURRENT_STREAMS] = MAX_STREAM_ID
        self.local_settings.acknowledge()
        self.decoder.max_header_list_size = MAX_READ_HEADER_BYTES

    # ---- work for nothing ----

    def spend(self, work: float) -> None:
        self._idle_work += work
        if self._idle_work > MAX_IDLE_WORK:
            now = self._clock_s()
            self.forgive((now - self._forgiven_at) * FORGIVEN_PER_S)
            self._forgiven_at = now
            if self._idle_work > MAX_IDLE_WORK:
                raise _TooMuchForNothing("too many frames that ask for nothing")

    def forgive(self, work: float) -> None:
        self._idle_work = max(0.0, self._idle_work - work)

    def check_header_block(self) -> None:
        size = sum(len(frame.data) for frame in self.incoming_buffer._headers_buffer)
        if size > MAX_READ_HEADER_BYTES:
            raise _TooMuchForNothing("a header block without an end")

    # ---- frames ----

    def _receive_frame(self, frame: Frame) -> list[Event]:
        if not isinstance(frame, DataFrame | HeadersFrame):
            self.spend(IDLE_WORK.get(type(frame), OTHER_IDLE_WORK))
        if isinstance(frame, PriorityFrame):
            return []  # RFC 9113, 5.3.2: of no meaning any more
        if isinstance(frame, GoAwayFrame):
            # To h2 nothing may follow. But a client may say so and await what it has asked for.
            self.client_leaves = True
            return []
        if isinstance(frame, SettingsFrame):
            _bound_table(frame)
        try:
            return super()._receive_frame(frame)
        except ProtocolError as error:
            if not self._is_of_one_stream(frame, error):
                raise
            return self._end_stream_for(frame, error)

    def _is_of_one_stream(self, frame: Frame, error: ProtocolError) -> bool:
        """Whether the connection is as sound as before (RFC 9113, 5.4)."""
        return (
            isinstance(frame, DataFrame | HeadersFrame)
            and frame.stream_id in self.streams
            and self.state_machine.state is not ConnectionState.CLOSED
            and not isinstance(error, FlowControlError | NoSuchStreamError)
            and not isinstance(error.__cause__, HPACKError | IndexError | TypeError)
            and not isinstance(error.__cause__, UnicodeDecodeError)
        )

    def _end_stream_for(self, frame: Frame, error: ProtocolError) -> list[Event]:
        self.reset_stream(frame.stream_id, error.error_code)
        if isinstance(frame, DataFrame) and frame.flow_controlled_length:
            self.acknowledge_received_data(frame.flow_controlled_length, frame.stream_id)
        self.spend(IDLE_WORK[RstStreamFrame])
        return [
            StreamReset(stream_id=frame.stream_id, error_code=error.error_code, remote_reset=False)
        ]

    def say_go_away(self, last_stream_id: int) -> None:
        """GOAWAY, after which h2 lets what is under way come to its end: not so with its own."""
        frame = GoAwayFrame(0)
        frame.last_stream_id = last_stream_id
        frame.error_code = ErrorCodes.NO_ERROR
        self._prepare_for_sending([frame])


def _bound_table(frame: SettingsFrame) -> None:
    code = SettingsFrame.HEADER_TABLE_SIZE
    if code in frame.settings:
        frame.settings[code] = min(frame.settings[code], MAX_TABLE_BYTES)


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
