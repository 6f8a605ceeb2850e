"""Readers that come late and ask for a snapshot or a tail, over a real link to an origin."""

from __future__ import annotations

from collections.abc import AsyncIterator

import httpx
import pytest

from tailrace.edge.application import create_app
from tailrace.edge.config import EdgeConfig
from tailrace.ledger.frame import (
    FRAMES_TYPE,
    Frame,
    Logged,
    Snapshot,
    Splitter,
    Status,
    StreamEnd,
    Token,
    decode,
)
from tests.edge.scripted_origin import STREAM, ScriptedOrigin

pytestmark = pytest.mark.anyio

WORDS = 300
WHOLE = "".join(f" w{n}" for n in range(WORDS))
URL = f"/v1/generate/{STREAM.hex()}"
FRAMES = {"Accept": FRAMES_TYPE}


@pytest.fixture
async def client() -> AsyncIterator[httpx.AsyncClient]:
    config = EdgeConfig(http=("127.0.0.1:0",), trusted_proxies=("127.0.0.1",))
    origin = ScriptedOrigin(WORDS)
    origin.times_ms = [1764322200000 + index for index in range(WORDS + 1)]
    async with origin.serving() as link:
        transport = httpx.ASGITransport(create_app(link, config), raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://edge") as client:
            yield client


async def frames(client: httpx.AsyncClient, **params: int | str) -> list[Frame]:
    got = await client.get(URL, headers=FRAMES, params=params)
    assert got.status_code == 200, got.text
    return [decode(raw)[1] for raw in Splitter().feed(got.content)]


async def test_a_snapshot_is_one_frame_and_the_end(client: httpx.AsyncClient) -> None:
    snapshot, end = await frames(client, snapshot=1)
    assert snapshot == Snapshot(0, WHOLE, WORDS - 1)
    assert isinstance(end, StreamEnd)


@pytest.mark.parametrize("have", [*range(0, WORDS, 37), WORDS - 1])
async def test_what_a_reader_has_and_the_snapshot_of_the_rest_are_the_whole(
    client: httpx.AsyncClient, have: int
) -> None:
    before = [one for one in await frames(client) if isinstance(one, Token)][: have + 1]
    rest, _ = [*await frames(client, after=have, snapshot=1), None][:2]
    text = "".join(one.text for one in before)
    assert text + (rest.text if isinstance(rest, Snapshot) else "") == WHOLE
    assert not isinstance(rest, Snapshot) or rest.first == have + 1


async def test_events_begin_with_a_snapshot(client: httpx.AsyncClient) -> None:
    got = await client.get(f"{URL}?snapshot=1", headers={"Accept": "text/event-stream"})
    blocks = got.text.strip().split("\n\n")
    assert [block.split("\n")[0] for block in blocks[1:]] == [f"id: {WORDS - 1}", f"id: {WORDS}"]
    assert blocks[1].split("\n")[1] == "event: snapshot"


@pytest.mark.parametrize(("tail", "first"), [(1, WORDS), (10, WORDS - 9), (10_000, 0)])
async def test_a_tail_is_the_newest_frames(
    client: httpx.AsyncClient, tail: int, first: int
) -> None:
    got = await frames(client, tail=tail)
    assert all(isinstance(one, Logged) for one in got)
    assert [one.index for one in got if isinstance(one, Logged)] == [*range(first, WORDS + 1)]


async def test_a_tail_can_be_a_snapshot(client: httpx.AsyncClient) -> None:
    snapshot, _ = await frames(client, tail=3, snapshot=1)
    assert snapshot == Snapshot(WORDS - 2, f" w{WORDS - 2} w{WORDS - 1}", WORDS - 1)


@pytest.mark.parametrize(
    ("since", "first"),
    [
        ("1764322200100", 100),
        ("2025-11-28T09:30:00.1Z", 100),
        ("2025-11-28t09:30:00.100z", 100),
        ("2025-11-28T10:30:00.100+01:00", 100),
        ("2025-11-28T10:30:00.100 01:00", 100),
        ("2020-01-01T00:00:00Z", 0),
    ],
)
async def test_frames_since_a_time(client: httpx.AsyncClient, since: str, first: int) -> None:
    got = await frames(client, since=since)
    assert [one.index for one in got if isinstance(one, Logged)] == [*range(first, WORDS + 1)]
    snapshot, end = await frames(client, since=since, snapshot=1)
    assert isinstance(snapshot, Snapshot)
    assert (snapshot.first, snapshot.index) == (first, WORDS - 1)
    assert isinstance(end, StreamEnd)


async def test_nothing_since_the_end_of_a_stream_is_no_content(client: httpx.AsyncClient) -> None:
    got = await client.get(f"{URL}?since=2026-01-01T00:00:00Z", headers=FRAMES)
    assert got.status_code == 204


async def test_a_document_has_the_text_of_the_tail(client: httpx.AsyncClient) -> None:
    got = await client.get(f"{URL}?tail=2&snapshot=1")
    assert got.json()["text"] == f" w{WORDS - 1}"


@pytest.mark.parametrize(
    ("query", "field"),
    [
        ("tail=3&after=4", "tail"),
        ("since=1764322200100&after=4", "since"),
        ("since=1764322200100&tail=4", "tail"),
        ("tail=0", "tail"),
        ("since=", "since"),
        ("since=1764322200", "since"),
        ("since=yesterday", "since"),
        ("since=2025-11-28", "since"),
        ("since=2025-11-28T09:30:00", "since"),
        ("since=2025-13-28T09:30:00Z", "since"),
        ("since=1764322200100&since=1764322200101", "since"),
        ("tail=-1", "tail"),
        ("tail=", "tail"),
        ("tail=1&tail=2", "tail"),
        ("snapshot=yes", "snapshot"),
        ("snapshot=1&snapshot=0", "snapshot"),
    ],
)
async def test_what_makes_no_sense_is_refused(
    client: httpx.AsyncClient, query: str, field: str
) -> None:
    got = await client.get(f"{URL}?{query}", headers=FRAMES)
    assert got.status_code == 400
    assert got.json()["error"]["field"] == field


async def test_a_status_is_not_folded(client: httpx.AsyncClient) -> None:
    got = await frames(client, after=WORDS - 1, snapshot=1)
    assert not any(isinstance(one, Snapshot | Status) for one in got)
