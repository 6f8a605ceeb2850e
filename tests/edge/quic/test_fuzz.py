"""Datagrams and frames that nobody meant, many and always the same ones."""

from __future__ import annotations

from random import Random

from tailrace.up import CertificateFiles
from tests.edge.quic.net import Client, Net, head

DATAGRAMS = 10_000
CLIENTS = 60
WRITES = 40
SEED = 20_261_122


def recorded(net: Net) -> list[bytes]:
    """Return what a client sends that connects, asks and goes."""
    sent: list[bytes] = []
    server = net.server.receive

    def record(datagram: bytes, address: object, path: object) -> None:
        sent.append(datagram)
        server(datagram, address, path)  # type: ignore[arg-type]

    net.server.receive = record  # type: ignore[method-assign]
    client = net.client()
    client.get(b"/recorded")
    client.quic.close()
    net.until(lambda: net.server.count == 0)
    net.server.receive = server  # type: ignore[method-assign]
    net.clients.clear()
    return sent


def mutated(random: Random, datagram: bytes) -> bytes:
    data = bytearray(datagram)
    for _ in range(random.randint(1, 8)):
        match random.randrange(4):
            case 0 if data:
                data[random.randrange(len(data))] = random.randrange(256)
            case 1 if data:
                del data[random.randrange(len(data)) :]
            case 2:
                at = random.randrange(len(data) + 1)
                data[at:at] = random.randbytes(random.randint(1, 20))
            case _ if data:
                data[0] ^= 1 << random.randrange(8)
    return bytes(data)


def test_ten_thousand_datagrams(certificate: CertificateFiles) -> None:
    random = Random(SEED)
    net = Net(certificate)
    samples = recorded(net)
    neighbour = net.client()
    stream, streaming = neighbour.open()
    ours = [connection.quic.cids[-1] for connection in net.server._connections]
    for n in range(DATAGRAMS):
        if random.random() < 0.3:
            data = random.randbytes(random.choice((1, 7, 30, 1200, 1500)))
        else:
            data = mutated(random, random.choice(samples))
        if random.random() < 0.3 and data:  # to the neighbour's connection, with its own id
            data = bytes((0x40 | data[0] & 0x3F,)) + ours[0] + data[9:]
        net.receive(data, (f"10.{random.randrange(4)}.0.{random.randrange(256)}", n % 60_000 + 1))
        net.strays.clear()
        if n % 500 == 0:
            net.pass_time(0.01)
    streaming.writer.write(b"undisturbed")
    net.until(lambda: neighbour.bodies[stream] == b"undisturbed")
    net.pass_time(15.0)
    assert (net.server.count, net.server.faults) == (1, 0)
    assert net.client().get(b"/new") == b"GET /new 0"


def writes(random: Random, client: Client) -> None:
    """Frames of HTTP/3 that are sound, mutated, or nothing at all, on streams of all kinds."""
    stream = client.quic.get_next_available_stream_id()
    fields = client.fields(stream, head(random.choice((b"/a", b"/stream")), b"POST"))
    body = b"\0" + bytes([random.randrange(64)]) + random.randbytes(random.randrange(64))
    data = random.choice((fields, fields + body, body, random.randbytes(30)))
    if random.random() < 0.5:
        data = mutated(random, data)
    kind = random.random()
    if kind < 0.7:
        client.send_raw(data, random.random() < 0.5, stream)
    elif kind < 0.8:
        uni = client.quic.get_next_available_stream_id(is_unidirectional=True)
        client.send_raw(random.randbytes(random.randint(1, 9)), random.random() < 0.3, uni)
    elif kind < 0.9 and stream >= 4:
        client.quic.reset_stream(random.randrange(stream // 4) * 4, random.randrange(1 << 20))
    else:
        control = client.http3._local_control_stream_id
        client.send_raw(random.randbytes(random.randint(1, 5)), stream=control)


def test_frames_of_http3(net: Net) -> None:
    random = Random(SEED)
    neighbour = net.client()
    stream, streaming = neighbour.open()
    expected = b""
    for n in range(CLIENTS):
        client = net.client()
        for _ in range(WRITES):
            if client.ended_with is not None:
                break
            try:
                writes(random, client)
            except RuntimeError:
                continue  # aioquic refuses to send what does not come after a reset or an end
            net.settle()
        net.clients.remove(client)
        streaming.writer.write(b"%d " % n)
        expected += b"%d " % n
        net.until(lambda: neighbour.bodies[stream] == expected)  # noqa: B023 - at once
    assert net.client().get(b"/new") == b"GET /new 0"
    net.pass_time(130.0)
    assert net.server.count <= 2
    assert net.server.faults == 0
