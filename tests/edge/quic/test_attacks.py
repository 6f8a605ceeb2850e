"""Attacks on HTTP/3 that have stopped servers, or might have, and their cost.

After each attack a neighbour's stream goes on, requests of the attacker that were sound are
answered, and somebody new can connect.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest
from aioquic.buffer import encode_uint_var
from aioquic.h3.connection import ErrorCode, FrameType, encode_frame, encode_settings

from tailrace.edge.quic.http3 import MAX_REFUSED, MAX_RESETS
from tailrace.edge.quic.interface import MAX_HEADER_BYTES, Code
from tailrace.up import CertificateFiles
from tests.edge.quic.net import OPEN, Client, Fields, Net, head

Answered = int
"""The attack's stream gets an answer of this status, and the connection goes on."""


class Closed(NamedTuple):
    """The attacker's connection is closed with this code."""

    code: int


class Unanswered(NamedTuple):
    """Nothing, or a reset, comes of it, and the connection goes on."""


Outcome = Answered | Closed | Unanswered
Attack = Callable[[Client], int]
"""Makes it, and gives the stream on which it was made."""

MESSAGE_ERROR = Closed(ErrorCode.H3_MESSAGE_ERROR)
UNEXPECTED = Closed(ErrorCode.H3_FRAME_UNEXPECTED)


def sent_fields(fields: Fields, end: bool = True) -> Attack:
    def attack(client: Client) -> int:
        stream = client.quic.get_next_available_stream_id()
        return client.send_raw(client.fields(stream, fields), end)

    return attack


def sent_frame(kind: int, data: bytes) -> Attack:
    return lambda client: client.send_raw(encode_frame(kind, data))


def with_body(client: Client, tail: Fields | None, body: bytes = b"data") -> int:
    stream = client.quic.get_next_available_stream_id()
    data = client.fields(stream, head(b"/p", b"POST")) + encode_frame(FrameType.DATA, body)
    return client.send_raw(data + (client.fields(stream, tail) if tail else b""), end=True)


def data_then_trailers(client: Client) -> int:
    return with_body(client, [(b"x-sum", b"1")])


def pseudo_headers_in_trailers(client: Client) -> int:
    return with_body(client, [(b":path", b"/")])


def only_trailers(client: Client) -> int:
    stream = client.quic.get_next_available_stream_id()
    frames = client.fields(stream, head(b"/t")) + client.fields(stream, [(b"x", b"1")])
    return client.send_raw(frames, end=True)


def after_the_answer(more: Callable[[Client, int], bytes]) -> Attack:
    """Goes on with a request that is answered before it is whole."""

    def attack(client: Client) -> int:
        stream = client.quic.get_next_available_stream_id()
        data = client.fields(stream, head(b"no-slash", b"POST"))
        data += encode_frame(FrameType.DATA, bytes(3000)) + more(client, stream)
        return client.send_raw(data, end=True, stream=stream)

    return attack


def quick_resets(client: Client) -> int:
    for _ in range(100):
        stream = client.ask(OPEN, body=None)
        client.net.settle()
        client.quic.reset_stream(stream, Code.REQUEST_CANCELLED)
        client.quic.stop_stream(stream, Code.REQUEST_CANCELLED)
        client.net.pass_time()
    return client.ask(b"/after")


def many_resets_in_no_time(client: Client) -> int:
    for _ in range(2 * MAX_RESETS):
        if client.ended_with is not None:
            break
        client.net.pass_time()  # to be allowed another stream
        stream = client.send_raw(b"")
        client.send_raw(client.fields(stream, head(OPEN)), stream=stream)
        client.net.settle()
        client.quic.reset_stream(stream, Code.REQUEST_CANCELLED)
        client.net.settle()
    return 0


def many_refused_in_no_time(client: Client) -> int:
    for _ in range(2 * MAX_REFUSED):
        if client.ended_with is not None:
            break
        client.net.pass_time()  # to be allowed another stream
        client.ask(b"/", method=b"CONNECT")
        client.net.settle()
    return 0


def settings_twice(client: Client) -> int:
    control = client.http3._local_control_stream_id
    assert control is not None
    client.send_raw(encode_frame(FrameType.SETTINGS, encode_settings({})), stream=control)
    return control


def control_stream(data: bytes, end: bool = False) -> Attack:
    def attack(client: Client) -> int:
        control = client.http3._local_control_stream_id
        assert control is not None
        return client.send_raw(data, end, control)

    return attack


def encoder_stream(data: bytes) -> Attack:
    def attack(client: Client) -> int:
        encoder = client.http3._local_encoder_stream_id
        assert encoder is not None
        return client.send_raw(data, stream=encoder)

    return attack


def uni_stream(data: bytes) -> Attack:
    def attack(client: Client) -> int:
        stream = client.quic.get_next_available_stream_id(is_unidirectional=True)
        return client.send_raw(data, stream=stream)

    return attack


def lone_fin(client: Client) -> int:
    return client.send_raw(b"", end=True)


def reset_before_anything(client: Client) -> int:
    stream = client.send_raw(b"\x01")
    client.net.settle()
    client.quic.reset_stream(stream, 0)
    return stream


def stop_before_anything(client: Client) -> int:
    stream = client.send_raw(b"\x01")
    client.net.settle()
    client.quic.stop_stream(stream, 0)
    client.net.settle()
    return client.send_raw(client.fields(stream, head(b"/s"))[1:], end=True, stream=stream)


def endless_head(client: Client) -> int:
    stream = client.send_raw(b"\x01" + encode_uint_var(7 << 20))
    client.quic._streams[stream].sender.reset = lambda **_: None  # type: ignore[method-assign]
    client.net.settle()
    for _ in range(40):
        client.send_raw(bytes(1000), stream=stream)
        client.net.settle()
    return stream


def large_head(size: int) -> Attack:
    fields = [(b"x-%d" % n, b"y" * 1000) for n in range(size // 1000)]
    return lambda client: client.ask(b"/", fields=fields)


def endless_trailers(client: Client) -> int:
    stream = client.quic.get_next_available_stream_id()
    client.send_raw(client.fields(stream, head(b"/", b"POST")))
    return client.send_raw(b"\x01" + encode_uint_var(7 << 20), stream=stream)


def without(name: bytes) -> Fields:
    return [field for field in head(b"/") if field[0] != name]


def with_value(name: bytes, value: bytes) -> Fields:
    return [(each, value if each == name else old) for each, old in head(b"/")]


ATTACKS: dict[str, tuple[Attack, Outcome]] = {
    # Legal, all of them: HTTP/3 was silent for everybody after each.
    "data, then trailers": (data_then_trailers, 200),
    "trailers without data": (only_trailers, 200),
    "data after the answer": (after_the_answer(lambda _c, _s: encode_frame(0, b"more")), 400),
    "trailers after the answer": (after_the_answer(lambda c, s: c.fields(s, [(b"x", b"1")])), 400),
    "plain CONNECT": (sent_fields([(b":method", b"CONNECT"), (b":authority", b"a:1")]), 501),
    "extended CONNECT": (
        sent_fields([*head(b"/v1/ws", b"CONNECT"), (b":protocol", b"x")][:5]),
        501,
    ),
    "resets": (quick_resets, 200),
    "resets in no time": (many_resets_in_no_time, Closed(Code.EXCESSIVE_LOAD)),
    "refusals in no time": (many_refused_in_no_time, Closed(Code.EXCESSIVE_LOAD)),
    # Values that are none.
    "non-ASCII path": (sent_fields(head("/é".encode())), 400),
    "path that is no path": (sent_fields(head(b"no-slash")), 400),
    "path with a space": (sent_fields(head(b"/a b")), 400),
    "non-ASCII method": (sent_fields(head(b"/", "GÉT".encode())), 400),
    "another scheme": (sent_fields(with_value(b":scheme", b"gopher")), 400),
    "no scheme": (sent_fields(without(b":scheme")), 400),
    "Host that differs": (sent_fields(head(b"/", fields=[(b"host", b"other")])), 400),
    "head over the limit": (large_head(MAX_HEADER_BYTES), 431),
    "200 kB of headers": (large_head(200_000), 431),
    "head that never ends": (endless_head, 431),
    # Against HTTP/3.
    "NUL in the path": (sent_fields(head(b"/\0")), MESSAGE_ERROR),
    "pseudo-header twice": (sent_fields([*head(b"/"), (b":path", b"/2")]), MESSAGE_ERROR),
    "no method": (sent_fields(without(b":method")), MESSAGE_ERROR),
    "empty path": (sent_fields(head(b"")), MESSAGE_ERROR),
    "no authority": (sent_fields(without(b":authority")), MESSAGE_ERROR),
    "upper-case name": (sent_fields([*head(b"/"), (b"X-Upper", b"1")]), MESSAGE_ERROR),
    "line break in a name": (sent_fields([*head(b"/"), (b"a\r\nb", b"1")]), MESSAGE_ERROR),
    "content-length -5": (sent_fields([*head(b"/"), (b"content-length", b"-5")]), MESSAGE_ERROR),
    "pseudo-header in trailers": (pseudo_headers_in_trailers, MESSAGE_ERROR),
    "DATA before HEADERS": (sent_frame(FrameType.DATA, b"x"), UNEXPECTED),
    "SETTINGS on a request": (sent_frame(FrameType.SETTINGS, b""), UNEXPECTED),
    "SETTINGS twice": (settings_twice, UNEXPECTED),
    "PUSH_PROMISE": (sent_frame(FrameType.PUSH_PROMISE, b"\0"), UNEXPECTED),
    "HEADERS of 2^62-1 bytes": (lambda c: c.send_raw(b"\x01" + b"\xff" * 8), 431),
    "HEADERS that is cut": (
        lambda c: c.send_raw(b"\x01\x40\x80abc", end=True),
        Closed(ErrorCode.H3_FRAME_ERROR),
    ),
    "trailers that never end": (endless_trailers, Closed(Code.EXCESSIVE_LOAD)),
    "bad QPACK": (
        sent_frame(FrameType.HEADERS, b"\xff" * 20),
        Closed(ErrorCode.QPACK_DECOMPRESSION_FAILED),
    ),
    "a dynamic table that was not offered": (
        encoder_stream(b"\x3f\xe1\x1f"),
        Closed(ErrorCode.QPACK_ENCODER_STREAM_ERROR),
    ),
    "two bytes of MAX_PUSH_ID": (
        control_stream(encode_frame(FrameType.MAX_PUSH_ID, b"\x01\x02")),
        Closed(ErrorCode.H3_FRAME_ERROR),
    ),
    "control stream closed": (
        control_stream(b"", end=True),
        Closed(ErrorCode.H3_CLOSED_CRITICAL_STREAM),
    ),
    "second control stream": (uni_stream(b"\0"), Closed(ErrorCode.H3_STREAM_CREATION_ERROR)),
    "push stream": (uni_stream(b"\x01"), Closed(ErrorCode.H3_STREAM_CREATION_ERROR)),
    "stream of an unknown type": (uni_stream(b"\x40\x99junk"), Unanswered()),
    "FIN alone": (lone_fin, Unanswered()),
    "reset before anything": (reset_before_anything, Unanswered()),
    "stopped before anything": (stop_before_anything, Unanswered()),
}


@pytest.mark.parametrize(("attack", "outcome"), ATTACKS.values(), ids=ATTACKS)
def test_only_the_attacker_feels_it(net: Net, attack: Attack, outcome: Outcome) -> None:
    neighbour, attacker = net.client(), net.client()
    stream, streaming = neighbour.open()
    made_on = attack(attacker)
    if isinstance(outcome, Closed):
        net.until(lambda: attacker.ended_with is not None)
        assert attacker.ended_with == outcome.code
        net.until(lambda: net.server.count == 1)
    else:
        if isinstance(outcome, Answered):
            net.until(lambda: made_on in attacker.whole)
            assert attacker.statuses[made_on] == outcome
            if outcome >= 400:  # refused by the server itself, not by a route
                assert len(dict(attacker.headers[made_on])[b"x-request-id"]) == 32
        net.settle()
        assert attacker.get(b"/sound") == b"GET /sound 0"
    streaming.writer.write(b"undisturbed")
    net.until(lambda: neighbour.bodies[stream] == b"undisturbed")
    assert net.client().get(b"/new") == b"GET /new 0"
    assert net.server.faults == 0


def test_junk_that_looks_like_first_packets_leaves_nothing_behind(net: Net) -> None:
    neighbour = net.client()
    stream, streaming = neighbour.open()
    for n in range(300):
        junk = b"\xc3\0\0\0\x01\x08" + n.to_bytes(8, "big") + b"\x08" + bytes(8) + b"\0\x44\x90"
        net.receive(junk.ljust(1200, b"\xa5"), (f"10.0.{n % 7}.{n % 250}", n + 1))
    assert net.server.count <= 1 + 64
    streaming.writer.write(b"undisturbed")
    net.until(lambda: neighbour.bodies[stream] == b"undisturbed")
    net.pass_time(11)
    assert net.server.count == 1


def test_many_connect_at_once(certificate: CertificateFiles) -> None:
    net = Net(certificate)
    clients = [Client(net) for _ in range(64)]
    net.until(lambda: all(client.connected for client in clients))
    asked = [client.ask(b"/all") for client in clients]
    net.until(lambda: all(s in c.whole for s, c in zip(asked, clients, strict=True)))
