"""The packets of an established connection, made and read without aioquic's own way through them.

Nearly all that is sent holds pieces of streams and an acknowledgement, and nearly all that comes an
acknowledgement or a request. aioquic asks of each packet what else might go in, begins one to find
that nothing does, and copies what comes three times: most of what a packet costs in all. Here such
packets are written and opened in one piece, many at once. Whatever else there is to say, or comes,
goes aioquic's way; so does the handshake.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from aioquic._buffer import Buffer
from aioquic._crypto import CryptoError
from aioquic.buffer import encode_uint_var
from aioquic.quic.connection import (
    END_STATES,
    QuicConnection,
    QuicConnectionError,
    QuicConnectionState,
    QuicReceiveContext,
    stream_is_client_initiated,
)
from aioquic.quic.packet import (
    PACKET_FIXED_BIT,
    QuicFrameType,
    QuicPacketType,
    decode_packet_number,
    push_ack_frame,
)
from aioquic.quic.packet_builder import QuicDeliveryState
from aioquic.quic.recovery import MAX_ACK_RANGES
from aioquic.tls import Epoch

BASE_BYTES = 1200
"""RFC 9000, 14.1"""
LARGE_BYTES = 1452
"""What Ethernet carries of IPv6 and UDP: nearly every path's most."""
MAX_PROBES, PROBE_EVERY_S = 3, 1.0
"""RFC 8899, 5.1"""
LOST_IN_A_ROW = 10
"""Large datagrams, of which a path that is merely full would have let one through."""


class PathSize:
    """How large the datagrams of a connection may be (RFC 8899; RFC 9000, 14.3).

    Any path carries BASE_BYTES. Once a client has been sent something, one packet of LARGE_BYTES
    that says nothing goes too; if it is acknowledged, so large are they from then on, until so many
    are lost in a row that the path must have become narrower: then they never grow again.
    """

    __slots__ = ("_asks_from_s", "_lost", "_probes", "size")

    def __init__(self) -> None:
        self.size = BASE_BYTES
        self._probes = 0  # sent, of those that may be
        self._asks_from_s = 0.0
        self._lost = 0  # large datagrams since the last one that was acknowledged

    def asks(self, now: float) -> bool:
        """Whether the path is to be asked now, which counts as asked."""
        if self.size != BASE_BYTES or self._probes >= MAX_PROBES or now < self._asks_from_s:
            return False
        self._probes += 1
        self._asks_from_s = now + PROBE_EVERY_S
        return True

    def answered(self) -> None:
        """A probe has been acknowledged."""
        if self._probes <= MAX_PROBES:
            self.size = LARGE_BYTES

    def large_came(self) -> None:
        self._lost = 0

    def large_lost(self) -> None:
        self._lost += 1
        if self._lost >= LOST_IN_A_ROW:
            self.shrink()

    def shrink(self) -> None:
        """The path carries less, or there is another one."""
        self.size = BASE_BYTES
        self._probes = MAX_PROBES + 1


NUMBER_BYTES, MAX_NUMBER = 2, 0xFFFF
"""Of a packet's number that are sent."""
SAMPLE_BYTES = 16
"""Of what is encrypted, from the fourth byte behind where the number begins (RFC 9001, 5.4.2)."""
LONG, SPIN, RESERVED, KEY_PHASE = 0x80, 0x20, 0x18, 0x04
"""Bits of a packet's first byte; those of a short header that are hidden are `HIDDEN`."""
HIDDEN = 0x1F
PIECE, LAST_PIECE = 0x0E, 0x0F
"""The type of a frame with a piece of a stream, its offset and its length (RFC 9000, 19.8)."""
LEAST_PIECE_BYTES = 64
"""A piece with its head for which a packet is begun, if it is not the stream's last."""
OFFSET_BYTES, MAX_OFFSET, OFFSET_MARKS = 4, 1 << 30, (0x80000000, 0xC000000000000000)
"""An offset is written in so many bytes, or in twice that many from the second on, and marked
(RFC 9000, 16)."""
LENGTH_BYTES, LENGTH_MARK = 2, 0x4000
NARROW_FROM_PTOS = 2
"""After so many that nothing answers, datagrams are small again, whatever the path carried."""
MAX_ACKNOWLEDGEMENT_BYTES = 512
PACKETS_A_PING = 8
"""While there are gaps in what has come: one in so many that acknowledge is to be acknowledged."""


class Sent:
    """What is remembered of a packet: aioquic's has the same fields, and costs five times that."""

    __slots__ = (
        *("delivery_handlers", "in_flight", "is_ack_eliciting", "packet_number", "sent_bytes"),
        "sent_time",
    )
    epoch = Epoch.ONE_RTT
    is_crypto_packet = False
    packet_type = QuicPacketType.ONE_RTT

    def __init__(
        self, number: int, size: int, now: float, handlers: Any, elicits: bool, in_flight: bool
    ) -> None:
        self.packet_number = number
        self.sent_bytes = size
        self.sent_time = now
        self.delivery_handlers = handlers
        self.is_ack_eliciting = elicits
        self.in_flight = in_flight


class Packets:
    """Packets that are being filled; all but the last are whole."""

    __slots__ = (
        *("_frames", "_full", "_handlers", "_limit", "_overhead", "_packet_s", "_room", "_used"),
        *("bucket_s", "elicits", "is_paced", "whole"),
    )

    def __init__(self, size: int, overhead: int, room: int, packet_s: float, bucket_s: float):
        """Datagrams of `size` bytes, `overhead` of them around the frames; congestion control lets
        `room` bytes go, and pacing a packet each `packet_s` beside what `bucket_s` is good for."""
        self._full, self._overhead = size - overhead, overhead
        self._room, self._packet_s, self.bucket_s = room, packet_s, bucket_s
        self.is_paced = False  # another packet has to wait
        self.whole: list[tuple[bytes, list[Any], bool]] = []
        self._begin()

    def _begin(self) -> None:
        self._frames: list[bytes] = []
        self._handlers: list[Any] = []
        self._limit, self._used = self._full, 0
        self.elicits = False  # an acknowledgement; what elicits none goes whenever it likes

    def end(self) -> None:
        """The packet is as full as it will be."""
        if self._frames:
            self.whole.append((b"".join(self._frames), self._handlers, self.elicits))
            if self.elicits:
                self._room -= self._used + self._overhead
            self._begin()

    def room_for(self, size: int) -> int:
        """How much of a piece that with its head has `size` bytes may be put in next."""
        if self.elicits and self._limit - self._used < min(size, LEAST_PIECE_BYTES):
            self.end()
        if not self.elicits:
            if self._packet_s and self.bucket_s <= 0:
                self.is_paced = True
                return 0
            self._limit = min(self._full, self._room - self._overhead)
            if self._limit - self._used < min(size, self._full - self._used):
                return 0
            self.elicits = True
            self.bucket_s = max(0.0, self.bucket_s - self._packet_s)
        return min(size, self._limit - self._used)

    def put(self, frame: bytes, handler: Any) -> None:
        self._frames.append(frame)
        self._handlers.append(handler)
        self._used += len(frame)


class PacketConnection(QuicConnection):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._path_size = PathSize()

    # ---- what is sent ----

    def datagrams_to_send(self, now: float) -> list[tuple[bytes, Any]]:
        if len(self._network_paths) > 1 or self._loss._pto_count >= NARROW_FROM_PTOS:
            self._path_size.shrink()
        if self._path_size.size != self._max_datagram_size:
            self._resize(self._path_size.size)
        talking = self._talking() if self._is_plain() else None
        if talking is None:
            self.acknowledge(now)  # by itself it would be one more packet, and a timer
            return super().datagrams_to_send(now)
        self._pacing_at = None
        due_at = self._spaces[Epoch.ONE_RTT].ack_at
        is_due = due_at is not None and due_at <= now
        return self._datagrams_of(talking, now, is_due) if talking or is_due else []

    def acknowledge(self, now: float) -> None:
        """What has come, in what is sent next."""
        space = self._spaces[Epoch.ONE_RTT]
        if space.ack_at is not None:
            space.ack_at = now

    def _is_plain(self) -> bool:
        """Nothing is to be said but of streams, and of what has come."""
        if not self._handshake_confirmed or self._state is not QuicConnectionState.CONNECTED:
            return False
        if self._close_pending or len(self._network_paths) != 1:
            return False
        path = self._network_paths[0]
        if not path.is_validated or path.remote_challenges or self._handshake_done_pending:
            return False
        if self._probe_pending or self._ping_pending or self._datagrams_pending:
            return False
        if self._retire_connection_ids or self._streams_blocked_pending:
            return False
        for connection_id in self._host_cids:
            if not connection_id.was_sent:
                return False
        return bool(self._crypto_streams[Epoch.ONE_RTT].sender.buffer_is_empty)

    def _talking(self) -> list[Any] | None:
        """The streams that have something to send; those that are over are let go. None where
        there is more to say than what they hold."""
        talking: list[Any] = []
        over: list[Any] = []
        for stream in self._streams_queue:
            sender, receiver = stream.sender, stream.receiver
            if sender.reset_pending or receiver.stop_pending:
                return None
            if stream.max_stream_data_local != stream.max_stream_data_local_sent:
                return None
            if not sender.buffer_is_empty:
                if not stream.is_blocked:
                    talking.append(stream)
            elif sender.is_finished and receiver.is_finished:
                over.append(stream)
        for stream in over:
            self._streams_queue.remove(stream)
            del self._streams[stream.stream_id]
            if stream_is_client_initiated(stream.stream_id):  # it may open another: RFC 9000, 4.6
                self._stream_limit(stream.stream_id).value += 1
        return talking if self._limits_are_told() else None

    def _limits_are_told(self) -> bool:
        if self._local_max_data.value != self._local_max_data.sent:
            return False
        for each in (self._local_max_streams_bidi, self._local_max_streams_uni):
            if each.sent - each.used < each.value - each.sent:
                return False
        return True

    def _datagrams_of(
        self, talking: Sequence[Any], now: float, is_due: bool
    ) -> list[tuple[bytes, Any]]:
        """Pieces of streams, as many as may leave, behind an acknowledgement of what has come.
        By itself that goes only if it is due."""
        loss, space = self._loss, self._spaces[Epoch.ONE_RTT]
        pacer: Any = loss._pacer
        pacer.update_bucket(now=now)
        packets = Packets(
            self._max_datagram_size,
            1 + len(self._peer_cid.cid) + NUMBER_BYTES + self._cryptos[Epoch.ONE_RTT].aead_tag_size,
            loss.congestion_window - loss.bytes_in_flight,
            pacer.packet_time or 0.0,
            pacer.bucket_time,
        )
        acknowledges = space.ack_at is not None
        if acknowledges:
            handler = (self._on_ack_delivery, (space, space.largest_received_packet))
            packets.put(self._acknowledgement(space, now), handler)
        for stream in talking:
            if not self._put_pieces(stream, packets):
                break
        if packets.is_paced:
            self._pacing_at = now + pacer.packet_time
        pacer.bucket_time = packets.bucket_s
        if packets.elicits or is_due:
            packets.end()
        if not packets.whole:
            return []
        if acknowledges:
            space.ack_at = None
        datagrams = self._sealed(packets.whole, now)
        if talking and self._path_size.asks(now):
            datagrams += self._probe(now)
        return datagrams

    def _probe(self, now: float) -> list[tuple[bytes, Any]]:
        """A packet that asks the path whether it carries so much. That it is lost says nothing of
        congestion (RFC 9000, 14.4)."""
        overhead = 1 + len(self._peer_cid.cid) + NUMBER_BYTES
        overhead += self._cryptos[Epoch.ONE_RTT].aead_tag_size
        payload = b"\1".ljust(LARGE_BYTES - overhead, b"\0")  # PING and PADDING
        return self._sealed([(payload, [(self._on_probe_delivery, ())], True)], now, is_probe=True)

    def _on_probe_delivery(self, delivery: QuicDeliveryState) -> None:
        if delivery is QuicDeliveryState.ACKED:
            self._path_size.answered()

    def _on_large_delivery(self, delivery: QuicDeliveryState) -> None:
        if delivery is QuicDeliveryState.ACKED:
            self._path_size.large_came()
        else:
            self._path_size.large_lost()

    def _resize(self, size: int) -> None:
        loss: Any = self._loss
        self._max_datagram_size = size
        loss._pacer._max_datagram_size = loss._cc._max_datagram_size = size

    def _acknowledgement(self, space: Any, now: float) -> bytes:
        delay_us = int((now - space.largest_received_time) * 1e6)
        buffer = Buffer(capacity=MAX_ACKNOWLEDGEMENT_BYTES)
        buffer.push_uint_var(QuicFrameType.ACK)
        delay, room = delay_us >> self._local_ack_delay_exponent, MAX_ACKNOWLEDGEMENT_BYTES - 1
        ranges = push_ack_frame(buffer, space.ack_queue, delay, room)
        if ranges > 1 and self._packet_number % PACKETS_A_PING == 0:
            buffer.push_uint_var(QuicFrameType.PING)  # so that the oldest need not be told again
        return bytes(buffer.data)

    def _put_pieces(self, stream: Any, packets: Packets) -> bool:
        """Put in what of a stream may leave; whether other streams have room behind it."""
        sender, wrote, fits = stream.sender, False, True
        pending, buffer, skip = sender._pending, sender._buffer, sender._buffer_start
        number = encode_uint_var(stream.stream_id)
        credit = self._remote_max_data - self._remote_max_data_used
        limit = min(sender.highest_offset + credit, stream.max_stream_data_remote)
        while fits:
            fin = sender._buffer_fin
            if len(pending):
                begin, end = pending[0].start, min(pending[0].stop, limit)
                if end <= begin:
                    break
            elif sender._pending_eof:
                begin = end = fin
            else:
                sender.buffer_is_empty = True
                break
            wide = end >= MAX_OFFSET
            at, head = begin, 1 + len(number) + (OFFSET_BYTES << wide) + LENGTH_BYTES
            while True:
                size = packets.room_for(head + end - at) - head
                if size < 0:
                    fits = False
                    break
                until = at + size
                ends = until == fin
                offset = (at | OFFSET_MARKS[wide]).to_bytes(OFFSET_BYTES << wide, "big")
                packets.put(
                    b"%c%b%b%b%b"
                    % (
                        LAST_PIECE if ends else PIECE,
                        number,
                        offset,
                        (size | LENGTH_MARK).to_bytes(LENGTH_BYTES, "big"),
                        buffer[at - skip : until - skip],
                    ),
                    (sender.on_data_delivery, (at, until, ends)),
                )
                wrote, at = True, until
                if ends:
                    sender._pending_eof = False
                if at >= end:
                    break
            if at > begin:
                pending.subtract(begin, at)
                self._remote_max_data_used += max(0, at - sender.highest_offset)
                sender.highest_offset = max(sender.highest_offset, at)
        if wrote:  # others have their turn before it again
            self._streams_queue.remove(stream)
            self._streams_queue.append(stream)
        return fits

    def _sealed(
        self,
        packets: Sequence[tuple[bytes, list[Any], bool]],
        now: float,
        *,
        is_probe: bool = False,
    ) -> list[tuple[bytes, Any]]:
        """Encrypt them, and remember that they are sent."""
        crypto: Any = self._cryptos[Epoch.ONE_RTT].send
        path = self._network_paths[0]
        loss, space = self._loss, self._spaces[Epoch.ONE_RTT]
        first = PACKET_FIXED_BIT | self._spin_bit << 5 | crypto.key_phase << 2 | NUMBER_BYTES - 1
        cid, number, seal = self._peer_cid.cid, self._packet_number, crypto.aead.encrypt
        head, bodies = bytes((first,)) + cid, []
        for payload, _, _ in packets:
            short = (number & MAX_NUMBER).to_bytes(NUMBER_BYTES, "big")
            bodies.append(seal(payload, head + short, number))
            number += 1
        begin = 4 - NUMBER_BYTES
        masks = self._masks(crypto.hp, [body[begin : begin + SAMPLE_BYTES] for body in bodies])
        datagrams: list[tuple[bytes, Any]] = []
        elicits_any = False
        for (_, handlers, elicits), body, mask in zip(packets, bodies, masks, strict=True):
            number = self._packet_number
            hidden = (number & MAX_NUMBER) ^ int.from_bytes(mask[1 : 1 + NUMBER_BYTES], "big")
            datagram = b"%c%b%b%b" % (
                first ^ mask[0] & HIDDEN,
                cid,
                hidden.to_bytes(NUMBER_BYTES, "big"),
                body,
            )
            if len(datagram) > BASE_BYTES and not is_probe:
                handlers.append((self._on_large_delivery, ()))
            size, in_flight = len(datagram), elicits and not is_probe
            packet: Any = Sent(number, size, now, handlers, elicits, in_flight)
            loss.on_packet_sent(packet=packet, space=space)
            datagrams.append((datagram, path.addr))
            self._packet_number = number + 1
            elicits_any |= elicits
        if elicits_any and not self._ack_eliciting_sent_since_receipt:
            self._close_at = now + self._idle_timeout()  # RFC 9000, 10.1
            self._ack_eliciting_sent_since_receipt = True
        return datagrams

    @staticmethod
    def _masks(protection: Any, samples: Sequence[bytes]) -> list[bytes]:
        """What hides the heads of packets (RFC 9001, 5.4): of AES all at once."""
        if protection._is_chacha20 or len(samples) == 1:
            return [protection._mask(sample) for sample in samples]
        masks = protection._mask(b"".join(samples))
        return [masks[at : at + SAMPLE_BYTES] for at in range(0, len(masks), SAMPLE_BYTES)]

    # ---- what comes ----

    def receive_datagram(self, data: bytes, addr: Any, now: float) -> None:
        if not self._received(data, addr, now):
            super().receive_datagram(data, addr, now)

    def _received(self, data: bytes, addr: Any, now: float) -> bool:
        """Take a datagram that is one packet of the connection as it stands. Whether it is such a
        one: if not, nothing has been done."""
        if data[0] & LONG or not self._handshake_confirmed or len(self._network_paths) != 1:
            return False
        path, cid = self._network_paths[0], self.host_cid
        begin = 1 + len(cid)
        if path.addr != addr or not path.is_validated or data[1:begin] != cid:
            return False
        if len(data) < begin + 4 + SAMPLE_BYTES or self._state is not QuicConnectionState.CONNECTED:
            return False
        crypto: Any = self._cryptos[Epoch.ONE_RTT].recv
        space = self._spaces[Epoch.ONE_RTT]
        mask = crypto.hp._mask(data[begin + 4 : begin + 4 + SAMPLE_BYTES])
        first = data[0] ^ mask[0] & HIDDEN
        if first & (RESERVED | KEY_PHASE) != crypto.key_phase << 2:
            return False
        size = (first & 3) + 1
        end = begin + size
        short = int.from_bytes(data[begin:end], "big") ^ int.from_bytes(mask[1 : 1 + size], "big")
        number = decode_packet_number(short, 8 * size, space.expected_packet_number)
        head = b"%c%b%b" % (first, cid, short.to_bytes(size, "big"))
        try:
            payload = crypto.aead.decrypt(data[end:], head, number)
        except CryptoError:
            return True
        if number not in space.received_packets:
            if number > self._spin_highest_pn:
                self._spin_bit = bool(first & SPIN)
                self._spin_highest_pn = number
            context = QuicReceiveContext(Epoch.ONE_RTT, cid, path, None, now, None)
            self._take(context, payload, number)
        return True

    def _take(self, context: QuicReceiveContext, payload: bytes, number: int) -> None:
        """What is said in a packet, and that it has come."""
        now, space = context.time, self._spaces[Epoch.ONE_RTT]
        if number > space.expected_packet_number:
            space.expected_packet_number = number + 1
        try:
            elicits, _ = self._payload_received(context, payload)
        except QuicConnectionError as error:
            self.close(error.error_code, error.frame_type, error.reason_phrase)
        if self._close_pending or self._state in END_STATES:
            return
        self._close_at = now + self._idle_timeout()
        self._ack_eliciting_sent_since_receipt = False
        if number > space.largest_received_packet:
            space.largest_received_packet = number
            space.largest_received_time = now
        space.ack_queue.add(number)
        space.received_packets.add(number)
        if len(space.ack_queue) > MAX_ACK_RANGES:
            space.ack_queue.shift()
        if elicits and space.ack_at is None:
            space.ack_at = now + self._ack_delay
