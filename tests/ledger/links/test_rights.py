"""Rights of tokens and keys, and the names of tenants."""

import pytest

from tailrace.ledger.errors import CallerError
from tailrace.ledger.links.rights import ALL_RIGHTS, OF_A_STREAM, Right, check_tenant, parse_rights


def test_rights_are_written_as_words_and_read_again() -> None:
    assert (Right.READ | Right.STREAM_WRITE).words == ("read", "stream-write")
    assert parse_rights(["stream-write", "read", "read"]) == Right.READ | Right.STREAM_WRITE
    assert parse_rights(ALL_RIGHTS.words) == ALL_RIGHTS == 127
    assert parse_rights(()) == Right(0)
    with pytest.raises(CallerError, match=r"'raed' is not a right .*generate"):
        parse_rights(["raed"])


def test_reading_cancelling_and_steering_may_be_said_of_one_stream() -> None:
    assert OF_A_STREAM.words == ("read", "cancel", "steer")


@pytest.mark.parametrize("name", ["a", "acme", "acme-7.eu_west", "0", "a" * 63])
def test_a_tenant_has_a_plain_name(name: str) -> None:
    assert check_tenant(name) == name


@pytest.mark.parametrize("name", ["", "A", "-a", ".", "a/b", "a b", "é", "a\n", "a" * 64])
def test_any_other_name_is_refused(name: str) -> None:
    with pytest.raises(CallerError, match="tenant"):
        check_tenant(name)
