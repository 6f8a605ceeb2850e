"""The stored settings of a stream, and its expiry."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.ledger.errors import CallerError
from tailrace.origin.streams.config import Create, ForkOrder, Part, StreamConfig
from tailrace.origin.streams.expiry import NEVER, Expiry, LastUse, format_rfc3339, parse_expiry
from tailrace.origin.streams.offsets import Offset

ids = st.binary(min_size=16, max_size=16)
counts = st.integers(0, 10**15)
expiries = st.builds(Expiry, ttl_s=st.none() | counts, at_ms=st.none() | counts)
offsets = st.builds(Offset, counts, counts)
orders = st.builds(ForkOrder, st.text(min_size=1), st.none() | offsets, counts)
asked = st.builds(Create, st.none() | st.text(), expiries, st.booleans(), st.none() | orders)
parts = st.lists(st.builds(Part, ids, counts)).map(tuple)
configs = st.builds(StreamConfig, ids, st.text(), asked, expiries, parts, st.booleans())

times = st.integers(-(2**41), 2**41)


@given(configs)
def test_a_configuration_is_unpacked_as_it_was_packed(config: StreamConfig) -> None:
    assert StreamConfig.unpack(config.pack()) == config


def test_a_fork_counts_on_from_what_it_has_inherited() -> None:
    config = StreamConfig(
        bytes(16), "text/plain", Create(), parts=(Part(bytes(16), 3), Part(bytes(16), 7))
    )
    assert config.base == 7
    assert StreamConfig(bytes(16), "text/plain", Create()).base == 0


def test_a_ttl_slides_with_the_last_use_and_a_moment_does_not() -> None:
    assert Expiry(ttl_s=60).deadline_ms(1_000) == 61_000
    assert Expiry(at_ms=5_000).deadline_ms(9_000) == 5_000
    assert NEVER.deadline_ms(1_000) is None


@pytest.mark.parametrize(
    "ttl", ["abc", "-1", "+60", "00060", "60.5", "1e3", "", " 60", "\u0666", "9" * 10]
)
def test_a_ttl_is_a_plain_whole_number_of_seconds(ttl: str) -> None:
    with pytest.raises(CallerError) as refused:
        parse_expiry(ttl, None)
    assert (refused.value.status, refused.value.field) == (400, "stream-ttl")


@pytest.mark.parametrize(
    "text",
    [
        "not-a-timestamp",
        "2031-01-31",
        "2031-13-01T00:00:00Z",
        "2031-01-31T23:59:60Z",
        "2031-01-31T23:59:59",
        "2031-W01-1T00:00:00Z",
        "20310131T235959Z",
        "2031-01-31T23:59:59+25:00",
        "0001-01-01T00:00:00+23:59",
        "9999-12-31T23:59:59-23:59",
    ],
)
def test_a_moment_is_as_rfc_3339_has_it(text: str) -> None:
    with pytest.raises(CallerError):
        parse_expiry(None, text)


def test_zones_and_fractions_of_a_moment_count() -> None:
    for text in ("2031-01-31T23:59:59.5Z", "2031-02-01t01:29:59.500000000+01:30"):
        assert parse_expiry(None, text) == Expiry(at_ms=1_927_670_399_500)


@given(times)
def test_a_moment_is_written_as_it_is_parsed(at_ms: int) -> None:
    assert parse_expiry(None, format_rfc3339(at_ms)) == Expiry(at_ms=at_ms)


def test_both_at_once_are_refused() -> None:
    with pytest.raises(CallerError):
        parse_expiry("60", "2031-01-31T23:59:59Z")


@given(st.integers(0, 10_000), st.lists(st.integers(0, 5_000_000), max_size=20), times)
def test_after_a_restart_nothing_expires_early_nor_late_by_more_than_a_tenth(
    ttl_s: int, pauses: list[int], start_ms: int
) -> None:
    expiry = Expiry(ttl_s=ttl_s)
    use, now_ms = LastUse(start_ms, start_ms), start_ms
    for pause in pauses:
        now_ms += pause
        if use.touch(expiry, now_ms):
            use.stored_ms = use.known_ms
    restored = LastUse.restored(use.stored_ms, expiry, now_ms)
    assert use.known_ms <= restored.known_ms <= use.known_ms + expiry.unwritten_ms


def test_a_read_is_stored_only_when_the_stored_one_is_old() -> None:
    expiry, use = Expiry(ttl_s=100), LastUse(0, 0)
    assert not use.touch(expiry, 10_000)
    assert use.touch(expiry, 10_001)
    assert not NEVER.unwritten_ms
    assert not LastUse(0, 0).touch(NEVER, 10_000)
