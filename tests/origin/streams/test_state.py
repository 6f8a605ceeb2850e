"""The stored values of a stream's object, and their use of the ledger."""

from pathlib import Path

import pytest

from tailrace.ledger.interface import ObjectKey
from tailrace.origin.streams.events import Change
from tests.ledger.next_alarm import next_alarm_ms
from tests.origin.streams.stream_world import StreamWorld, streams_at

pytestmark = pytest.mark.anyio


async def test_an_append_of_plain_bytes_writes_no_value(tmp_path: Path) -> None:
    async with streams_at(tmp_path) as world:
        await world.put("a")
        values = await world.ledger.objects.list(ObjectKey("stream", "a"))
        await world.post("a", b"x" * 200_000)
        assert await world.ledger.objects.list(ObjectKey("stream", "a")) == values
        assert list(values) == ["config"]


async def test_a_stream_is_gone_in_the_very_ms_that_its_window_has_passed(tmp_path: Path) -> None:
    async with streams_at(tmp_path) as world:
        start = world.clock.now
        await world.put("a", stream_ttl="2")
        world.clock.now = start + 1_999
        assert await world.status("a") == 200
        world.clock.now = start + 2_000
        assert await world.status("a") == 404


@pytest.mark.parametrize("use", ["GET", "now", "long-poll", "POST", "close", "PUT"])
async def test_reads_and_writes_renew_the_window_and_head_does_not(
    tmp_path: Path, use: str
) -> None:
    async with streams_at(tmp_path) as world:
        start = world.clock.now
        await world.put("a", b"x", stream_ttl="2")
        world.clock.now = start + 1_500
        await _use(world, use)
        world.clock.now = start + 3_499
        assert await world.status("a") == 200
        world.clock.now = start + 3_500
        assert await world.status("a") == 404


async def _use(world: StreamWorld, use: str) -> None:
    queries = {"GET": "", "now": "?offset=now", "long-poll": "?offset=now&live=long-poll"}
    if use in queries:
        answer = await world.ask("GET", "a", query=queries[use])
    elif use == "PUT":
        answer = await world.put("a", stream_ttl="2")
    else:
        body, closed = (b"", "true") if use == "close" else (b"y", "false")
        answer = await world.post("a", body, stream_closed=closed)
    assert answer.status in (200, 204)


async def test_a_moment_to_expire_at_does_not_move(tmp_path: Path) -> None:
    async with streams_at(tmp_path) as world:
        at = "1970-01-01T00:20:00Z"
        await world.put("a", b"x", stream_expires_at=at)
        assert (await world.ask("HEAD", "a")).header(
            "stream-expires-at"
        ) == "1970-01-01T00:20:00.000Z"
        world.clock.now = 1_199_999
        assert await world.text("a") == b"x"
        world.clock.now = 1_200_000
        assert await world.status("a", "GET") == 404


async def test_the_alarm_removes_what_nobody_asks_for(tmp_path: Path) -> None:
    async with streams_at(tmp_path) as world:
        start = world.clock.now
        await world.put("a", b"x", stream_ttl="2")
        world.clock.now = start + 1_000
        await world.text("a")  # which puts the end off, but not the alarm
        for due in (start + 2_000, start + 3_000):
            while await next_alarm_ms(world.ledger.objects) != due:
                await world.clock.parks.get()
            world.clock.move_to(due)
        await world.is_empty()
        assert world.events[-1].kind is Change.DELETED


async def test_after_a_restart_a_read_that_was_not_stored_still_counts(tmp_path: Path) -> None:
    async with streams_at(tmp_path) as world:
        start = world.clock.now
        await world.put("a", stream_ttl="100")
        world.clock.now = start + 10_000
        await world.text("a")  # not worth a write
    async with streams_at(tmp_path, now_ms=start + 109_999) as world:
        assert await world.status("a") == 200
    async with streams_at(tmp_path, now_ms=start + 110_000) as world:
        assert await world.status("a") == 404


async def test_after_a_restart_a_stream_expires_late_by_a_tenth_at_most(tmp_path: Path) -> None:
    async with streams_at(tmp_path) as world:
        start = world.clock.now
        await world.put("a", stream_ttl="100")
        world.clock.now = start + 50_000
        await world.text("a")  # stored, as the last stored use is old
    async with streams_at(tmp_path, now_ms=start + 160_000 - 1) as world:
        assert await world.status("a") == 200
    async with streams_at(tmp_path, now_ms=start + 160_000) as world:
        assert await world.status("a") == 404


async def test_a_name_can_be_put_again_in_the_request_that_finds_it_expired(tmp_path: Path) -> None:
    async with streams_at(tmp_path) as world:
        await world.put("a", b"old", stream_ttl="1")
        world.clock.now += 1_000
        assert (await world.put("a", b"new", content_type="text/html")).status == 201
        assert await world.text("a") == b"new"
        assert [event.kind for event in world.events] == [
            Change.CREATED,
            Change.DELETED,
            Change.CREATED,
        ]
