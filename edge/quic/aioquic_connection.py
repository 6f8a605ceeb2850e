"""A subclass of aioquic's connection that changes some of its behaviour.

This file and `aioquic_sending.py` are the only ones that use private parts of aioquic. They are
listed in `edge/private_names.py`, which compares the list with the installed version at import.

- Flow control: a client may send one window more than the application has read. aioquic itself
  doubles a window whenever half of it is used, so it does not limit the unread bytes of a body.
- Session tickets do not permit early data (0-RTT), which an attacker could replay.
- The first byte of a connection id can be chosen, so that several processes can share a port.
- Stateless reset tokens are computed from connection ids, so that they outlive this process.
- QPACK has no dynamic table for requests.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, NamedTuple

import pylsqpack
from aioquic.h3.connection import FrameType, H3Connection, HeadersState, Setting
from aioquic.quic.connection import (
    QuicConnection,
    stream_is_client_initiated,
    stream_is_unidirectional,
)

from tailrace.edge.private_names import AIOQUIC, require_private_names
from tailrace.edge.quic.aioquic_sending import SendingConnection
from tailrace.edge.quic.interface import (
    CONNECTION_WINDOW_BYTES,
    MAX_CONTROL_BYTES,
    MAX_HEADER_BYTES,
    STREAM_WINDOW_BYTES,
)

CONTROL_BYTES_PER_REQUEST = 256
"""Number of bytes by which each request raises the limits of the client's control streams."""

ResetToken = Callable[[bytes], bytes]
"""A function that returns the stateless reset token of a connection id."""

require_private_names(AIOQUIC)
# Silence aioquic: it logs several lines per connection, some of them warnings about clients.
logging.getLogger("quic").setLevel(logging.CRITICAL + 1)


class SendBuffer(NamedTuple):
    """Positions in the data of one response, in bytes from its beginning."""

    sent: int
    acknowledged: int


class AioquicConnection(SendingConnection):
    """The server's end of a QUIC connection."""

    def __init__(self, first_cid_byte: int | None, reset_token: ResetToken, **options: Any) -> None:
        super().__init__(**options)
        self._first_cid_byte = first_cid_byte
        self._reset_token = reset_token
        self._control_limit = MAX_CONTROL_BYTES
        first = self._host_cids[0]
        self._finish_connection_id(first)
        self.host_cid = self._local_initial_source_connection_id = first.cid

    @property
    def is_closing(self) -> bool:
        """True once either side has closed the connection."""
        return self._close_event is not None

    # ---- the handshake ----

    def _initialize(self, peer_cid: bytes) -> None:
        super()._initialize(peer_cid)
        self.tls._max_early_data = None

    def _replenish_connection_ids(self) -> None:
        known = len(self._host_cids)
        super()._replenish_connection_ids()
        for each in self._host_cids[known:]:
            self._finish_connection_id(each)

    def _finish_connection_id(self, connection_id: Any) -> None:
        if self._first_cid_byte is not None:
            connection_id.cid = bytes([self._first_cid_byte]) + connection_id.cid[1:]
        connection_id.stateless_reset_token = self._reset_token(connection_id.cid)

    # ---- streams ----

    def send_buffer(self, stream_id: int) -> SendBuffer | None:
        """Return how far a response has been sent; None if its stream has ended."""
        stream = self._streams.get(stream_id)
        if stream is None:
            return None
        return SendBuffer(stream.sender.highest_offset, stream.sender._buffer_start)

    def is_refused(self, stream_id: int) -> bool:
        """Return True if the client has already refused the response (STOP_SENDING)."""
        return self._streams[stream_id].sender._reset_error_code is not None

    def is_receiving(self, stream_id: int) -> bool:
        """Return True if more of a request can arrive."""
        stream = self._streams.get(stream_id)
        return stream is not None and not stream.receiver.is_finished

    def missing_bytes(self, stream_id: int) -> int:
        """Return how many bytes of a reset stream count as sent, but will never arrive."""
        receiver = self._streams[stream_id].receiver
        missing: int = receiver.highest_offset - receiver.starting_offset()
        return missing

    # ---- flow control: windows grow by `grant` and `grant_stream`, not by what arrives ----

    def _write_connection_limits(self, builder: Any, space: Any) -> None:
        limit = self._local_max_data
        used, limit.used = limit.used, 0
        try:
            super()._write_connection_limits(builder, space)
        finally:
            limit.used = used

    def _write_stream_limits(self, builder: Any, space: Any, stream: Any) -> None:
        if stream.max_stream_data_local_sent == stream.max_stream_data_local:
            return
        receiver = stream.receiver
        highest, receiver.highest_offset = receiver.highest_offset, 0
        try:
            super()._write_stream_limits(builder, space, stream)
        finally:
            receiver.highest_offset = highest

    def grant(self, limit: int) -> None:
        """Let the client send up to `limit` bytes in total, on all streams together."""
        if limit - self._local_max_data.sent >= CONNECTION_WINDOW_BYTES // 2:
            self._local_max_data.value = limit
            self._must_ask_aioquic = True

    def grant_stream(self, stream_id: int, unread: int) -> None:
        """Let the client send one window more of a request than has been read."""
        stream = self._streams.get(stream_id)
        if stream is None or stream.receiver.is_finished:
            return
        limit = stream.receiver.starting_offset() + STREAM_WINDOW_BYTES - unread
        if limit - stream.max_stream_data_local >= STREAM_WINDOW_BYTES // 2:
            stream.max_stream_data_local = limit
            self._must_ask_aioquic = True

    def grant_control(self) -> None:
        """Let the client send more on its control streams, because it has sent one more request."""
        self._control_limit += CONTROL_BYTES_PER_REQUEST
        for stream_id, stream in self._streams.items():
            if stream_is_unidirectional(stream_id) and stream_is_client_initiated(stream_id):
                more = self._control_limit - stream.max_stream_data_local
                if more >= MAX_CONTROL_BYTES // 2:
                    stream.max_stream_data_local += more
                    self._must_ask_aioquic = True


class Http3Parser(H3Connection):
    """aioquic's HTTP/3 connection, used only to parse requests; the caller encodes responses."""

    def __init__(self, quic: QuicConnection) -> None:
        super().__init__(quic)
        self._decoder = pylsqpack.Decoder(0, 0)

    def _get_local_settings(self) -> dict[int, int]:
        return {
            Setting.QPACK_MAX_TABLE_CAPACITY: 0,
            Setting.QPACK_BLOCKED_STREAMS: 0,
            Setting.MAX_FIELD_SECTION_SIZE: MAX_HEADER_BYTES,
            Setting.DUMMY: 1,
        }

    def is_head_too_long(self, stream_id: int) -> bool:
        """Return True if a request has begun a HEADERS frame that is over the limit."""
        return self._is_too_long(stream_id, trailers=False)

    def are_trailers_too_long(self, stream_id: int) -> bool:
        """Return True if a request has begun trailers that are over the limit."""
        return self._is_too_long(stream_id, trailers=True)

    def _is_too_long(self, stream_id: int, *, trailers: bool) -> bool:
        # Check the announced size now: aioquic would buffer the HEADERS frame until it is complete,
        # and copy the buffer for each piece.
        stream = self._stream.get(stream_id)
        if stream is None or stream.frame_type != FrameType.HEADERS or stream.frame_size is None:
            return False
        is_head = stream.headers_recv_state is HeadersState.INITIAL
        return stream.frame_size > MAX_HEADER_BYTES and is_head != trailers

    def end_sending(self, stream_id: int) -> None:
        """Forget a stream whose response has ended, unless more of its request can arrive."""
        stream = self._stream.get(stream_id)
        if stream is not None:
            stream.sending_ended = True
            if stream.is_ended():
                self.forget(stream_id)

    def forget(self, stream_id: int) -> None:
        """Drop the state of a request."""
        self._stream.pop(stream_id, None)
