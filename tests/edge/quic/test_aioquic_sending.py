"""Packets of responses: the same bytes arrive as in aioquic's packets, and no other frame waits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from random import Random
from typing import Any

import pytest
from aioquic.tls import CIPHER_SUITES, CipherSuite, Epoch

from tailrace.edge.quic.aioquic_sending import ACK_DELAY_S, MAX_KEPT_STREAMS, SendingConnection
from tailrace.edge.quic.interface import STREAM_WINDOW_BYTES, Address, Code, Datagrams
from tailrace.edge.quic.response_packets import MAX_SHORT_OFFSET
from tailrace.up import CertificateFiles
from tests.edge.quic.net import OPEN, STEP_S, Client, Net, Streaming, head

BODY = bytes(range(256)) * 40
LOST, DELAYED, DUPLICATED = 0.1, 0.1, 0.05
"""Shares of the datagrams of both sides."""
SEEDS = range(5)
ROUNDS = 40


class UnreliableNet(Net):
    """A network that loses, delays and duplicates datagrams of both sides, from a seed."""

    def __init__(self, files: CertificateFiles, seed: int) -> None:
        super().__init__(files)
        self.random = Random(seed)
        self.is_reliable = True
        self._late: list[Callable[[], None]] = []

    def send(self, datagrams: Datagrams) -> None:
        for each in datagrams:
            self._disturb(partial(super().send, [each]))

    def receive(self, datagram: bytes, address: Address) -> None:
        self._disturb(partial(super().receive, datagram, address))

    def settle(self) -> None:
        late, self._late = self._late, []
        for deliver in late:
            if self.random.random() < 0.5:
                deliver()
            else:
                self._late.append(deliver)
        super().settle()

    def _disturb(self, deliver: Callable[[], None]) -> None:
        drawn = 1.0 if self.is_reliable else self.random.random()
        if drawn < LOST:
            return
        if drawn < LOST + DELAYED + DUPLICATED:
            self._late.append(deliver)
        if drawn >= LOST + DELAYED:
            deliver()


def served(net: Net) -> Any:
    """Return the server's end of the only connection."""
    (connection,) = net.server._connections
    return connection.quic._quic  # type: ignore[attr-defined]


def answered(net: Net, client: Client, body: bytes = BODY) -> None:
    """Check that a response arrives."""
    stream, streaming = client.open()
    streaming.writer.write(body)
    streaming.writer.end()
    net.until(lambda: stream in client.whole)
    assert client.bodies[stream] == body


# ---- both ways of sending ----


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("is_short", [True, False], ids=["ours", "aioquic's"])
def test_both_ways_deliver_the_same_bytes_over_an_unreliable_network(
    certificate: CertificateFiles, seed: int, is_short: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not is_short:
        monkeypatch.setattr(SendingConnection, "established", lambda _connection: None)
    net = UnreliableNet(certificate, seed)
    client = net.client()
    opened = [client.open() for _ in range(4)]
    net.is_reliable = False
    written = {stream: bytearray() for stream, _ in opened}
    pieces = Random(seed)
    for _ in range(ROUNDS):
        for stream, streaming in opened:
            piece = pieces.randbytes(pieces.choice((1, 40, 900, 5_000)))
            if streaming.writer.writable_bytes() > 0:
                streaming.writer.write(piece)
                written[stream] += piece
        net.pass_time(pieces.choice((STEP_S, 0.05)))
    for _, streaming in opened:
        streaming.writer.end()
    net.until(lambda: client.whole >= written.keys())
    assert all(client.bodies[stream] == written[stream] for stream in written)
    assert min(map(len, written.values())) > 10_000
    assert (served(net)._space is not None) == is_short


# ---- frames that only aioquic writes ----


def packets_due(connection: SendingConnection, now: float) -> Sequence[Any]:
    """Return the packets that aioquic would write, besides responses, if nothing held it back."""
    state: Any = connection
    pacer, control, packet_time = (
        state._loss._pacer,
        state._loss._cc,
        state._loss._pacer.packet_time,
    )
    kept = state._must_ask_aioquic, state._pacing_at
    pacer.packet_time = None
    control.congestion_window += 1 << 20
    due: Sequence[Any] = state._other_datagrams(state._streams_queue, now)
    control.congestion_window -= 1 << 20
    pacer.packet_time = packet_time
    state._must_ask_aioquic, state._pacing_at = kept
    return due


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Check that no other frame is due whenever aioquic was not asked; count that."""
    count = [0]
    sending = SendingConnection.datagrams_to_send

    def send(connection: SendingConnection, now: float) -> Any:
        is_asked = connection._must_ask_aioquic
        datagrams = sending(connection, now)
        if not is_asked:
            assert not packets_due(connection, now)
            count[0] += 1
        return datagrams

    monkeypatch.setattr(SendingConnection, "datagrams_to_send", send)
    return count


@pytest.mark.parametrize("seed", SEEDS)
def test_aioquic_is_asked_whenever_a_frame_of_its_own_is_due(
    certificate: CertificateFiles, seed: int, checked: list[int]
) -> None:
    net = UnreliableNet(certificate, seed)
    client = net.client()
    random = Random(seed)
    opened: dict[int, Streaming] = {}
    written: dict[int, bytearray] = {}
    net.is_reliable = False
    for n in range(500):
        stream = random.choice(list(opened)) if opened else 0
        match random.choices(range(8), (40, 4, 3, 1, 1, 2, 1, 1))[0]:
            case 1 if len(opened) < 8:
                before = len(net.routes.streams)
                stream = client.ask(OPEN, b"POST", body=bytes(random.choice((0, 50_000))))
                net.until(lambda: len(net.routes.streams) > before)  # noqa: B023
                opened[stream], written[stream] = net.routes.streams[-1], bytearray()
            case 2 if opened:
                opened.pop(stream).writer.end()
            case 3 if opened:
                opened.pop(stream).writer.reset()
                del written[stream]
            case 4 if opened:
                client.quic.stop_stream(stream, 0x10C)
                del opened[stream], written[stream]
            case 5:
                client.quic.send_ping(n)
            case 6:
                client.quic.change_connection_id()
            case 7:
                client.address = (client.address[0], client.address[1] + 100)
                client.quic.send_ping(n)  # from there
            case _ if opened:
                piece = random.randbytes(random.choice((1, 40, 900, 9_000)))
                if opened[stream].writer.writable_bytes() > 0:
                    opened[stream].writer.write(piece)
                    written[stream] += piece
        net.pass_time(random.choice((STEP_S, STEP_S, 0.2)))
    for streaming in opened.values():
        streaming.writer.end()
    net.until(lambda: client.whole >= written.keys())
    assert all(client.bodies[stream] == written[stream] for stream in written)
    assert len(written) > 3 and checked[0] > 100


@pytest.mark.parametrize("suite", list(CIPHER_SUITES))
def test_every_cipher_suite_encrypts_responses(net: Net, suite: CipherSuite) -> None:
    answered(net, net.client(cipher_suites=[suite]))


def test_responses_follow_a_change_of_keys(net: Net) -> None:
    client = net.client()
    for phase in (1, 0):
        client.quic.request_key_update()
        answered(net, client)
        assert served(net)._cryptos[Epoch.ONE_RTT].send.key_phase == phase


def test_no_more_is_in_flight_than_the_congestion_window_allows(net: Net) -> None:
    client = net.client()
    _, streaming = client.open()
    loss = served(net)._loss
    for size in (1, 700, 5_000, 30_000, 100_000):
        streaming.writer.write(bytes(size))
        net.batch.flush()
        assert loss.bytes_in_flight <= loss.congestion_window


def test_pacing_holds_packets_back_until_a_timer(net: Net) -> None:
    client = net.client()
    stream, streaming = client.open()
    answered(net, client, bytes(100_000))  # so that the congestion window is large
    net.pass_time(1.0)
    connection = served(net)
    connection._loss._pacer.update_rate(congestion_window=20_000, smoothed_rtt=1.0)
    before = net.sent
    streaming.writer.write(bytes(40_000))
    net.batch.flush()
    assert 10 <= net.sent - before < 15
    assert net.now < connection._pacing_at == connection.get_timer() < net.now + 0.1
    net.until(lambda: len(client.bodies[stream]) == 40_000)


def test_a_lost_end_of_a_response_is_sent_again(net: Net) -> None:
    client = net.client()
    stream, streaming = client.open()
    streaming.writer.write(BODY)
    net.until(lambda: client.bodies[stream] == BODY)
    lost: list[bytes] = []
    net.lost = lambda datagram: not lost and not lost.append(datagram)  # type: ignore[func-returns-value]
    streaming.writer.end()
    net.until(lambda: stream in client.whole)
    assert len(lost) == 1 and client.bodies[stream] == BODY


def test_an_acknowledgement_leaves_with_a_response_and_needs_no_packet(net: Net) -> None:
    client = net.client()
    stream, streaming = client.open()
    net.pass_time(1.0)
    before = net.sent
    client.quic.send_ping(1)
    net.settle()
    assert net.sent == before
    streaming.writer.write(BODY[:100])
    net.batch.flush()
    net.pass_time(1.0)
    assert net.sent == before + 1 and client.bodies[stream] == BODY[:100]


def test_aioquic_is_not_asked_while_a_client_only_acknowledges(
    net: Net, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = net.client()
    stream, streaming = client.open()
    net.pass_time(1.0)
    asked: list[float] = []
    monkeypatch.setattr(
        SendingConnection, "_other_datagrams", lambda _self, _unsent, now: asked.append(now)
    )
    for _ in range(5):
        streaming.writer.write(BODY[:100])
        net.pass_time(0.05)
    assert client.bodies[stream] == BODY[:100] * 5 and not asked
    assert served(net)._loss.bytes_in_flight == 0


def test_an_acknowledgement_from_another_address_has_the_path_validated(net: Net) -> None:
    client = net.client()
    _, streaming = client.open()
    net.pass_time(1.0)
    streaming.writer.write(BODY[:100])
    net.batch.flush()
    while net._to_clients:
        client.receive(net._to_clients.popleft()[0])
    client.address = (client.address[0], client.address[1] + 1)
    net.pass_time(0.1)  # its timer sends an acknowledgement and nothing else
    path = served(net)._network_paths[0]
    assert path.addr == client.address and path.is_validated


def test_finished_streams_are_dropped_with_the_next_request(net: Net) -> None:
    client = net.client()
    net.pass_time(1.0)
    for _ in range(10):
        answered(net, client, BODY[:100])
        net.pass_time(1.0)
        assert len(served(net)._streams_queue) <= 8


def test_many_finished_streams_are_dropped_without_another_request(net: Net) -> None:
    client = net.client()
    opened = [client.open() for _ in range(60)]
    net.pass_time(1.0)
    for _, streaming in opened:
        streaming.writer.end()
    net.until(lambda: len(client.whole) == 60)
    net.pass_time(1.0)
    assert len(served(net)._streams_queue) <= MAX_KEPT_STREAMS


def test_a_client_is_asked_to_stop_long_after_its_request(net: Net) -> None:
    client = net.client()
    stream = client.quic.get_next_available_stream_id()
    client.http3.send_headers(stream, head(OPEN, b"POST"))
    (connection,) = net.server._connections
    net.pass_time(1.0)
    connection.quic.stop(stream)
    connection.mark_dirty()
    net.until(lambda: stream in client.stopped)


def test_a_blocked_stream_sends_nothing(net: Net) -> None:
    client = net.client()
    stream, streaming = client.open()
    net.pass_time(1.0)
    served(net)._streams[stream].is_blocked = True
    streaming.writer.write(BODY[:100])
    net.pass_time(1.0)
    assert not client.bodies[stream]
    served(net)._streams[stream].is_blocked = False
    streaming.writer.write(BODY[100:200])
    net.until(lambda: client.bodies[stream] == BODY[:200])


def test_responses_of_a_gigabyte_have_long_offsets(net: Net) -> None:
    client = net.client(max_data=1 << 32, max_stream_data=1 << 32)
    stream, streaming = client.open()
    net.pass_time(1.0)
    sender = served(net)._streams[stream].sender
    receiver = client.quic._streams[stream].receiver
    assert sender.highest_offset == receiver.starting_offset()
    moved = MAX_SHORT_OFFSET - len(BODY) // 2 - sender.highest_offset
    for name in ("_buffer_start", "_buffer_stop", "highest_offset"):
        setattr(sender, name, getattr(sender, name) + moved)
    receiver._buffer_start += moved
    receiver.highest_offset += moved
    for n in range(1, 3):
        streaming.writer.write(BODY)
        net.until(lambda: client.bodies[stream] == BODY * n)  # noqa: B023
    assert receiver.starting_offset() > MAX_SHORT_OFFSET


def test_an_upload_is_acknowledged_at_once(net: Net) -> None:
    client = net.client()
    net.pass_time(1.0)
    stream = client.ask(OPEN, b"POST", body=bytes(3_000))
    net.pass_time(ACK_DELAY_S / 2)
    assert client.quic._streams[stream].sender._buffer_start > 1_000


def test_a_client_may_send_more_when_an_application_has_read_late(net: Net) -> None:
    client = net.client()
    stream = client.quic.get_next_available_stream_id()
    client.http3.send_headers(stream, head(OPEN, b"POST"))
    net.pass_time(1.0)
    (connection,) = net.server._connections
    sent = client.quic._streams[stream].max_stream_data_remote
    limit = served(net)._streams[stream].max_stream_data_local
    served(net)._streams[stream].receiver._buffer_start += STREAM_WINDOW_BYTES
    connection.quic.consumed(stream, 0)
    connection.mark_dirty()
    net.pass_time(0.1)
    assert served(net)._streams[stream].max_stream_data_local > limit
    assert client.quic._streams[stream].max_stream_data_remote > sent


def test_the_flow_control_of_a_connection_bounds_all_responses(net: Net) -> None:
    client = net.client(max_data=20_000)
    opened = [client.open() for _ in range(3)]
    client.quic._write_connection_limits = lambda **_options: None  # type: ignore[method-assign]
    for _, streaming in opened:
        streaming.writer.write(BODY)
    net.pass_time(1.0)
    assert 19_000 < sum(len(client.bodies[stream]) for stream, _ in opened) < 20_000
    assert client.ended_with is None


def test_a_closed_connection_sends_no_responses(net: Net) -> None:
    client = net.client()
    stream, streaming = client.open()
    net.pass_time(1.0)
    (connection,) = net.server._connections
    streaming.writer.write(BODY)
    connection.quic.close(Code.NO_ERROR)
    before = net.sent
    net.batch.flush()
    assert net.sent == before + 1
    net.until(lambda: client.ended_with is not None)
    assert not client.bodies[stream]


def test_an_address_that_is_not_validated_gets_three_times_what_it_sent(net: Net) -> None:
    client = net.client()
    _, streaming = client.open()
    answered(net, client, bytes(100_000))  # so that the congestion window is large
    net.pass_time(1.0)
    sent: list[bytes] = []
    net.lost = lambda datagram: not sent.append(datagram)  # type: ignore[func-returns-value]
    client.address = (client.address[0], client.address[1] + 1)
    client.quic.send_ping(1)
    (ping,) = (datagram for datagram, _ in client.quic.datagrams_to_send(net.now))
    net.receive(ping, client.address)
    streaming.writer.write(BODY)
    net.batch.flush()
    assert 0 < sum(map(len, sent)) <= 3 * len(ping)
