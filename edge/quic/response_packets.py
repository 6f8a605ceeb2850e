"""Packets that hold pieces of responses: STREAM frames behind a short header (RFC 9000, 17.3.1)."""

from __future__ import annotations

from collections.abc import Callable
from struct import Struct
from typing import Any

from aioquic.quic.crypto import CryptoPair
from aioquic.quic.packet import QuicPacketType, QuicStreamFrame
from aioquic.tls import Epoch

from tailrace.edge.quic.path_mtu import LARGE_DATAGRAM_BYTES, SMALL_DATAGRAM_BYTES, PathMtu

NUMBER_BYTES = 2
"""Bytes of the packet number in a packet's header, as aioquic sends it."""
PING_FRAME, PADDING_FRAME = b"\1", b"\0"
STREAM_FRAME = 0x0E
"""Type of a STREAM frame with an offset and a length (RFC 9000, 19.8). With its lowest bit
set (FIN), the frame ends the stream."""
MAX_SHORT_OFFSET = 1 << 29
"""From this offset in a stream on, `put` encodes offsets in 8 bytes, and before it in 4 bytes. 4
bytes can hold offsets below 1 << 30: one call of `put` that begins before this offset cannot exceed
that."""
MIN_PIECE_BYTES = 64
"""Minimum free bytes for which a STREAM frame is put into a packet that holds other frames."""

DeliveryHandler = tuple[Callable[..., None], tuple[Any, ...]]
"""A function that aioquic calls with a QuicDeliveryState when a packet was acknowledged or lost,
and the function's other arguments."""

_SHORT_OFFSETS = Struct(">IH").pack, 0x80 << 24
_LONG_OFFSETS = Struct(">QH").pack, 0xC0 << 56
"""Encode an offset and a length. The offset's two highest bits say how long it is (RFC 9000,
16)."""


class SentPacket:
    """A packet as loss recovery sees it: a smaller form of aioquic's `QuicSentPacket`."""

    __slots__ = ("delivery_handlers", "in_flight", "packet_number", "sent_bytes", "sent_time")
    epoch = Epoch.ONE_RTT
    is_ack_eliciting = True
    is_crypto_packet = False
    packet_type = QuicPacketType.ONE_RTT

    def __init__(
        self, number: int, sent_bytes: int, handlers: list[DeliveryHandler], in_flight: bool
    ) -> None:
        self.packet_number = number
        self.sent_bytes = sent_bytes
        self.delivery_handlers = handlers
        self.in_flight = in_flight
        self.sent_time = 0.0


class ResponsePackets:
    """Packets of STREAM frames.

    This class stands in for aioquic's own packet builder, of which aioquic uses `packet_number` and
    `flush` to register the packets as sent.
    """

    def __init__(
        self, crypto: CryptoPair, first_byte: int, cid: bytes, number: int, path_mtu: PathMtu
    ) -> None:
        """Begin without packets.

        Args:
            crypto: Keys of packets with a short header.
            first_byte: First byte of the header, without the key phase.
            cid: The client's connection id.
            number: Number of the first packet.
            path_mtu: Size of the datagrams.
        """
        self._path_mtu = path_mtu
        self._large_handler: DeliveryHandler = (path_mtu.large_delivered, ())
        self.packet_number = number
        self._crypto = crypto
        self._first_byte = first_byte
        self._cid = cid
        self._overhead_bytes = 1 + len(cid) + NUMBER_BYTES + crypto.aead_tag_size
        self._rooms: list[int] = []  # bytes left in each packet; the last one is being filled
        self._frames: list[bytes | memoryview] = []
        self._handlers: list[DeliveryHandler] = []
        self._datagrams: list[bytes] = []
        self._packets: list[SentPacket] = []

    def allow(self, flight_bytes: int, packets: int) -> None:
        """Set how many bytes congestion control permits, and how many packets pacing permits."""
        datagram_bytes = self._path_mtu.datagram_bytes
        full, rest = divmod(max(flight_bytes, 0), datagram_bytes)
        self._rooms = [datagram_bytes - self._overhead_bytes] * min(full, packets)
        if packets > full and rest > self._overhead_bytes:
            self._rooms.insert(0, rest - self._overhead_bytes)

    def begin_with(self, frame: bytes, handler: DeliveryHandler) -> bool:
        """Put a frame into the first packet; return False if that leaves no room for data."""
        if not self._rooms or self._rooms[-1] - len(frame) < 2 * MIN_PIECE_BYTES:
            return False
        self._rooms[-1] -= len(frame)
        self._frames.append(frame)
        self._handlers.append(handler)
        return True

    def usable_bytes(self, stream_id: bytes, offset: int) -> int:
        """Return how many bytes of a stream's data fit, from `offset` in the stream on.

        `stream_id` is encoded as in a packet, as in all methods of this class.
        """
        head_bytes = _head_bytes(stream_id, offset)
        while self._rooms and self._rooms[-1] < head_bytes + MIN_PIECE_BYTES:
            self._end_packet()
        return sum(self._rooms) - head_bytes * len(self._rooms)

    def put(self, stream_id: bytes, frame: QuicStreamFrame, delivered: Callable[..., None]) -> None:
        """Write data for which `usable_bytes` has room, in as many packets as it takes."""
        head_bytes = _head_bytes(stream_id, frame.offset)
        pack, mark = _SHORT_OFFSETS if frame.offset < MAX_SHORT_OFFSET else _LONG_OFFSETS
        data, begin, end = memoryview(frame.data), frame.offset, frame.offset + len(frame.data)
        while True:
            room_bytes = self._rooms[-1] - head_bytes
            piece = data[:room_bytes]
            data = data[room_bytes:]
            stop = begin + len(piece)
            fin = frame.fin and stop == end
            head = bytes((STREAM_FRAME | fin,)), stream_id, pack(begin | mark, len(piece) | 0x4000)
            self._frames += (*head, piece)
            self._handlers.append((delivered, (begin, stop, fin)))
            self._rooms[-1] -= head_bytes + len(piece)
            if stop == end:
                return
            begin = stop
            self._end_packet()

    def _end_packet(self) -> None:
        self._rooms.pop()
        if self._frames:
            if self._path_mtu.datagram_bytes > SMALL_DATAGRAM_BYTES:
                self._handlers.append(self._large_handler)
            self._add_packet(b"".join(self._frames), self._handlers)
            self._frames, self._handlers = [], []

    def add_probe(self) -> None:
        """Add a packet that probes the path. Congestion control ignores its loss."""
        if self._frames:
            self._end_packet()
        payload = PING_FRAME.ljust(LARGE_DATAGRAM_BYTES - self._overhead_bytes, PADDING_FRAME)
        self._add_packet(payload, [(self._path_mtu.probe_delivered, ())], in_flight=False)

    def _add_packet(
        self, payload: bytes, handlers: list[DeliveryHandler], in_flight: bool = True
    ) -> None:
        number, crypto = self.packet_number, self._crypto
        first = self._first_byte | crypto.key_phase << 2
        short_number = (number & 0xFFFF).to_bytes(NUMBER_BYTES, "big")
        header = b"%c%b%b" % (first, self._cid, short_number)
        datagram = crypto.encrypt_packet(header, payload, number)
        self._datagrams.append(datagram)
        self._packets.append(SentPacket(number, len(datagram), handlers, in_flight))
        self.packet_number = number + 1

    def flush(self) -> tuple[list[bytes], list[SentPacket]]:
        """Return the datagrams and what loss recovery needs to know of each."""
        if self._frames:
            self._end_packet()
        return self._datagrams, self._packets


def _head_bytes(stream_id: bytes, offset: int) -> int:
    """Return the length of a STREAM frame without its data."""
    return 1 + len(stream_id) + (4 if offset < MAX_SHORT_OFFSET else 8) + 2
