"""aioquic's connection, which writes packets of responses itself.

Nearly all packets of an edge hold pieces of responses and nothing else. Before each packet aioquic
looks for 15 kinds of frames, and at the end it begins one packet more to find that nothing is left.
So packets of responses are written here, many at once. aioquic's congestion control, flow control,
encryption and loss recovery are used as they are.

aioquic writes all other packets. This module asks aioquic for them after each event that can make
one due: a packet that the client wants acknowledged, a packet from another address or for another
connection id, a loss, a timer, many finished streams, and calls of this edge, such as
`reset_stream`. Most packets of a client only acknowledge others: after such a packet aioquic has
nothing to send.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from aioquic.buffer import Buffer, encode_uint_var  # type: ignore[attr-defined]
from aioquic.quic.connection import NetworkAddress, QuicConnection
from aioquic.quic.packet import PACKET_FIXED_BIT, QuicFrameType, push_ack_frame
from aioquic.quic.packet_builder import QuicDeliveryState
from aioquic.tls import Epoch

from tailrace.edge.quic.congestion import TimerPacer
from tailrace.edge.quic.path_mtu import PathMtu
from tailrace.edge.quic.response_packets import NUMBER_BYTES, ResponsePackets

ACK_DELAY_S = 0.02
"""Time for which an acknowledgement waits for response data that can share its packet, in seconds.
Clients expect at most 25 ms (RFC 9000, 18.2: the default of max_ack_delay)."""
FULL_DATAGRAM_BYTES = 1000
"""Length of a datagram that is acknowledged at once, because it is part of an upload."""
MAX_ACK_BYTES = 512
"""Maximum bytes of an ACK frame. If it has too many gaps, the oldest packets are left out."""
ACK_DELAY_EXPONENT = 3
"""Delays of acknowledgements have units of 2**3 microseconds (RFC 9000, 18.2: the default)."""
MAX_KEPT_STREAMS = 16
"""Maximum number of streams in aioquic's queue. With more, aioquic is asked for packets at once,
which drops finished streams from the queue. With fewer, this can wait for the next new request."""


class SendingConnection(QuicConnection):
    """A QUIC connection that writes packets of responses itself."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._must_ask_aioquic = True  # packets that only aioquic writes may be due
        # The packet number space of packets with a short header; set after the handshake.
        self._space: Any = None
        self._path_mtu = PathMtu()
        self._loss._pacer = TimerPacer(max_datagram_size=self.configuration.max_datagram_size)

    def established(self) -> None:
        """Write packets of responses from now on: the handshake is complete."""
        self._space = next(each for each in self._loss.spaces if each.is_application_data)

    # ---- everything that can make other packets due ----

    def receive_datagram(self, data: bytes, addr: NetworkAddress, now: float) -> None:
        """Handle a datagram of the client."""
        space: Any = self._space
        control: Any = self._loss._cc
        if space is None:
            super().receive_datagram(data, addr, now)
            return
        is_waiting = space.ack_at is not None
        address = self.get_peer_address()
        before = (control.losses, address, self.host_cid)
        super().receive_datagram(data, addr, now)
        if before != (control.losses, addr, self.host_cid):
            self._must_ask_aioquic = True
        if address != self.get_peer_address():
            self._path_mtu.shrink()
        if len(self._streams_queue) > MAX_KEPT_STREAMS:
            self._must_ask_aioquic |= any(stream.is_finished for stream in self._streams_queue)
        if space.ack_at is not None:
            self._must_ask_aioquic = True
            if len(data) >= FULL_DATAGRAM_BYTES:
                space.ack_at = now
            elif not is_waiting:
                space.ack_at = now + ACK_DELAY_S

    def handle_timer(self, now: float) -> None:
        """Handle the expiry of the timer that `get_timer` returned."""
        self._must_ask_aioquic = True
        super().handle_timer(now)

    def reset_stream(self, stream_id: int, error_code: int) -> None:
        """Reset a response (RESET_STREAM), so that the client sees that its body is incomplete."""
        self._must_ask_aioquic = True
        super().reset_stream(stream_id, error_code)

    def stop_stream(self, stream_id: int, error_code: int) -> None:
        """Ask the client to stop sending the body of its request (STOP_SENDING)."""
        self._must_ask_aioquic = True
        super().stop_stream(stream_id, error_code)

    # ---- sending ----

    def sendable_bytes(self, stream_id: int) -> int:
        """Return how many more bytes of a response congestion and flow control allow now."""
        stream = self._streams.get(stream_id)
        if stream is None or self._pacing_at is not None:
            return 0
        return max(
            0,
            min(
                self._loss.congestion_window - self._loss.bytes_in_flight,
                self._remote_max_data - self._remote_max_data_used,
                stream.max_stream_data_remote - stream.sender.highest_offset,
            ),
        )

    def datagrams_to_send(self, now: float) -> list[tuple[bytes, NetworkAddress]]:
        """Return the datagrams to send now."""
        if (
            self._space is None
            or self._close_event is not None
            or not self._network_paths[0].is_validated
        ):
            self._must_ask_aioquic = True
            return super().datagrams_to_send(now)
        unsent = [
            stream
            for stream in self._streams_queue
            if not (stream.sender.buffer_is_empty or stream.is_blocked)
        ]
        datagrams: list[tuple[bytes, NetworkAddress]] = []
        if self._must_ask_aioquic:
            datagrams = self._other_datagrams(unsent, now)
        if unsent:
            datagrams += self._response_datagrams(unsent, now)
        return datagrams

    def _other_datagrams(
        self, unsent: Sequence[Any], now: float
    ) -> list[tuple[bytes, NetworkAddress]]:
        """Return the packets that only aioquic writes, without the data of streams."""
        hidden = {stream: None for stream in unsent if not stream.receiver.stop_pending}
        if hidden:
            self._streams_queue = [each for each in self._streams_queue if each not in hidden]
        datagrams = super().datagrams_to_send(now)
        self._streams_queue = [*self._streams_queue, *hidden]
        room_bytes = self._loss.congestion_window - self._loss.bytes_in_flight
        # aioquic has now written all that is due, unless congestion control or pacing forbade it.
        self._must_ask_aioquic = (
            self._pacing_at is not None or room_bytes < self.configuration.max_datagram_size
        )
        return datagrams

    def _response_datagrams(
        self, unsent: Sequence[Any], now: float
    ) -> list[tuple[bytes, NetworkAddress]]:
        """Return packets of responses, as many as congestion control and pacing allow now."""
        loss: Any = self._loss
        cid = self._peer_cid.cid
        packets: Any = ResponsePackets(
            self._cryptos[Epoch.ONE_RTT],
            PACKET_FIXED_BIT | self._spin_bit << 5 | NUMBER_BYTES - 1,
            cid,
            self._packet_number,
            self._path_mtu,
        )
        packets.allow(
            loss.congestion_window - loss.bytes_in_flight,
            loss._pacer.allowed_packets(now),
        )
        acknowledges = self._space.ack_at is not None and packets.begin_with(
            self._ack_frame(now), (self._ack_delivered, (self._space.largest_received_packet,))
        )
        served = [stream for stream in unsent if self._put_data(stream, packets)]
        datagrams: list[tuple[bytes, NetworkAddress]] = []
        if served:
            if acknowledges:
                self._space.ack_at = None
            if self._path_mtu.take_probe(now):
                packets.add_probe()
            datagrams = self._flush_builder(packets, self._network_paths[0], cid, now)
            loss._pacer.count_packets(len(datagrams))
        self._pacing_at = None
        if any(not stream.sender.buffer_is_empty for stream in unsent):
            self._pacing_at = loss._pacer.next_send_time(now=now)
            for stream in served:  # move the stream behind those that have not sent
                self._streams_queue.remove(stream)
                self._streams_queue.append(stream)
        return datagrams

    def _ack_frame(self, now: float) -> bytes:
        """Return an ACK frame of all packets that have arrived."""
        space = self._space
        delay_us = int((now - space.largest_received_time) * 1e6)
        buffer = Buffer(capacity=MAX_ACK_BYTES)
        buffer.push_uint_var(QuicFrameType.ACK)
        push_ack_frame(buffer, space.ack_queue, delay_us >> ACK_DELAY_EXPONENT, MAX_ACK_BYTES - 1)
        return buffer.data

    def _ack_delivered(self, delivery: QuicDeliveryState, last: int) -> None:
        """Stop acknowledging packets up to number `last`, whose ACK the client has received."""
        if delivery is QuicDeliveryState.ACKED:
            self._space.ack_queue.subtract(0, last + 1)

    def _put_data(self, stream: Any, packets: ResponsePackets) -> bool:
        """Put a stream's data into packets, as far as limits allow; return True if any was put."""
        sender = stream.sender
        stream_id = encode_uint_var(stream.stream_id)
        was_put = False
        while not sender.buffer_is_empty:
            usable_bytes = packets.usable_bytes(stream_id, sender.next_offset)
            if usable_bytes <= 0:
                break
            highest = sender.highest_offset
            credit = self._remote_max_data - self._remote_max_data_used
            limit = min(highest + credit, stream.max_stream_data_remote)
            frame = sender.get_frame(usable_bytes, limit)
            if frame is None:
                break
            self._remote_max_data_used += sender.highest_offset - highest
            packets.put(stream_id, frame, sender.on_data_delivery)
            was_put = True
        return was_put
