"""Snapshots, tails and times over a WebSocket session: what late readers are sent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.edge.session import MAX_CREDIT_FRAMES, WINDOW_BYTES, Session
from tailrace.ledger.flow.credit_window import Window
from tailrace.ledger.frame import (
    SCHEMA_HASH,
    Credit,
    Detach,
    FinishReason,
    Frame,
    Hello,
    Logged,
    Notice,
    Opened,
    Resume,
    Snapshot,
    StreamEnd,
    StreamError,
    Token,
    decode,
    encode,
    split,
)

STREAM = bytes(16)
CORR = 7
RESUME = Resume(STREAM, snapshot=True)


@dataclass
class Link:
    """A session with the origin behind it, which has `frames` and obeys the credit."""

    frames: Sequence[Logged]
    exist: int
    """Number of frames that exist when the stream is opened."""
    first: int = 0
    session: Session = field(default_factory=Session)
    window: Window = field(default_factory=lambda: Window(0, 0))
    shown: list[Frame] = field(default_factory=list)
    asked: list[Frame] = field(default_factory=list)

    def client(self, *frames: Frame) -> None:
        """Send frames of the client, and let everything happen that follows."""
        for _, frame in self.session.receive(b"".join(encode(one, CORR) for one in frames)):
            self._take(frame)
        self.run()

    def _take(self, frame: Frame) -> None:
        self.asked.append(frame)
        if isinstance(frame, Resume):
            self.window = Window.starting(0, frame.credit, credit_bytes=frame.credit_bytes)
            self.window.begin_at(self.first)
            opened = Opened(STREAM, self.exist, "", "demo", 1, first=self.first)
            self.session.deliver(encode(opened, CORR))
        elif isinstance(frame, Credit):
            self.window.grant(frame.limit, frame.bytes)

    def run(self) -> None:
        """Send until neither the origin nor the session has anything that may be sent."""
        while True:
            wanted = self.window.wanted(len(self.frames))
            some = self.frames[self.window.next : self.window.next + wanted]
            for raw in self.window.passing([encode(one, CORR) for one in some]):
                self.session.deliver(raw)
            message = self.session.next_message()
            self.shown += [] if message is None else [decode(raw)[1] for raw in split(message)]
            credits = self.session.credits()
            for _, frame in credits:
                self._take(frame)
            if not (wanted or message or credits):
                break

    @property
    def stream(self) -> list[Frame]:
        return [one for one in self.shown if isinstance(one, Logged | Snapshot | StreamError)]


def opened_link(frames: Sequence[Logged], exist: int, resume: Resume, first: int = 0) -> Link:
    link = Link(frames, exist, first)
    link.session.receive(encode(Hello(SCHEMA_HASH, "test")))
    link.client(resume)
    return link


def words(count: int, first: int = 0) -> list[Logged]:
    return [Token(f" w{n}", n) for n in range(first, first + count)]


def text(frames: Sequence[Frame]) -> str:
    return "".join(one.text for one in frames if isinstance(one, Token | Snapshot))


def test_a_snapshot_comes_whole_however_little_credit_there_is() -> None:
    link = opened_link(words(5000), 5000, replace(RESUME, credit=1))
    assert link.stream == [Snapshot(0, text(words(5000)), 4999)]


def test_without_credit_nothing_is_read_for_a_snapshot() -> None:
    link = opened_link(words(5000), 5000, RESUME)
    assert link.stream == []
    assert link.window.next == 0
    link.client(Credit(1))
    assert link.stream == [Snapshot(0, text(words(5000)), 4999)]


def test_frames_after_a_snapshot_need_credit_beyond_it() -> None:
    link = opened_link(words(3000), 2000, replace(RESUME, credit=MAX_CREDIT_FRAMES))
    assert link.stream == [Snapshot(0, text(words(2000)), 1999)]
    link.client(Credit(2003))
    assert link.stream[1:] == words(3, 2000)
    link.client(Credit(2003 + MAX_CREDIT_FRAMES))
    assert link.stream[1:] == words(1000, 2000)


def test_frames_between_two_texts_need_credit_too() -> None:
    frames = [*words(10), Notice("inexact", "", 10), *words(10, 11)]
    link = opened_link(frames, 21, replace(RESUME, credit=5))
    assert link.stream == [Snapshot(0, text(words(10)), 9)]
    link.client(Credit(11))
    assert link.stream[1:] == [frames[10]]
    link.client(Credit(12))
    assert link.stream[2:] == [Snapshot(11, text(words(10, 11)), 20)]


def test_credit_in_bytes_counts_the_bytes_that_the_client_got() -> None:
    resume = replace(RESUME, credit=MAX_CREDIT_FRAMES, credit_bytes=10_000)
    link, given = opened_link(words(2000), 1000, resume), 10_000
    assert link.stream[0] == Snapshot(0, text(words(1000)), 999)
    assert given < sum(len(encode(one)) for one in words(1000))
    while len(link.stream) <= 1000:
        before, shown = len(link.stream), sum(len(encode(one)) for one in link.stream)
        assert shown <= given + WINDOW_BYTES
        given = shown + 500
        link.client(Credit(1000 + before + 500, given))
        assert len(link.stream) > before
    assert link.stream[1:] == words(1000, 1000)


def test_a_reader_at_the_end_of_the_log_gets_no_snapshot() -> None:
    link = opened_link(words(8), 5, replace(RESUME, after=4, credit=9), first=5)
    assert link.stream == words(3, 5)


def test_an_end_follows_its_snapshot_and_frees_the_corr() -> None:
    end = StreamEnd(5, FinishReason.STOP, 5, 1)
    link = opened_link([*words(5), end], 6, replace(RESUME, credit=9))
    assert link.stream == [Snapshot(0, text(words(5)), 4), end]
    link.client(replace(RESUME, credit=9))
    assert link.stream[2:] == link.stream[:2]


def test_a_failure_comes_after_the_text_before_it() -> None:
    link = opened_link(words(5), 500, replace(RESUME, credit=9))
    error = StreamError("damaged", "a row is damaged", False, 500)
    link.session.deliver(encode(error, CORR))
    link.run()
    assert link.stream == [Snapshot(0, text(words(5)), 4), error]


def test_a_detached_reader_is_sent_no_snapshot() -> None:
    link = opened_link(words(5), 500, replace(RESUME, credit=9))
    link.client(Detach())
    assert link.stream == []
    link.frames = words(5000)
    link.client(replace(RESUME, credit=9))
    assert link.stream[0] == Snapshot(0, text(words(500)), 499)


def test_many_snapshots_of_one_client_hold_limited_memory() -> None:
    """A client that reads nothing can have one text in memory, and a little of each other."""
    session = Session()
    session.receive(encode(Hello(SCHEMA_HASH, "test")))
    big = [encode(Token("x" * 4000, n)) for n in range(2000)]
    windows: dict[int, Window] = {}
    requests = b"".join(encode(replace(RESUME, credit=9), corr) for corr in range(1, 101))

    def take(forwarded: Sequence[tuple[int, Frame]]) -> None:
        for corr, frame in forwarded:
            if isinstance(frame, Resume):
                windows[corr] = Window.starting(0, frame.credit, credit_bytes=frame.credit_bytes)
                session.deliver(encode(Opened(STREAM, len(big), "", "demo", 1), corr))
            elif isinstance(frame, Credit):
                windows[corr].grant(frame.limit, frame.bytes)

    take(session.receive(requests))
    while credits := session.credits():
        take(credits)
        for corr, window in windows.items():
            wanted = window.wanted(len(big))
            for raw in window.passing(big[window.next : window.next + wanted]):
                session.deliver(raw[:5] + corr.to_bytes(4, "little") + raw[9:])
    received = sum(window.passed_bytes for window in windows.values())
    assert 1 << 20 < received < 6 << 20


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"after": 3, "tail": 4}, "Resume.tail"),
        ({"after": 3, "since_ms": 4}, "Resume.since_ms"),
        ({"tail": 3, "since_ms": 4}, "Resume.tail"),
        ({"tail": 0}, "Resume.tail"),
    ],
)
def test_what_makes_no_sense_is_refused(fields: dict[str, Any], field: str) -> None:
    link = opened_link(words(9), 9, replace(RESUME, credit=9, **fields))
    [error] = link.stream
    assert isinstance(error, StreamError)
    assert (error.code, error.status, error.field) == ("invalid_request", 400, field)
    assert link.asked == []


@pytest.mark.parametrize("fields", [{"tail": 3}, {"since_ms": 1}])
def test_credit_counts_from_the_frame_that_the_origin_has_chosen(fields: dict[str, Any]) -> None:
    link = opened_link(words(9), 9, Resume(STREAM, credit=2, **fields), first=6)
    assert link.stream == words(2, 6)
    link.client(Credit(9))
    assert link.stream == words(3, 6)


def test_credit_before_opened_cannot_be_an_index() -> None:
    session = Session()
    session.receive(encode(Hello(SCHEMA_HASH, "test")))
    session.receive(encode(Resume(STREAM, tail=3), CORR) + encode(Credit(9), CORR))
    message = session.next_message()
    assert message is not None
    errors = [frame for _, frame in map(decode, split(message)) if isinstance(frame, StreamError)]
    assert [error.field for error in errors] == ["Credit.limit"]


@given(st.data())
def test_whatever_credit_comes_when_the_text_is_whole(data: st.DataObject) -> None:
    """The snapshot and what follows are the stream, in order, for any frames and any credit."""
    frames: list[Logged] = []
    for index in range(data.draw(st.integers(1, 60))):
        is_text = data.draw(st.integers(0, 4)) > 0
        frames.append(Token(f"t{index}", index) if is_text else Notice("inexact", "", index))
    exist = data.draw(st.integers(1, len(frames)))
    first = data.draw(st.integers(0, exist))
    after = first - 1 if first else None
    credit = data.draw(st.integers(0, 9))
    credit_bytes = data.draw(st.none() | st.integers(0, 200))
    link = opened_link(
        frames, exist, replace(RESUME, after=after, credit=credit, credit_bytes=credit_bytes), first
    )
    shown_bytes = 0
    while (position := next_index(link.stream, first)) < len(frames):
        shown_bytes = sum(len(encode(one)) for one in link.stream)
        step = data.draw(st.integers(1, 9))
        link.client(Credit(position + step, shown_bytes + data.draw(st.integers(1, 300))))
        assert next_index(link.stream, first) > position
    position = first
    for frame in link.stream:
        if isinstance(frame, Snapshot):
            assert frame.first == position
            assert frame.text == text(frames[position : frame.index + 1])
            assert frame.index < exist
        else:
            assert frame == frames[position]
            assert position >= exist or not isinstance(frame, Token)
        position = next_index([frame], first)


def next_index(frames: Sequence[Frame], first: int) -> int:
    last = frames[-1] if frames else None
    return last.index + 1 if isinstance(last, Logged | Snapshot) else first
