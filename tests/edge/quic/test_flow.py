"""Back-pressure in both directions, losses, and what a turn of the loop sends."""

from __future__ import annotations

import asyncio

import pytest
from aioquic.h3.connection import FrameType, encode_frame
from starlette.types import Receive, Scope, Send

from tailrace.edge.quic.interface import CONNECTION_WINDOW_BYTES, STREAM_WINDOW_BYTES
from tailrace.edge.quic.path_mtu import LARGE_DATAGRAM_BYTES
from tailrace.edge.server.interfaces import UNSENT_BYTES
from tailrace.up import CertificateFiles
from tests.edge.quic.net import (
    APP,
    BODY_TIMEOUT_S,
    MAX_BODY_BYTES,
    STALLED_TIMEOUT_S,
    Client,
    Net,
    Streaming,
    head,
)

FRAME = bytes(1000)


def pour(net: Net, streaming: Streaming, seconds: float = 3.0) -> int:
    """Write whenever there is room, for a while; how many bytes were taken."""
    written = 0
    end = net.now + seconds
    while net.now < end:
        while streaming.writer.writable_bytes() > 0:
            streaming.writer.write(FRAME)
            written += len(FRAME)
        net.pass_time(0.05)
    return written


def test_a_client_that_acknowledges_nothing_costs_little(net: Net) -> None:
    client = net.client()
    _, streaming = client.open()
    client.silent = True
    net.clients.remove(client)
    written = pour(net, streaming)
    assert UNSENT_BYTES <= written <= 64 << 10


def test_a_client_whose_window_is_full_is_owed_little_and_goes_on_when_it_opens(net: Net) -> None:
    window = 32 << 10
    client = net.client(max_stream_data=window)
    stream, streaming = client.open()
    granted = client.quic._write_stream_limits
    client.quic._write_stream_limits = lambda **_options: None  # type: ignore[method-assign]
    written = pour(net, streaming)
    assert len(client.bodies[stream]) <= window < written <= window + UNSENT_BYTES + len(FRAME)
    drains = streaming.drains
    client.quic._write_stream_limits = granted  # type: ignore[method-assign]
    client.quic.send_ping(1)
    net.until(lambda: len(client.bodies[stream]) == written)
    assert streaming.drains == drains + 1
    written += pour(net, streaming, 1.0)
    streaming.writer.end()
    net.until(lambda: stream in client.whole)
    assert len(client.bodies[stream]) == written > 4 * window


def test_readers_of_one_connection_stall_apart(net: Net) -> None:
    client = net.client(max_stream_data=8 << 10)
    stalled, other = client.open()[1], client.open()
    client.quic._write_stream_limits = lambda **_options: None  # type: ignore[method-assign]
    pour(net, stalled, 1.0)
    assert stalled.writer.writable_bytes() < 1
    other[1].writer.write(b"undisturbed")
    net.until(lambda: client.bodies[other[0]] == b"undisturbed")


def test_a_body_is_whole_over_a_way_that_loses_every_fifth_datagram(net: Net) -> None:
    client = net.client()
    stream, streaming = client.open()
    count = iter(range(1 << 30))
    net.lost = lambda _datagram: next(count) % 5 == 0
    written = 0
    while written < 300 * len(FRAME):
        while streaming.writer.writable_bytes() > 0:
            streaming.writer.write(FRAME)
            written += len(FRAME)
        net.pass_time()
    streaming.writer.end()
    net.until(lambda: stream in client.whole)
    assert client.bodies[stream] == bytes(written)


def test_what_one_turn_writes_leaves_in_one_datagram(net: Net) -> None:
    client = net.client()
    opened = [client.open() for _ in range(5)]
    net.pass_time(1.0)
    before = net.sent
    for _, streaming in opened:
        for _ in range(3):
            streaming.writer.write(b"0123456789")
    net.batch.flush()
    assert net.sent == before + 1
    net.until(lambda: all(client.bodies[stream] == b"0123456789" * 3 for stream, _ in opened))


def test_a_replay_leaves_in_full_datagrams(net: Net) -> None:
    client = net.client()
    stream, streaming = client.open()
    pour(net, streaming, 0.15)  # so that its window is wide
    sent: list[bytes] = []
    net.lost = lambda datagram: bool(sent.append(datagram))  # type: ignore[func-returns-value]
    body = bytes(range(256)) * 90
    before = len(client.bodies[stream])
    streaming.writer.write(body)
    streaming.writer.end()
    net.batch.flush()
    assert {len(datagram) for datagram in sent[:-1]} == {LARGE_DATAGRAM_BYTES}
    net.until(lambda: stream in client.whole)
    assert client.bodies[stream][before:] == body


def test_streams_that_fill_packets_take_turns(net: Net) -> None:
    client = net.client()
    opened = [client.open() for _ in range(3)]
    net.pass_time(1.0)
    for _, streaming in opened:
        streaming.writer.write(bytes(40_000))
    for _ in range(12):
        net.pass_time(0.01)
    come = [len(client.bodies[stream]) for stream, _ in opened]
    assert min(come) > 0
    net.until(lambda: all(len(client.bodies[stream]) == 40_000 for stream, _ in opened))


def test_readers_of_one_connection_share_what_leaves_at_once(net: Net) -> None:
    client = net.client()
    opened = [client.open()[1] for _ in range(20)]
    client.silent = True
    net.clients.remove(client)
    written = 0
    for streaming in opened:
        while streaming.writer.writable_bytes() > 0:
            streaming.writer.write(FRAME)
            written += len(FRAME)
    assert written <= 20 * (UNSENT_BYTES + len(FRAME)) + 12_000


def test_an_idle_connection_is_sent_nothing(net: Net) -> None:
    client = net.client()
    client.open()
    net.pass_time(5.0)
    before = net.sent
    net.pass_time(20.0)
    assert net.sent == before


def test_a_client_that_takes_nothing_for_too_long_is_cut_off(net: Net) -> None:
    client = net.client(max_stream_data=8 << 10)
    (stalled, streaming), (other, others) = client.open(), client.open()
    client.quic._write_stream_limits = lambda **_options: None  # type: ignore[method-assign]
    pour(net, streaming, 1.0)
    net.pass_time(STALLED_TIMEOUT_S - 2)
    assert not streaming.left and stalled not in client.reset
    net.until(lambda: stalled in client.reset and streaming.left)
    others.writer.write(b"undisturbed")
    net.until(lambda: client.bodies[other] == b"undisturbed")


# ---- bodies of requests ----


def test_a_body_that_does_not_come_is_waited_for_only_so_long(net: Net) -> None:
    client = net.client()
    stream = client.quic.get_next_available_stream_id()
    client.send_raw(client.fields(stream, head(b"/slow", b"POST")) + b"\0\x40\x40half")
    net.pass_time(BODY_TIMEOUT_S - 1)
    assert stream not in client.statuses
    net.until(lambda: stream in client.whole)
    assert client.statuses[stream] == 408
    assert len(dict(client.headers[stream])[b"x-request-id"]) == 32
    assert client.get(b"/next") == b"GET /next 0"


def upload(client: Client, path: bytes, size: int) -> int:
    stream = client.quic.get_next_available_stream_id()
    client.send_raw(client.fields(stream, head(path, b"POST")))
    client.send_raw(encode_frame(FrameType.DATA, bytes(size)), end=True, stream=stream)
    return stream


def test_a_large_body_comes_whole(net: Net) -> None:
    client = net.client()
    stream = upload(client, b"/whole", MAX_BODY_BYTES)
    net.until(lambda: stream in client.whole)
    assert client.bodies[stream] == b"POST /whole %d" % MAX_BODY_BYTES


class Slow:
    """An application that reads when it may; so much has come to it."""

    def __init__(self) -> None:
        self.may_read = asyncio.Event()
        self.size = 0

    async def __call__(self, _scope: Scope, receive: Receive, send: Send) -> None:
        await self.may_read.wait()
        more = True
        while more:
            message = await receive()
            self.size += len(message.get("body", b""))
            more = message.get("more_body", False)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"%d" % self.size})


async def carry(net: Net, seconds: float = 0.5) -> None:
    """Let time pass, and tasks run."""
    end = net.now + seconds
    while net.now < end:
        net.pass_time()
        for _ in range(5):
            await asyncio.sleep(0)


@pytest.mark.anyio
async def test_a_body_that_nobody_reads_stays_with_the_client(
    certificate: CertificateFiles,
) -> None:
    slow = Slow()
    net = Net(certificate, app=slow)
    client = net.client()
    size = 3 * CONNECTION_WINDOW_BYTES
    stream = upload(client, APP, size)
    await carry(net, 3.0)
    sent = client.quic._streams[stream].sender.highest_offset
    assert STREAM_WINDOW_BYTES // 2 <= sent <= STREAM_WINDOW_BYTES
    assert client.get(b"/beside") == b"GET /beside 0"
    slow.may_read.set()
    for _ in range(40):
        await carry(net)
        if stream in client.whole:
            break
    assert client.bodies[stream] == b"%d" % size
