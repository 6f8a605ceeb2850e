"""A client's position in a stream, from the bytes of its connections."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.client import Position
from tailrace.ledger.errors import NotFound
from tailrace.ledger.frame import (
    FinishReason,
    Frame,
    Heartbeat,
    Logged,
    Opened,
    Status,
    StreamEnd,
    StreamError,
    StreamState,
    Token,
    encode,
)

FRAMES: list[Logged] = [
    *(Token(f" {n}", n) for n in range(5)),
    StreamEnd(5, FinishReason.STOP, 5, 1),
]


def body(*frames: Frame) -> bytes:
    return b"".join(encode(frame) for frame in frames)


@given(st.lists(st.integers(0, len(body(*FRAMES))), max_size=8))
def test_frames_come_whole_however_the_bytes_are_cut(cuts: list[int]) -> None:
    data = body(*FRAMES)
    edges = [0, *sorted(cuts), len(data)]
    position = Position()
    pieces = (data[a:b] for a, b in pairwise(edges))
    assert [frame for piece in pieces for frame in position.feed(piece)] == FRAMES
    assert position.ended


@given(st.integers(0, 5), st.integers(0, 5))
def test_a_second_connection_doubles_nothing(lost_after: int, resumed_from: int) -> None:
    position = Position()
    read = position.feed(body(*FRAMES[:lost_after]) + b"\x0a\x00")  # cut inside a frame
    position.reconnect()
    read += position.feed(body(*FRAMES[min(lost_after, resumed_from) :]))
    assert read == FRAMES
    assert position.fault is None


def test_it_resumes_after_the_last_frame_read() -> None:
    position = Position()
    assert position.after is None
    position.feed(body(*FRAMES[:3]))
    assert position.after == 2


def test_it_begins_where_it_is_told() -> None:
    position = Position(after=2)
    assert position.feed(body(*FRAMES)) == FRAMES[3:]


def test_rewinding_reads_again_even_what_had_ended() -> None:
    position = Position()
    position.feed(body(*FRAMES))
    position.rewind(4)
    assert not position.ended
    assert position.feed(body(*FRAMES)) == FRAMES[4:]


def test_a_heartbeat_is_no_frame_of_the_stream() -> None:
    position = Position()
    assert position.feed(body(Heartbeat(0, ready=True), FRAMES[0])) == [FRAMES[0]]


@pytest.mark.parametrize(
    ("state", "ended"), [(StreamState.ENDED, True), (StreamState.RUNNING, False)]
)
def test_a_status_tells_whether_more_is_to_come(state: StreamState, ended: bool) -> None:
    position = Position(after=5)
    position.feed(body(Status(bytes(16), state, 6)))
    assert position.ended is ended


def test_frames_before_an_error_are_not_lost() -> None:
    position = Position()
    data = body(FRAMES[0], StreamError("not_found", "gone", False, 404), FRAMES[1])
    assert position.feed(data) == [FRAMES[0]]
    assert isinstance(position.fault, NotFound)
    assert position.after == 0


def test_a_new_connection_begins_without_fault() -> None:
    position = Position()
    position.feed(b"<html>")
    position.reconnect()
    assert position.fault is None


@pytest.mark.parametrize(
    "data",
    [
        body(FRAMES[1]),  # index 0 is missing
        body(Opened(bytes(16), 0, "", "demo", 1)),
        b"<html>502 Bad Gateway</html>",
        b"\x05\x00\x00\x01\x3f\x00\x00\x00\x00",
    ],
)
def test_a_body_that_cannot_be_right_is_worth_another_connection(data: bytes) -> None:
    position = Position()
    assert position.feed(data) == []
    assert position.fault is not None
    assert position.fault.retryable
