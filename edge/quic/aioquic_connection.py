"""A QUIC connection of aioquic's, with what it decides for itself and is decided otherwise here.

- A client may send as much as has been read and a window more. aioquic doubles its windows
  whenever half of one is used, so that a body is taken in as fast as it comes.
- Session tickets carry no permission for early data, which anybody could send once more.
- The first byte of a connection id may be given, so that several processes can share a port.
- Stateless reset tokens are computed from connection ids, so that they outlive this process.
- An acknowledgement waits for something to go with.
- What may leave at once does: aioquic's pacing counts in microseconds, for which there is no timer.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from aioquic.quic.congestion.base import K_INITIAL_WINDOW
from aioquic.quic.connection import (
    QuicConnectionAdapter,
    stream_is_client_initiated,
    stream_is_unidirectional,
)
from aioquic.quic.recovery import QuicPacketPacer

from tailrace.edge.quic.aioquic_packets import PacketConnection
from tailrace.edge.quic.core import (
    CONNECTION_WINDOW_BYTES,
    MAX_CONTROL_BYTES,
    MAX_REQUESTS_AT_ONCE,
    STREAM_WINDOW_BYTES,
    TIMER_S,
)

CONTROL_BYTES_PER_REQUEST = 256
"""More that a client may send about a connection for each request on it."""
MAX_CONTROL_STREAMS = 16
"""Unidirectional streams that a client may have open: it needs three."""
ACK_DELAY_S = 0.02
"""That an acknowledgement waits for something to go with; a client reckons with 25 ms."""
PACING_GAIN = 2
"""How many windows may leave in a round trip's time, were they acknowledged: RFC 9002, 7.7 asks for
one and a little, Linux takes two while a window grows."""

ResetToken = Callable[[bytes], bytes]
"""Gives the stateless reset token of a connection id."""


class _Mute(QuicConnectionAdapter):
    """aioquic has lines for each connection and packet, some of them warnings about a client."""

    def debug(self, msg: object, *args: object, **kwargs: Any) -> None: ...

    info = warning = error = debug


_MUTE = _Mute(logging.getLogger("quic"), {})


class _Pacer(QuicPacketPacer):
    """Lets go at once what may (RFC 9002, 7.7), and what is due before the loop's clock can tell.

    aioquic lets a quarter of the first window go, and each further packet by itself.
    """

    def update_rate(self, congestion_window: int, smoothed_rtt: float) -> None:
        super().update_rate(PACING_GAIN * congestion_window, smoothed_rtt)
        first_window_s = K_INITIAL_WINDOW * (self.packet_time or 0.0)
        self.bucket_max = max(self.bucket_max, TIMER_S, first_window_s)


class AioquicConnection(PacketConnection):
    def __init__(
        self,
        mark: int | None,
        reset_token: ResetToken,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self._mark = mark
        self._reset_token = reset_token
        self._logger = self._loss._logger = _MUTE
        self._loss._pacer = _Pacer(max_datagram_size=self._max_datagram_size)
        self._local_max_streams_bidi.value = MAX_REQUESTS_AT_ONCE
        self._local_max_streams_bidi.sent = MAX_REQUESTS_AT_ONCE
        self._local_max_streams_uni.value = MAX_CONTROL_STREAMS
        self._local_max_streams_uni.sent = MAX_CONTROL_STREAMS
        self._local_max_stream_data_uni = MAX_CONTROL_BYTES
        if mark is not None:
            first = self._host_cids[0]
            first.cid = bytes([mark]) + first.cid[1:]
            self.host_cid = self._local_initial_source_connection_id = first.cid
        self._host_cids[0].stateless_reset_token = reset_token(self.host_cid)

    def _initialize(self, peer_cid: bytes) -> None:
        super()._initialize(peer_cid)
        self.tls._max_early_data = None

    def _replenish_connection_ids(self) -> None:
        known = len(self._host_cids)
        super()._replenish_connection_ids()
        for each in self._host_cids[known:]:
            if self._mark is not None:
                each.cid = bytes([self._mark]) + each.cid[1:]
            each.stateless_reset_token = self._reset_token(each.cid)

    # ---- what is sent ----

    def established(self) -> None:
        """The handshake, which no acknowledgement may hold up, is over."""
        self._ack_delay = ACK_DELAY_S

    def leaves_at_once(self, stream: Any) -> int:
        """How many bytes of a stream congestion and flow control would let go."""
        if self._pacing_at is not None:
            return 0
        credit: int = stream.max_stream_data_remote - stream.sender.highest_offset
        return min(
            self._loss.congestion_window - self._loss.bytes_in_flight,
            credit,
            self._remote_max_data - self._remote_max_data_used,
        )

    # ---- windows: raised by `grant_stream` and `grant`, not by what has come ----

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
        """The client may send so many bytes in all, of all streams."""
        if limit - self._local_max_data.sent >= CONNECTION_WINDOW_BYTES // 2:
            self._local_max_data.value = limit

    def grant_stream(self, stream_id: int, unread: int) -> None:
        """Of a stream the client may send what has come in order and a window, less `unread`."""
        stream = self._streams.get(stream_id)
        if stream is None or stream.receiver.is_finished:
            return
        limit = stream.receiver.starting_offset() + STREAM_WINDOW_BYTES - unread
        if limit - stream.max_stream_data_local >= STREAM_WINDOW_BYTES // 2:
            stream.max_stream_data_local = limit

    def grant_control(self) -> None:
        """Another request, and so much more that the client may send beside requests."""
        self._local_max_stream_data_uni += CONTROL_BYTES_PER_REQUEST
        for stream_id, stream in self._streams.items():
            if stream_is_unidirectional(stream_id) and stream_is_client_initiated(stream_id):
                more = self._local_max_stream_data_uni - stream.max_stream_data_local
                if more >= MAX_CONTROL_BYTES // 2:
                    stream.max_stream_data_local += more
