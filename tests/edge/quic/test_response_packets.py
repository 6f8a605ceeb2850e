"""Packets of STREAM frames: they hold the data they were given, within what may be sent."""

from __future__ import annotations

import pytest
from aioquic.buffer import Buffer, encode_uint_var  # type: ignore[attr-defined]
from aioquic.quic.crypto import CryptoPair
from aioquic.quic.packet import QuicProtocolVersion, QuicStreamFrame
from aioquic.quic.packet_builder import QuicDeliveryState
from aioquic.quic.stream import QuicStreamSender
from hypothesis import given
from hypothesis import strategies as st

from tailrace.edge.quic.congestion import UNPACED_PACKETS, TimerPacer
from tailrace.edge.quic.path_mtu import LARGE_DATAGRAM_BYTES, SMALL_DATAGRAM_BYTES, PathMtu
from tailrace.edge.quic.response_packets import MAX_SHORT_OFFSET, ResponsePackets

CID = b"12345678"
FIRST_BYTE = 0x41
FIRST_NUMBER = 0xFFFD
"""The 16 bits of the number that are sent wrap around within a few packets."""

Frame = tuple[int, int, bytes, bool]
"""Stream, offset, data, and whether the stream ends with it."""


def keys(*, is_client: bool) -> CryptoPair:
    crypto = CryptoPair()
    crypto.setup_initial(cid=CID, is_client=is_client, version=QuicProtocolVersion.VERSION_1)
    return crypto


def packets_of(mtu: PathMtu) -> ResponsePackets:
    return ResponsePackets(keys(is_client=False), FIRST_BYTE, CID, FIRST_NUMBER, mtu)


def large() -> PathMtu:
    mtu = PathMtu()
    mtu.probe_delivered(QuicDeliveryState.ACKED)
    return mtu


def opened(datagrams: list[bytes]) -> list[Frame]:
    """Return the frames in datagrams, as a client decrypts them."""
    crypto, frames = keys(is_client=True), list[Frame]()
    for n, datagram in enumerate(datagrams):
        number = FIRST_NUMBER + n
        _, payload, found = crypto.decrypt_packet(datagram, 1 + len(CID), number)
        assert found == number
        buffer = Buffer(data=payload)
        while not buffer.eof():
            kind, stream, offset = (buffer.pull_uint_var() for _ in range(3))
            assert kind & ~1 == 0x0E
            data = buffer.pull_bytes(buffer.pull_uint_var())
            frames.append((stream, offset, data, bool(kind & 1)))
    return frames


@given(
    sizes=st.lists(st.integers(0, 9_000), min_size=1, max_size=5),
    flight_bytes=st.integers(-2_000, 30_000),
    count=st.integers(0, 20),
    is_large=st.booleans(),
    skipped=st.sampled_from([0, 70, MAX_SHORT_OFFSET]),
)
def test_data_arrives_within_what_may_be_sent(
    sizes: list[int], flight_bytes: int, count: int, is_large: bool, skipped: int
) -> None:
    mtu = large() if is_large else PathMtu()
    packets = packets_of(mtu)
    packets.allow(flight_bytes, count)
    taken: dict[int, tuple[bytes, bool]] = {}
    for n, size in enumerate(sizes):
        sender, stream = QuicStreamSender(None, writable=True), 4 * n + 60
        sender.write(bytes([n + 1]) * size, end_stream=True)
        data, is_whole = b"", False
        while not sender.buffer_is_empty:
            offset = skipped + sender.next_offset
            usable_bytes = packets.usable_bytes(encode_uint_var(stream), offset)
            if usable_bytes <= 0:
                break
            frame = sender.get_frame(usable_bytes, 1 << 20)
            if frame is None:
                break
            data, is_whole = data + frame.data, frame.fin
            moved = QuicStreamFrame(data=frame.data, fin=frame.fin, offset=offset)
            packets.put(encode_uint_var(stream), moved, lambda *_: None)
        taken[stream] = data, is_whole
    datagrams, sent = packets.flush()
    assert all(len(datagram) <= mtu.datagram_bytes for datagram in datagrams)
    assert sum(map(len, datagrams)) <= max(flight_bytes, 0) and len(datagrams) <= count
    assert [packet.sent_bytes for packet in sent] == [len(datagram) for datagram in datagrams]
    assert packets.packet_number == FIRST_NUMBER + len(datagrams)
    frames = opened(datagrams)
    for stream, (data, is_whole) in taken.items():
        pieces = [frame for frame in frames if frame[0] == stream]
        assert b"".join(piece for _, _, piece, _ in pieces) == data
        assert any(is_last for *_, is_last in pieces) == is_whole
        begin = skipped
        for _, offset, piece, _ in pieces:
            assert offset == begin
            begin += len(piece)
    handled = [arguments for packet in sent for _, arguments in packet.delivery_handlers]
    assert [each for each in handled if each] == [
        (offset, offset + len(data), is_last) for _, offset, data, is_last in frames
    ]


def test_long_data_fills_its_packets() -> None:
    packets = packets_of(large())
    packets.allow(1 << 20, UNPACED_PACKETS)
    packets.usable_bytes(b"\0", 0)
    packets.put(b"\0", QuicStreamFrame(data=bytes(10_000), offset=0), lambda *_: None)
    sizes = [len(datagram) for datagram in packets.flush()[0]]
    assert set(sizes[:-1]) == {LARGE_DATAGRAM_BYTES} and len(sizes) == 8


def test_a_frame_in_front_leaves_room_for_data_or_is_refused() -> None:
    packets = packets_of(PathMtu())
    packets.allow(200, 1)
    assert not packets.begin_with(bytes(100), (lambda *_: None, ()))
    assert packets.begin_with(bytes(20), (lambda *_: None, ()))
    assert 0 < packets.usable_bytes(b"\0", 0) < 200


def test_a_probe_is_a_large_datagram_that_is_not_in_flight() -> None:
    packets = packets_of(PathMtu())
    packets.add_probe()
    (datagram,), (sent,) = packets.flush()
    assert len(datagram) == LARGE_DATAGRAM_BYTES > SMALL_DATAGRAM_BYTES
    assert not sent.in_flight and sent.is_ack_eliciting


@pytest.mark.parametrize("rtt_s", [0.001, 0.02, 0.3])
def test_pacing_allows_an_initial_window_and_two_windows_per_round_trip(rtt_s: float) -> None:
    pacer = TimerPacer(max_datagram_size=SMALL_DATAGRAM_BYTES)
    assert pacer.allowed_packets(0.0) == UNPACED_PACKETS
    window = 50 * SMALL_DATAGRAM_BYTES
    pacer.update_rate(window, rtt_s)
    at_once = pacer.allowed_packets(10.0)
    assert at_once >= 10
    pacer.count_packets(at_once)
    assert pacer.next_send_time(10.0) == 10.0 + (pacer.packet_time or 0.0)
    sent, steps = 0, 1_000
    for n in range(steps):
        allowed = pacer.allowed_packets(10.0 + rtt_s * (n + 1) / steps)
        pacer.count_packets(allowed)
        sent += allowed
    assert 98 <= sent <= 102
