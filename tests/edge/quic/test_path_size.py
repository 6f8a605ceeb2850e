"""The size of datagrams: what a path is asked, and what is done where it carries less."""

from __future__ import annotations

from typing import Any

from tailrace.edge.quic.aioquic_packets import (
    BASE_BYTES,
    LARGE_BYTES,
    LOST_IN_A_ROW,
    MAX_PROBES,
    PROBE_EVERY_S,
    PathSize,
)
from tests.edge.quic.net import Client, Net, Streaming

BODY = bytes(40_000)


def served(net: Net) -> Any:
    (connection,) = net.server._connections
    return connection.core._quic  # type: ignore[attr-defined]


def written(net: Net, client: Client, stream: int, streaming: Streaming) -> None:
    """What is written comes whole."""
    before = len(client.bodies[stream])
    streaming.writer.write(BODY)
    net.until(lambda: len(client.bodies[stream]) == before + len(BODY))


def test_a_path_is_asked_until_it_answers() -> None:
    size = PathSize()
    assert size.asks(0.0) and not size.asks(PROBE_EVERY_S / 2) and size.asks(PROBE_EVERY_S)
    assert size.size == BASE_BYTES
    size.answered()
    assert size.size == LARGE_BYTES and not size.asks(100.0)


def test_a_path_that_does_not_answer_is_asked_so_often() -> None:
    size = PathSize()
    assert [size.asks(100.0 * n) for n in range(MAX_PROBES + 2)] == [True] * MAX_PROBES + [
        False
    ] * 2
    size.answered()  # late
    assert size.size == LARGE_BYTES


def test_a_path_that_loses_every_large_datagram_has_become_narrow() -> None:
    size = PathSize()
    assert size.asks(0.0)
    size.answered()
    for _ in range(3):
        for _ in range(LOST_IN_A_ROW - 1):
            size.large_lost()
        size.large_came()
    assert size.size == LARGE_BYTES
    for _ in range(LOST_IN_A_ROW):
        size.large_lost()
    size.answered()
    assert size.size == BASE_BYTES and not size.asks(100.0)


def test_what_is_sent_first_asks_the_path(net: Net) -> None:
    client = net.client()
    net.pass_time(1.0)
    assert served(net)._max_datagram_size == BASE_BYTES
    stream, streaming = client.open()
    written(net, client, stream, streaming)
    assert served(net)._max_datagram_size == LARGE_BYTES


def test_a_narrow_path_carries_what_it_did_and_its_window_does_not_suffer(net: Net) -> None:
    lost: list[bytes] = []
    net.lost = lambda datagram: len(datagram) > 1280 and not lost.append(datagram)  # type: ignore[func-returns-value]
    client = net.client()
    stream, streaming = client.open()
    for _ in range(5):
        written(net, client, stream, streaming)
        net.pass_time(2 * PROBE_EVERY_S)
    assert [len(datagram) for datagram in lost] == [LARGE_BYTES] * MAX_PROBES
    assert served(net)._max_datagram_size == BASE_BYTES
    assert served(net)._loss._cc.ssthresh is None


def test_a_path_that_becomes_narrow_gets_what_it_carries(net: Net) -> None:
    client = net.client()
    stream, streaming = client.open()
    written(net, client, stream, streaming)
    net.lost = lambda datagram: len(datagram) > 1280
    for _ in range(3):
        written(net, client, stream, streaming)
    assert served(net)._max_datagram_size == BASE_BYTES
    streaming.writer.end()
    net.until(lambda: stream in client.whole)


def test_another_path_is_not_taken_for_as_wide(net: Net) -> None:
    client = net.client()
    stream, streaming = client.open()
    written(net, client, stream, streaming)
    net.lost = lambda datagram: len(datagram) > 1280
    client.address = ("127.0.0.2", 50_000)
    client.quic.send_ping(1)
    net.settle()
    written(net, client, stream, streaming)
    assert served(net)._max_datagram_size == BASE_BYTES
    assert net.server.count == 1
