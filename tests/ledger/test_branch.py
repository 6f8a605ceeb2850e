"""Branches on every ledger: a stream that begins with the records of another one."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from tailrace.ledger.branch import MAX_PARTS, BranchPoint, Part, inherited, part_at
from tailrace.ledger.errors import BeyondEnd, Conflict, NotFound, WrongIndex
from tailrace.ledger.interface import Append, Ledger, NewStream
from tests.ledger.backends import (
    TTL_S,
    A,
    B,
    Backend,
    C,
    end,
    everything,
    finish,
    indexes,
    new,
    opened,
    token,
    tokens,
)

pytestmark = pytest.mark.anyio

MANY = 900  # more than one segment, and more than one read


def branch(stream: bytes, of: bytes, at: int, key: str | None = None) -> NewStream:
    return replace(new(stream, key=key), base=BranchPoint(of, at))


def own(stream: bytes, begin: int, count: int, text: str = " mine") -> list[Append]:
    return [Append(stream, 1, at, token(at, text)) for at in range(begin, begin + count)]


async def running(ledger: Ledger, count: int = MANY, stream: bytes = A) -> None:
    await ledger.create(new(stream))
    assert await ledger.append(tokens(stream, range(count))) == []


async def test_a_branch_has_the_records_of_its_parent_and_goes_on_with_its_own(
    ledger: Ledger,
) -> None:
    await running(ledger)
    parent = await everything(ledger, A)
    for at, stream in ((0, B), (1, C), (MANY - 7, b"D" * 16), (MANY, b"E" * 16)):
        info, created = await ledger.create(branch(stream, A, at))
        assert (info.stream, info.next_index, info.epoch, created) == (stream, at, 1, True)
        assert await ledger.append(own(stream, at, 300)) == []
        records = await everything(ledger, stream)
        assert records[:at] == parent[:at]
        assert [each.record for each in own(stream, at, 300)] == records[at:]
        assert indexes(records) == list(range(at + 300))
        for start in (0, max(0, at - 1), at, at + 1):
            frames: list[bytes] = []
            while some := await ledger.frames(stream, start + len(frames), 64):
                frames += some
            assert frames == [record.frame for record in records[start:]]
    assert await everything(ledger, A) == parent


async def test_the_first_own_record_of_a_branch_has_the_index_of_the_branch(
    ledger: Ledger,
) -> None:
    await running(ledger, 5)
    await ledger.create(branch(B, A, 3))
    [refusal] = await ledger.append([Append(B, 1, 0, token(0))])
    assert isinstance(refusal.error, WrongIndex)
    assert refusal.error.hint == "the next index is 3"


async def test_a_parent_that_runs_and_its_branch_do_not_change_each_other(ledger: Ledger) -> None:
    await running(ledger, 4)
    await ledger.create(branch(B, A, 4))
    await ledger.append([*tokens(A, range(4, 8)), *own(B, 4, 2)])
    assert len(await everything(ledger, A)) == 8
    records = await everything(ledger, B)
    assert records[4:] == [each.record for each in own(B, 4, 2)]


async def test_a_branch_takes_all_of_an_ended_stream_but_its_end(ledger: Ledger) -> None:
    await ledger.create(new(A))
    records = await finish(ledger, A, 3)
    await ledger.create(branch(B, A, 3))
    assert await everything(ledger, B) == records[:3]
    assert not (await ledger.info(B)).ended
    with pytest.raises(BeyondEnd, match="index 4 is beyond the 3 frames") as error:
        await ledger.create(branch(C, A, 4))
    assert (error.value.field, error.value.hint) == (
        "index",
        "from 0 to 3, which is before the stream's end",
    )
    with pytest.raises(NotFound):
        await ledger.info(C)


async def test_a_branch_of_no_stream_is_not_found(ledger: Ledger) -> None:
    with pytest.raises(NotFound):
        await ledger.create(branch(B, A, 0))
    with pytest.raises(NotFound):
        await ledger.info(B)


async def test_a_branch_is_created_once_for_each_key(ledger: Ledger) -> None:
    await running(ledger, 5)
    first, created = await ledger.create(branch(B, A, 3, key="k"))
    again, created_again = await ledger.create(branch(C, A, 3, key="k"))
    assert (first.stream, created, again.stream, created_again) == (B, True, B, False)


async def test_a_branch_of_a_branch_of_a_branch(ledger: Ledger) -> None:
    await running(ledger, 10)
    streams = [A, *(bytes([100 + n]) * 16 for n in range(4))]
    for depth, (older, younger) in enumerate(pairwise(streams)):
        at = 10 + 2 * depth
        await ledger.create(branch(younger, older, at))
        await ledger.append(own(younger, at, 2, f" {depth}"))
    last = await everything(ledger, streams[-1])
    assert indexes(last) == list(range(18))
    assert last[:16] == (await everything(ledger, streams[-2]))[:16]
    await ledger.create(branch(B, streams[-1], 11))  # within what its parent has inherited
    assert await everything(ledger, B) == last[:11]


async def test_the_records_stay_while_a_branch_needs_them(ledger: Ledger, backend: Backend) -> None:
    await running(ledger)
    await ledger.append([Append(A, 1, MANY, end(MANY))])
    parent = await everything(ledger, A)
    await ledger.create(branch(B, A, 500))
    await ledger.create(branch(C, B, 400))
    await ledger.delete(A)
    with pytest.raises(NotFound):
        await ledger.info(A)
    await ledger.expire()
    assert await everything(ledger, B) == parent[:500]
    await ledger.append([Append(B, 1, 500, end(500))])
    backend.clock.now += int(TTL_S * 1000)
    assert await ledger.expire() == 1  # B, which has ended; C still runs
    await ledger.expire()
    assert await everything(ledger, C) == parent[:400]


async def test_an_expired_parent_is_gone_and_its_branch_is_not(
    ledger: Ledger, backend: Backend
) -> None:
    await ledger.create(new(A))
    records = await finish(ledger, A, 20)
    await ledger.create(branch(B, A, 20))
    backend.clock.now += int(TTL_S * 1000)
    assert await ledger.expire() == 1
    with pytest.raises(NotFound):
        await ledger.read(A, 0, 1)
    assert await everything(ledger, B) == records[:20]
    with pytest.raises(NotFound):
        await ledger.create(branch(C, A, 20))


async def test_a_branch_is_there_after_a_restart(backend: Backend) -> None:
    async with opened(backend) as ledger:
        await running(ledger)
        parent = await everything(ledger, A)
        await ledger.create(branch(B, A, 700))
        await ledger.create(branch(C, B, 600))
        await ledger.append(own(C, 600, 3))
        await ledger.delete(A)
    async with opened(backend) as ledger:
        await ledger.expire()
        assert (await ledger.info(B)).next_index == 700
        assert await everything(ledger, B) == parent[:700]
        epoch = await ledger.take_over(C)
        assert await ledger.append([Append(C, epoch, 603, token(603))]) == []
        records = await everything(ledger, C)
        assert records[:600] == parent[:600]
        assert indexes(records) == list(range(604))


async def test_an_ended_stream_is_known_by_its_identity(ledger: Ledger, backend: Backend) -> None:
    await ledger.create(replace(new(A), identity=b"same"))
    await ledger.create(replace(new(B), identity=b"same"), replace(new(C), identity=b"other"))
    assert await ledger.known(b"same") is None  # none has ended
    await finish(ledger, A, 1)
    await ledger.append(tokens(C, range(1)))
    found = await ledger.known(b"same")
    assert found == await ledger.info(A)
    await finish(ledger, B, 2)
    assert await ledger.known(b"same") == await ledger.info(B)
    assert await ledger.known(b"other") is None
    await ledger.delete(B)
    assert await ledger.known(b"same") == await ledger.info(A)
    backend.clock.now += int(TTL_S * 1000)
    await ledger.expire()
    assert await ledger.known(b"same") is None


def test_the_parts_of_a_branch_end_where_it_begins() -> None:
    parts = (Part(1, 10), Part(2, 20))
    assert inherited(parts, 3, 25) == (Part(1, 10), Part(2, 20), Part(3, 25))
    assert inherited(parts, 3, 20) == parts
    assert inherited(parts, 3, 15) == (Part(1, 10), Part(2, 15))
    assert inherited(parts, 3, 0) == ()
    assert part_at(parts, 3, 9, 100) == (1, 1)
    assert part_at(parts, 3, 10, 5) == (2, 5)
    assert part_at(parts, 3, 20, 5) == (3, 5)


def test_a_branch_has_at_most_64_parts() -> None:
    parts = tuple(Part(at, at + 1) for at in range(MAX_PARTS))
    assert len(inherited(parts, 99, MAX_PARTS)) == MAX_PARTS
    with pytest.raises(Conflict, match="65 older streams") as error:
        inherited(parts, 99, MAX_PARTS + 1)
    assert error.value.code == "branch_depth"
