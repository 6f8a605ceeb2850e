"""Path MTU discovery: when large datagrams are tried, used, and given up."""

from __future__ import annotations

from aioquic.quic.packet_builder import QuicDeliveryState

from tailrace.edge.quic.path_mtu import (
    LARGE_DATAGRAM_BYTES,
    MAX_LOST_IN_A_ROW,
    MAX_PROBES,
    PROBE_INTERVAL_S,
    SMALL_DATAGRAM_BYTES,
    PathMtu,
)
from tests.edge.quic.net import Client, Net, Streaming

BODY = bytes(40_000)
ACKED, LOST = QuicDeliveryState.ACKED, QuicDeliveryState.LOST


def path_mtu(net: Net) -> PathMtu:
    """Return that of the only connection."""
    (connection,) = net.server._connections
    found: PathMtu = connection.quic._quic._path_mtu  # type: ignore[attr-defined]
    return found


def pour(net: Net, client: Client, stream: int, streaming: Streaming) -> None:
    """Check that data arrives."""
    before = len(client.bodies[stream])
    streaming.writer.write(BODY)
    net.until(lambda: len(client.bodies[stream]) == before + len(BODY))


def test_a_path_is_probed_until_a_probe_is_acknowledged() -> None:
    mtu = PathMtu()
    assert mtu.take_probe(0.0)
    assert not mtu.take_probe(PROBE_INTERVAL_S / 2)
    assert mtu.take_probe(PROBE_INTERVAL_S)
    assert mtu.datagram_bytes == SMALL_DATAGRAM_BYTES
    mtu.probe_delivered(ACKED)
    assert mtu.datagram_bytes == LARGE_DATAGRAM_BYTES and not mtu.take_probe(100.0)


def test_a_path_is_probed_a_few_times_and_a_late_acknowledgement_counts() -> None:
    mtu = PathMtu()
    probes = [mtu.take_probe(100.0 * n) for n in range(MAX_PROBES + 2)]
    assert probes == [True] * MAX_PROBES + [False] * 2
    mtu.probe_delivered(LOST)
    assert mtu.datagram_bytes == SMALL_DATAGRAM_BYTES
    mtu.probe_delivered(ACKED)
    assert mtu.datagram_bytes == LARGE_DATAGRAM_BYTES


def test_losses_in_a_row_end_large_datagrams_for_good() -> None:
    mtu = PathMtu()
    assert mtu.take_probe(0.0)
    mtu.probe_delivered(ACKED)
    for _ in range(3):
        for _ in range(MAX_LOST_IN_A_ROW - 1):
            mtu.large_delivered(LOST)
        mtu.large_delivered(ACKED)
    assert mtu.datagram_bytes == LARGE_DATAGRAM_BYTES
    for _ in range(MAX_LOST_IN_A_ROW):
        mtu.large_delivered(LOST)
    mtu.probe_delivered(ACKED)
    assert mtu.datagram_bytes == SMALL_DATAGRAM_BYTES and not mtu.take_probe(100.0)


def test_a_path_is_probed_as_soon_as_something_is_sent(net: Net) -> None:
    net.client()
    assert path_mtu(net).datagram_bytes == SMALL_DATAGRAM_BYTES
    net.pass_time(0.1)
    assert path_mtu(net).datagram_bytes == LARGE_DATAGRAM_BYTES


def test_lost_probes_do_not_shrink_the_congestion_window(net: Net) -> None:
    lost: list[bytes] = []
    net.lost = lambda datagram: len(datagram) > 1280 and not lost.append(datagram)  # type: ignore[func-returns-value]
    client = net.client()
    opened = client.open()
    for _ in range(5):
        pour(net, client, *opened)
        net.pass_time(2 * PROBE_INTERVAL_S)
    assert [len(datagram) for datagram in lost] == [LARGE_DATAGRAM_BYTES] * MAX_PROBES
    assert path_mtu(net).datagram_bytes == SMALL_DATAGRAM_BYTES
    (connection,) = net.server._connections
    assert connection.quic._quic._loss._cc.ssthresh is None  # type: ignore[attr-defined]


def test_a_path_that_becomes_narrow_gets_small_datagrams(net: Net) -> None:
    client = net.client()
    stream, streaming = client.open()
    pour(net, client, stream, streaming)
    net.lost = lambda datagram: len(datagram) > 1280
    for _ in range(3):
        pour(net, client, stream, streaming)
    assert path_mtu(net).datagram_bytes == SMALL_DATAGRAM_BYTES
    streaming.writer.end()
    net.until(lambda: stream in client.whole)


def test_another_path_begins_with_small_datagrams(net: Net) -> None:
    client = net.client()
    opened = client.open()
    pour(net, client, *opened)
    sent: list[int] = []
    net.lost = lambda datagram: bool(sent.append(len(datagram)))  # type: ignore[func-returns-value]
    client.address = ("127.0.0.2", 50_000)
    client.quic.send_ping(1)
    net.settle()
    pour(net, client, *opened)
    assert max(sent) == SMALL_DATAGRAM_BYTES and net.server.count == 1
