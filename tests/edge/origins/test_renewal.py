"""What a relay shows an origin when it asks again for a stream that was open."""

import pytest

from ledger.frame import Open, Pass, Renew, Resume, Token, encode
from tests.edge.origins.test_relay import OPEN, OPENED, STREAM, Client, Link, bad_token, errors


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
