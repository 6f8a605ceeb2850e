"""One HTTP/2 connection alone, with h2's own client at its other end: bytes in, bytes out."""

from __future__ import annotations

import pytest
from h2.errors import ErrorCodes
from h2.events import (
    ConnectionTerminated,
    DataReceived,
    ResponseReceived,
    StreamReset,
)
from h2.settings import SettingCodes

from tailrace.edge.server.hardened_h2 import (
    CONNECTION_WINDOW_BYTES,
    MAX_CLOSED_STREAMS,
    MAX_STREAMS,
)
from tailrace.edge.server.http2_connection import (
    MAX_CONNECTION_UNSENT_BYTES,
    BodyReceived,
    HeadReceived,
    Http2Connection,
    Http2Stream,
    RequestReset,
)
from tailrace.edge.server.interfaces import UNSENT_BYTES
from tests.edge.server.http2_pair import GET, PLENTY, POST, Pair


@pytest.fixture
def pair() -> Pair:
    return Pair()


class Reader:
    """A `ResponseSource` that counts what it hears."""

    def __init__(self, stream: Http2Stream) -> None:
        self.relieved = 0
        stream.source = self

    def drained(self) -> None:
        self.relieved += 1

    def disconnected(self) -> None: ...


# ---- requests and responses ----


def test_a_request_is_what_its_pseudo_headers_say(pair: Pair) -> None:
    stream = pair.asks([*GET, ("accept", "text/event-stream")])
    [asked] = pair.happened
    assert isinstance(asked, HeadReceived)
    request = asked.request
    assert (request.method, request.path, request.query) == ("GET", b"/v1/stream/a", b"offset=-1")
    assert request.headers == [(b"host", b"edge.example"), (b"accept", b"text/event-stream")]
    assert (request.scheme, request.http_version) == ("https", "2")
    assert request.peer == ("192.0.2.1", 4000)
    assert (asked.ended, asked.too_large, stream.is_received) == (True, False, True)


def test_a_response_is_its_head_what_was_written_and_the_end(pair: Pair) -> None:
    stream = pair.asks()
    stream.start(200, [(b"content-type", b"text/plain")])
    stream.write(b"one ")
    pair.talk()
    stream.write(b"two ")
    stream.write(b"three")
    stream.end()
    stream.write(b"nothing")
    pair.talk()
    [response] = pair.said(ResponseReceived)
    assert response.headers == [(b":status", b"200"), (b"content-type", b"text/plain")]
    assert pair.bodies[stream.id] == b"one two three"
    assert pair.ended == {stream.id}
    assert not pair.server.streams


def test_a_response_without_a_body_is_one_frame(pair: Pair) -> None:
    stream = pair.asks()
    stream.start(204, [])
    stream.end()
    pair.talk()
    assert pair.ended == {stream.id}
    assert not pair.said(DataReceived)


def test_frames_of_many_streams_leave_together(pair: Pair) -> None:
    streams = [pair.asks() for _ in range(20)]
    for stream in streams:
        stream.start(200, [])
        stream.write(b"token")
    sent = pair.server.take(PLENTY)
    assert len([e for e in pair.client.receive_data(sent) if isinstance(e, DataReceived)]) == 20


def test_a_body_comes_in_pieces_and_opens_the_window_as_it_is_taken(pair: Pair) -> None:
    stream = pair.asks(POST, ended=False)
    whole = bytes(200_000)
    sent = 0
    while sent < len(whole):
        size = min(16_384, len(whole) - sent, pair.client.local_flow_control_window(stream.id))
        if size == 0:
            came = sum(len(e.data) for e in pair.happened if isinstance(e, BodyReceived))
            assert came == sent  # a client sends no more than a window ahead of the reader
            stream.consumed(stream.unread_bytes)
        else:
            sent += size
            pair.client.send_data(stream.id, whole[:size], end_stream=sent == len(whole))
        pair.talk()
    pieces = [event for event in pair.happened if isinstance(event, BodyReceived)]
    assert b"".join(piece.data for piece in pieces) == whole
    assert [piece.ended for piece in pieces] == [False] * (len(pieces) - 1) + [True]


def test_bodies_that_nobody_took_are_not_held_against_the_connection(pair: Pair) -> None:
    """A client may send as much as ever after requests that were answered unread."""
    for _ in range(2 * CONNECTION_WINDOW_BYTES // 65_535):
        stream = pair.asks(POST, ended=False)
        for size in (16_384, 16_384, 16_384, 16_383):
            pair.client.send_data(stream.id, bytes(size))
        stream.start(413, [])
        stream.end()
        pair.talk()
    assert pair.client.outbound_flow_control_window > CONNECTION_WINDOW_BYTES // 4


def test_trailers_end_a_body(pair: Pair) -> None:
    stream = pair.asks(POST, ended=False)
    pair.client.send_data(stream.id, b"a")
    pair.client.send_headers(stream.id, [("checksum", "1")], end_stream=True)
    pair.talk()
    assert pair.happened[1:] == [BodyReceived(stream, b"a", False), BodyReceived(stream, b"", True)]


def test_a_request_that_is_answered_before_it_is_whole_is_asked_for_no_more(pair: Pair) -> None:
    stream = pair.asks(POST, ended=False)
    stream.start(413, [])
    stream.write(b"too large")
    stream.end()
    pair.talk()
    assert pair.bodies[stream.id] == b"too large"
    [reset] = pair.said(StreamReset)
    assert reset.error_code is ErrorCodes.NO_ERROR


def test_a_response_that_breaks_off_can_be_seen_to(pair: Pair) -> None:
    stream = pair.asks()
    stream.start(200, [])
    stream.write(b"half")
    stream.reset()
    pair.talk()
    assert pair.bodies[stream.id] == b"half"
    assert pair.ended == set()
    assert [event.error_code for event in pair.said(StreamReset)] == [ErrorCodes.INTERNAL_ERROR]


def test_what_breaks_off_does_not_wait_for_a_client_without_room(pair: Pair) -> None:
    stream = pair.asks()
    stream.start(200, [])
    stream.write(bytes(70_000))
    stream.reset()
    pair.talk()
    assert len(pair.bodies[stream.id]) == 65_535
    assert pair.said(StreamReset)
    assert not pair.server.streams


# ---- back-pressure ----


def test_room_is_what_may_wait_less_what_does(pair: Pair) -> None:
    stream = pair.asks()
    stream.start(200, [])
    assert stream.writable_bytes() == UNSENT_BYTES
    stream.write(bytes(1000))
    assert stream.writable_bytes() == UNSENT_BYTES - 1000
    pair.talk()
    assert stream.writable_bytes() == UNSENT_BYTES


def test_who_found_no_room_hears_when_there_is_some(pair: Pair) -> None:
    stream = pair.asks()
    reader = Reader(stream)
    stream.start(200, [])
    stream.write(bytes(65_535))
    pair.talk()  # the client's window is spent
    stream.write(bytes(UNSENT_BYTES))
    assert stream.writable_bytes() == 0
    pair.talk()
    assert pair.server.drained() == []
    pair.opens(1, stream)
    assert pair.server.drained() == [reader]
    assert pair.server.drained() == []


def test_a_connection_without_room_holds_bodies_back_and_no_head(pair: Pair) -> None:
    one, other = pair.asks(), pair.asks()
    one.start(200, [])
    one.write(b"one")
    other.start(200, [])
    sent = pair.server.take(0)
    events = pair.client.receive_data(sent)
    assert [type(event) for event in events] == [ResponseReceived, ResponseReceived]
    pair.talk()
    assert pair.bodies == {one.id: b"one"}


def test_the_streams_of_a_connection_share_what_may_wait(pair: Pair) -> None:
    streams = [pair.asks() for _ in range(MAX_STREAMS)]
    for stream in streams:
        stream.start(200, [])
        while stream.writable_bytes() > 0:
            stream.write(bytes(100))
    waiting = sum(stream.unsent_bytes for stream in streams)
    assert waiting <= MAX_CONNECTION_UNSENT_BYTES + 100 * MAX_STREAMS
    reader = Reader(streams[0])
    for stream in streams[1:]:
        stream.end()
    pair.opens(PLENTY)
    assert pair.server.drained() == [reader]
    assert streams[0].writable_bytes() == UNSENT_BYTES


def test_a_stream_that_the_client_does_not_read_keeps_no_other_waiting(pair: Pair) -> None:
    stalled, flowing = pair.asks(), pair.asks()
    for stream in (stalled, flowing):
        stream.start(200, [])
    pair.client.increment_flow_control_window(PLENTY)
    pair.client.increment_flow_control_window(PLENTY, flowing.id)
    stalled.write(bytes(80_000))
    pair.talk()
    for _ in range(100):
        flowing.write(bytes(10_000))
        pair.talk()
    assert len(pair.bodies[flowing.id]) == 1_000_000
    assert len(pair.bodies[stalled.id]) == 65_535


def test_streams_take_turns(pair: Pair) -> None:
    streams = [pair.asks() for _ in range(3)]
    pair.opens(PLENTY, *streams)
    for stream in streams:
        stream.start(200, [])
        stream.write(bytes(100_000))
    sent = bytearray()
    while piece := pair.server.take(20_000):
        sent += piece
    order = [
        event.stream_id
        for event in pair.client.receive_data(bytes(sent))
        if isinstance(event, DataReceived)
    ]
    assert order[:6] == [1, 3, 5, 1, 3, 5]


def test_a_larger_initial_window_lets_go_what_waits(pair: Pair) -> None:
    pair.opens(PLENTY)
    stream = pair.asks()
    stream.start(200, [])
    stream.write(bytes(100_000))
    pair.talk()
    assert len(pair.bodies[stream.id]) == 65_535
    pair.client.update_settings({SettingCodes.INITIAL_WINDOW_SIZE: 100_000})
    pair.talk()
    assert len(pair.bodies[stream.id]) == 100_000


# ---- for ever, and the end ----


def test_a_connection_has_no_last_request(pair: Pair) -> None:
    """A stream that runs on beside more requests than are remembered."""
    live = pair.asks()
    live.start(200, [])
    for _ in range(1_500):
        stream = pair.asks()
        stream.start(204, [])
        stream.end()
        pair.talk()
    live.write(b"still here")
    live.end()
    pair.talk()
    assert pair.bodies[live.id] == b"still here"
    assert not pair.said(ConnectionTerminated)
    assert len(pair.server._h2._closed_streams) <= MAX_CLOSED_STREAMS


def test_a_connection_that_goes_away_finishes_what_it_has(pair: Pair) -> None:
    stream = pair.asks()
    stream.start(200, [])
    pair.server.go_away()
    sent = pair.server.take(PLENTY)
    assert sent.startswith(goaway(2**31 - 1))
    stream.write(b"the rest")
    stream.end()
    assert not pair.server.closed
    sent = pair.server.take(PLENTY)
    assert b"the rest" in sent
    assert sent.endswith(goaway(stream.id))
    assert pair.server.closed


def goaway(last_id: int) -> bytes:
    return b"\x00\x00\x08\x07" + bytes(5) + last_id.to_bytes(4, "big") + bytes(4)


def test_an_idle_connection_that_goes_away_is_over(pair: Pair) -> None:
    pair.server.go_away()
    assert pair.server.closed


def test_a_client_that_says_goaway_still_gets_what_it_asked_for(pair: Pair) -> None:
    stream = pair.asks()
    stream.start(200, [])
    pair.talk()
    pair.server.receive(goaway(0))
    assert not pair.server.closed
    stream.write(b"the rest")
    stream.end()
    pair.talk()
    assert pair.bodies[stream.id] == b"the rest"
    assert pair.server.closed


def test_a_connection_that_is_lost_takes_all_its_streams_along(pair: Pair) -> None:
    streams = [pair.asks() for _ in range(3)]
    assert pair.server.lost() == [RequestReset(stream) for stream in streams]
    assert pair.server.receive(b"anything") == []
    for stream in streams:
        stream.write(b"too late")
        stream.end()


@pytest.mark.parametrize("data", [b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\x02\x00", bytes(100)])
def test_what_is_not_http2_ends_the_connection(data: bytes) -> None:
    server = Http2Connection(lambda: 0.0, lambda: None)
    assert server.receive(data) == []
    assert server.closed
