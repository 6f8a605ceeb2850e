"""The first frame since a time, in each kind of ledger."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from random import Random

import pytest

from tailrace.ledger.frame import Token, encode
from tailrace.ledger.interface import Append, Ledger, Record
from tailrace.ledger.record_extra import RecordExtra
from tailrace.origin.generations.frame_times import (
    SEARCH_RECORDS,
    TIME_STEP_MS,
    index_since,
    time_to_store,
)
from tests.ledger.backends import A, Backend, new, opened

pytestmark = pytest.mark.anyio

BEGIN_MS = 1_764_322_200_000


async def stored(ledger: Ledger, times_ms: Sequence[int]) -> list[int | None]:
    """Store a frame at each of these times, and return the times that were stored."""
    await ledger.create(new(A))
    last_ms, kept, appends = 0, list[int | None](), list[Append]()
    for index, now_ms in enumerate(times_ms):
        at_ms = time_to_store(last_ms, now_ms)
        last_ms = at_ms or last_ms
        kept.append(at_ms)
        record = Record(encode(Token("x", index)), (1,), RecordExtra(at_ms=at_ms).pack())
        appends.append(Append(A, 1, index, record))
    assert await ledger.append(appends) == []
    return kept


async def since(ledger: Ledger, at_ms: int) -> int:
    return await index_since(ledger, await ledger.info(A), at_ms)


@pytest.mark.parametrize("seed", range(6))
async def test_no_frame_is_missed_and_only_a_second_of_earlier_ones_is_sent(
    ledger: Ledger, seed: int
) -> None:
    random = Random(seed)
    times, now_ms = list[int](), BEGIN_MS
    for _ in range(3 * SEARCH_RECORDS):
        now_ms += random.choice((0, 0, 1, 7, 40, 200, random.choice((0, 1000, 90_000))))
        times.append(now_ms)
    await stored(ledger, times)
    asked = {BEGIN_MS - 1, times[-1] + 1, times[-1] + TIME_STEP_MS}
    asked |= {at + random.choice((-1, 0, 1, 999, 1000)) for at in random.sample(times, 60)}
    for at_ms in asked:
        first = await since(ledger, at_ms)
        assert all(each < at_ms for each in times[:first])
        assert all(each > at_ms - TIME_STEP_MS for each in times[first:])


async def test_a_time_is_stored_at_most_once_a_second(ledger: Ledger) -> None:
    kept = await stored(ledger, [BEGIN_MS + 30 * n for n in range(200)])
    times = [each for each in kept if each is not None]
    assert times[0] == BEGIN_MS
    assert {later - earlier for earlier, later in pairwise(times)} == {1020}


async def test_an_empty_stream_begins_at_its_beginning(ledger: Ledger) -> None:
    await ledger.create(new(A))
    assert await since(ledger, BEGIN_MS) == 0


async def test_frames_without_times_count_as_new(ledger: Ledger) -> None:
    """An older release has stored them."""
    await ledger.create(new(A))
    old = [Append(A, 1, n, Record(encode(Token("x", n)), (1,))) for n in range(2 * SEARCH_RECORDS)]
    assert await ledger.append(old) == []
    assert await since(ledger, BEGIN_MS) == 0
    timed = Record(encode(Token("x", len(old))), (1,), RecordExtra(at_ms=BEGIN_MS).pack())
    assert await ledger.append([Append(A, 1, len(old), timed)]) == []
    assert await since(ledger, BEGIN_MS - 1) == 0
    assert await since(ledger, BEGIN_MS) == len(old)
    assert await since(ledger, BEGIN_MS + TIME_STEP_MS) == len(old) + 1


async def test_times_survive_a_restart(backend: Backend) -> None:
    async with opened(backend) as ledger:
        await stored(ledger, [BEGIN_MS + 100 * n for n in range(100)])
    async with opened(backend) as ledger:
        assert await since(ledger, BEGIN_MS + 5000) == 50
        assert await since(ledger, BEGIN_MS + 99_000) == 100
