"""The count of what clients have open at the origins."""

import pytest

from tailrace.edge.origins.open_requests import OpenRequests, Owner


@pytest.fixture
def requests() -> OpenRequests:
    return OpenRequests(2, 3, exempt=lambda address: address == "127.0.0.1")


def refused(requests: OpenRequests, address: str = "", tenant: str = "") -> bool:
    """Ask for one more, which is counted if it is allowed."""
    owner = requests.owner(address, tenant)
    error = requests.refusal(owner)
    if error is None:
        requests.add(owner)
        return False
    assert (error.code, error.status, error.retryable) == ("too_many_streams", 429, True)
    assert error.min_retry_ms == 1000
    return True


def test_an_address_has_its_share_and_others_have_theirs(requests: OpenRequests) -> None:
    assert [refused(requests, "192.0.2.1") for _ in range(3)] == [False, False, True]
    assert not refused(requests, "192.0.2.2")
    requests.remove(requests.owner("192.0.2.1", ""))
    assert [refused(requests, "192.0.2.1") for _ in range(2)] == [False, True]


def test_all_addresses_of_a_network_of_ipv6_are_one_client(requests: OpenRequests) -> None:
    assert [refused(requests, f"2001:db8::{n}") for n in (1, 2, 3)] == [False, False, True]
    assert not refused(requests, "2001:db8:0:1::1")


def test_a_tenant_has_its_share_wherever_its_clients_are(requests: OpenRequests) -> None:
    asked = [refused(requests, f"192.0.2.{n}", "acme") for n in range(1, 5)]
    assert asked == [False, False, False, True]
    assert not refused(requests, "192.0.2.5", "bolt")


def test_a_client_without_address_or_at_an_exempt_one_counts_by_tenant_only(
    requests: OpenRequests,
) -> None:
    assert not any(refused(requests, address) for address in ("", "127.0.0.1") for _ in range(9))
    assert requests.owner("127.0.0.1", "acme") == Owner("", "acme")
