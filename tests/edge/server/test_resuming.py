"""The invariant of PROTOCOL.md in every dialect: a prefix and the resume after it are the whole.

For every index k, the items up to k and the items of a resume after k are together all items of the
stream, each exactly once: as events, frames, lines, chunks of OpenAI's APIs, and over a WebSocket.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, NamedTuple

import httpx
import pytest
from wsproto.events import BytesMessage

from tailrace.ledger.frame import (
    CLOSING,
    Answer,
    Body,
    BodyEnd,
    FinishReason,
    Frame,
    Logged,
    Notice,
    Opened,
    Reasoning,
    Resume,
    Revision,
    Score,
    ScoredToken,
    Snapshot,
    Splitter,
    StreamEnd,
    Token,
    TokenScores,
    ToolCall,
    decode,
    encode,
    split,
)
from tailrace.ledger.stream_text import StreamText
from tests.edge.scripted_origin import STREAM, ScriptedOrigin
from tests.edge.server.serving import Served, serving
from tests.edge.server.test_websocket import Peer

pytestmark = pytest.mark.anyio

ID = STREAM.hex()


def stream() -> list[Logged]:
    """Return a stream with every kind of frame that a generation has."""
    scores = (TokenScores(Score(7, b" s", -0.5)),)
    made: list[Callable[[int], Logged]] = [
        lambda at: Notice("loading", "1 s", at),
        lambda at: Reasoning("hm", at),
        lambda at: Reasoning(" so", at),
        lambda at: Token("One", at),
        lambda at: Token(' "two"', at),
        lambda at: ScoredToken(" s", scores, at),
        lambda at: Revision(6, " wrong", False, at),
        lambda at: Revision(6, " right", True, at),
        lambda at: Token("\n€", at),
        lambda at: Notice("inexact", "another engine", at),
        lambda at: Token(" last", at),
        lambda at: ToolCall(0, "call_1", "add", '{"a"', at),
        lambda at: ToolCall(0, "", "", ": 1}", at),
    ]
    frames = [make(at) for at, make in enumerate(made)]
    return [*frames, StreamEnd(9, FinishReason.STOP, len(frames), 3)]


FRAMES = stream()
LAST = len(FRAMES) - 1


class Place(NamedTuple):
    """An edge, a client of it, and the origin behind it."""

    served: Served
    client: httpx.AsyncClient
    origin: ScriptedOrigin


@pytest.fixture(scope="module")
async def place() -> AsyncIterator[Place]:
    origin = ScriptedOrigin(0)
    origin.frames, origin.released = FRAMES, len(FRAMES)
    async with (
        origin.listening(),
        serving(origin) as served,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{served.port}") as client,
    ):
        yield Place(served, client, origin)


class Item(NamedTuple):
    """One piece of a body: the index `at` to resume after, and the piece itself."""

    at: int
    value: object


Items = list[Item]
Read = Callable[[Place, dict[str, Any]], Awaitable[Items]]


async def body(place: Place, path: str, accept: str, params: dict[str, Any]) -> bytes:
    got = await place.client.get(path, headers={"Accept": accept}, params=params)
    assert got.status_code in (200, 204), got.text
    return got.content


def of_events(data: bytes) -> Items:
    found = Items()
    for block in data.decode().split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.splitlines())
        if "data" in fields and fields["data"] != "[DONE]":
            number = json.loads(fields["data"]).get("sequence_number", fields.get("id"))
            if number is not None:
                found.append(Item(int(number), block))
    return found


async def events(place: Place, params: dict[str, Any]) -> Items:
    return of_events(await body(place, f"/v1/generate/{ID}", "text/event-stream", params))


async def lines(place: Place, params: dict[str, Any]) -> Items:
    data = await body(place, f"/v1/generate/{ID}", "application/x-ndjson", params)
    return [Item(json.loads(line)["index"], line) for line in data.splitlines()]


async def frames(place: Place, params: dict[str, Any]) -> Items:
    data = await body(place, f"/v1/generate/{ID}", "application/vnd.tailrace.frames", params)
    return of_frames([decode(raw)[1] for raw in Splitter().feed(data)])


def of_frames(found: list[Frame]) -> Items:
    return [Item(one.index, one) for one in found if isinstance(one, Logged | Snapshot)]


async def socket(place: Place, params: dict[str, Any]) -> Items:
    resume = Resume(STREAM, credit=1000, **params | {"snapshot": "snapshot" in params})
    async with Peer.connected(place.served) as peer:
        await peer.send(BytesMessage(encode(resume, 5)))
        found = list[Frame]()
        while not found or found[-1].tag not in CLOSING:
            found += [frame for corr, frame in await peer.frames(1) if corr == 5]
    assert isinstance(found[0], Opened)
    return of_frames(found)


def chunks(path: str) -> Read:
    async def read(place: Place, params: dict[str, Any]) -> Items:
        wanted: dict[str, Any] = {"stream": "true"}
        if "after" in params:
            wanted["starting_after"] = params["after"]
        return of_events(await body(place, path, "text/event-stream", wanted))

    return read


DIALECTS: dict[str, Read] = {
    "events": events,
    "lines": lines,
    "frames": frames,
    "websocket": socket,
    "chat completions": chunks(f"/v1/chat/completions/chatcmpl-{ID}"),
    "completions": chunks(f"/v1/completions/cmpl-{ID}"),
    "responses": chunks(f"/v1/responses/resp_{ID}"),
    "messages": chunks(f"/v1/messages/msg_{ID}"),
}


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_what_a_reader_has_and_what_it_resumes_are_the_whole(
    place: Place, dialect: str
) -> None:
    read = DIALECTS[dialect]
    whole = await read(place, {})
    assert len(whole) >= 8
    for have in range(whole[-1].at + 1):
        prefix = [item for item in whole if item.at <= have]
        assert prefix + await read(place, {"after": have}) == whole, have


def text_of(items: Items, dialect: str) -> str:
    text = StreamText()
    for _, value in items:
        if isinstance(value, Snapshot):
            text.add(Token(value.text if not value.reasoning else "", value.index))
        elif isinstance(value, Frame):
            text.add(value)
    return text.text


@pytest.mark.parametrize("dialect", ["frames", "websocket"])
async def test_what_a_reader_has_and_a_snapshot_of_the_rest_are_the_whole(
    place: Place, dialect: str
) -> None:
    read = DIALECTS[dialect]
    whole = await read(place, {})
    for have in range(LAST + 1):
        prefix = [item for item in whole if item.at <= have]
        rest = await read(place, {"after": have, "snapshot": 1})
        assert text_of(prefix + rest, dialect) == text_of(whole, dialect), have
        position = have + 1
        for _, value in rest:
            first = value.first if isinstance(value, Snapshot) else position
            assert first == position, have
            position = value.index + 1 if isinstance(value, Snapshot | Logged) else position
        assert position == len(FRAMES)


@pytest.mark.parametrize("dialect", ["events", "lines", "frames", "websocket"])
async def test_a_reader_that_is_cut_behind_a_snapshot_resumes_like_any_other(
    place: Place, dialect: str
) -> None:
    read = DIALECTS[dialect]
    whole, snapshot = await read(place, {}), await read(place, {"snapshot": 1})
    for item in snapshot:
        rest = await read(place, {"after": item.at})
        assert rest == [each for each in whole if each.at > item.at]


@pytest.mark.parametrize("dialect", ["events", "lines", "frames", "websocket"])
async def test_a_tail_is_the_end_of_the_whole(place: Place, dialect: str) -> None:
    read = DIALECTS[dialect]
    whole = await read(place, {})
    for tail in range(1, len(FRAMES) + 3):
        assert await read(place, {"tail": tail}) == whole[-tail:]


@pytest.mark.parametrize("dialect", ["events", "lines", "frames", "websocket"])
async def test_every_time_has_its_frames(place: Place, dialect: str) -> None:
    read, name = DIALECTS[dialect], "since_ms" if dialect == "websocket" else "since"
    place.origin.times_ms = [1_764_322_200_000 + 10 * at for at in range(len(FRAMES))]
    whole = await read(place, {})
    for at, at_ms in enumerate(place.origin.times_ms):
        assert await read(place, {name: at_ms}) == whole[at:]
        assert await read(place, {name: at_ms + 1}) == whole[at + 1 :]


async def parts_of(place: Place, params: dict[str, Any], most: int | None = None) -> list[str]:
    """Return the first `most` events of the AI SDK's chat, or all of them, from its start."""
    found, left = list[str](), ""
    path = "/api/chat/one/stream"
    async with place.client.stream("GET", path, params=params) as response:
        assert response.status_code == 200
        async for text in response.aiter_text():
            *blocks, left = (left + text).split("\n\n")
            found += blocks
            if most is not None and len(found) >= most:
                return found[:most]
    assert (left, found[-1]) == ("", "data: [DONE]")
    return found


def message_of(parts: list[str]) -> dict[str, str]:
    """Return what a page shows of a message: each kind of content, put together."""
    shown: dict[str, str] = {}
    for part in parts[:-1]:
        fields = json.loads(part.removeprefix("data: "))
        kind = fields["type"]
        if kind == "data-revised":
            shown["text-delta"] = fields["data"]["text"]
        elif kind.endswith("-delta"):
            content = fields.get("delta", fields.get("inputTextDelta"))
            shown[kind] = shown.get(kind, "") + content
    return shown


async def test_a_chat_of_the_ai_sdk_comes_again_as_a_page_has_it(place: Place) -> None:
    """A chat has no index: it comes again from its start, with the same events."""
    chat = json.dumps({"turns": [{"stream": ID}]}).encode()
    place.origin.answers = [Answer(200, ()), Body(chat), BodyEnd()]
    whole = await parts_of(place, {})
    assert len(whole) >= 8
    for have in range(1, len(whole) + 1):
        assert await parts_of(place, {}, most=have) == whole[:have]
    assert await parts_of(place, {}) == whole
    snapshot = await parts_of(place, {"snapshot": 1})
    assert len(snapshot) < len(whole)
    assert message_of(snapshot) == message_of(whole)


async def test_a_document_has_the_text_behind_the_index(place: Place) -> None:
    text = [one.text for one in FRAMES if isinstance(one, Token | ScoredToken)]
    assert len(text) == 5
    for have in range(7, LAST + 1):  # a Revision reaches back no further
        got = await place.client.get(f"/v1/generate/{ID}", params={"after": have})
        behind = [one for one in FRAMES[have + 1 :] if isinstance(one, Token)]
        assert got.json()["text"] == "".join(one.text for one in behind)


def test_the_stream_has_every_kind_of_frame_that_merges() -> None:
    kinds = {type(frame) for frame in FRAMES}
    assert {Token, ScoredToken, Revision, Reasoning, Notice, ToolCall, StreamEnd} <= kinds
    assert split(encode(FRAMES[-1]))
