"""The event stream reader against the WHATWG text, cut anywhere."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.ledger.errors import Unavailable
from tailrace.origin.producers.upstream_reply import (
    MAX_EVENT_BYTES,
    MAX_LINE_BYTES,
    EventReader,
    ServerEvent,
)

STREAM = (
    b"\xef\xbb\xbf: a comment\r\n"
    b"data: first\r\n\r\n"
    b"event: named\ndata:second\ndata: line\nid: 7\nretry: 10\n\n"
    b"event: without data\n\n"
    b"data\n\n"
    b"data: \xc3\xa9\xf0\x9f\x8c\x8a\rdata: cr\r\r"
    b"unknown: field\ndata:  two spaces\n\n"
    b"data: cut off"
)
EVENTS = [
    ServerEvent("message", "first"),
    ServerEvent("named", "second\nline"),
    ServerEvent("message", ""),
    ServerEvent("message", "é🌊\ncr"),
    ServerEvent("message", " two spaces"),
]


def read(*pieces: bytes) -> list[ServerEvent]:
    reader = EventReader()
    return [event for piece in pieces for event in reader.feed(piece)]


def test_an_event_stream_is_read_as_the_standard_says() -> None:
    assert read(STREAM) == EVENTS


@pytest.mark.parametrize("at", range(len(STREAM) + 1))
def test_a_stream_that_comes_in_two_pieces_is_the_same_stream(at: int) -> None:
    assert read(STREAM[:at], STREAM[at:]) == EVENTS


def test_a_stream_that_comes_byte_by_byte_is_the_same_stream() -> None:
    assert read(*(STREAM[at : at + 1] for at in range(len(STREAM)))) == EVENTS


def test_an_event_comes_out_with_its_last_byte() -> None:
    for end in (b"\n\n", b"\r\r", b"\r\n\r"):
        reader = EventReader()
        assert list(reader.feed(b"data: x" + end[:-1])) == []
        assert list(reader.feed(end[-1:])) == [ServerEvent("message", "x")]


def test_what_came_before_rubbish_is_given_first() -> None:
    events = EventReader().feed(b"data: x\n\ndata: \xff\n\n")
    assert next(events) == ServerEvent("message", "x")
    with pytest.raises(Unavailable, match="not UTF-8"):
        next(events)


@given(st.lists(st.text(st.characters(exclude_characters="\r\n", codec="utf-8"))), st.data())
def test_any_data_comes_through_any_cuts(lines: list[str], data: st.DataObject) -> None:
    raw = "".join(f"data: {line}\n" for line in lines).encode() + b"\n"
    cut = data.draw(st.integers(0, len(raw)))
    expected = [ServerEvent("message", "\n".join(lines))] if lines else []
    assert read(raw[:cut], raw[cut:]) == expected


@given(st.binary(max_size=200))
def test_rubbish_is_read_or_refused_and_nothing_else(raw: bytes) -> None:
    with suppress(Unavailable):
        assert all(isinstance(event, ServerEvent) for event in read(raw))


@pytest.mark.parametrize(
    "raw",
    [
        b"data: \xff\n",
        b"x" * (MAX_LINE_BYTES + 1),
        b"data: " + b"x" * MAX_EVENT_BYTES + b"\n",
        (b"data: " + b"x" * 1000 + b"\n") * (MAX_EVENT_BYTES // 1000),
    ],
    ids=["not UTF-8", "a line without end", "a long line", "many lines"],
)
def test_what_is_too_long_or_no_text_is_refused(raw: bytes) -> None:
    pieces = [raw[at : at + (1 << 16)] for at in range(0, len(raw), 1 << 16)]
    with pytest.raises(Unavailable, match="the upstream server sent"):
        read(*pieces)
