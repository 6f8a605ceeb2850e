"""The object behind a stream: its limits, its alarm, its end."""

import asyncio
import json
from pathlib import Path

import pytest

from tailrace.ledger.errors import StreamFull
from tailrace.ledger.interface import ObjectKey, ValueRange
from tailrace.ledger.objects.object import ERASE, ObjectRequest, ObjectResponse
from tailrace.ledger.sqlite.retention import RetentionSettings
from tailrace.origin.streams import state
from tailrace.origin.streams.events import Change, StreamEvent
from tailrace.origin.streams.fork import GIVE_BACK, TAKE
from tailrace.origin.streams.json_messages import RUN
from tailrace.origin.streams.offsets import Offset
from tailrace.origin.streams.read import SLICE_STEPS, USE
from tailrace.origin.streams.settings import StreamSettings
from tests.ledger.objects.object_world import crashed
from tests.origin.streams.stream_world import ROOT, ZERO, StreamWorld, streams_at

pytestmark = pytest.mark.anyio


def error_code(response: ObjectResponse) -> object:
    assert isinstance(response.body, bytes)
    return json.loads(response.body)["error"]["code"]


async def test_a_stream_lives_from_put_to_delete(tmp_path: Path) -> None:
    async with streams_at(tmp_path) as world:
        made = await world.put("a/b", b"hello")
        assert (made.status, made.header("location")) == (201, f"{ROOT}a/b")
        assert (await world.post("a/b", b" world")).status == 204
        assert await world.text("a/b") == b"hello world"
        assert (await world.ask("DELETE", "a/b")).status == 204
        assert await world.status("a/b") == 404


async def test_the_location_is_the_url_without_its_query(tmp_path: Path) -> None:
    async with streams_at(tmp_path) as world:
        made = await world.ask("PUT", "a%20b", query="?x=1", content_type="text/plain")
    assert made.header("location") == f"{ROOT}a%20b"


async def test_what_was_acknowledged_is_there_after_a_crash(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    async with streams_at(tmp_path / "one") as world:
        await world.put("a", b"1")
        await world.post("a", b"2", stream_seq="5")
        await world.post("a", b"3", producer_id="p", producer_epoch="0", producer_seq="0")
        crashed(tmp_path / "one", tmp_path / "two")
    async with streams_at(tmp_path / "two") as world:
        assert await world.text("a") == b"123"
        again = await world.post("a", b"3", producer_id="p", producer_epoch="0", producer_seq="0")
        assert again.status == 204
        assert (await world.post("a", b"4", stream_seq="5")).status == 409
        assert (await world.post("a", b"4", stream_seq="6")).status == 204
        assert (await world.ask("POST", "a", stream_closed="true")).status == 204
        assert await world.text("a") == b"1234"
    async with streams_at(tmp_path / "two") as world:
        assert (await world.ask("HEAD", "a")).header("stream-closed") == "true"
        assert (await world.post("a", b"5")).status == 409


async def test_a_stream_put_anew_begins_anew(tmp_path: Path) -> None:
    async with streams_at(tmp_path) as world:
        await world.put("a", b"old", stream_closed="true")
        await world.ask("DELETE", "a")
        await world.put("a", b"new", content_type="text/html")
        assert await world.text("a") == b"new"
        dues = await world.post(
            "a",
            b"!",
            content_type="text/html",
            producer_id="p",
            producer_epoch="0",
            producer_seq="0",
        )
        assert dues.status == 200


async def test_deleting_leaves_nothing(tmp_path: Path) -> None:
    async with streams_at(tmp_path) as world:
        await world.put("a", b"x", stream_ttl="60")
        await world.post("a", b"x", producer_id="p", producer_epoch="0", producer_seq="0")
        await world.ask("DELETE", "a")
        assert await world.ledger.objects.list(ObjectKey("stream", "a")) == {}
        assert await world.runtime.ledger.objects.names("stream") == []


async def test_every_change_is_told_of_once_it_is_durable(tmp_path: Path) -> None:
    async with streams_at(tmp_path) as world:
        await world.put("a", b"1")
        await world.put("a", b"1")
        await world.post("a", b"2")
        await world.post("a", b"2", content_type="text/html")
        await world.ask("POST", "a", stream_closed="true")
        await world.ask("POST", "a", stream_closed="true")
        await world.ask("DELETE", "a")
        one, two = (f"{n:016d}_{0:016d}" for n in (1, 2))
        assert world.events == [
            StreamEvent(Change.CREATED, "a", one),
            StreamEvent(Change.APPENDED, "a", two, since_offset=one),
            StreamEvent(Change.APPENDED, "a", two, since_offset=two),
            StreamEvent(Change.DELETED, "a", two),
        ]


async def test_a_refused_append_changes_nothing(tmp_path: Path) -> None:
    async with streams_at(tmp_path) as world:
        await world.put("a", b"[1]", content_type="application/json")
        for body in (b"[2", b"[]"):
            refused = await world.post("a", body, content_type="application/json", stream_seq="9")
            assert refused.status == 400
        await world.post("a", b"2", content_type="application/json", stream_seq="8")
        assert await world.text("a") == b"[1,2]"


async def test_a_refused_put_creates_nothing(tmp_path: Path) -> None:
    async with streams_at(tmp_path) as world:
        assert (await world.put("a", b"[1", content_type="application/json")).status == 400
        assert await world.status("a") == 404


@pytest.mark.parametrize("name", ["../x", "a/../b", "a//b", "a\x00b", "__ds/x", "a\\b"])
async def test_a_name_that_leads_elsewhere_is_no_stream(tmp_path: Path, name: str) -> None:
    async with streams_at(tmp_path) as world:
        assert (await world.put(name)).status == 404
        assert await world.runtime.ledger.objects.names("stream") == []


async def test_what_objects_ask_each_other_no_client_can_ask(tmp_path: Path) -> None:
    async with streams_at(tmp_path) as world:
        await world.put("a")
        for method in (TAKE, GIVE_BACK, USE, ERASE, "", "PATCH", "get"):
            answer = await world.ask(method, "a", b"{}")
            assert (answer.status, answer.header("allow")) == (405, "PUT, POST, GET, HEAD, DELETE")
            without_url = ObjectRequest(method, "", (), b"{}")
            answer = await world.runtime.fetch(ObjectKey("stream", "a"), without_url)
            assert answer.status == 405


async def test_a_body_over_the_limit_is_refused_whole(tmp_path: Path) -> None:
    settings = StreamSettings(max_body_bytes=4)
    async with streams_at(tmp_path, settings=settings) as world:
        assert (await world.put("a", b"12345")).status == 413
        await world.put("a", b"1234")
        refused = await world.post("a", b"12345")
        assert (refused.status, error_code(refused)) == (413, "too_large")
        assert await world.text("a") == b"1234"


async def test_an_offset_that_is_none_is_named(tmp_path: Path) -> None:
    async with streams_at(tmp_path) as world:
        await world.put("a", b"123")
        beyond, within = f"{9:016d}_{0:016d}", f"{0:016d}_{3:016d}"
        for offset in ("x", beyond, within):
            for live in ("", "&live=sse", "&live=long-poll", "&live=frames"):
                answer = await world.ask("GET", "a", query=f"?offset={offset}{live}")
                assert (answer.status, error_code(answer)) == (400, "bad_offset")


async def test_zero_is_where_an_empty_stream_begins_and_ends(tmp_path: Path) -> None:
    async with streams_at(tmp_path) as world:
        assert (await world.put("a")).header("stream-next-offset") == ZERO
        assert await world.text("a", f"?offset={ZERO}") == b""


async def test_a_full_stream_says_so_and_stays_readable(tmp_path: Path) -> None:
    small = RetentionSettings(max_stream_bytes=4096)
    async with streams_at(tmp_path, retention=small) as world:
        await world.put("a")
        assert (await world.post("a", b"x" * 3000)).status == 204
        with pytest.raises(StreamFull):
            await world.post("a", b"y" * 3000)
        assert await world.text("a") == b"x" * 3000
        assert (await world.post("a", stream_closed="true")).status == 204


async def test_many_small_values_are_few_frames_and_others_have_their_turns(tmp_path: Path) -> None:
    turns = 0

    async def somebody_else() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    async with streams_at(tmp_path) as world:
        await world.put("a", content_type="application/json")
        other = asyncio.create_task(somebody_else())
        body = b"[" + b"1," * 500_000 + b"1]"
        answer = await world.post("a", body, content_type="application/json")
        other.cancel()
        assert answer.status == 204 and await world.text("a") == body
        assert (answer.header("stream-next-offset") or "") < str(Offset(100))
    assert turns > 500_000 // (RUN * SLICE_STEPS)


async def test_a_stream_remembers_so_many_producers_those_that_came_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state, "MAX_PRODUCERS", 8)

    async def post(world: StreamWorld, name: str, seq: int) -> int:
        fields = {"producer_id": name, "producer_epoch": "0", "producer_seq": str(seq)}
        return (await world.post("a", b"x", **fields)).status

    async with streams_at(tmp_path) as world:
        await world.put("a")
        for number in range(20):
            assert await post(world, f"p{number}", 0) == 200
            assert await post(world, "constant", number) == 200
            values = await world.ledger.objects.list(
                ObjectKey("stream", "a"), ValueRange("producer:")
            )
            assert len(values) <= 8
        assert [await post(world, f"p{number}", 0) for number in range(15, 20)] == [204] * 5
        assert await post(world, "p0", 1) == 409, "forgotten: refused, and not taken for new"
