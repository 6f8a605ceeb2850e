"""Client addresses behind trusted proxies."""

from ipaddress import ip_network

import pytest

from tailrace.edge.access.head import Head, Proxies

NETWORKS = [ip_network("10.0.0.0/8"), ip_network("2001:db8::/32")]
CLIENT = "203.0.113.7"


def asked(peer: str, *headers: tuple[str, str], scheme: str = "http") -> Head:
    fields = (("host", "inside:8080"), *headers)
    raw = tuple((name.encode(), value.encode()) for name, value in fields)
    return Head("GET", "/", scheme, peer, raw)


def seen(head: Head) -> tuple[str, str, str]:
    return head.address, head.scheme, head.host


FOR, PROTO, HOST = "x-forwarded-for", "x-forwarded-proto", "x-forwarded-host"
INSIDE = "inside:8080"


@pytest.mark.parametrize(
    ("peer", "headers", "what"),
    [
        # Headers of a client that is not a proxy are ignored.
        (CLIENT, [(FOR, "1.1.1.1"), (PROTO, "https"), (HOST, "a")], (CLIENT, "http", INSIDE)),
        ("10.0.0.1", [], ("10.0.0.1", "http", INSIDE)),
        (
            "10.0.0.1",
            [(FOR, CLIENT), (PROTO, "https"), (HOST, "a.example")],
            (CLIENT, "https", "a.example"),
        ),
        # Addresses that the client has made up are left of the true one.
        ("10.0.0.1", [(FOR, f"1.1.1.1, {CLIENT}")], (CLIENT, "http", INSIDE)),
        ("10.0.0.1", [(FOR, "1.1.1.1"), (FOR, CLIENT)], (CLIENT, "http", INSIDE)),
        ("10.0.0.1", [(FOR, f"1.1.1.1, {CLIENT}, 10.2.2.2")], (CLIENT, "http", INSIDE)),
        ("10.0.0.1", [(FOR, "10.3.3.3, 10.2.2.2")], ("10.3.3.3", "http", INSIDE)),
        ("::ffff:10.0.0.1", [(FOR, f"{CLIENT}:4711")], (CLIENT, "http", INSIDE)),
        ("2001:db8::1", [(FOR, "[2001:db9::7]:443")], ("2001:db9::7", "http", INSIDE)),
        ("10.0.0.1", [(FOR, f"{CLIENT}, unknown")], ("10.0.0.1", "http", INSIDE)),
        ("10.0.0.1", [(PROTO, "gopher"), (FOR, CLIENT)], (CLIENT, "http", INSIDE)),
        ("", [(FOR, CLIENT)], ("", "http", INSIDE)),
        ("10.0.0.1", [("forwarded", f"for={CLIENT}")], ("10.0.0.1", "http", INSIDE)),
    ],
)
def test_x_forwarded_counts_as_far_as_trusted_proxies_wrote_it(
    peer: str, headers: list[tuple[str, str]], what: tuple[str, str, str]
) -> None:
    assert seen(Proxies(NETWORKS).resolve(asked(peer, *headers))) == what


@pytest.mark.parametrize(
    ("value", "what"),
    [
        (f"for={CLIENT};proto=https;host=a.example", (CLIENT, "https", "a.example")),
        (f'For="{CLIENT}:4711" ; Proto=https', (CLIENT, "https", INSIDE)),
        ('for="[2001:db9::7]:1"', ("2001:db9::7", "http", INSIDE)),
        (f"for=1.1.1.1;host=evil, for={CLIENT};host=b", (CLIENT, "http", "b")),
        (f"for={CLIENT};proto=https, for=10.9.9.9;proto=http", (CLIENT, "https", INSIDE)),
        ("for=_hidden;proto=https", ("10.0.0.1", "https", INSIDE)),
        (f'for={CLIENT};host="a,b\\"c"', (CLIENT, "http", 'a,b"c')),
        ('for="unfinished', ("10.0.0.1", "http", INSIDE)),
        (",;=,", ("10.0.0.1", "http", INSIDE)),
    ],
)
def test_forwarded_is_read_where_the_operator_says_so(
    value: str, what: tuple[str, str, str]
) -> None:
    head = asked("10.0.0.1", ("forwarded", value), (FOR, "9.9.9.9"))
    assert seen(Proxies(NETWORKS, "forwarded").resolve(head)) == what


def test_a_websocket_behind_tls_is_one_over_tls() -> None:
    head = asked("10.0.0.1", (PROTO, "https"), scheme="ws")
    assert Proxies(NETWORKS).resolve(head).scheme == "wss"
