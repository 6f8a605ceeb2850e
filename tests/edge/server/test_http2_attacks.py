"""A client's fault on an HTTP/2 connection costs that request, or that client's connection."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest
from h2.errors import ErrorCodes
from h2.events import StreamReset
from h2.settings import SettingCodes
from hyperframe.frame import (
    ContinuationFrame,
    DataFrame,
    Frame,
    HeadersFrame,
    PingFrame,
    PriorityFrame,
    RstStreamFrame,
    SettingsFrame,
    WindowUpdateFrame,
)

from tailrace.edge.server.flood import DECAY_PER_S, MAX_POINTS
from tailrace.edge.server.hardened_h2 import MAX_READ_HEADER_BYTES, MAX_STREAMS
from tailrace.edge.server.http2_connection import HeadReceived, RequestReset
from tests.edge.server.http2_pair import GET, PLENTY, POST, Pair


@pytest.fixture
def pair() -> Pair:
    return Pair()


# ---- faults of one request ----

Fault = Callable[[Pair], None]


def sent_as(headers: Iterable[tuple[str | bytes, str | bytes]]) -> Fault:
    def fault(pair: Pair) -> None:
        stream_id = pair.client.get_next_available_stream_id()
        pair.client.send_headers(stream_id, list(headers), end_stream=True)

    return fault


def a_body_of_another_length(pair: Pair) -> None:
    stream_id = pair.client.get_next_available_stream_id()
    pair.client.send_headers(stream_id, [*POST, ("content-length", "5")])
    pair.client.send_data(stream_id, b"no", end_stream=True)


def data_after_the_answer(pair: Pair) -> None:
    stream = pair.asks(POST, ended=False)
    stream.start(405, [])
    stream.end()
    sent = pair.server.take(PLENTY)
    # The client does not know of the refusal yet.
    pair.client.send_data(stream.id, b"more", end_stream=True)
    pair.client.receive_data(sent)


def a_stream_that_depends_on_itself(pair: Pair) -> None:
    frame = PriorityFrame(101)
    frame.depends_on = 101
    pair.sends(frame)


FAULTS: dict[str, Fault] = {
    "a path that is not ASCII": sent_as([*GET[:3], (":path", "/é")]),
    "a path with a space": sent_as([*GET[:3], (":path", "/a b")]),
    "a path that is no path": sent_as([*GET[:3], (":path", "v1")]),
    "an empty path": sent_as([*GET[:3], (":path", "")]),
    "a method that is not ASCII": sent_as([(":method", "GÉT"), *GET[1:]]),
    "an empty method": sent_as([(":method", ""), *GET[1:]]),
    "CONNECT": sent_as([(":method", "CONNECT"), (":authority", "edge.example")]),
    "no method": sent_as(GET[1:]),
    "two methods": sent_as([GET[0], *GET]),
    "two hosts": sent_as([*GET, ("host", "other.example")]),
    "a pseudo-header of its own": sent_as([*GET, (":mine", "1")]),
    "a pseudo-header behind others": sent_as([GET[0], ("accept", "a"), *GET[1:]]),
    "a name in capitals": sent_as([*GET, ("Accept", "a")]),
    "a header of a connection": sent_as([*GET, ("connection", "close")]),
    "a line break in a value": sent_as([*GET, ("accept", "a\r\nb: c")]),
    "a length that is none": sent_as([*POST, ("content-length", "five")]),
    "two lengths": sent_as([*POST, ("content-length", "5"), ("content-length", "6")]),
    "another length": a_body_of_another_length,
    "DATA after the answer": data_after_the_answer,
    "a stream that depends on itself": a_stream_that_depends_on_itself,
}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS.keys())
def test_a_fault_of_one_request_costs_that_request_alone(pair: Pair, fault: Fault) -> None:
    beside = pair.asks()
    beside.start(200, [])
    beside.write(b"before ")
    pair.talk()
    fault(pair)
    pair.talk()
    assert not pair.server.closed
    beside.write(b"after")
    beside.end()
    last = pair.asks()
    last.start(204, [])
    last.end()
    pair.talk()
    assert pair.bodies[beside.id] == b"before after"
    assert {beside.id, last.id} <= pair.ended
    assert not pair.server.streams


def test_a_fault_in_a_request_under_way_is_told_to_who_answers_it(pair: Pair) -> None:
    stream = pair.asks([*POST, ("content-length", "5")], ended=False)
    pair.client.send_data(stream.id, b"far too much", end_stream=True)
    pair.talk()
    assert pair.happened[-1] == RequestReset(stream)
    assert not stream.open


def test_requests_over_the_limit_are_refused_one_by_one() -> None:
    """A client may send them before it knows the limit."""
    pair = Pair()
    pair.client.remote_settings[SettingCodes.MAX_CONCURRENT_STREAMS] = 2 * MAX_STREAMS
    pair.client.remote_settings.acknowledge()
    for n in range(MAX_STREAMS + 3):
        pair.client.send_headers(2 * n + 1, GET, end_stream=True)
    pair.talk()
    asked = [event.stream for event in pair.happened if isinstance(event, HeadReceived)]
    assert len(asked) == MAX_STREAMS
    refused = pair.said(StreamReset)
    assert [event.error_code for event in refused] == [ErrorCodes.REFUSED_STREAM] * 3
    for stream in asked:
        stream.start(204, [])
        stream.end()
    pair.talk()
    assert len(pair.ended) == MAX_STREAMS
    assert pair.asks().open


@pytest.mark.parametrize(
    "more", [[("x-long", "x" * 17_000)], [(f"x-{n}", "1") for n in range(100)]]
)
def test_headers_over_the_limit_can_be_answered(pair: Pair, more: list[tuple[str, str]]) -> None:
    stream = pair.asks([*GET, *more])
    asked = pair.happened[-1]
    assert isinstance(asked, HeadReceived)
    assert asked.too_large
    stream.start(431, [])
    stream.end()
    pair.talk()
    assert pair.ended == {stream.id}


# ---- a client that would have us work for nothing ----


def headers_and_reset(stream_id: int) -> list[Frame]:
    head = HeadersFrame(stream_id, b"\x82\x87\x84\x41\x01a", flags=["END_HEADERS", "END_STREAM"])
    return [head, RstStreamFrame(stream_id, 8)]


FLOODS: dict[str, Callable[[int], list[Frame]]] = {
    "PING": lambda _: [PingFrame(0, b"12345678")],
    "SETTINGS": lambda _: [SettingsFrame(0, {4: 70_000})],
    "PRIORITY": lambda n: [PriorityFrame(2 * n + 1, 0, 15)],
    "WINDOW_UPDATE": lambda _: [WindowUpdateFrame(0, 1)],
    "reset": lambda n: headers_and_reset(2 * n + 1),
    "empty DATA": lambda n: [
        HeadersFrame(1, b"\x83\x87\x84\x41\x01a", flags=["END_HEADERS"]) if n == 0 else DataFrame(1)
    ],
    "CONTINUATION": lambda n: [HeadersFrame(1, b"") if n == 0 else ContinuationFrame(1, b"")],
    "a long header block": lambda n: [
        HeadersFrame(1, b"") if n == 0 else ContinuationFrame(1, bytes(16_384))
    ],
}


@pytest.mark.parametrize("frames", FLOODS.values(), ids=FLOODS.keys())
@pytest.mark.parametrize("at_once", [1, 20])
def test_a_flood_ends_the_connection(
    pair: Pair, frames: Callable[[int], list[Frame]], at_once: int
) -> None:
    sent = answered = 0
    for n in range(0, 20_000, at_once):
        batch = [frame for k in range(at_once) for frame in frames(n + k)]
        sent += len(batch)
        pair.sends(*batch)
        answered += len(pair.server.take(PLENTY))
        if pair.server.closed:
            break
    assert pair.server.closed
    assert sent <= 5 * MAX_POINTS + 200
    assert answered < 64_000
    assert not pair.server.streams


@pytest.mark.parametrize("at_once", [1, 3, 5])
def test_a_header_block_without_an_end_is_kept_up_to_a_limit(pair: Pair, at_once: int) -> None:
    frames = [HeadersFrame(1, b""), *(ContinuationFrame(1, bytes(16_384)) for _ in range(6))]
    pair.sends(PingFrame(0, b"12345678"), *frames[:3])
    closed = [pair.server.closed]
    for begin in range(3, len(frames), at_once):
        pair.sends(*frames[begin : begin + at_once])
        closed.append(pair.server.closed)
    assert not closed[0] and closed[-1]
    assert len(frames) * 16_384 < 2 * MAX_READ_HEADER_BYTES


def test_what_is_asked_for_nothing_is_forgiven_with_time(pair: Pair) -> None:
    for _ in range(20 * int(MAX_POINTS)):
        pair.sends(PingFrame(0, b"12345678"))
        pair.server.take(PLENTY)
        pair.now += 2.5 / DECAY_PER_S
    assert not pair.server.closed


def test_a_client_that_opens_its_windows_as_it_reads_works_for_us(pair: Pair) -> None:
    stream = pair.asks()
    stream.start(200, [])
    for _ in range(10_000):
        stream.write(b"token")
        pair.talk()
        pair.opens(5, stream)
    assert not pair.server.closed
    assert len(pair.bodies[stream.id]) == 50_000


def test_what_a_client_lets_us_remember_is_bounded(pair: Pair) -> None:
    pair.client.update_settings({SettingCodes.HEADER_TABLE_SIZE: 1 << 30})
    pair.talk()
    for n in range(500):
        stream = pair.asks()
        stream.start(204, [(b"tailrace-token", b"%d" % n * 20)])
        stream.end()
    pair.talk()
    assert pair.server._h2.encoder.header_table_size == 4096


def test_a_header_block_full_of_changes_of_the_table_ends_the_connection(pair: Pair) -> None:
    """One byte each, and thousands of them are a whole request's (RFC 7541, 6.3)."""
    block = pair.client.encoder.encode(GET)
    frame = HeadersFrame(1, b"\x20" * (int(MAX_POINTS) + 1) + block)
    frame.flags.add("END_HEADERS")
    frame.flags.add("END_STREAM")
    pair.sends(frame)
    pair.talk()
    assert pair.server.closed


def test_trailers_without_end_end_the_connection(pair: Pair) -> None:
    for _ in range(2 * int(MAX_POINTS)):
        stream = pair.asks(POST, ended=False)
        pair.client.send_headers(stream.id, [("t", "t")], end_stream=True)
        pair.talk()
        if pair.server.closed:
            break
        stream.start(204, [])
        stream.end()
        pair.talk()
    assert pair.server.closed
