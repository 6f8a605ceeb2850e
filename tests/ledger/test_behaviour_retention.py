"""The promises of `tailrace.ledger.interface` for retention and deletion, on every backend."""

import pytest

from tailrace.ledger.errors import NotFound
from tailrace.ledger.interface import Append, Ledger
from tests.ledger.backends import (
    TTL_S,
    A,
    B,
    Backend,
    end,
    finish,
    indexes,
    new,
    opened,
    refusals,
    tokens,
)

pytestmark = pytest.mark.anyio


async def test_an_ended_stream_expires_after_its_ttl(ledger: Ledger, backend: Backend) -> None:
    await ledger.create(new())
    await finish(ledger, A, 3)
    backend.clock.now += int(TTL_S * 1000) - 1
    assert await ledger.expire() == 0
    backend.clock.now += 1
    assert await ledger.expire() == 1
    with pytest.raises(NotFound):
        await ledger.read(A, 0, 10)
    assert await ledger.expire() == 0


async def test_a_stream_without_an_end_does_not_expire(ledger: Ledger, backend: Backend) -> None:
    await ledger.create(new())
    await ledger.append(tokens(A, [0]))
    backend.clock.now += int(TTL_S * 1000) * 100
    assert await ledger.expire() == 0
    assert indexes(await ledger.read(A, 0, 10)) == [0]


async def test_retention_slides_with_reads(ledger: Ledger, backend: Backend) -> None:
    await ledger.create(new())
    records = await finish(ledger, A, 3)
    for _ in range(5):
        backend.clock.now += int(TTL_S * 1000) - 1
        assert await ledger.read(A, 0, 10) == records
        assert await ledger.expire() == 0
    backend.clock.now += int(TTL_S * 1000)
    assert await ledger.expire() == 1


async def test_a_watched_stream_does_not_expire(ledger: Ledger, backend: Backend) -> None:
    await ledger.create(new())
    await finish(ledger, A, 3)
    await ledger.info(A)

    def wake() -> None: ...

    ledger.watch(A, wake)
    backend.clock.now += int(TTL_S * 1000)
    assert await ledger.expire() == 0
    ledger.unwatch(A, wake)
    backend.clock.now += int(TTL_S * 1000)
    assert await ledger.expire() == 1


async def test_retention_holds_after_a_restart(backend: Backend) -> None:
    async with opened(backend) as ledger:
        await ledger.create(new())
        await finish(ledger, A, 3)
    backend.clock.now += int(TTL_S * 1000)
    async with opened(backend) as ledger:
        assert await ledger.expire() == 1


async def test_hundreds_of_streams_expire_at_once(ledger: Ledger, backend: Backend) -> None:
    streams = [number.to_bytes(16, "big") for number in range(200)]
    for stream in streams:
        await ledger.create(new(stream))
    await ledger.append([Append(stream, 1, 0, end(0)) for stream in streams])
    assert await ledger.expire() == 0
    removed = 0
    for _ in range(5):  # a sweep may handle only some of the ended streams
        backend.clock.now += int(TTL_S * 1000)
        removed += await ledger.expire()
    assert removed == 200


async def test_a_deleted_stream_is_gone_at_once(ledger: Ledger) -> None:
    await ledger.create(new(A))
    await ledger.create(new(B))
    await ledger.append([*tokens(A, range(3)), *tokens(B, range(3))])
    await ledger.delete(A)
    with pytest.raises(NotFound):
        await ledger.info(A)
    with pytest.raises(NotFound):
        await ledger.read(A, 0, 10)
    late = tokens(A, [3])
    assert await refusals(ledger, *late) == [(late[0], NotFound)]
    assert indexes(await ledger.read(B, 0, 10)) == [0, 1, 2]


async def test_a_deleted_stream_stays_gone_after_a_restart(backend: Backend) -> None:
    async with opened(backend) as ledger:
        await ledger.create(new(A))
        await ledger.append(tokens(A, range(3)))
        await ledger.delete(A)
    async with opened(backend) as ledger:
        with pytest.raises(NotFound):
            await ledger.info(A)
        assert await ledger.unfinished() == []


async def test_a_key_is_free_again_when_its_stream_is_gone(ledger: Ledger) -> None:
    await ledger.create(new(A, key="k"))
    await ledger.delete(A)
    info, created = await ledger.create(new(B, key="k", request_hash=b"other"))
    assert (info.stream, created) == (B, True)
