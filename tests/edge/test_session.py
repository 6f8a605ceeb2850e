"""A WebSocket session alone: messages in, messages and frames for the link out."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from tailrace.edge.access.authenticator import ANONYMOUS
from tailrace.edge.server.flood import MAX_POINTS, FloodBudget
from tailrace.edge.session import (
    MAX_CREDIT_FRAMES,
    MAX_MESSAGE_BYTES,
    MAX_STREAMS_PER_CONNECTION,
    MAX_WAITING_REPLIES,
    MIN_WINDOW_BYTES,
    REFUSED_POINTS,
    WINDOW_BYTES,
    Close,
    CloseCode,
    Session,
)
from tailrace.ledger.frame import (
    SCHEMA_HASH,
    Caller,
    Cancel,
    Chunk,
    Credit,
    Detach,
    FinishReason,
    Frame,
    Heartbeat,
    Hello,
    Input,
    Open,
    Opened,
    Priority,
    Resume,
    Status,
    Steer,
    StreamEnd,
    StreamError,
    StreamState,
    SwitchStages,
    Token,
    corr_of,
    decode,
    encode,
    split,
)

STREAM = bytes(16)
OPEN = Open("demo", prompt="Once", credit=4)
END = StreamEnd(1, FinishReason.STOP, 1, 3)
HELLO = encode(Hello(SCHEMA_HASH, "test"))


def sent(session: Session) -> list[tuple[int, Frame]]:
    """Return all frames that leave for the client now."""
    frames: list[tuple[int, Frame]] = []
    while (message := session.next_message()) is not None:
        frames += map(decode, split(message))
    return frames


def forwards(session: Session, message: bytes | str) -> list[bytes]:
    """Return the frames that the link gets for a client's message, without the byte credit."""
    frames: list[bytes] = []
    for corr, frame in session.receive(message):
        frames.append(encode(without_bytes(frame), corr))
    return frames


def without_bytes(frame: Frame) -> Frame:
    if isinstance(frame, Open | Resume):
        assert frame.credit_bytes is not None
        return replace(frame, credit_bytes=None)
    if isinstance(frame, Credit):
        assert frame.bytes is not None
        return replace(frame, bytes=None)
    return frame


def errors(session: Session) -> list[tuple[int, str, int]]:
    return [
        (corr, frame.code, frame.status)
        for corr, frame in sent(session)
        if isinstance(frame, StreamError)
    ]


@pytest.fixture
def session() -> Session:
    session = Session()
    session.receive(HELLO)
    sent(session)
    return session


# ---- hello ----


def test_both_sides_begin_with_hello() -> None:
    session = Session()
    [(corr, hello)] = sent(session)
    assert corr == 0
    assert isinstance(hello, Hello)
    assert forwards(session, HELLO) == []
    assert session.close is None


# ---- requests ----


def test_requests_pass_as_they_came(session: Session) -> None:
    frames = [
        encode(OPEN, 1),
        encode(Resume(STREAM, credit=1), 2),
        encode(Cancel(STREAM), 3),
        encode(Credit(8), 1),
        encode(Detach(), 2),
    ]
    assert forwards(session, b"".join(frames)) == frames


def test_a_request_gets_the_class_of_the_key_and_no_more_urgent_one() -> None:
    session = Session(priority=Priority.BATCH)
    session.receive(HELLO)
    sent(session)
    [(_, asked)] = session.receive(encode(OPEN, 1))
    assert isinstance(asked, Open)
    assert asked.priority is Priority.BATCH
    urgent = replace(OPEN, priority=Priority.INTERACTIVE)
    assert session.receive(encode(urgent, 2)) == []
    assert errors(session) == [(2, "class_not_allowed", 403)]
    assert len(session.receive(encode(OPEN, 2))) == 1, "the channel is free again"


def test_hello_and_a_request_may_share_a_message() -> None:
    assert forwards(Session(), HELLO + encode(OPEN, 1)) == [encode(OPEN, 1)]


def test_credit_and_detach_for_a_stream_that_has_closed_go_nowhere(session: Session) -> None:
    assert forwards(session, encode(Credit(8), 9) + encode(Detach(), 9)) == []
    assert session.close is None


@pytest.mark.parametrize("closing", [END, Status(STREAM, StreamState.ENDED, 2)])
def test_a_corr_is_free_again_when_its_last_frame_has_left(
    session: Session, closing: Frame
) -> None:
    session.receive(encode(OPEN, 1))
    session.deliver(encode(closing, 1))
    sent(session)
    assert forwards(session, encode(OPEN, 1)) == [encode(OPEN, 1)]


def test_nothing_of_a_detached_stream_follows_on_its_corr(session: Session) -> None:
    session.receive(encode(OPEN, 1) + encode(OPEN, 2))
    session.deliver(encode(Token("old", 0), 1))
    session.deliver(encode(Token("other", 0), 2))
    session.receive(encode(Detach(), 1) + encode(OPEN, 1))
    assert sent(session) == [(2, Token("other", 0))]


def test_detaching_costs_the_same_whatever_waits_for_other_streams(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    session.receive(encode(OPEN, 1) + encode(OPEN, 2))
    for index in range(1000):
        session.deliver(encode(Token("x", index), 2))
    looked_at: list[bytes] = []

    def looks(raw: bytes) -> int:
        looked_at.append(raw)
        return corr_of(raw)

    monkeypatch.setattr("tailrace.edge.session.corr_of", looks)
    session.receive(encode(Detach(), 1))
    assert len(looked_at) < 10


# ---- bad input ----


def test_a_message_that_is_too_long_is_told_so(session: Session) -> None:
    detach = encode(Detach(), 1)
    fits = MAX_MESSAGE_BYTES // len(detach)
    assert forwards(session, detach * fits) == []
    assert session.close is None
    assert forwards(session, detach * (fits + 1)) == []
    assert errors(session) == [(0, "too_large", 413)]
    assert session.close == Close(CloseCode.MESSAGE_TOO_BIG, "too_large")


def test_frames_before_the_bad_one_count(session: Session) -> None:
    assert forwards(session, encode(OPEN, 1) + encode(HELLO_AGAIN, 0)) == [encode(OPEN, 1)]


HELLO_AGAIN = Hello(SCHEMA_HASH, "test")


def test_a_closing_session_hears_nothing_more(session: Session) -> None:
    session.receive("hello")
    assert forwards(session, encode(OPEN, 1)) == []


def test_a_bad_payload_costs_its_own_stream_only(session: Session) -> None:
    session.receive(encode(OPEN, 1))
    bad_credit = b"\x06\x00\x00\x01" + encode(Credit(0), 1)[4:9] + b"\x80"
    assert forwards(session, bad_credit + encode(OPEN, 2)) == [
        encode(Detach(), 1),
        encode(OPEN, 2),
    ]
    assert errors(session) == [(1, "bad_frame", 400)]
    assert session.close is None


NOTHING_SPEAKS = [
    OPEN,
    Resume(STREAM),
    Cancel(STREAM),
    Steer(STREAM, None, "x"),
    Input(STREAM, None, 0, b"x"),
    SwitchStages(STREAM, None, ()),
]


@pytest.mark.parametrize("request_frame", NOTHING_SPEAKS)
def test_what_neither_a_key_nor_a_token_speaks_for_is_refused_here(request_frame: Frame) -> None:
    session = Session(caller=ANONYMOUS)
    session.receive(HELLO)
    assert session.receive(encode(request_frame, 1)) == []
    assert errors(session) == [(1, "no_key", 401)]
    assert session.close is None
    assert session.receive(encode(request_frame, 1)) == [], "the corr is free"


@pytest.mark.parametrize(
    ("caller", "request_frame"),
    [
        (ANONYMOUS, Resume(STREAM, token="v1.token")),
        (ANONYMOUS, Cancel(STREAM, token="v1.token")),
        (ANONYMOUS, Steer(STREAM, "v1.token", "x")),
        (ANONYMOUS, Input(STREAM, "v1.token", 0, b"x")),
        (ANONYMOUS, SwitchStages(STREAM, "v1.token", ())),
        *((Caller("acme", 0), request) for request in NOTHING_SPEAKS),
        *((None, request) for request in NOTHING_SPEAKS),
    ],
)
def test_what_a_key_or_a_token_speaks_for_is_the_origins_to_decide(
    caller: Caller | None, request_frame: Frame
) -> None:
    session = Session(caller=caller)
    session.receive(HELLO)
    assert len(session.receive(encode(request_frame, 1))) == 1
    assert errors(session) == []


# ---- bounds ----


def test_streams_over_the_cap_are_refused_one_by_one() -> None:
    session = Session(max_streams=2)
    session.receive(HELLO)
    assert len(session.receive(b"".join(encode(OPEN, corr) for corr in (1, 2, 3)))) == 2
    assert errors(session) == [(3, "too_many_streams", 429)]
    session.receive(encode(Detach(), 1))
    assert forwards(session, encode(OPEN, 3)) == [encode(OPEN, 3)]


def test_requests_that_were_left_without_an_answer_count_too() -> None:
    left = [2]
    session = Session(max_streams=3, detached=lambda: left[0])
    session.receive(HELLO)
    assert len(session.receive(encode(OPEN, 1) + encode(OPEN, 2))) == 1
    assert errors(session) == [(2, "too_many_streams", 429)]
    left[0] = 1
    assert len(session.receive(encode(OPEN, 2))) == 1


def test_the_cap_is_256_unless_told_otherwise(session: Session) -> None:
    opens = b"".join(encode(OPEN, corr) for corr in range(1, MAX_STREAMS_PER_CONNECTION + 2))
    assert len(session.receive(opens)) == 256


@pytest.mark.parametrize(
    "request_frame",
    [
        Open("demo", prompt="x", caller=Caller("acme", 127)),
        Resume(STREAM, caller=Caller("acme", 1)),
        Cancel(STREAM, caller=Caller("", 0)),
        Steer(STREAM, None, "x", caller=Caller("acme", 4)),
    ],
)
def test_who_asks_is_not_a_clients_to_say(session: Session, request_frame: Frame) -> None:
    assert forwards(session, encode(request_frame, 1)) == []
    assert errors(session) == [(1, "invalid_request", 400)]
    assert session.close is None


def test_credit_counts_from_the_last_frame_that_has_left(session: Session) -> None:
    session.receive(encode(OPEN, 1))
    session.deliver(encode(Token("a", 0), 1))
    sent(session)
    most = encode(Credit(1 + MAX_CREDIT_FRAMES), 1)
    assert forwards(session, most) == [most]
    session.deliver(encode(Token("b", 1), 1))  # waits here: not yet with the client
    assert forwards(session, encode(Credit(2 + MAX_CREDIT_FRAMES), 1)) == [encode(Detach(), 1)]
    assert sent(session)[0][1] != Token("b", 1)


def test_credit_of_a_resumed_stream_counts_from_where_it_resumes(session: Session) -> None:
    session.receive(encode(Resume(STREAM, after=5000), 1))
    most = encode(Credit(5001 + MAX_CREDIT_FRAMES), 1)
    assert forwards(session, most) == [most]


def test_a_client_that_leaves_its_refusals_unread_is_not_read_either(session: Session) -> None:
    refused = encode(Open("demo", credit=MAX_CREDIT_FRAMES + 1), 1)
    congested = []
    for _ in range(MAX_WAITING_REPLIES + 1):
        session.receive(refused)
        congested.append(session.congested)
    assert congested == [False] * MAX_WAITING_REPLIES + [True]
    sent(session)
    assert not session.congested


# ---- floods ----


@pytest.mark.parametrize("request_frame", NOTHING_SPEAKS)
def test_requests_without_an_api_key_end_the_connection_once_the_budget_is_spent(
    request_frame: Frame,
) -> None:
    session = Session(caller=ANONYMOUS, spend=FloodBudget(lambda: 0.0).spend)
    session.receive(HELLO)
    sent(session)
    refused = int(MAX_POINTS / REFUSED_POINTS) + 1
    raw = encode(request_frame, 1)
    session.receive(raw * min(2 * refused, MAX_MESSAGE_BYTES // len(raw)))
    told = errors(session)
    assert told.count((1, "no_key", 401)) == refused, "no frame behind the last one is answered"
    assert told.count((0, "too_many_requests", 429)) == 1
    assert session.close == Close(CloseCode.POLICY_VIOLATION, "too_many_requests")


TOO_MUCH_CREDIT = replace(OPEN, credit=MAX_CREDIT_FRAMES + 1)


@pytest.mark.parametrize(
    ("limits", "frame"),
    [
        ({"caller": ANONYMOUS}, encode(OPEN, 1)),
        ({}, encode(TOO_MUCH_CREDIT, 1)),
        ({}, encode(replace(OPEN, caller=Caller("acme", 1)), 1)),
        ({"max_streams": 0}, encode(OPEN, 1)),
        ({"priority": Priority.BATCH}, encode(replace(OPEN, priority=Priority.INTERACTIVE), 1)),
    ],
    ids=["no key", "too much credit", "a caller", "too many streams", "too urgent"],
)
def test_a_refused_request_costs_points(limits: dict[str, Any], frame: bytes) -> None:
    spent: list[float] = []
    session = Session(**limits, spend=counted(spent))
    session.receive(HELLO)
    session.receive(frame)
    assert len(errors(session)) == 1
    assert sum(spent) > 0


def test_a_detach_of_an_open_stream_costs_points_and_the_open_costs_none() -> None:
    spent: list[float] = []
    session = Session(spend=counted(spent))
    session.receive(HELLO + encode(OPEN, 1))
    assert spent == []
    assert forwards(session, encode(Detach(), 1)) == [encode(Detach(), 1)]
    assert sum(spent) > 0


def counted(spent: list[float]) -> Callable[[float], bool]:
    """Return a budget that is never spent, and notes in `spent` what it is charged."""

    def spend(points: float) -> bool:
        spent.append(points)
        return True

    return spend


# ---- messages ----


def test_frames_that_wait_together_leave_together(session: Session) -> None:
    session.receive(encode(OPEN, 1))
    frames: list[Frame] = [Opened(STREAM, 0, "", "demo", 3), Token("a", 0), END]
    for frame in frames:
        session.deliver(encode(frame, 1))
    message = session.next_message()
    assert message == b"".join(encode(frame, 1) for frame in frames)
    assert session.next_message() is None


def test_streams_take_turns_so_that_none_waits_behind_a_long_one(session: Session) -> None:
    session.receive(encode(OPEN, 1) + encode(OPEN, 2))
    for index in range(3):
        session.deliver(encode(Token("long", index), 1))
    session.deliver(encode(Token("late", 0), 2))
    assert [(corr, frame.text) for corr, frame in sent(session) if isinstance(frame, Token)] == [
        (1, "long"),
        (2, "late"),
        (1, "long"),
        (1, "long"),
    ]


def test_no_message_is_over_the_limit_and_no_frame_is_cut(session: Session) -> None:
    session.receive(encode(OPEN, 1))
    for index in range(3):
        session.deliver(encode(Chunk(bytes(40_000), False, index), 1))
    messages = [session.next_message() for _ in range(3)]
    assert [len(split(message or b"")) for message in messages] == [1, 1, 1]


def test_a_frame_over_the_limit_travels_alone(session: Session) -> None:
    session.receive(encode(OPEN, 1))
    large = encode(Chunk(bytes(MAX_MESSAGE_BYTES), False, 0), 1)
    session.deliver(large)
    session.deliver(encode(Token("a", 1), 1))
    assert session.next_message() == large
    assert session.next_message() == encode(Token("a", 1), 1)


def test_only_the_newest_heartbeat_waits(session: Session) -> None:
    session.deliver(encode(Heartbeat(1, ready=True)))
    session.deliver(encode(Heartbeat(2, ready=True)))
    assert sent(session) == [(0, Heartbeat(2, ready=True))]


def test_a_client_that_sees_no_details_learns_only_if_the_edge_is_ready(session: Session) -> None:
    session.sees_details = False
    said = (("loading a-model at 10.0.0.1:8470",), ("a-model",), ("cuda H100",))
    for ready, reasons in ((True, ()), (False, ("origin_not_ready",))):
        session.deliver(encode(Heartbeat(1, ready, *said, streams=7, room=9, ledger="file:1")))
        assert sent(session) == [(0, Heartbeat(1, ready, reasons))]


def test_an_edge_that_goes_away_closes_the_connection(session: Session) -> None:
    farewell = StreamError("unavailable", "shutting down", True, 503)
    session.deliver(encode(farewell, 0))
    assert sent(session) == [(0, farewell)]
    assert session.close is not None
    assert session.close.code is CloseCode.GOING_AWAY


# ---- tokens that pass at once ----


def reading(session: Session, corr: int) -> None:
    """Open a stream on channel `corr`, with nothing left to send."""
    session.receive(encode(Resume(STREAM, credit=1000), corr))
    session.deliver(encode(Opened(STREAM, 0, "", "demo", 3), corr))
    sent(session)


def test_a_token_passes_as_it_came_until_credit_is_due(session: Session) -> None:
    reading(session, 1)
    sizes, index = 0, 0
    while session.pass_on(raw := encode(Token("a", index), 1), len(raw)) == raw:
        sizes, index = sizes + len(raw), index + 1
    assert 0 < sizes < WINDOW_BYTES
    assert session.credits() == []
    session.deliver(raw)
    assert sent(session) == [(1, Token("a", index))]
    [credit] = session.credits()
    assert credit == (1, Credit(1000, sizes + len(raw) + WINDOW_BYTES))
    again = encode(Token("a", index + 1), 1)
    assert session.pass_on(again, 100) == again
    # The limit counts from the last frame sent.
    most = encode(Credit(index + 2 + MAX_CREDIT_FRAMES), 1)
    assert session.receive(most) != [] and errors(session) == []


@pytest.mark.parametrize(
    "waits",
    [
        encode(Token("b", 0), 2),
        encode(Heartbeat(1, ready=True)),
        encode(StreamError("unavailable", "this edge goes away", True, 503)),
    ],
    ids=["a frame", "a heartbeat", "the farewell"],
)
def test_a_token_does_not_overtake_what_waits(session: Session, waits: bytes) -> None:
    reading(session, 1)
    reading(session, 2)
    session.deliver(waits)
    assert session.pass_on(encode(Token("a", 0), 1), 100) is None


@pytest.mark.parametrize(
    ("raw", "room"),
    [
        (encode(Token("a", 0), 1), 5),
        (encode(Token("a" * 125, 0), 1), 1000),
        (encode(END, 1), 100),
        (encode(Token("a", 0), 2), 100),
    ],
    ids=["no room", "large", "an end", "nobody reads it"],
)
def test_only_a_small_token_of_a_stream_passes_where_there_is_room(
    session: Session, raw: bytes, room: int
) -> None:
    reading(session, 1)
    assert session.pass_on(raw, room) is None


# ---- bytes of credit ----


def test_what_may_wait_is_bounded_in_bytes_whatever_credit_a_client_gives(session: Session) -> None:
    [raw] = session.receive(encode(Open("demo", credit=1000), 1))
    _, asked = raw
    assert asked == Open("demo", credit=1000, credit_bytes=WINDOW_BYTES)
    session.deliver(encode(Opened(STREAM, 0, "", "demo", 3), 1))
    text, sizes, index = "x" * 500, 0, 0
    while sizes < WINDOW_BYTES:
        frame = encode(Token(text, index), 1)
        session.deliver(frame)
        sizes, index = sizes + len(frame), index + 1
    assert session.credits() == []  # no frame was sent
    while session.next_message(most_bytes=2000) is not None:
        pass
    credits = [frame for _, frame in session.credits()]
    assert all(isinstance(c, Credit) and c.limit == 1000 for c in credits)
    given = [c.bytes for c in credits if isinstance(c, Credit) and c.bytes is not None]
    assert given == sorted(set(given))
    assert sizes < given[-1] <= sizes + WINDOW_BYTES


def test_a_clients_own_bytes_of_credit_are_kept_to(session: Session) -> None:
    [raw] = session.receive(encode(Resume(STREAM, credit=9, credit_bytes=10), 1))
    assert raw == (1, Resume(STREAM, credit=9, credit_bytes=10))
    session.deliver(encode(Token("x" * 20, 0), 1))
    sent(session)
    assert session.credits() == []
    [raw] = session.receive(encode(Credit(9, 50), 1))
    assert raw == (1, Credit(9, 50))


def test_streams_of_one_connection_share_what_may_wait(session: Session) -> None:
    for corr in range(1, 9):
        [raw] = session.receive(encode(Resume(STREAM, credit=9), corr))
    _, last = raw
    assert isinstance(last, Resume)
    assert last.credit_bytes == max(WINDOW_BYTES // 8, MIN_WINDOW_BYTES)


def test_a_client_that_says_no_hello_is_told_so() -> None:
    session = Session()
    sent(session)
    session.time_out()
    assert errors(session) == [(0, "request_timeout", 408)]
    assert session.close == Close(CloseCode.PROTOCOL_ERROR, "request_timeout")


def test_a_client_that_has_said_hello_is_not_timed_out(session: Session) -> None:
    session.time_out()
    assert session.close is None
