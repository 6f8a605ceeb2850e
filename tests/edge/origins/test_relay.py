"""The relay alone: raw frames in, raw frames out, a clock that is a number."""

from dataclasses import dataclass, field, replace

import pytest

from tailrace.edge.origins.link_protocol import LINK_IDLE_TIMEOUT_S, LinkState
from tailrace.edge.origins.relay import LOST_LINK_TIMEOUT_S, Relay
from tailrace.edge.origins.route import CONNECT_TIMEOUT_S, route_of
from tailrace.edge.origins.sink import with_corr_bytes
from tailrace.ledger.errors import FrameError, SchemaMismatch, TailraceError, Unavailable
from tailrace.ledger.frame import (
    LINK_CODEC,
    SCHEMA_HASH,
    Answer,
    Body,
    BodyEnd,
    Call,
    Caller,
    Cancel,
    Credit,
    Detach,
    FinishReason,
    Frame,
    Heartbeat,
    Hello,
    Open,
    Opened,
    Pass,
    Resume,
    Status,
    Steer,
    StreamEnd,
    StreamError,
    StreamState,
    Token,
    decode,
    encode,
)

STREAM = bytes(range(16))
OPENED = Opened(STREAM, 0, "v1.token", "demo", 3)
OPEN = Open("demo", prompt="Once", credit=8)
KEYED = Open("demo", prompt="Once", credit=8, idempotency_key="key")
END = StreamEnd(2, FinishReason.LENGTH, 2, 3)


@dataclass(eq=False)
class Client:
    """A sink that keeps what it is given, decoded."""

    frames: list[tuple[int, Frame]] = field(default_factory=list)

    def deliver(self, raw: bytes) -> None:
        self.frames.append(decode(raw))

    def deliver_run(self, run: list[bytes], corr: bytes) -> None:
        for raw in with_corr_bytes(run, corr):
            self.deliver(raw)


class Link:
    """A relay with the origin's side of its link, and a clock."""

    def __init__(self, relay: Relay | None = None) -> None:
        self.relay = Relay() if relay is None else relay
        self.now = 1000.0

    def connect(self) -> list[tuple[int, Frame]]:
        """Bring the link up; gives what the relay asks for, without its Hello."""
        self.relay.connected()
        assert [type(frame) for _, frame in self.sent()] == [Hello]
        self.says(Hello(SCHEMA_HASH, "test"))
        return self.sent()

    def lose(self) -> None:
        self.relay.disconnected(self.now)
        self.deliver()

    def asks(self, client: Client, frame: Frame, corr: int = 1) -> None:
        if isinstance(frame, Credit):
            self.relay.credit(client, corr, frame)
        elif isinstance(frame, Detach):
            self.relay.detach(client, corr)
        else:
            self.relay.adopt(route_of(client, corr, frame, self.now))
        self.deliver()

    def says(self, *frames: Frame, corr: int = 0) -> None:
        self.relay.receive([encode(frame, corr) for frame in frames])
        self.deliver()

    def passes(self, seconds: float) -> None:
        self.now += seconds
        self.relay.expire(self.now)
        self.deliver()

    def deliver(self) -> None:
        for route, raw in self.relay.refused():
            route.sink.deliver(raw)

    def sent(self) -> list[tuple[int, Frame]]:
        return [LINK_CODEC.decode(raw) for raw in self.relay.frames_to_send()]


@pytest.fixture
def link() -> Link:
    link = Link()
    link.connect()
    return link


def opened(link: Link, request: Frame = OPEN, corr: int = 1) -> tuple[Client, int]:
    """Return a client whose request has been answered by Opened, and its corr on the link."""
    client = Client()
    link.asks(client, request, corr)
    [(link_corr, sent)] = link.sent()
    assert sent == request
    link.says(OPENED, corr=link_corr)
    assert client.frames.pop() == (corr, OPENED)
    return client, link_corr


def errors(client: Client) -> list[tuple[int, str, bool]]:
    return [
        (corr, frame.code, frame.retryable)
        for corr, frame in client.frames
        if isinstance(frame, StreamError)
    ]


# ---- the link's own frames ----


def test_the_link_is_up_after_the_hello_of_both_sides() -> None:
    relay = Relay()
    relay.connected()
    assert relay.state is LinkState.GREETING
    relay.receive([encode(Hello(SCHEMA_HASH, "test"))])
    assert relay.state.value == "up"


def test_another_schema_is_refused() -> None:
    relay = Relay()
    relay.connected()
    with pytest.raises(SchemaMismatch):
        relay.receive([encode(Hello(b"otherone", "test"))])


def hello_of_another_release() -> bytes:
    """Return a Hello with one field less."""
    payload = b"otherone" + b"\x04test"
    return (len(payload) + 5 | 1 << 24).to_bytes(4, "little") + bytes((11, 0, 0, 0, 0)) + payload


def test_a_hello_with_other_fields_is_refused_for_its_schema() -> None:
    relay = Relay()
    relay.connected()
    with pytest.raises(SchemaMismatch, match=b"otherone".hex()):
        relay.receive([hello_of_another_release()])


def test_an_error_of_the_connection_ends_it(link: Link) -> None:
    with pytest.raises(TailraceError) as caught:
        link.says(StreamError("schema_mismatch", "no", False, 426))
    assert caught.value.code == "schema_mismatch"


@pytest.mark.parametrize("frame", [Hello(SCHEMA_HASH, "again"), Token("x", 0)])
def test_a_frame_that_does_not_belong_on_corr_0_ends_the_link(link: Link, frame: Frame) -> None:
    with pytest.raises(FrameError):
        link.says(frame)


def bad_token() -> StreamError:
    return StreamError("bad_token", "expired", False, 401)


def test_a_stream_under_way_goes_on_without_a_token_that_has_lost_its_worth(link: Link) -> None:
    client, link_corr = opened(link)
    link.says(Token("a", 0), corr=link_corr)
    link.lose()
    assert link.connect() == [(link_corr, Resume(STREAM, after=0, token="v1.token", credit=7))]
    link.says(bad_token(), corr=link_corr)
    assert link.sent() == [(link_corr, Resume(STREAM, after=0, credit=7))]
    link.says(OPENED, Token("b", 1), corr=link_corr)
    assert client.frames == [(1, Token("a", 0)), (1, Token("b", 1))]


def test_where_a_token_is_asked_for_its_loss_is_told(link: Link) -> None:
    client, link_corr = opened(link)
    link.lose()
    link.connect()
    link.says(bad_token(), corr=link_corr)
    link.says(bad_token(), corr=link_corr)
    assert errors(client) == [(1, "bad_token", False)]


def test_a_clients_own_token_is_judged_when_it_asks(link: Link) -> None:
    client = Client()
    link.asks(client, Resume(STREAM, token="v1.old", credit=8))
    [(link_corr, _)] = link.sent()
    link.says(bad_token(), corr=link_corr)
    assert errors(client) == [(1, "bad_token", False)]


def test_without_a_link_there_is_no_heartbeat(link: Link) -> None:
    link.says(Heartbeat(1, ready=True))
    link.lose()
    assert link.relay.heartbeat is None


# ---- frames that pass ----


def test_two_clients_may_use_the_same_corr(link: Link) -> None:
    one, corr_one = opened(link, corr=7)
    two, corr_two = opened(link, corr=7)
    link.says(Token("1", 0), corr=corr_one)
    link.says(Token("2", 0), corr=corr_two)
    assert corr_one != corr_two
    assert one.frames == [(7, Token("1", 0))]
    assert two.frames == [(7, Token("2", 0))]


def test_credit_and_detach_reach_the_origin_under_the_link_corr(link: Link) -> None:
    client, corr = opened(link)
    link.asks(client, Credit(20))
    link.asks(client, Detach())
    assert link.sent() == [(corr, Credit(20)), (corr, Detach())]


@pytest.mark.parametrize(
    "closing",
    [END, Status(STREAM, StreamState.ENDED, 3), StreamError("not_found", "no", False, 404)],
)
def test_a_closing_frame_ends_the_route(link: Link, closing: Frame) -> None:
    client, corr = opened(link)
    link.says(closing, corr=corr)
    assert client.frames == [(1, closing)]
    assert link.relay.route_count == 0
    link.asks(client, Credit(20))
    link.asks(client, Detach())
    assert link.sent() == []


def test_frames_on_their_way_to_a_detached_client_go_nowhere(link: Link) -> None:
    client, corr = opened(link)
    link.asks(client, Detach())
    link.says(Token("late", 0), corr=corr)
    assert client.frames == []


def test_a_client_that_has_gone_is_detached_and_never_cancelled(link: Link) -> None:
    client, one = opened(link, corr=1)
    link.asks(client, OPEN, corr=2)
    [(two, _)] = link.sent()
    other, _ = opened(link)
    link.relay.forget(client)
    assert link.sent() == [(one, Detach())]
    link.says(Heartbeat(1, ready=True))
    link.says(Pass(bytes(32)), OPENED, Token("late", 0), corr=two)
    assert link.sent()[-1] == (two, Detach())
    assert client.frames == []
    assert link.relay.route_count == 1
    assert other.frames == []


@pytest.mark.parametrize("request_frame", [OPEN, Resume(STREAM), Cancel(STREAM)])
@pytest.mark.parametrize("answer", [OPENED, Status(STREAM, StreamState.ENDED, 3), None])
def test_a_request_counts_until_its_answer_although_its_client_detached(
    link: Link, request_frame: Frame, answer: Frame | None
) -> None:
    client = Client()
    link.asks(client, request_frame)
    link.asks(client, Detach())
    assert (link.relay.route_count, link.relay.held_bytes) == (1, 0)
    assert link.sent() == [(1, request_frame)]
    link.asks(client, OPEN)  # the client has its corr back at once
    assert link.sent() == [(2, OPEN)]
    if answer is None:  # no request waits for the answer on another link
        link.lose()
        link.connect()
    else:
        link.says(answer, corr=1)
    assert client.frames == [] if answer else errors(client)
    assert link.relay.route_count == (0 if answer is None else 1)
    assert link.sent() == ([(1, Detach())] if answer == OPENED else [])


def test_a_call_that_its_client_has_left_ends_at_once(link: Link) -> None:
    client = Client()
    link.asks(client, Call("stream", "a", "GET", "http://e/a", (), b"", 4))
    link.sent()
    link.relay.forget(client)
    assert link.sent() == [(1, Detach())]
    assert link.relay.route_count == 0


def test_link_corrs_go_round_without_0() -> None:
    link = Link(Relay(last_corr=2**32 - 2))
    link.connect()
    assert [opened(link)[1] for _ in range(3)] == [2**32 - 1, 1, 2]


# ---- a lost link ----


def test_a_stream_under_way_is_resumed_after_the_last_frame_that_passed(link: Link) -> None:
    client, _ = opened(link)
    link.says(Token("a", 0), Token("b", 1), corr=1)
    link.asks(client, Credit(10))
    link.sent()
    link.lose()
    assert link.connect() == [(1, Resume(STREAM, after=1, token="v1.token", credit=8))]
    link.says(Opened(STREAM, 2, "v1.other", "demo", 3), END, corr=1)
    assert client.frames == [(1, Token("a", 0)), (1, Token("b", 1)), (1, END)]


def test_a_stream_without_a_frame_yet_is_resumed_from_its_beginning(link: Link) -> None:
    opened(link)
    link.lose()
    assert link.connect() == [(1, Resume(STREAM, token="v1.token", credit=8))]


def test_a_reader_is_resumed_from_where_it_asked_with_the_latest_token(link: Link) -> None:
    caller = Caller("acme", 5)
    resume = Resume(STREAM, after=40, token="v1.mine", follow=False, credit=8, caller=caller)
    opened(link, resume)
    for token in ("v1.token", "v1.later"):
        link.lose()
        assert link.connect() == [(1, replace(resume, token=token))]
        link.says(replace(OPENED, token="v1.later"), corr=1)


def test_each_heartbeat_of_the_origin_is_answered_with_one(link: Link) -> None:
    link.says(Heartbeat(1, ready=True), Heartbeat(2, ready=True))
    alive = Heartbeat(0, ready=True, patience_ms=round(LINK_IDLE_TIMEOUT_S * 1000))
    assert link.sent() == [(0, alive), (0, alive)]


def test_an_origin_is_full_when_as_many_corrs_are_open_as_it_has_told(link: Link) -> None:
    link.says(Heartbeat(1, ready=True, corrs=2))
    link.sent()
    _, corr = opened(link)
    full = [link.relay.is_full]
    opened(link)
    full.append(link.relay.is_full)
    link.says(END, corr=corr)
    assert [*full, link.relay.is_full] == [False, True, False]


def test_whoever_opened_a_stream_is_who_goes_on_with_it(link: Link) -> None:
    caller = Caller("acme", 127, 64, 2000)
    opened(link, Open("demo", prompt="Once", credit=8, caller=caller))
    link.lose()
    assert link.connect() == [(1, Resume(STREAM, token="v1.token", credit=8, caller=caller))]


def test_used_up_credit_is_not_given_twice(link: Link) -> None:
    opened(link, Open("demo", credit=2))
    link.says(Token("a", 0), Token("b", 1), corr=1)
    link.lose()
    assert link.connect() == [(1, Resume(STREAM, after=1, token="v1.token", credit=0))]


def test_bytes_of_credit_count_from_the_request_whatever_link_it_is_on(link: Link) -> None:
    client, _ = opened(link, Open("demo", credit=8, credit_bytes=100))
    size = len(encode(Token("a", 0)))
    link.says(Token("a", 0), corr=1)
    link.lose()
    left = Resume(STREAM, after=0, token="v1.token", credit=7, credit_bytes=100 - size)
    assert link.connect() == [(1, left)]
    link.asks(client, Credit(10, 200))
    assert link.sent() == [(1, Credit(10, 200 - size))]
    link.says(Opened(STREAM, 2, "v1.other", "demo", 3), Token("b", 1), corr=1)
    link.lose()
    left = Resume(STREAM, after=1, token="v1.other", credit=8, credit_bytes=200 - 2 * size)
    assert link.connect() == [(1, left)]


def test_runs_of_tokens_pass_in_order_each_under_its_readers_corr(link: Link) -> None:
    client, other = Client(), Client()
    link.asks(client, OPEN, corr=7)
    link.asks(other, OPEN, corr=9)
    tokens = [Token("t", index) for index in range(5)]
    link.says(OPENED, corr=1)
    link.says(OPENED, corr=2)
    first, second = ([encode(token, corr) for token in tokens] for corr in (1, 2))
    link.relay.receive([*first[:3], *second[:2], *first[3:], *second[2:]])
    assert client.frames == [(7, OPENED), *((7, token) for token in tokens)]
    assert other.frames == [(9, OPENED), *((9, token) for token in tokens)]
    assert link.relay.counters.frames == 10
    link.lose()
    link.relay.connected()
    link.sent()
    link.says(Hello(SCHEMA_HASH, "test"))
    assert [frame.start for _, frame in link.sent() if isinstance(frame, Resume)] == [5, 5]


def test_frames_that_come_again_are_dropped(link: Link) -> None:
    client, _ = opened(link)
    link.says(Token("a", 0), Token("b", 1), corr=1)
    link.lose()
    link.connect()
    link.says(Token("a", 0), Token("b", 1), END, corr=1)
    assert client.frames == [(1, Token("a", 0)), (1, Token("b", 1)), (1, END)]


def test_a_stream_survives_a_second_loss(link: Link) -> None:
    client, _ = opened(link)
    for index in range(3):
        link.says(Token("x", index), corr=1)
        link.lose()
        [(_, resume)] = link.connect()
        assert resume == Resume(STREAM, after=index, token="v1.token", credit=7 - index)
    assert [frame for _, frame in client.frames] == [Token("x", index) for index in range(3)]


def test_a_request_with_a_key_that_was_not_answered_is_sent_again(link: Link) -> None:
    client = Client()
    link.asks(client, KEYED)
    link.asks(client, Credit(9))
    link.lose()
    assert client.frames == []
    assert link.connect() == [(1, KEYED), (1, Credit(9))]


@pytest.mark.parametrize(
    ("request_frame", "code"),
    [(OPEN, "origin_unreachable"), (Steer(STREAM, None, "go on"), "outcome_unknown")],
)
def test_what_could_be_done_twice_fails_instead(
    link: Link, request_frame: Frame, code: str
) -> None:
    client = Client()
    link.asks(client, request_frame)
    link.lose()
    assert errors(client) == [(1, code, True)]
    assert link.connect() == []


def test_a_cancel_is_sent_again(link: Link) -> None:
    link.asks(Client(), Cancel(STREAM))
    link.lose()
    assert link.connect() == [(1, Cancel(STREAM))]


def test_a_client_that_goes_while_the_link_is_down_is_forgotten(link: Link) -> None:
    client, _ = opened(link)
    link.lose()
    link.relay.forget(client)
    assert link.connect() == []


# ---- calls ----


def a_call(method: str, body: bytes = b"") -> Call:
    return Call("stream", "a", method, "http://edge/v1/stream/a", body=body, credit=4)


def test_an_answer_and_its_body_pass_and_the_end_ends_the_route(link: Link) -> None:
    client = Client()
    link.asks(client, a_call("GET"), corr=0)
    [(corr, _)] = link.sent()
    link.says(Answer(200), Body(b"a"), corr=corr)
    link.asks(client, Credit(9), corr=0)
    assert link.sent() == [(corr, Credit(9))]
    link.says(BodyEnd(), Body(b"late"), corr=corr)
    assert client.frames == [(0, Answer(200)), (0, Body(b"a")), (0, BodyEnd())]
    assert link.relay.route_count == 0


@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_a_read_without_an_answer_is_asked_again(link: Link, method: str) -> None:
    client = Client()
    link.asks(client, a_call(method))
    link.asks(client, Credit(9))
    link.lose()
    assert client.frames == []
    assert link.connect() == [(1, a_call(method)), (1, Credit(9))]


@pytest.mark.parametrize("method", ["PUT", "POST", "DELETE"])
def test_the_outcome_of_a_change_is_unknown_when_the_link_breaks(link: Link, method: str) -> None:
    client = Client()
    link.asks(client, a_call(method, b"data"))
    link.lose()
    assert errors(client) == [(1, "outcome_unknown", True)]
    assert link.connect() == []


def test_the_outcome_of_a_change_is_unknown_when_the_edge_goes_away(link: Link) -> None:
    changing, reading = Client(), Client()
    link.asks(changing, a_call("POST"))
    link.asks(reading, a_call("GET"))
    link.relay.refuse_all(Unavailable("going"))
    link.deliver()
    assert errors(changing) == [(1, "outcome_unknown", True)]
    assert errors(reading) == [(1, "unavailable", True)]


def test_a_change_that_was_never_sent_waits_for_the_link() -> None:
    link = Link()
    in_time, too_late = Client(), Client()
    link.asks(in_time, a_call("POST"))
    assert link.connect() == [(1, a_call("POST"))]
    other = Link()
    other.asks(too_late, a_call("POST"))
    other.passes(CONNECT_TIMEOUT_S)
    assert errors(too_late) == [(1, "origin_unreachable", True)]


def test_a_body_that_has_begun_breaks_off_with_the_link(link: Link) -> None:
    client = Client()
    link.asks(client, a_call("GET"))
    link.says(Answer(200), Body(b"a"), corr=1)
    link.lose()
    assert errors(client) == [(1, "origin_unreachable", True)]
    assert link.connect() == []


def test_a_call_is_held_until_it_is_answered_and_no_longer(link: Link) -> None:
    answered, refused, left = Client(), Client(), Client()
    body = bytes(2 << 20)
    for client in (answered, refused, left):
        link.asks(client, a_call("POST", body))
    held = link.relay.held_bytes
    assert held > 3 * len(body)
    link.says(Answer(200), corr=1)
    assert link.relay.held_bytes * 3 == held * 2
    link.says(StreamError("not_found", "no", False, 404), corr=2)
    link.relay.forget(left)
    assert link.relay.held_bytes == 0
    link.sent()
    opened(link)
    assert link.relay.held_bytes == 0  # small requests are not counted


# ---- patience ----


def test_a_stream_under_way_waits_longer_than_a_new_request(link: Link) -> None:
    under_way, _ = opened(link)
    link.lose()
    new = Client()
    link.asks(new, OPEN)
    link.passes(CONNECT_TIMEOUT_S)
    assert errors(new) == [(1, "origin_unreachable", True)]
    link.passes(LOST_LINK_TIMEOUT_S - CONNECT_TIMEOUT_S - 1)
    assert errors(under_way) == []
    link.passes(1)
    assert errors(under_way) == [(1, "origin_unreachable", True)]


def test_a_new_request_is_sent_when_the_link_comes_in_time() -> None:
    link = Link()
    client = Client()
    link.asks(client, OPEN)
    link.passes(CONNECT_TIMEOUT_S / 2)
    assert link.connect() == [(1, OPEN)]
    link.passes(LOST_LINK_TIMEOUT_S * 2)
    assert client.frames == []


def test_links_that_come_and_go_before_the_hello_do_not_prolong_the_patience(link: Link) -> None:
    client, _ = opened(link)
    link.lose()
    for _ in range(3):
        link.passes(LOST_LINK_TIMEOUT_S / 3)
        link.relay.connected()
        link.lose()
    assert errors(client) == [(1, "origin_unreachable", True)]


def test_an_edge_that_goes_away_says_so_to_everyone(link: Link) -> None:
    client, corr = opened(link)
    link.relay.refuse_all(Unavailable("going"))
    link.deliver()
    assert errors(client) == [(1, "unavailable", True)]
    assert link.sent() == [(corr, Detach())]


def test_a_request_moves_to_another_relay_with_all_that_it_has(link: Link) -> None:
    client, corr = opened(link)
    link.says(Token("a", 0), corr=corr)
    link.lose()
    other = Link(Relay(last_corr=40))
    other.connect()
    [route] = link.relay.waiting()
    link.relay.release(route)
    other.relay.adopt(route)
    assert other.sent() == [(41, Resume(STREAM, after=0, token="v1.token", credit=7))]
    assert link.relay.route_count == 0
    other.says(OPENED, Token("b", 1), corr=41)
    other.asks(client, Credit(20))
    assert other.sent() == [(41, Credit(20))]
    assert client.frames == [(1, Token("a", 0)), (1, Token("b", 1))]


@pytest.mark.parametrize("code", ["overloaded", "loading", "unknown_stream"])
def test_what_was_refused_before_it_began_can_be_asked_for_elsewhere(link: Link, code: str) -> None:
    client = Client()
    link.asks(client, OPEN)
    link.sent()
    link.relay.receive([encode(StreamError(code, "no", True, 503), 1)])
    [(route, raw)] = link.relay.refused()
    assert decode(route.request)[1] == OPEN
    assert decode(raw) == (1, StreamError(code, "no", True, 503))
    assert (link.relay.route_count, link.relay.held_bytes) == (0, 0)


def test_what_was_refused_for_good_or_after_it_began_is_the_clients(link: Link) -> None:
    client, corr = opened(link)
    link.says(StreamError("overloaded", "no", True, 503), corr=corr)
    link.asks(client, OPEN, corr=2)
    [(corr, _)] = link.sent()
    link.says(StreamError("prompt_too_long", "no", False, 400), corr=corr)
    assert errors(client) == [(1, "overloaded", True), (2, "prompt_too_long", False)]


def test_how_an_origin_does_is_told_by_what_it_answers_first(link: Link) -> None:
    _, corr = opened(link)
    link.says(Token("a", 0), END, corr=corr)
    for code in ("bad_request", "internal"):
        link.asks(Client(), OPEN)
        [(corr, _)] = link.sent()
        link.says(StreamError(code, "no", False, 500), corr=corr)
    assert link.relay.outcomes() == [True, True, False]
