"""The promises of `tailrace.ledger.interface` for usage, on every backend."""

import pytest

from tailrace.ledger.frame import FinishReason, StreamEnd, encode
from tailrace.ledger.interface import Append, Ledger, Record, StreamKind
from tailrace.ledger.record_extra import EndUsage, RecordExtra
from tailrace.ledger.usage import DAY_MS, UsageCounts, UsageQuery, day_name
from tests.ledger.backends import TTL_S, A, B, Backend, C, new, opened, refusals, tokens

pytestmark = pytest.mark.anyio

BY_ALL = ("day", "month", "tenant", "key", "model", "priority", "finish")
OF_A = EndUsage(5 * DAY_MS + 7, "acme", "0123456789ab", "demo", "standard", 3, 4, 6)
OF_B = EndUsage(40 * DAY_MS, "other", "", "größer", "batch")


def end(index: int, used: EndUsage | None, output: int = 9, prompt: int = 5) -> Record:
    frame = StreamEnd(output, FinishReason.STOP, index, prompt)
    return Record(encode(frame), (), RecordExtra(usage=used).pack())


async def finish(ledger: Ledger, stream: bytes, used: EndUsage | None, count: int = 2) -> None:
    batch = [*tokens(stream, range(count)), Append(stream, 1, count, end(count, used))]
    assert await ledger.append(batch) == []


async def total(ledger: Ledger, **query: object) -> UsageCounts:
    return (await ledger.usage(UsageQuery(**query))).total  # type: ignore[arg-type]


async def test_a_stream_is_counted_when_it_has_ended(ledger: Ledger) -> None:
    await ledger.create(new())
    await ledger.append(tokens(A, [0, 1]))
    assert await total(ledger) == UsageCounts()
    assert await ledger.append([Append(A, 1, 2, end(2, OF_A))]) == []
    assert await total(ledger) == UsageCounts(1, 5, 3, 9, 4, 6, 3)


async def test_sums_are_grouped_by_any_column(ledger: Ledger) -> None:
    for stream, used in ((A, OF_A), (B, OF_B), (C, OF_B)):
        await ledger.create(new(stream))
        await finish(ledger, stream, used)
    sums = await ledger.usage(UsageQuery(BY_ALL))
    assert sums.rows == [
        (
            ("1970-01-06", "1970-01", "acme", "0123456789ab", "demo", "standard", "stop"),
            UsageCounts(1, 5, 3, 9, 4, 6, 3),
        ),
        (
            ("1970-02-10", "1970-02", "other", "", "größer", "batch", "stop"),
            UsageCounts(2, 10, 0, 18, 0, 0, 18),
        ),
    ]
    by_month = await ledger.usage(UsageQuery(("month",)))
    assert [(group, counts.streams) for group, counts in by_month.rows] == [
        (("1970-01",), 1),
        (("1970-02",), 2),
    ]
    assert day_name(5) == "1970-01-06"


async def test_rows_are_chosen_by_time_and_column(ledger: Ledger) -> None:
    for stream, used in ((A, OF_A), (B, OF_B)):
        await ledger.create(new(stream))
        await finish(ledger, stream, used)
    at_ms = OF_A.ended_ms
    assert (await total(ledger, from_ms=at_ms)).streams == 2
    assert (await total(ledger, from_ms=at_ms + 1)).streams == 1
    assert (await total(ledger, to_ms=at_ms)).streams == 0
    assert (await total(ledger, to_ms=at_ms + 1)).streams == 1
    assert (await total(ledger, where={"model": "größer", "tenant": "other"})).streams == 1
    assert (await total(ledger, where={"model": "größer", "tenant": "acme"})).streams == 0


async def test_an_end_that_is_refused_or_repeated_is_not_counted(ledger: Ledger) -> None:
    await ledger.create(new())
    assert len(await refusals(ledger, Append(A, 1, 1, end(1, OF_A)))) == 1
    assert await total(ledger) == UsageCounts()
    await finish(ledger, A, OF_A)
    assert len(await refusals(ledger, Append(A, 1, 2, end(2, OF_A)))) == 1
    assert len(await refusals(ledger, Append(A, 1, 3, end(3, OF_A)))) == 1
    assert (await total(ledger)).streams == 1


async def test_only_the_producer_that_wrote_the_end_is_counted(ledger: Ledger) -> None:
    await ledger.create(new())
    await ledger.append(tokens(A, [0, 1]))
    epoch = await ledger.take_over(A)
    fenced, stored = Append(A, 1, 2, end(2, OF_A)), Append(A, epoch, 2, end(2, OF_B, output=2))
    assert len(await refusals(ledger, fenced, stored)) == 1
    assert await total(ledger) == UsageCounts(1, 5, 0, 2, 0, 0, 2)


async def test_replay_counts_nothing(ledger: Ledger) -> None:
    await ledger.create(new())
    await finish(ledger, A, OF_A)
    before = await total(ledger)
    for start in range(3):
        await ledger.read(A, start, 10)
        await ledger.frames(A, start, 10)
    assert await total(ledger) == before


async def test_streams_of_objects_and_of_older_releases_have_no_usage(ledger: Ledger) -> None:
    await ledger.create(new(A, kind=StreamKind.OBJECT))
    await ledger.create(new(B))
    await finish(ledger, A, None)
    await finish(ledger, B, None)
    assert await total(ledger) == UsageCounts()


async def test_an_extra_that_cannot_be_read_does_not_stop_the_ledger(ledger: Ledger) -> None:
    await ledger.create(new())
    frame = encode(StreamEnd(1, FinishReason.STOP, 0, 1))
    assert await ledger.append([Append(A, 1, 0, Record(frame, (), b"\xff"))]) == []
    assert await total(ledger) == UsageCounts()
    await ledger.create(new(B))
    await finish(ledger, B, OF_B)
    assert (await total(ledger)).streams == 1


async def test_usage_outlives_its_stream(ledger: Ledger, backend: Backend) -> None:
    for stream, used in ((A, OF_A), (B, OF_B)):
        await ledger.create(new(stream))
        await finish(ledger, stream, used)
    await ledger.delete(B)
    backend.clock.now += int(TTL_S * 1000)
    assert await ledger.expire() == 1
    assert (await total(ledger)).streams == 2


async def test_usage_is_counted_although_its_stream_is_deleted_at_once(ledger: Ledger) -> None:
    """The stream is deleted in the commit after its end, before its segments are stored."""
    streams = [bytes([number]) * 16 for number in range(1, 201)]
    await ledger.create(*map(new, streams))
    batch = [Append(stream, 1, 0, end(0, OF_A)) for stream in streams]
    assert await ledger.append(batch) == []
    for stream in streams:
        await ledger.delete(stream)
    assert (await total(ledger)).streams == len(streams)


async def test_usage_is_there_after_a_restart(backend: Backend) -> None:
    async with opened(backend) as ledger:
        await ledger.create(new())
        await finish(ledger, A, OF_A)
    async with opened(backend) as ledger:
        assert (await total(ledger)).streams == 1


async def test_usage_is_forgotten_after_its_own_retention(ledger: Ledger, backend: Backend) -> None:
    streams = [bytes([number]) * 16 for number in range(1, 101)]
    await ledger.create(*map(new, streams))
    for stream in streams:
        await finish(ledger, stream, OF_A)
    await ledger.create(new(bytes(16)))
    await finish(ledger, bytes(16), OF_B)
    backend.clock.now = OF_A.ended_ms + 400 * DAY_MS
    await ledger.expire()
    assert (await total(ledger)).streams == 101
    backend.clock.now += 1
    await ledger.expire()
    assert (await total(ledger)).streams == 1


async def test_what_is_read_later_is_delivered(ledger: Ledger) -> None:
    await ledger.create(new())
    await finish(ledger, A, OF_A)
    await ledger.deliver({A: 8, B: 9})
    assert (await total(ledger)).delivered_tokens == 8
    await ledger.deliver({A: 7})
    assert (await total(ledger)).delivered_tokens == 8
    await ledger.deliver({A: 2**62})
    counts = await total(ledger)
    assert (counts.delivered_tokens, counts.unread_tokens) == (9, 0)
