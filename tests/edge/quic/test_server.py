"""Connections: what they may be, how they end, and that none reaches into another."""

from __future__ import annotations

import gc
from datetime import UTC, datetime
from pathlib import Path

import pytest

from tailrace.edge.access.connections import ConnectionLimits
from tailrace.edge.quic.aioquic_library import AioquicHttp3Connection
from tailrace.edge.quic.http3 import Http3Stream
from tailrace.edge.quic.interface import Code
from tailrace.edge.quic.server import HANDSHAKE_TIMEOUT_S
from tailrace.edge.server.dispatch import RequestDispatcher
from tailrace.up import CertificateFiles, development_certificate
from tests.edge.quic.net import Client, Net


def test_a_request_is_answered(net: Net) -> None:
    client = net.client()
    assert client.get(b"/a?b=c") == b"GET /a 0"
    assert (net.routes.requests[0].query, net.routes.requests[0].http_version) == (b"b=c", "3")
    assert net.routes.requests[0].header(b"host") == b"localhost"
    assert net.routes.requests[0].peer == client.address


def test_a_request_that_was_answered_is_no_garbage(net: Net) -> None:
    def exchanges() -> int:
        return sum(type(each) in (Http3Stream, RequestDispatcher) for each in gc.get_objects())

    client = net.client()
    client.get(b"/a")
    gc.collect()
    gc.disable()
    try:
        before = exchanges()
        client.get(b"/b")
        assert exchanges() == before
    finally:
        gc.enable()


def test_a_client_that_closes_is_gone_at_once_and_forgotten_soon(net: Net) -> None:
    client = net.client()
    _, streaming = client.open()
    client.quic.close(Code.NO_ERROR)
    net.settle()
    assert streaming.left
    net.until(lambda: net.server.count == 0)


def test_a_client_that_vanishes_is_gone_when_its_idle_time_is_over(net: Net) -> None:
    client = net.client(idle_timeout=5.0)
    _, streaming = client.open()
    client.silent = True
    net.clients.remove(client)
    net.until(lambda: net.server.count == 0)
    assert streaming.left


def test_a_handshake_that_does_not_go_on_is_forgotten(net: Net) -> None:
    client = Client(net)
    first, _ = client.quic.datagrams_to_send(net.now)[0]
    net.clients.remove(client)
    net.receive(first, client.address)
    assert net.server.count == 1
    net.pass_time(HANDSHAKE_TIMEOUT_S + 0.1)
    assert net.server.count == 0


def test_under_load_a_client_has_to_show_where_it_is(certificate: CertificateFiles) -> None:
    net = Net(certificate, retry_from=3)
    hanging = [Client(net) for _ in range(3)]
    for client in hanging:
        for data, _ in client.quic.datagrams_to_send(net.now):
            net.receive(data, client.address)
        net.clients.remove(client)
    assert net.server.count == 3
    late = net.client()
    assert late.quic._retry_count == 1
    assert late.get(b"/x") == b"GET /x 0"
    forged = Client(net)
    forged.quic._peer_token = b"no token of ours at all"
    net.until(lambda: forged.ended_with is not None)
    assert forged.ended_with == 0xB  # INVALID_TOKEN


def test_an_address_has_so_many_connections_and_others_are_not_kept_out(
    certificate: CertificateFiles,
) -> None:
    net = Net(certificate, ConnectionLimits(3, 2))
    assert [net.client().connected for _ in range(2)] == [True, True]
    third = Client(net)
    net.until(lambda: third.ended_with is not None)
    assert third.ended_with == 0x2  # CONNECTION_REFUSED
    net.client(host="127.0.0.2")
    full = Client(net, host="127.0.0.3")
    net.until(lambda: full.ended_with is not None)
    net.clients[0].quic.close()
    net.until(lambda: net.server.count == 2)
    net.client(host="127.0.0.3")


def test_a_version_that_is_not_spoken_is_answered_with_those_that_are(net: Net) -> None:
    question = b"\xc0" + bytes.fromhex("1a2a3a4a") + b"\x08" + bytes(8) + b"\x04abcd"
    net.receive(question.ljust(1200, b"\0"), ("10.0.0.1", 1))
    net.settle()
    (answer, to), *more = net.strays
    assert to == ("10.0.0.1", 1) and not more
    assert answer[1:5] == bytes(4) and answer[5:10] == b"\x04abcd"
    net.receive(question, ("10.0.0.1", 1))  # a small one gets nothing: it could be amplified
    net.settle()
    assert len(net.strays) == 1 and net.server.count == 0


def test_a_ticket_resumes_a_session_once_and_allows_no_early_data(net: Net) -> None:
    first = net.client()
    net.until(lambda: bool(first.tickets))
    ticket = first.tickets[0]
    assert ticket.max_early_data_size is None
    again = net.client(session_ticket=ticket)
    assert again.quic.tls.session_resumed
    assert not net.client(session_ticket=ticket).quic.tls.session_resumed


def test_a_client_that_moves_to_another_address_keeps_its_streams(net: Net) -> None:
    client = net.client()
    stream, streaming = client.open()
    client.address = ("10.0.0.9", 555)
    client.quic.send_ping(1)
    net.until(lambda: net.server.count == 1 and not client.quic._ping_pending)
    streaming.writer.write(b"still here")
    net.until(lambda: client.bodies[stream] == b"still here")


def test_draining_lets_what_is_under_way_end_and_takes_nothing_new(net: Net) -> None:
    client = net.client()
    stream, streaming = client.open()
    net.server.drain()
    net.settle()
    late = client.ask(b"/late")
    net.until(lambda: late in client.reset)
    assert client.reset[late] == Code.REQUEST_REJECTED
    refused = Client(net)
    net.until(lambda: refused.ended_with is not None)
    assert not net.server.idle
    streaming.writer.write(b"the rest")
    streaming.writer.end()
    net.until(lambda: stream in client.whole)
    net.until(lambda: net.server.idle)
    assert client.bodies[stream] == b"the rest"
    assert b"\x07\x01" in b"".join(client.raw.values())  # GOAWAY on the control stream
    net.server.close()
    net.settle()
    net.until(lambda: client.ended_with is not None)
    assert client.ended_with == Code.NO_ERROR
    assert net.server.count == 0


def test_a_fault_of_ours_ends_one_connection_and_no_other(
    net: Net, monkeypatch: pytest.MonkeyPatch
) -> None:
    neighbour, victim = net.client(), net.client()
    stream, streaming = neighbour.open()
    victims = victim.open()[1]

    def fail(*_arguments: object) -> None:
        raise RuntimeError("a fault")

    connection = next(each for each in net.server._connections if each.http3.peer == victim.address)
    monkeypatch.setattr(connection.quic, "receive", fail)
    victim.ask(b"/x")
    net.settle()
    assert victims.left and (net.server.count, net.server.faults) == (1, 1)
    streaming.writer.write(b"undisturbed")
    net.until(lambda: neighbour.bodies[stream] == b"undisturbed")


def test_requests_leave_nothing_behind_on_their_connection(net: Net) -> None:
    client = net.client()
    for n in range(200):
        stream = client.ask(b"/n", b"POST", body=b"x" * n)
        refused = client.ask(b"no-slash", body=b"")
        net.until(lambda: {stream, refused} <= client.whole)  # noqa: B023 - at once
    left = client.open()[0]
    client.quic.reset_stream(left, Code.REQUEST_CANCELLED)
    client.quic.stop_stream(left, Code.REQUEST_CANCELLED)
    net.until(lambda: net.routes.streams[-1].left)
    net.pass_time(1.0)
    quic = next(iter(net.server._connections)).quic
    assert isinstance(quic, AioquicHttp3Connection) and quic._http3 is not None
    assert (quic._written, quic._ignored, quic._unread, quic._all_unread) == ({}, set(), {}, 0)
    control_streams = 6
    assert len(quic._http3._stream) <= control_streams
    assert len(quic._quic._streams) <= control_streams


def test_a_certificate_that_is_renewed_is_given_to_new_connections(
    net: Net, tmp_path: Path
) -> None:
    stays = net.client()
    renewed = development_certificate(tmp_path, datetime.now(UTC))
    net.server.library.load(renewed.certificate, renewed.key)
    refused = Client(net)
    net.until(lambda: refused.ended_with is not None)  # the client trusts only the old certificate
    net.files = renewed
    assert net.client().get(b"/new") == b"GET /new 0"
    assert stays.get(b"/old") == b"GET /old 0"
