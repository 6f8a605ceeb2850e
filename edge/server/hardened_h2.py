"""A subclass of h2's connection that adds the limits of a server.

h2 itself ends the connection for nearly every fault of a request, and for a request over the limit.
It does not limit unproductive frames, and sends nothing more after a GOAWAY of either side. One
private method of h2 is overridden, `_receive_frame`; edge/private_names.py checks that it exists.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from h2.config import H2Configuration
from h2.connection import ConnectionState, H2Connection
from h2.errors import ErrorCodes
from h2.events import Event, StreamReset
from h2.exceptions import FlowControlError, NoSuchStreamError, ProtocolError
from h2.settings import SettingCodes, Settings
from hpack.exceptions import HPACKError
from hpack.hpack import Decoder
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

from tailrace.edge.private_names import H2, require_private_names
from tailrace.edge.server.flood import EMPTY_POINTS, SMALL_PIECE_BYTES, FloodBudget

MAX_STREAMS = 256
"""Maximum number of open requests of a connection; further ones are refused and may be retried."""
MAX_HEADER_BYTES = 16 << 10
"""Maximum size of a request's header fields, in bytes as counted by RFC 9113, 6.5.2. A request with
more is answered with 431."""
MAX_HEADERS = 100
"""Maximum number of header fields of a request; one with more is answered with 431."""
MAX_READ_HEADER_BYTES = 64 << 10
"""Maximum size in bytes of a header block that is decoded, so that its request can be answered with
431. A larger block ends the connection, after at most 2 * PIECE_BYTES more have been read."""
CONNECTION_WINDOW_BYTES = 1 << 20
"""Flow-control window of a connection: maximum unread bytes of all its request bodies together."""
PIECE_BYTES = 16 << 10
"""Bytes of input that are parsed at a time, and the maximum length of a frame."""
MAX_TABLE_BYTES = 4096
"""Maximum size of HPACK's table for responses, even if the client allows more."""
MAX_CLOSED_STREAMS = 1024
"""Maximum number of closed streams that are remembered, because late frames may arrive for them."""
MAX_STREAM_ID = 2**31 - 1
FRAME_POINTS: dict[type[Frame], float] = {
    PingFrame: 2.0,
    PriorityFrame: 1.0,
    RstStreamFrame: 5.0,
    SettingsFrame: 10.0,
    WindowUpdateFrame: 0.2,
}
"""Points that a frame adds to its connection's flood score. Other types add EMPTY_POINTS."""
TRAILER_POINTS = 1.0
"""Points that the trailers of a request add to the flood score. No route uses trailers."""
RESIZE_POINTS = 1.0
"""Points that each HPACK dynamic table size update adds to the flood score. One header block can
hold thousands of these updates, so a small frame could cause much work."""


require_private_names(H2)


class FloodDetected(ProtocolError):
    """The client has spent its flood budget, or sends an endless header block."""

    error_code = ErrorCodes.ENHANCE_YOUR_CALM


class CountingDecoder(Decoder):
    """hpack's decoder; it calls `resized` whenever the client resizes the dynamic table."""

    def __init__(self) -> None:
        self.resized: Callable[[], None] = lambda: None
        super().__init__()

    @property
    def header_table_size(self) -> int:
        return self.header_table.maxsize

    @header_table_size.setter
    def header_table_size(self, size: int) -> None:
        self.resized()
        self.header_table.maxsize = size


class HardenedH2Connection(H2Connection):
    """h2's connection with limits for the client; a faulty request ends only its own stream."""

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
        self.client_leaves = False  # the client has sent GOAWAY
        self._before = bytearray()  # output that is sent before the rest of h2's output
        self._unframed_bytes = 0  # bytes received since the last whole frame
        self.flood = FloodBudget(clock_s)
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
        # A client may send more requests than the limit before it knows the limit, and h2 would end
        # the connection. So h2 accepts them all, and `Http2Connection` refuses the excess requests.
        self.local_settings[SettingCodes.MAX_CONCURRENT_STREAMS] = MAX_STREAM_ID
        self.local_settings.acknowledge()
        decoder = CountingDecoder()
        decoder.max_allowed_table_size = self.decoder.max_allowed_table_size
        decoder.max_header_list_size = MAX_READ_HEADER_BYTES
        decoder.resized = partial(self.spend, RESIZE_POINTS)
        self.decoder = decoder

    def take_data(self) -> bytearray:
        """Return the frames to be sent, and forget them."""
        if not self._before:
            return bytearray(self.data_to_send())
        data, self._before = self._before, bytearray()
        data += self.data_to_send()
        return data

    # ---- floods ----

    def spend(self, points: float) -> None:
        """Charge points; raise FloodDetected if the budget is spent."""
        if not self.flood.spend(points):
            raise FloodDetected("too many unproductive frames")

    # ---- frames ----

    def receive_data(self, data: bytes) -> list[Event]:  # type: ignore[override]
        """Parse input; raise FloodDetected for a header block that does not end.

        h2 collects the frames of a header block, up to 64, and handles them as one frame when the
        block ends. Every other frame is shorter than the limit for header blocks. So if more input
        than this limit arrives without completing a frame, it is a header block that does not end.
        """
        events: list[Event] = []
        view = memoryview(data)
        for begin in range(0, len(view), PIECE_BYTES):
            piece = view[begin : begin + PIECE_BYTES]
            self._unframed_bytes += len(piece)
            events += super().receive_data(piece)
            if self._unframed_bytes > MAX_READ_HEADER_BYTES + PIECE_BYTES:
                raise FloodDetected("the header block does not end")
        return events

    def _receive_frame(self, frame: Frame) -> list[Event]:
        self._unframed_bytes = 0
        if not isinstance(frame, DataFrame | HeadersFrame):
            self.spend(FRAME_POINTS.get(type(frame), EMPTY_POINTS))
        elif (
            isinstance(frame, DataFrame)
            and len(frame.data) < SMALL_PIECE_BYTES
            and "END_STREAM" not in frame.flags
        ):
            self.spend(EMPTY_POINTS)
        if isinstance(frame, PriorityFrame):
            return []  # priorities are deprecated (RFC 9113, 5.3.2)
        if isinstance(frame, GoAwayFrame):
            # h2 would send nothing more after a GOAWAY, but open requests must still be answered.
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
        """Return True if an error concerns one stream and not the connection (RFC 9113, 5.4)."""
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
        self.spend(FRAME_POINTS[RstStreamFrame])
        return [
            StreamReset(stream_id=frame.stream_id, error_code=error.error_code, remote_reset=False)
        ]

    def say_go_away(self, last_stream_id: int) -> None:
        """Send GOAWAY and keep open requests, which h2's own `close_connection` would end."""
        frame = GoAwayFrame(0)
        frame.last_stream_id = last_stream_id
        frame.error_code = ErrorCodes.NO_ERROR
        self._before += self.data_to_send() + frame.serialize()


def _bound_table(frame: SettingsFrame) -> None:
    code = SettingsFrame.HEADER_TABLE_SIZE
    if code in frame.settings:
        frame.settings[code] = min(frame.settings[code], MAX_TABLE_BYTES)
