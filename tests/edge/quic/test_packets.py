"""The packets that are written and read without aioquic's own way through them."""

from __future__ import annotations

from typing import Any

import pytest
from aioquic.quic.packet import QuicErrorCode, QuicPacketType
from aioquic.quic.packet_builder import QuicPacketBuilder
from aioquic.tls import CIPHER_SUITES, CipherSuite, Epoch

from tailrace.edge.quic.aioquic_packets import MAX_OFFSET, RESERVED, Packets
from tests.edge.quic.net import Client, Net

BODY = bytes(range(256)) * 40


def served(net: Net) -> Any:
    """The server's end of the one connection."""
    (connection,) = net.server._connections
    return connection.core._quic  # type: ignore[attr-defined]


def answered(net: Net, client: Client, body: bytes = BODY) -> None:
    stream, streaming = client.open()
    streaming.writer.write(body)
    streaming.writer.end()
    net.until(lambda: stream in client.whole)
    assert client.bodies[stream] == body


@pytest.mark.parametrize("suite", list(CIPHER_SUITES))
def test_every_cipher_hides_the_heads_of_many_packets_at_once(net: Net, suite: CipherSuite) -> None:
    answered(net, net.client(cipher_suites=[suite]))


def test_a_client_that_changes_its_keys_is_answered_with_the_new_ones(net: Net) -> None:
    client = net.client()
    for phase in (1, 0):
        client.quic.request_key_update()
        answered(net, client)
        assert served(net)._cryptos[Epoch.ONE_RTT].send.key_phase == phase


def test_no_more_is_in_flight_than_the_window_lets(net: Net) -> None:
    client = net.client()
    _, streaming = client.open()
    connection = served(net)
    for size in (1, 700, 5_000, 30_000, 100_000):
        streaming.writer.write(bytes(size))
        net.batch.flush()
        assert connection._loss.bytes_in_flight <= connection._loss.congestion_window


def test_what_congestion_control_leaves_is_used_by_what_fits_into_it() -> None:
    packets = Packets(1200, 27, 1000, 0.0, 0.0)
    assert packets.room_for(1173) == 0  # less than a packet of all that there is to send
    assert packets.room_for(900) == 900
    packets.put(bytes(900), None)
    assert packets.room_for(500) == 73
    packets.put(bytes(73), None)
    assert packets.room_for(500) == 0
    assert [len(payload) for payload, _, _ in packets.whole] == [973]


def test_pacing_holds_a_packet_and_not_what_goes_into_one() -> None:
    packets = Packets(1200, 27, 10_000, 0.5, 0.5)
    for _ in range(3):
        assert packets.room_for(300) == 300
        packets.put(bytes(300), None)
    assert not packets.is_paced
    assert packets.room_for(300) == 273
    packets.put(bytes(273), None)
    assert packets.room_for(27) == 0 and packets.is_paced


def test_an_end_that_comes_late_is_sent_by_itself_and_again_when_it_is_lost(net: Net) -> None:
    client = net.client()
    stream, streaming = client.open()
    streaming.writer.write(BODY)
    net.until(lambda: client.bodies[stream] == BODY)
    lost: list[bytes] = []
    net.lost = lambda datagram: not lost and not lost.append(datagram)  # type: ignore[func-returns-value]
    streaming.writer.end()
    net.until(lambda: stream in client.whole)
    assert len(lost) == 1 and client.bodies[stream] == BODY


def test_an_offset_takes_more_bytes_beyond_a_gigabyte(net: Net) -> None:
    client = net.client(max_data=1 << 32, max_stream_data=1 << 32)
    stream, streaming = client.open()
    net.pass_time(1.0)
    sender = served(net)._streams[stream].sender
    receiver = client.quic._streams[stream].receiver
    assert sender.highest_offset == receiver.starting_offset()
    moved = MAX_OFFSET - len(BODY) // 2 - sender.highest_offset
    for name in ("_buffer_start", "_buffer_stop", "highest_offset"):
        setattr(sender, name, getattr(sender, name) + moved)
    receiver._buffer_start += moved
    receiver.highest_offset += moved
    before = len(client.bodies[stream])
    streaming.writer.write(BODY)
    streaming.writer.end()
    net.until(lambda: stream in client.whole)
    assert client.bodies[stream][before:] == BODY
    assert receiver.starting_offset() > MAX_OFFSET


def test_a_datagram_that_comes_twice_is_taken_once(net: Net) -> None:
    client = net.client()
    net.pass_time(1.0)
    stream = client.quic.get_next_available_stream_id()
    client.http3.send_headers(
        stream,
        [(b":method", b"GET"), (b":scheme", b"https"), (b":authority", b"a"), (b":path", b"/x")],
        end_stream=True,
    )
    (data, _), *_ = client.quic.datagrams_to_send(net.now)
    for _ in range(3):
        net.receive(data, client.address)
    net.until(lambda: stream in client.whole)
    assert len(net.routes.requests) == 1
    assert len(served(net)._spaces[Epoch.ONE_RTT].ack_queue) == 1


def test_a_reserved_bit_ends_the_connection(net: Net) -> None:
    client = net.client()
    quic = client.quic
    crypto: Any = quic._cryptos[Epoch.ONE_RTT]
    number = quic._packet_number
    head = bytes((0x41 | RESERVED,)) + quic._peer_cid.cid + number.to_bytes(2, "big")
    net.receive(crypto.encrypt_packet(head, b"\1" + bytes(20), number), client.address)
    net.until(lambda: client.ended_with is not None)
    assert client.ended_with == QuicErrorCode.PROTOCOL_VIOLATION


def test_a_frame_that_is_none_ends_the_connection(net: Net) -> None:
    client = net.client()
    quic = client.quic
    builder = QuicPacketBuilder(
        host_cid=quic.host_cid,
        peer_cid=quic._peer_cid.cid,
        version=1,
        is_client=True,
        max_datagram_size=1200,
        packet_number=quic._packet_number,
    )
    builder.start_packet(QuicPacketType.ONE_RTT, quic._cryptos[Epoch.ONE_RTT])
    builder.start_frame(0x21, capacity=1)
    (datagram,), _ = builder.flush()
    net.receive(bytes(datagram), client.address)
    net.until(lambda: client.ended_with is not None)
    assert client.ended_with == QuicErrorCode.FRAME_ENCODING_ERROR


def test_the_gaps_in_what_has_come_are_told(net: Net) -> None:
    client = net.client()
    space = served(net)._spaces[Epoch.ONE_RTT]
    for n in range(40):
        net.now += 0.01
        client.quic.send_ping(n)
        for data, _ in client.quic.datagrams_to_send(net.now):
            if n % 3:
                net.receive(data, client.address)
    assert len(space.ack_queue) > 10
    answered(net, client)
    for n in range(40):
        client.quic.send_ping(n)
        net.pass_time(0.1)
    assert len(space.ack_queue) < 3 and client.quic._loss.bytes_in_flight == 0
