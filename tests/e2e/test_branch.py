"""Branches through real processes: exact up to the index, and streams like any other after it."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from websockets.asyncio.client import connect

from tailrace.ledger.frame import (
    FRAMES_TYPE,
    SCHEMA_HASH,
    Cancel,
    Hello,
    Logged,
    Splitter,
    Status,
    Token,
    decode,
    encode,
    split,
)
from tests.e2e.conftest import HeldHouse, House
from tests.e2e.sse import SSE, Reading, events, resume, start

pytestmark = pytest.mark.anyio

TOKENS = 60
REQUEST = {
    "model": "demo",
    "prompt": "Once upon a time",
    "max_tokens": TOKENS,
    "temperature": 0.8,
    "seed": 7,
    "ignore_eos": True,
}


async def branch(
    client: httpx.AsyncClient,
    url: str,
    parent: Reading,
    body: dict[str, Any],
    stop_after: int | None = None,
    headers: dict[str, str] | None = None,
) -> Reading:
    reading = Reading()
    target = f"{url}/v1/generate/{parent.stream}/branch"
    more = {**SSE, "Tailrace-Token": parent.token, **(headers or {})}
    async with client.stream("POST", target, json=body, headers=more) as response:
        assert response.status_code == 200, await response.aread()
        reading.stream = response.headers["Tailrace-Stream"]
        reading.token = response.headers["Tailrace-Token"]
        async for event in events(response):
            reading.events.append(event)
            if len(reading.events) == stop_after:
                break
    return reading


async def frames(client: httpx.AsyncClient, url: str, reading: Reading) -> list[Logged]:
    """Return all logged frames of a stream."""
    target = f"{url}/v1/generate/{reading.stream}"
    response = await client.get(target, headers={"Accept": FRAMES_TYPE})
    found = [decode(raw)[1] for raw in Splitter().feed(response.content)]
    return [frame for frame in found if isinstance(frame, Logged)]


async def forget(url: str, reading: Reading) -> None:
    """Delete a stream from the ledger."""
    wanted = Cancel(bytes.fromhex(reading.stream), reading.token, forget=True)
    async with connect(url.replace("http", "ws", 1) + "/v1/ws", compression=None) as socket:
        await socket.send(encode(Hello(SCHEMA_HASH, "test")) + encode(wanted, 1))
        async for message in socket:
            assert isinstance(message, bytes)
            if any(isinstance(decode(raw)[1], Status) for raw in split(message)):
                return


async def test_a_branch_with_the_parents_seed_is_the_parent_from_every_index(
    standing_house: House, client: httpx.AsyncClient
) -> None:
    one, two = (edge.url for edge in standing_house.edges)
    whole = await start(client, one, REQUEST)
    parent = await frames(client, one, whole)
    for index in (0, 1, 17, len(whole.events) - 1):
        made = await branch(client, two, whole, {"index": index, "seed": 7})
        assert made.stream != whole.stream
        assert made.events == whole.events
        assert await frames(client, one, made) == parent


async def test_a_branch_with_another_seed_has_the_same_frames_and_then_others(
    standing_house: House, client: httpx.AsyncClient
) -> None:
    url = standing_house.edges[0].url
    whole = await start(client, url, REQUEST)
    made = await branch(client, url, whole, {"index": 20, "seed": 8, "temperature": 1.5})
    parent, own = await frames(client, url, whole), await frames(client, url, made)
    assert own[:20] == parent[:20]
    assert own[20:] != parent[20:]
    assert made.indexes == list(range(len(made.events)))
    assert made.end["total_tokens"] == TOKENS
    # A branch of the branch, within what it shares and beyond.
    for index in (10, 30):
        again = await branch(client, url, made, {"index": index, "seed": 9})
        assert (await frames(client, url, again))[:index] == own[:index]


async def test_text_of_a_branch_is_added_as_if_the_model_had_written_it(
    standing_house: House, client: httpx.AsyncClient
) -> None:
    url = standing_house.edges[0].url
    whole = await start(client, url, REQUEST)
    body = {"index": 20, "text": " But then a dragon came.", "seed": 7}
    made = await branch(client, url, whole, body)
    parent, own = await frames(client, url, whole), await frames(client, url, made)
    assert own[:20] == parent[:20]
    shared = "".join(frame.text for frame in own[:20] if isinstance(frame, Token))
    assert isinstance(own[20], Token)
    assert made.text.startswith(shared)
    assert own[20].text.endswith(" But then a dragon came.")
    assert made.end["total_tokens"] == TOKENS
    assert (await branch(client, url, whole, body)).events == made.events


async def test_an_instruction_follows_the_shared_frames_as_the_users_message(
    standing_house: House, client: httpx.AsyncClient
) -> None:
    url = standing_house.edges[0].url
    chat = {name: REQUEST[name] for name in REQUEST if name != "prompt"}
    chat["messages"] = [{"role": "user", "content": "Tell me a story."}]
    whole = await start(client, url, chat)
    body = {"index": 10, "instruction": "Another one, please.", "max_tokens": 30, "seed": 5}
    made = await branch(client, url, whole, body)
    parent, own = await frames(client, url, whole), await frames(client, url, made)
    assert own[:10] == parent[:10]
    assert made.end["total_tokens"] == 30
    assert made.end["prompt_tokens"] > whole.end["prompt_tokens"] + 10
    assert made.indexes == list(range(len(made.events)))
    assert (await branch(client, url, whole, body)).events == made.events
    # It is branched after its instruction, and not before.
    again = await branch(client, url, made, {"index": 15, "seed": 5})
    assert again.events == made.events
    target = f"{url}/v1/generate/{made.stream}/branch"
    before = await client.post(target, json={"index": 9})
    assert (before.status_code, before.json()["error"]["code"]) == (409, "cannot_branch")


async def test_a_reader_of_a_branch_may_be_cut_at_every_event(
    standing_house: House, client: httpx.AsyncClient
) -> None:
    one, two = (edge.url for edge in standing_house.edges)
    whole = await start(client, one, REQUEST | {"max_tokens": 12})
    body = {"index": 6, "seed": 3}
    made = await branch(client, one, whole, body)
    for cut in range(1, len(made.events)):
        again = await branch(client, one, whole, body, stop_after=cut)
        await resume(client, two, again)
        assert again.events == made.events
    target = f"{one}/v1/generate/{made.stream}"
    async with client.stream("GET", f"{target}?tail=3", headers=SSE) as response:
        newest = [event async for event in events(response)]
    assert newest == made.events[-3:]
    async with client.stream("GET", f"{target}?snapshot=1", headers=SSE) as response:
        shown = [event async for event in events(response)]
    assert shown[0].name == "snapshot"
    assert shown[0].data["text"] == made.text
    document = (await client.get(target)).json()
    assert (document["state"], document["text"]) == ("ended", made.text)


async def test_a_branch_outlives_its_parent(
    standing_house: House, client: httpx.AsyncClient
) -> None:
    url = standing_house.edges[0].url
    whole = await start(client, url, REQUEST)
    made = await branch(client, url, whole, {"index": 40, "seed": 7})
    await forget(url, whole)
    gone = await client.get(f"{url}/v1/generate/{whole.stream}")
    assert gone.status_code == 404
    refused = await client.post(f"{url}/v1/generate/{whole.stream}/branch", json={"index": 1})
    assert (refused.status_code, refused.json()["error"]["code"]) == (404, "unknown_stream")
    assert (await resume(client, url, Reading(made.stream))).events == whole.events


async def test_an_idempotency_key_finds_the_branch_again(
    standing_house: House, client: httpx.AsyncClient
) -> None:
    url = standing_house.edges[0].url
    whole = await start(client, url, REQUEST)
    key = {"Idempotency-Key": f"branch of {whole.stream}"}
    body = {"index": 5, "temperature": 1.0}
    first = await branch(client, url, whole, body, headers=key)
    second = await branch(client, url, whole, body, headers=key)
    assert (first.stream, first.events) == (second.stream, second.events)
    target = f"{url}/v1/generate/{whole.stream}/branch"
    other = await client.post(target, json={"index": 6}, headers=key)
    assert (other.status_code, other.json()["error"]["field"]) == (409, "idempotency_key")


async def test_what_cannot_be_branched_is_refused_by_name(
    standing_house: House, client: httpx.AsyncClient
) -> None:
    url = standing_house.edges[0].url
    whole = await start(client, url, REQUEST)
    last = len(whole.events) - 1
    target = f"{url}/v1/generate/{whole.stream}/branch"
    cases: list[tuple[dict[str, Any], int, str, str]] = [
        ({}, 400, "invalid_request", "index"),
        ({"index": -1}, 400, "invalid_request", "index"),
        ({"index": last + 1}, 416, "beyond_end", "index"),
        ({"index": 3, "prompt": "x"}, 400, "unknown_field", "prompt"),
        ({"index": 3, "text": ""}, 400, "invalid_request", "text"),
        ({"index": 3, "text": "a", "instruction": "b"}, 400, "invalid_request", "instruction"),
        ({"index": 3, "instruction": "Shorter!"}, 409, "unsupported", "instruction"),
        ({"index": 30, "max_tokens": 30}, 400, "invalid_request", "max_tokens"),
        ({"index": 3, "temperature": 9}, 400, "invalid_request", "temperature"),
    ]
    for body, status, code, field in cases:
        answer = await client.post(target, json=body)
        error = answer.json()["error"]
        assert (answer.status_code, error["field"]) == (status, field), (body, error)
        assert error["code"] == code, (body, error)
        assert error["message"], body
    for stream, status in (("0" * 32, 404), ("nonsense", 404)):
        answer = await client.post(f"{url}/v1/generate/{stream}/branch", json={"index": 0})
        assert (answer.status_code, answer.json()["error"]["code"]) == (status, "unknown_stream")


async def test_a_worker_killed_under_a_branch_gives_the_same_branch(
    house: HeldHouse, client: httpx.AsyncClient
) -> None:
    url = house.edges[0].url
    whole = await start(client, url, REQUEST)
    body = {"index": 20, "text": " But then a dragon came.", "seed": 7}
    made = await branch(client, url, whole, body)
    for nth, cut in enumerate((21, 30)):
        house.origin.hold_behind(made, cut)
        again = await branch(client, url, whole, body, stop_after=cut)
        await house.origin.kill_worker()
        house.origin.go_on()
        await house.origin.saw("worker.ready", 2 + nth)
        await resume(client, url, again)
        assert again.events == made.events


async def test_a_running_stream_can_be_branched(
    house: HeldHouse, client: httpx.AsyncClient
) -> None:
    url = house.edges[0].url
    whole = await start(client, url, REQUEST)
    house.origin.hold_behind(whole, 10)
    parent = await start(client, url, REQUEST, stop_after=10)
    target = f"{url}/v1/generate/{parent.stream}/branch"
    beyond = await client.post(target, json={"index": TOKENS})
    assert (beyond.status_code, beyond.json()["error"]["code"]) == (416, "beyond_end")
    made = await branch(client, url, parent, {"index": 8, "seed": 7}, stop_after=8)
    house.origin.go_on()
    await resume(client, url, parent)
    await resume(client, url, made)
    assert made.events == parent.events == whole.events
