"""Several pieces of work at once."""

import asyncio

import pytest

from tailrace.ledger.process.tasks import background, first_of, gather

pytestmark = pytest.mark.anyio


async def forever(ended: list[str]) -> None:
    try:
        await asyncio.Event().wait()
    finally:
        ended.append("cancelled")


async def give(value: int) -> int:
    return value


async def fail() -> int:
    raise LookupError


async def test_the_first_to_end_is_the_answer_and_the_others_have_ended() -> None:
    ended: list[str] = []
    assert await first_of(forever(ended), give(3)) == 3
    assert ended == ["cancelled"]


async def test_of_two_that_end_at_once_the_one_that_failed_is_told_of() -> None:
    future = asyncio.get_running_loop().create_future()
    future.set_result(None)
    with pytest.raises(LookupError):
        await first_of(future, give(3), fail())


async def test_together_they_give_all_or_the_first_error() -> None:
    assert await gather(give(1), give(2)) == [1, 2]
    with pytest.raises(LookupError):
        await gather(give(1), fail())


async def test_what_runs_beside_a_block_has_ended_after_it() -> None:
    ended: list[str] = []
    with pytest.raises(LookupError):
        async with background([forever(ended), fail()]) as tasks:
            await tasks[1]
    assert ended == ["cancelled"]
