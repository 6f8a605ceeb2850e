"""A stream is one log: read in any view, from any index, by several, at any pace."""

from __future__ import annotations

import asyncio
import json
import socket
from urllib.parse import urlsplit
from uuid import uuid4

import httpx
import pytest

from tailrace.edge import sse
from tailrace.edge.generate.json_lines import line
from tailrace.ledger.frame import (
    LOGGED,
    SCHEMA_HASH,
    Snapshot,
    StreamEnd,
    Token,
    decode,
    encode,
    split,
    tag_of,
)
from tests.e2e.multiplex import Stream, connected
from tests.e2e.sse import SSE, TIMEOUT, Reading, after_retry, events, resume, retry_ms, start
from tests.runtimes.conftest import Scripts
from tests.runtimes.runtime import Runtime

pytestmark = pytest.mark.anyio

LINES = {"Accept": "application/jsonl"}
FRAMES = {"Accept": "application/vnd.tailrace.frames"}
SMALL_BUFFER_BYTES = 4096
PADDING = 4000
MANY = 3_000
"""Number of frames, of PADDING bytes each: more than all buffers on the way take."""


def frames_of(body: bytes) -> list[Token | StreamEnd]:
    return [frame for _, frame in map(decode, split(body)) if isinstance(frame, Token | StreamEnd)]


async def test_a_post_that_is_repeated_reads_the_same_stream_in_every_view(
    client: httpx.AsyncClient, script: Scripts
) -> None:
    told = script(12)
    key = {"Idempotency-Key": uuid4().hex}
    answers = [
        await client.post("/v1/generate", json=told.body, headers=key | view)
        for view in (SSE, FRAMES, {"Accept": "application/json"})
    ]
    as_events, as_frames, as_json = answers
    assert len({answer.headers["Tailrace-Stream"] for answer in answers}) == 1
    shown = [event async for event in events(as_events)]
    assert [event.id for event in shown] == list(range(13))
    assert [event.data["text"] for event in shown[:-1]] == told.texts
    *tokens, end = frames_of(as_frames.content)
    assert [token.text for token in tokens if isinstance(token, Token)] == told.texts
    assert isinstance(end, StreamEnd)
    assert end.index == 12
    document = as_json.json()
    assert (document["text"], document["finish_reason"]) == (told.text, "stop")
    assert shown[-1].data["finish_reason"] == "stop"


async def test_each_answer_says_another_time_after_which_an_event_source_comes_back(
    client: httpx.AsyncClient, script: Scripts
) -> None:
    made = await client.post("/v1/generate", json=script(1).body, headers=SSE)
    path = f"/v1/generate/{made.headers['Tailrace-Stream']}"
    texts = [made.text] + [(await client.get(path, headers=SSE)).text for _ in range(7)]
    said = [retry_ms(text) for text in texts]
    assert all(sse.MIN_RETRY_MS <= ms <= sse.MAX_RETRY_MS for ms in said)
    assert len(set(said)) > 1
    assert len({after_retry(text) for text in texts}) == 1


async def test_every_kind_of_frame_is_read_in_every_view_and_resumed(
    stage: Runtime, client: httpx.AsyncClient, script: Scripts
) -> None:
    """A call of a tool as well as a text: whatever the schema logs, each runtime passes on."""
    told = script(3, every_kind=True)
    whole = await client.post("/v1/generate", json=told.body, headers=FRAMES)
    frames = split(whole.content)
    assert {tag_of(raw) for raw in frames} == LOGGED
    assert whole.headers["Tailrace-Schema"] == SCHEMA_HASH.hex()
    stream = whole.headers["Tailrace-Stream"]
    path = f"/v1/generate/{stream}"
    for last in range(-1, len(frames) - 1):
        after = {} if last < 0 else {"after": last}
        rest = await client.get(path, params=after, headers=FRAMES)
        assert split(rest.content) == frames[last + 1 :]
        shown = await client.get(path, params=after, headers=SSE)
        expected = httpx.Response(200, content=sse.events(frames[last + 1 :]))
        assert [e async for e in events(shown)] == [e async for e in events(expected)]
        told_lines = await client.get(path, params=after, headers=LINES)
        assert told_lines.headers["Content-Type"] == "application/jsonl"
        lines = b"".join(map(line, frames[last + 1 :])).splitlines()
        assert [json.loads(each) for each in told_lines.text.splitlines()] == [
            json.loads(each) for each in lines
        ]
    document = (await client.get(path)).json()
    assert [call["name"] for call in document["tool_calls"]] == ["weather", "time"]
    read = Stream(bytes.fromhex(stream), whole.headers["Tailrace-Token"])
    async with connected(stage.url, [read]) as socket_client:
        await socket_client.resume(len(frames))
        await socket_client.drain()
    assert [encode(frame) for frame in read.frames] == frames


async def test_every_index_is_a_place_to_go_on_from(
    client: httpx.AsyncClient, script: Scripts
) -> None:
    told = script(16)
    whole = await start(client, "", told.body)
    path = f"/v1/generate/{whole.stream}"
    frames = frames_of((await client.get(path, headers=FRAMES)).content)
    assert [frame.index for frame in frames] == whole.indexes
    for last in whole.indexes[:-1]:
        rest = await resume(client, "", Reading(whole.stream, events=whole.events[: last + 1]))
        assert rest.events == whole.events
        answer = await client.get(path, params={"after": last}, headers=FRAMES)
        assert frames_of(answer.content) == frames[last + 1 :]


async def test_a_late_reader_gets_a_tail_a_time_or_a_snapshot(
    client: httpx.AsyncClient, script: Scripts
) -> None:
    told = script(16)
    whole = await start(client, "", told.body)
    path = f"/v1/generate/{whole.stream}"
    for tail in (1, 5, 16, 99):
        answer = await client.get(path, params={"tail": tail}, headers=SSE)
        assert [event async for event in events(answer)] == whole.events[-tail:]
    frames = (await client.get(path, headers=FRAMES)).content
    for params in ({"since": "2026-01-01T00:00:00Z"}, {"since": 1764322200000}, {"snapshot": 0}):
        assert (await client.get(path, params=params, headers=FRAMES)).content == frames
    answer = await client.get(path, params={"snapshot": 1}, headers=LINES)
    snapshot, end = [json.loads(text) for text in answer.text.splitlines()]
    assert (snapshot["type"], snapshot["text"]) == ("snapshot", told.text)
    assert (snapshot["first"], snapshot["index"]) == (0, whole.indexes[-2])
    assert end["index"] == whole.indexes[-1]


async def test_grouped_text_is_read_on_from_every_index(
    client: httpx.AsyncClient, script: Scripts
) -> None:
    """Whatever a reader has before a cut, the pieces of a resume are the rest."""
    told = script(16)
    chars = 3 * len(told.texts[0])
    body = told.body | {"group": {"by": "paragraph", "chars": chars}}
    group: dict[str, str | int] = {"group": "paragraph", "group_chars": chars}
    for view in (SSE, LINES, FRAMES):
        made = await client.post("/v1/generate", json=body, headers=view)
        path = f"/v1/generate/{made.headers['Tailrace-Stream']}"
        whole = _grouped(view, made.content)
        assert "".join(text for text, _ in whole) == told.text
        assert 1 < len(whole) < len(told.texts) / 2
        assert [_grouped(view, (await client.get(path, params=group, headers=view)).content)] == [
            whole
        ]
        for last in (*range(len(told.texts)), *(index for _, index in whole)):
            params = group | {"after": last}
            rest = _grouped(view, (await client.get(path, params=params, headers=view)).content)
            assert "".join(text for text, _ in rest) == "".join(told.texts[last + 1 :])


def _grouped(view: dict[str, str], body: bytes) -> list[tuple[str, int]]:
    """Return the text and the index of each piece in a body."""
    if view is FRAMES:
        frames = [frame for _, frame in map(decode, split(body))]
        return [(one.text, one.index) for one in frames if isinstance(one, Token | Snapshot)]
    lines = body.decode().splitlines()
    data = [json.loads(line.removeprefix("data: ")) for line in lines if "{" in line]
    return [(each["text"], each["index"]) for each in data if "text" in each]


async def test_a_branch_is_read_on_from_every_event(runtime: Runtime) -> None:
    body = {"model": "demo", "prompt": "Once", "max_tokens": 12, "seed": 1, "ignore_eos": True}
    async with httpx.AsyncClient(base_url=runtime.url, timeout=TIMEOUT) as client:
        whole = await start(client, "", body)
        target, wanted = f"/v1/generate/{whole.stream}/branch", {"index": 7, "seed": 1}
        for cut in whole.indexes:
            made = Reading()
            async with client.stream("POST", target, json=wanted, headers=SSE) as response:
                made.stream = response.headers["Tailrace-Stream"]
                async for event in events(response):
                    made.events.append(event)
                    if len(made.events) > cut:
                        break
            if cut < whole.indexes[-1]:
                await resume(client, "", made)
            assert made.stream != whole.stream
            assert made.events == whole.events


async def test_who_comes_later_reads_the_same_from_the_start_and_both_read_on(
    client: httpx.AsyncClient, script: Scripts
) -> None:
    told = script(40, hold=15)
    first, second = Reading(), Reading()

    async def read(reading: Reading, method: str, path: str, joined: asyncio.Event) -> None:
        body = told.body if method == "POST" else None
        async with client.stream(method, path, json=body, headers=SSE) as response:
            reading.stream = response.headers["Tailrace-Stream"]
            async for event in events(response):
                reading.events.append(event)
                if event.id == 14:
                    joined.set()

    async with asyncio.TaskGroup() as readers:
        begun, followed = asyncio.Event(), asyncio.Event()
        readers.create_task(read(first, "POST", "/v1/generate", begun))
        await begun.wait()
        readers.create_task(read(second, "GET", f"/v1/generate/{first.stream}", followed))
        await followed.wait()
        told.go_on()
    assert first.events == second.events
    assert (first.text, first.indexes) == (told.text, list(range(41)))


async def test_a_reader_that_stops_holds_up_nobody_and_loses_nothing(
    stage: Runtime, client: httpx.AsyncClient, script: Scripts
) -> None:
    told = script(MANY, padding=PADDING)
    async with client.stream("POST", "/v1/generate", json=told.body, headers=FRAMES) as quick:
        path = f"/v1/generate/{quick.headers['Tailrace-Stream']}"
        slow_reader, slow_writer = await connection_of_a_small_buffer(stage.url)
        head = f"GET {path} HTTP/1.1\r\nHost: localhost\r\nAccept: {FRAMES['Accept']}\r\n"
        slow_writer.write(f"{head}Connection: close\r\n\r\n".encode())
        quick_frames = frames_of(await quick.aread())
    rest = await slow_reader.read()
    slow_writer.close()
    assert rest.startswith(b"HTTP/1.1 200 ")
    slow_frames = frames_of(unchunked(rest.partition(b"\r\n\r\n")[2]))
    assert [frame.index for frame in slow_frames] == list(range(MANY + 1))
    assert slow_frames == quick_frames


async def connection_of_a_small_buffer(
    url: str,
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Connect with a receive buffer that takes little more than what is read from it."""
    made = socket.socket()
    made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SMALL_BUFFER_BYTES)
    made.setblocking(False)
    parts = urlsplit(url)
    await asyncio.get_running_loop().sock_connect(made, (parts.hostname, parts.port))
    return await asyncio.open_connection(sock=made, limit=SMALL_BUFFER_BYTES)


def unchunked(body: bytes) -> bytes:
    """Return a body in chunks (RFC 9112, 7.1), put together; one that breaks off fails."""
    parts: list[bytes] = []
    while True:
        size, _, body = body.partition(b"\r\n")
        if int(size, 16) == 0:
            return b"".join(parts)
        parts.append(body[: int(size, 16)])
        body = body[int(size, 16) + 2 :]
