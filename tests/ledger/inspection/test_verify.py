"""`ledger verify` on both kinds of ledger."""

from pathlib import Path

import pytest

from tailrace.ledger.frame import Token, encode
from tailrace.ledger.inspection.commands import Finding, reading, verify
from tests.ledger.ledger_files import (
    A,
    B,
    C,
    Place,
    PostgresPlace,
    SqlitePlace,
    three_streams,
    token,
)
from tests.ledger.other_owner import OtherOwner

pytestmark = pytest.mark.anyio


@pytest.fixture(params=["sqlite", "postgres"])
def empty(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    """Return each kind of place in turn, without a ledger."""
    if request.param == "sqlite":
        return SqlitePlace(tmp_path)
    return PostgresPlace(request.getfixturevalue("database"))


@pytest.fixture
async def ledger(empty: Place) -> Place:
    await (await three_streams(empty)).close()
    return empty


async def findings(ledger: Place) -> list[Finding]:
    async with reading(ledger.place) as reader:
        return (await verify(reader)).findings


async def test_a_whole_ledger_is_said_to_be_whole(ledger: Place) -> None:
    seen: list[int] = []
    async with reading(ledger.place) as reader:
        verdict = await verify(reader, seen.append)
    assert verdict.findings == []
    assert verdict.whole
    assert (verdict.streams, verdict.ended) == (3, 1)
    assert (verdict.frames, verdict.tokens) == (1206, 2 * 1205)
    assert seen == [1, 2, 3]


async def test_it_is_verified_while_its_owner_writes(empty: Place) -> None:
    with OtherOwner(empty):
        assert await findings(empty) == []


async def test_missing_records_are_named_with_their_stream(ledger: Place) -> None:
    ledger.lose_some_of(A)
    [finding] = await findings(ledger)
    assert finding.stream == A.hex()
    assert "does not follow index" in finding.what


async def test_a_frame_that_says_another_index_is_named(ledger: Place) -> None:
    ledger.put(C, 0, encode(Token("x", 5)))
    [finding] = await findings(ledger)
    assert finding.stream == C.hex()
    assert "and index 5" in finding.what


async def test_what_is_no_frame_is_named(ledger: Place) -> None:
    ledger.put(B, 5, token(5).frame.replace(b"The", b"\xffhe"))
    [finding] = await findings(ledger)
    assert finding.stream == B.hex()
    assert "UTF-8" in finding.what


async def test_an_end_that_is_only_claimed_is_named(ledger: Place) -> None:
    ledger.mark_ended(B)
    assert await findings(ledger) == [
        Finding(B.hex(), "the stream is marked as ended, but has no StreamEnd")
    ]


async def test_something_behind_the_end_is_named(ledger: Place) -> None:
    ledger.put(A, 1201, token(1201).frame)
    assert await findings(ledger) == [Finding(A.hex(), "index 1201 follows the end at index 1200")]


async def test_a_gap_at_the_tip_is_named(ledger: Place) -> None:
    ledger.put(B, 9, token(9).frame)
    [finding] = await findings(ledger)
    assert finding.stream == B.hex()
    assert "from index 4 to 9" in finding.what or "9 does not follow index 4" in finding.what


async def test_a_value_of_no_object_is_named(ledger: Place) -> None:
    ledger.add_stray_value()
    assert await findings(ledger) == [Finding(None, "1 values belong to no object")]
