"""A QUIC connection of aioquic's, with what it decides for itself and is decided otherwise here.

- A client may send as much as has been read and a window more. aioquic doubles its windows
  whenever half of one is used, so that a body is taken in as fast as it comes.
- Session tickets carry no permission for early data, which anybody could send once more.
- The first byte of a connection id may be given, so that several processes can share a port.
- The host name that a handshake asks for is told; aioquic reads it and throws it away.
- What fills packets by itself is put into them without a look at all else that might go in, and
  no packet is begun where there is nothing to say. An acknowledgement goes with something else.
- What may leave at once does: aioquic's pacing counts in microseconds, for which there is no timer.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

from aioquic._buffer import Buffer
from aioquic.buffer import encode_uint_var
from aioquic.quic.congestion.base import K_INITIAL_WINDOW
from aioquic.quic.connection import (
    QuicConnection,
    QuicConnectionAdapter,
    stream_is_client_initiated,
    stream_is_unidirectional,
)
from aioquic.quic.packet import PACKET_FIXED_BIT, QuicPacketType
from aioquic.quic.packet_builder import QuicSentPacket
from aioquic.quic.recovery import QuicPacketPacer
from aioquic.tls import Epoch, pull_client_hello

from edge.quic.core import (
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
ACK_DELAY_S = 0.005
"""That an acknowledgement waits for something to go with; a client reckons with five times that."""
OFFSET_BYTES, OFFSET_MARK = 4, 0x80000000
MAX_OFFSET = 1 << 30
"""An offset below it can be written in so many bytes, with such a mark (RFC 9000, 16)."""
PACING_GAIN = 2
"""How many windows may leave in a round trip's time, were they acknowledged: RFC 9002, 7.7 asks for
one and a little, Linux takes two while a window grows."""
NUMBER_BYTES = 2
"""Of a packet's number that are sent."""

AskedFor = Callable[[str], None]
"""Told the host name of a handshake, before the client can ask anything of it."""


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


class AioquicConnection(QuicConnection):
    def __init__(self, mark: int | None, asked_for: AskedFor | None, **options: Any) -> None:
        super().__init__(**options)
        self._mark = mark
        self._asked_for = asked_for
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

    def _initialize(self, peer_cid: bytes) -> None:
        super()._initialize(peer_cid)
        self.tls._max_early_data = None
        if self._asked_for is not None:
            handle: Callable[..., None] = self.tls._server_handle_hello
            hears = partial(self._hear, self._asked_for, handle)
            self.tls._server_handle_hello = hears  # type: ignore[method-assign]

    @staticmethod
    def _hear(
        asked_for: AskedFor, handle: Callable[..., None], hello: Buffer, *answers: Buffer
    ) -> None:
        begun = hello.tell()
        name = pull_client_hello(hello).server_name
        hello.seek(begun)
        handle(hello, *answers)
        if name is not None:
            asked_for(name)

    def _replenish_connection_ids(self) -> None:
        known = len(self._host_cids)
        super()._replenish_connection_ids()
        if self._mark is not None:
            for each in self._host_cids[known:]:
                each.cid = bytes([self._mark]) + each.cid[1:]

    # ---- what is sent ----

    def datagrams_to_send(self, now: float) -> list[tuple[bytes, Any]]:
        if self._is_silent(now):
            self._pacing_at = None
            return []
        self.acknowledge(now)  # by itself it would be one more packet, and a timer
        return super().datagrams_to_send(now)

    def established(self) -> None:
        """The handshake, which no acknowledgement may hold up, is over."""
        self._ack_delay = ACK_DELAY_S

    def acknowledge(self, now: float) -> None:
        """What has come, in what is sent next."""
        space = self._spaces[Epoch.ONE_RTT]
        if space.ack_at is not None:
            space.ack_at = now

    def _is_silent(self, now: float) -> bool:
        """There is nothing to say, of all that may go into a packet: each acknowledgement that
        comes is a reason to look, and aioquic begins a packet and throws it away."""
        if not self._handshake_confirmed or self._close_pending or len(self._network_paths) != 1:
            return False
        path, acknowledge_at = self._network_paths[0], self._spaces[Epoch.ONE_RTT].ack_at
        if not path.is_validated or path.remote_challenges:
            return False
        if acknowledge_at is not None and acknowledge_at <= now:
            return False
        is_asked = self._probe_pending or self._ping_pending or self._handshake_done_pending
        if is_asked or self._retire_connection_ids or self._streams_blocked_pending:
            return False
        if not all(connection_id.was_sent for connection_id in self._host_cids):
            return False
        return self._limits_are_told() and self._streams_are_silent()

    def _limits_are_told(self) -> bool:
        if self._local_max_data.value != self._local_max_data.sent:
            return False
        streams = (self._local_max_streams_bidi, self._local_max_streams_uni)
        return all(each.sent - each.used >= each.value - each.sent for each in streams)

    def _streams_are_silent(self) -> bool:
        if not self._crypto_streams[Epoch.ONE_RTT].sender.buffer_is_empty:
            return False
        for stream in self._streams_queue:
            sender, receiver = stream.sender, stream.receiver
            if not sender.buffer_is_empty or sender.reset_pending or receiver.stop_pending:
                return False
            if stream.max_stream_data_local != stream.max_stream_data_local_sent:
                return False
            if sender.is_finished and receiver.is_finished:
                return False
        return True

    def _write_application(self, builder: Any, network_path: Any, now: float) -> None:
        if self._handshake_confirmed and network_path.is_validated:
            for stream in list(self._streams_queue):
                if self._write_full(builder, stream, now):
                    self._streams_queue.remove(stream)  # others have their turn before it again
                    self._streams_queue.append(stream)
        super()._write_application(builder, network_path, now)

    def _write_full(self, builder: Any, stream: Any, now: float) -> int:
        """Packets that hold nothing but as much of one stream as goes in, and how many.

        aioquic asks of each packet what else might go in, for a third of what a packet costs in
        all. What does not fill one, and all else that there is to say, goes its way behind these.
        """
        sender = stream.sender
        if sender.buffer_is_empty or sender._reset_error_code is not None or stream.is_blocked:
            return 0
        if len(sender._pending) == 0:
            return 0
        begin, end = sender._pending[0].start, sender._pending[0].stop
        crypto, pacer = self._cryptos[Epoch.ONE_RTT], self._loss._pacer
        first = PACKET_FIXED_BIT | self._spin_bit << 5 | crypto.key_phase << 2 | NUMBER_BYTES - 1
        head = bytes([first]) + self._peer_cid.cid
        frame = b"\x0c" + encode_uint_var(stream.stream_id)  # its offset follows, no length
        payload = self._max_datagram_size - len(head) - NUMBER_BYTES - crypto.aead_tag_size
        size = payload - len(frame) - OFFSET_BYTES
        credit = self._remote_max_data - self._remote_max_data_used
        end = min(end, sender.highest_offset + credit, stream.max_stream_data_remote, MAX_OFFSET)
        at, buffer, skip, written = begin, sender._buffer, sender._buffer_start, 0
        room = builder.max_flight_bytes - builder._flight_bytes
        while end - at >= size and room >= self._max_datagram_size:
            if pacer.next_send_time(now=now) is not None:
                break
            number = builder._packet_number
            datagram = crypto.encrypt_packet(
                head + (number & 0xFFFF).to_bytes(NUMBER_BYTES, "big"),
                frame
                + (at | OFFSET_MARK).to_bytes(OFFSET_BYTES, "big")
                + buffer[at - skip : at - skip + size],
                number,
            )
            packet = QuicSentPacket(
                epoch=Epoch.ONE_RTT,
                in_flight=True,
                is_ack_eliciting=True,
                is_crypto_packet=False,
                packet_number=number,
                packet_type=QuicPacketType.ONE_RTT,
                sent_bytes=len(datagram),
            )
            packet.delivery_handlers.append((sender.on_data_delivery, (at, at + size, False)))
            builder._packets.append(packet)
            builder._datagrams.append(datagram)
            builder._packet_number += 1
            builder._flight_bytes += len(datagram)
            pacer.update_after_send(now=now)
            room -= len(datagram)
            at += size
            written += 1
        if written:
            sender._pending.subtract(begin, at)
            self._remote_max_data_used += max(0, at - sender.highest_offset)
            sender.highest_offset = max(sender.highest_offset, at)
        return written

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
