"""Rules on hosts and on the origins of web pages."""

import pytest
from structlog.testing import capture_logs

from tailrace.edge.access.head import Head
from tailrace.edge.access.hosts import HostRule, is_loopback
from tailrace.edge.access.page_origins import PROXY_HINT, OriginRule
from tailrace.edge.access.rules import MAX_LOGGED_REFUSALS
from tailrace.edge.config import EdgeConfig, access_rules
from tailrace.ledger.errors import CallerError, Forbidden


def asked(host: str, origin: str | None = None) -> Head:
    headers = [(b"host", host.encode())]
    if origin is not None:
        headers.append((b"origin", origin.encode()))
    return Head("GET", "/", "http", "127.0.0.1", tuple(headers))


@pytest.mark.parametrize(
    ("host", "origin"),
    [
        ("localhost:8080", None),  # no browser
        ("localhost:8080", "http://localhost:8080"),
        ("edge.example", "https://edge.example"),
        ("edge.example:443", "https://edge.example"),
        ("Edge.Example", "https://edge.example:443"),
        ("[::1]:8080", "http://[::1]:8080"),
        ("edge.example", "https://app.example"),  # named
    ],
)
def test_a_page_of_the_same_name_and_port_may_ask_and_one_that_is_named(
    host: str, origin: str | None
) -> None:
    OriginRule(["https://app.example"]).check(asked(host, origin))


@pytest.mark.parametrize(
    ("host", "origin"),
    [
        ("localhost:8080", "http://localhost:3000"),
        ("localhost:8080", "http://localhost"),
        ("localhost:8080", "null"),
        ("localhost:8080", ""),
        ("", "null"),
        ("", "http://"),
        ("edge.example", "https://app.example.evil"),
        ("edge.example", "https://evil/https://app.example"),
        ("edge.example", "https://edge.example.evil"),
        ("edge.example", "https://edge.example, https://evil"),
    ],
)
def test_any_other_page_may_not(host: str, origin: str) -> None:
    with pytest.raises(Forbidden, match="allowed_origins") as refused:
        OriginRule(["https://app.example"]).check(asked(host, origin))
    assert (refused.value.status, refused.value.code) == (403, "foreign_origin")
    assert "pass the Host header on" in (refused.value.hint or "")
    assert "edge.trusted_proxies" in (refused.value.hint or "")


def test_all_pages_may_where_any_is_allowed() -> None:
    OriginRule(["*"]).check(asked("localhost", "null"))
    OriginRule(["*"]).check(asked("localhost", "https://any.example"))


@pytest.mark.parametrize(
    "host",
    [
        *("", "localhost", "LOCALHOST:8080", "a.localhost:1", "localhost.", "127.0.0.1:8080"),
        *("[::1]:1", "[::1]", "10.0.0.7", "box", "Box:81"),
    ],
)
def test_a_private_edge_answers_to_local_names_and_to_those_it_is_given(host: str) -> None:
    HostRule(["Box"], on=True).check(asked(host))


@pytest.mark.parametrize("host", ["evil.example", "localhost.evil.example:80", "127.0.0.1.nip.io"])
def test_a_name_that_somebody_pointed_here_is_not_answered(host: str) -> None:
    """DNS rebinding: to the browser the page that asks is of the same origin as this edge."""
    with pytest.raises(CallerError, match=r"edge\.hosts = \[") as refused:
        HostRule(["box"], on=True).check(asked(host, f"http://{host}"))
    assert (refused.value.status, refused.value.code) == (421, "foreign_host")
    name = host.partition(":")[0]
    assert f'edge.hosts = ["{name}"]' in (refused.value.hint or "")
    assert "edge.trusted_proxies" in (refused.value.hint or "")
    HostRule([], on=False).check(asked(host))


@pytest.mark.parametrize(
    ("host", "is_one"),
    [
        *(("localhost", True), ("127.3.2.1", True), ("::1", True), ("0.0.0.0", False)),
        *(("::", False), ("10.0.0.1", False), ("edge.example", False)),
    ],
)
def test_what_only_this_machine_can_reach(host: str, is_one: bool) -> None:
    assert is_loopback(host) is is_one


def test_a_refused_page_and_host_are_logged_once_each_with_what_to_set() -> None:
    rules = access_rules(EdgeConfig(http=("127.0.0.1:0",)))
    with capture_logs() as logged:
        for _ in range(3):
            assert rules.admit(asked("localhost", "http://localhost:3000")).refusal is not None
            assert rules.admit(asked("edge.example")).refusal is not None
    page, host = logged
    assert (page["event"], page["origin"]) == ("page origin refused", "http://localhost:3000")
    assert "add 'http://localhost:3000' to edge.allowed_origins" in page["hint"]
    assert page["hint"].endswith(PROXY_HINT)
    assert (host["event"], host["host"]) == ("host refused", "edge.example")
    assert 'edge.hosts = ["edge.example"]' in host["hint"]


def test_not_all_refused_origins_that_somebody_can_think_of_are_logged() -> None:
    rules = access_rules(EdgeConfig(http=("127.0.0.1:0",)))
    with capture_logs() as logged:
        rules.admit(asked("localhost", "http://" + "a" * 5_000))
        for number in range(2 * MAX_LOGGED_REFUSALS):
            rules.admit(asked("localhost", f"http://{number}.example"))
    assert len(logged) == MAX_LOGGED_REFUSALS
