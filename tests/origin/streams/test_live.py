"""Live reads: long polls and server-sent events."""

import asyncio
import base64
import json
from collections.abc import AsyncIterator
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.ledger.frame import (
    FRAMES_TYPE,
    Chunk,
    FinishReason,
    Frame,
    Heartbeat,
    Splitter,
    StreamEnd,
    decode,
)
from tailrace.ledger.objects.object import ObjectResponse
from tailrace.origin.streams.chunks import chunks
from tailrace.origin.streams.offsets import START, Offset
from tailrace.origin.streams.page import Page, PageBuilder, Tip
from tailrace.origin.streams.read import (
    SILENCE,
    EventTexts,
    control_event,
    data_event,
)
from tailrace.origin.streams.settings import StreamSettings
from tests.origin.streams.stream_world import TIMEOUT_S, ZERO, StreamWorld, streams_at

pytestmark = pytest.mark.anyio

PATIENT = StreamSettings(long_poll_s=TIMEOUT_S, sse_s=TIMEOUT_S)


def page_of(messages: list[bytes], start: Offset = START, *, closed: bool = False) -> Page:
    frames = [record.frame for record in chunks(messages, 0)]
    builder = PageBuilder(start, Tip(len(frames), closed), json=False)
    builder.feed(frames[start.index :])
    return builder.page()


def parsed(events: bytes) -> list[tuple[str, str]]:
    """(type, data) of each event, as WHATWG HTML 9.2.6 has a browser read them."""
    found: list[tuple[str, str]] = []
    name, lines = "", list[str]()
    for line in events.decode().replace("\r\n", "\n").replace("\r", "\n").split("\n"):
        field, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if not line and lines:
            found.append((name, "\n".join(lines)))
        if not line:
            name, lines = "", []
        elif field == "event":
            name = value
        elif field == "data":
            lines.append(value)
    return found


@given(st.text())
def test_a_data_event_is_one_event_whatever_is_in_it(text: str) -> None:
    lines = text.replace("\r\n", "\n").replace("\r", "\n")
    assert parsed(data_event(text)) == [("data", lines)]


def test_a_control_event_says_where_the_reader_is() -> None:
    event = control_event(Offset(3), 77, up_to_date=True, closed=False)
    ((name, data),) = parsed(event)
    assert name == "control"
    assert json.loads(data) == {
        "streamNextOffset": str(Offset(3)),
        "streamCursor": "77",
        "upToDate": True,
    }


def test_nobody_comes_back_to_a_closed_stream_with_a_cursor() -> None:
    event = control_event(Offset(3), 77, up_to_date=True, closed=True)
    assert "streamCursor" not in json.loads(parsed(event)[0][1])
    assert json.loads(parsed(event)[0][1])["streamClosed"] is True


def test_json_goes_as_one_array_and_bytes_as_base64() -> None:
    page = page_of([b'{"a":1}', b"2"])
    as_json, as_base64 = EventTexts("application/json"), EventTexts("image/png")
    assert json.loads(as_json.text(page)) == [{"a": 1}, 2]
    assert base64.b64decode(as_base64.text(page)) == b'{"a":1}2'
    assert as_json.text(page_of([])) == as_base64.text(page_of([])) == ""
    assert EventTexts("text/plain").text(page) == '{"a":1}2'


@given(st.text(min_size=1), st.data())
def test_text_is_whole_however_it_was_cut(text: str, data: st.DataObject) -> None:
    raw = text.encode()
    cuts = sorted(data.draw(st.sets(st.integers(1, max(1, len(raw) - 1)))) | {0, len(raw)})
    messages = [raw[a:b] for a, b in pairwise(cuts) if a < b]
    encoder, seen = EventTexts("text/plain"), ""
    for count in range(1, len(messages) + 1):
        page = page_of(messages[:count], Offset(count - 1))
        seen += encoder.text(page)
        # Whoever comes back to the offset of this event reads on with the next character.
        rest = b"".join(page_of(messages, encoder.offset(page)).data)
        assert seen + rest.decode() == text
    assert seen == text


def test_a_character_that_never_ends_is_replaced_at_the_end() -> None:
    encoder = EventTexts("text/plain")
    assert encoder.text(page_of([b"a\xc3"])) == "a"
    assert encoder.offset(page_of([b"a\xc3"])) == Offset(0, 1)
    assert encoder.text(page_of([b"a\xc3"], Offset(1), closed=True)) == "\ufffd"


def body_of(answer: ObjectResponse) -> AsyncIterator[bytes]:
    assert answer.status == 200 and not isinstance(answer.body, bytes)
    return answer.body


async def rest_of(body: AsyncIterator[bytes]) -> bytes:
    async with asyncio.timeout(TIMEOUT_S):
        return b"".join([part async for part in body])


async def frames_of(world: StreamWorld, name: str, offset: str = "-1") -> list[Frame]:
    """Return all frames of a closed stream."""
    answer = await world.ask("GET", name, query=f"?offset={offset}&live=frames")
    assert answer.header("content-type") == FRAMES_TYPE
    return [decode(raw)[1] for raw in Splitter().feed(await rest_of(body_of(answer)))]


async def test_a_long_poll_answers_with_what_is_appended(tmp_path: Path) -> None:
    async with streams_at(tmp_path, settings=PATIENT) as world:
        await world.put("a", b"old")
        poll = asyncio.create_task(world.ask("GET", "a", query="?offset=now&live=long-poll"))
        await world.status("a")  # the poll waits outside: others go on
        await world.post("a", b"new")
        answer = await poll
        assert (answer.status, answer.body) == (200, b"new")
        assert answer.header("stream-up-to-date") == "true"
        assert (answer.header("stream-cursor") or "").isdigit()


async def test_a_long_poll_ends_with_the_stream(tmp_path: Path) -> None:
    async with streams_at(tmp_path, settings=PATIENT) as world:
        await world.put("a", b"old")
        poll = asyncio.create_task(world.ask("GET", "a", query="?offset=now&live=long-poll"))
        await world.status("a")
        await world.ask("POST", "a", stream_closed="true")
        answer = await poll
        assert (answer.status, answer.header("stream-closed")) == (204, "true")
        again = await world.ask("GET", "a", query="?offset=now&live=long-poll")
        assert (again.status, again.header("stream-closed")) == (204, "true")


async def test_a_long_poll_on_a_deleted_stream_finds_nothing(tmp_path: Path) -> None:
    async with streams_at(tmp_path, settings=PATIENT) as world:
        await world.put("a", b"old")
        poll = asyncio.create_task(world.ask("GET", "a", query="?offset=now&live=long-poll"))
        await world.status("a")
        await world.ask("DELETE", "a")
        await world.put("a", b"another")
        assert (await poll).status == 404


async def test_a_long_poll_in_vain_says_where_to_go_on(tmp_path: Path) -> None:
    async with streams_at(tmp_path) as world:
        made = await world.put("a", b"old")
        answer = await world.ask("GET", "a", query="?offset=now&live=long-poll&cursor=99999999")
        assert answer.status == 204
        assert answer.header("stream-next-offset") == made.header("stream-next-offset")
        assert answer.header("cache-control") == "no-store"
        assert int(answer.header("stream-cursor") or "") > 99999999


async def test_an_event_stream_shows_what_is_there_what_comes_and_the_end(tmp_path: Path) -> None:
    async with streams_at(tmp_path, settings=PATIENT) as world:
        await world.put("a", b"one")
        body = body_of(await world.ask("GET", "a", query="?offset=-1&live=sse"))
        first = await anext(body)
        assert first.startswith(b"event: data\ndata:one\n\nevent: control\ndata:{")
        assert b'"upToDate":true' in first
        await world.post("a", b"two", stream_closed="true")
        rest = await rest_of(body)
        assert rest.startswith(b"event: data\ndata:two\n\nevent: control\n")
        assert rest.count(b"event: control") == 1 and b'"streamClosed":true' in rest


async def test_an_event_stream_that_shows_nothing_says_so_first(tmp_path: Path) -> None:
    async with streams_at(tmp_path, settings=PATIENT) as world:
        made = await world.put("a", b"one")
        body = body_of(await world.ask("GET", "a", query="?offset=now&live=sse"))
        first = await anext(body)
        assert b"event: data" not in first and b'"upToDate":true' in first
        assert (made.header("stream-next-offset") or "?").encode() in first
        await world.ask("DELETE", "a")
        assert await rest_of(body) == b""


async def test_an_event_stream_ends_in_time(tmp_path: Path) -> None:
    async with streams_at(tmp_path, settings=StreamSettings(sse_s=0.0)) as world:
        await world.put("a", b"\xff", content_type="image/png")
        answer = await world.ask("GET", "a", query="?offset=-1&live=sse")
        assert answer.header("stream-sse-data-encoding") == "base64"
        assert (await rest_of(body_of(answer))).startswith(b"event: data\ndata:/w==\n\n")


async def test_a_silent_body_shows_that_it_lives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tailrace.origin.streams.read.SILENCE_S", 0.0)
    async with streams_at(tmp_path, settings=PATIENT) as world:
        await world.put("a")
        events = body_of(await world.ask("GET", "a", query="?offset=-1&live=sse"))
        assert (await anext(events)).startswith(b"event: control\n")
        assert await anext(events) == SILENCE
        frames = body_of(await world.ask("GET", "a", query="?offset=-1&live=frames"))
        assert decode(await anext(frames)) == (0, Heartbeat(world.clock.now, True, (), ()))
        await world.post("a", b"x", stream_closed="true")
        assert b"data:x\n" in await rest_of(events)
        assert await rest_of(frames) != b""


async def test_a_reader_that_goes_is_not_watched_for(tmp_path: Path) -> None:
    async with streams_at(tmp_path, settings=PATIENT) as world:
        await world.put("a", b"one")
        answers = [
            await world.ask("GET", "a", query=f"?offset=now&live={live}")
            for live in ("sse", "frames")
        ]
        for answer in answers:
            body = body_of(answer)
            waiting = asyncio.ensure_future(anext(body))
            await asyncio.sleep(0)
            waiting.cancel()
            await asyncio.wait([waiting])
            await body.aclose()  # type: ignore[attr-defined]
        (tail,) = world.ledger._residents.tails.values()
        assert not tail.watchers


async def test_frames_are_the_ledgers_own_up_to_the_end(tmp_path: Path) -> None:
    async with streams_at(tmp_path, settings=PATIENT) as world:
        await world.put("a", b"one")
        body = body_of(await world.ask("GET", "a", query="?offset=-1&live=frames"))
        first = await anext(body)
        assert decode(first) == (0, Chunk(b"one", True, 0))
        await world.post("a", b"two", stream_closed="true")
        rest = [decode(raw)[1] for raw in Splitter().feed(await rest_of(body))]
        assert rest == [Chunk(b"two", True, 1), StreamEnd(0, FinishReason.STOP, 2, 0)]
        assert await frames_of(world, "a", f"{2:016d}_{0:016d}") == rest[1:]


async def test_frames_of_a_fork_are_numbered_through(tmp_path: Path) -> None:
    async with streams_at(tmp_path, settings=PATIENT) as world:
        await world.put("s", b"one", stream_closed="true")
        await world.ask("PUT", "f", stream_forked_from="/v1/stream/s")
        await world.ask("PUT", "g", stream_forked_from="/v1/stream/f")
        await world.post("g", b"two", stream_closed="true")
        assert await frames_of(world, "g") == [
            Chunk(b"one", True, 0),
            Chunk(b"two", True, 1),
            StreamEnd(0, FinishReason.STOP, 2, 0),
        ]


async def test_frames_begin_where_a_frame_begins(tmp_path: Path) -> None:
    async with streams_at(tmp_path) as world:
        await world.put("a", b"one")
        for offset in (f"{0:016d}_{1:016d}", f"{2:016d}_{0:016d}"):
            answer = await world.ask("GET", "a", query=f"?offset={offset}&live=frames")
            assert answer.status == 400
        assert (await world.ask("GET", "a", query=f"?offset={ZERO}&live=frames")).status == 200
