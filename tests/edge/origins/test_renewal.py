"""Proofs that a relay shows an origin when it resumes a stream that was open."""

import pytest

from tailrace.edge.origins.relay import LOST_LINK_TIMEOUT_S
from tailrace.edge.origins.renewal_queue import MAX_RENEWALS
from tailrace.ledger.frame import (
    Credit,
    Detach,
    Frame,
    Open,
    Pass,
    Renew,
    Resume,
    Steer,
    Token,
    encode,
)
from tests.edge.origins.test_relay import (
    END,
    OPEN,
    OPENED,
    STREAM,
    Client,
    Link,
    bad_token,
    errors,
)


@pytest.fixture
def link() -> Link:
    link = Link()
    link.connect()
    return link


MAC = bytes(range(32))


def test_a_stream_under_way_is_renewed_with_the_latest_pass_which_no_client_sees(
    link: Link,
) -> None:
    client = Client()
    link.asks(client, OPEN)
    link.sent()
    link.says(Pass(bytes(32)), OPENED, Token("a", 0), corr=1)
    link.lose()
    assert link.connect() == [(1, Renew(STREAM, 0, True, 7, None, bytes(32)))]
    link.says(Pass(MAC), OPENED, Token("b", 1), corr=1)
    link.lose()
    assert link.connect() == [(1, Renew(STREAM, 1, True, 6, None, MAC))]
    assert client.frames == [(1, OPENED), (1, Token("a", 0)), (1, Token("b", 1))]


def test_a_pass_that_has_lost_its_worth_gives_way_to_the_token_and_that_to_none(link: Link) -> None:
    client = Client()
    link.asks(client, OPEN)
    link.sent()
    link.says(Pass(MAC), OPENED, corr=1)
    link.lose()
    link.connect()
    for token in ("v1.token", None):
        link.says(bad_token(), corr=1)
        assert link.sent() == [(1, Resume(STREAM, token=token, credit=8))]
    link.says(bad_token(), corr=1)
    assert errors(client) == [(1, "bad_token", False)]


def read_by(link: Link, count: int, credit: int = 8) -> list[Client]:
    """Clients that each read the stream."""
    clients = [Client() for _ in range(count)]
    for client in clients:
        link.asks(client, Resume(STREAM, credit=credit))
        [(corr, _)] = link.sent()
        link.says(Pass(MAC), OPENED, corr=corr)
    return clients


def test_streams_are_renewed_a_few_hundred_at_a_time_each_when_another_is_answered(
    link: Link,
) -> None:
    clients = read_by(link, 3 * MAX_RENEWALS)
    link.lose()
    asked = link.connect()
    renewed = len(asked)
    assert renewed == MAX_RENEWALS
    while asked:
        assert all(isinstance(frame, Renew) for _, frame in asked)
        answered, asked = asked[:7], asked[7:]
        for corr, _ in answered:
            link.says(Pass(MAC), OPENED, Token("a", 0), corr=corr)
        more = link.sent()
        renewed += len(more)
        assert len(more) == len(answered) or renewed == len(clients)
        asked += more
    assert renewed == len(clients)
    assert all(client.frames[-1] == (1, Token("a", 0)) for client in clients)


@pytest.mark.parametrize("ends", [bad_token(), END, "detached"], ids=["refused", "ended", "gone"])
def test_a_renewal_that_ends_in_another_way_makes_room_for_the_next(
    link: Link, ends: Frame | str
) -> None:
    clients = read_by(link, MAX_RENEWALS + 1)
    link.lose()
    asked = [corr for corr, _ in link.connect()]
    if isinstance(ends, Frame):
        link.says(ends, corr=asked[0])
    else:
        link.relay.forget(clients[0])
    [*_, (last, renew)] = link.sent()
    assert last == MAX_RENEWALS + 1
    assert isinstance(renew, Renew)


def test_readers_with_credit_are_renewed_before_those_without(link: Link) -> None:
    read_by(link, MAX_RENEWALS, credit=0)
    readers = read_by(link, 10)
    link.lose()
    asked = link.connect()
    credits = [frame.credit for _, frame in asked if isinstance(frame, Renew)]
    assert credits[:10] == [8] * len(readers)
    assert credits[10:] == [0] * (MAX_RENEWALS - 10)


def test_what_comes_for_a_stream_whose_turn_has_not_come_is_in_its_renewal(link: Link) -> None:
    clients = read_by(link, MAX_RENEWALS + 2)
    link.lose()
    first = link.connect()[0][0]
    link.asks(clients[-2], Credit(50))
    link.asks(clients[-1], Detach())
    assert link.sent() == []
    for corr in (first, first + 1):
        link.says(OPENED, corr=corr)
    assert link.sent() == [(MAX_RENEWALS + 1, Renew(STREAM, None, True, 50, None, MAC))]


def test_a_link_that_is_lost_again_before_all_are_renewed_begins_anew(link: Link) -> None:
    clients = read_by(link, MAX_RENEWALS + 100)
    for _ in range(3):
        link.lose()
        link.passes(LOST_LINK_TIMEOUT_S / 2)
        assert len(link.connect()) == MAX_RENEWALS
        link.passes(LOST_LINK_TIMEOUT_S)
    link.lose()
    link.passes(LOST_LINK_TIMEOUT_S)
    assert all(errors(client) == [(1, "origin_unreachable", True)] for client in clients)


def test_requests_that_wait_for_their_first_answer_are_asked_again_as_they_came(link: Link) -> None:
    clients = [Client() for _ in range(MAX_RENEWALS + 1)]
    for client in clients:
        link.asks(client, Resume(STREAM, credit=8))
    steered = Client()
    link.asks(steered, Steer(STREAM, None, "a"))
    assert len(link.sent()) == MAX_RENEWALS + 2, "new requests wait for nobody"
    link.lose()
    assert errors(steered) == [(1, "outcome_unknown", True)]
    link.asks(steered, OPEN, corr=2)
    asked = link.connect()
    assert [frame for _, frame in asked if isinstance(frame, Open)] == [OPEN]
    assert len(asked) == MAX_RENEWALS + 1
    link.says(OPENED, corr=1)
    assert [frame for _, frame in link.sent()] == [Resume(STREAM, credit=8)]


def test_of_a_request_that_is_answered_nothing_is_kept_but_what_renews_it(link: Link) -> None:
    client = Client()
    link.asks(client, Open("demo", prompt="x" * 500_000, credit=8))
    assert link.relay.held_bytes > 500_000
    link.sent()
    link.says(Pass(MAC), OPENED, corr=1)
    assert link.relay.held_bytes == 0
    link.lose()
    [(_, renewed)] = link.connect()
    assert len(encode(renewed)) < 100
