"""Chats over real processes: followed on every device, resumed at any event, stopped from any."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import Any, NamedTuple
from uuid import uuid4

import httpx
import pytest
from typer.testing import CliRunner

from tailrace.cli import app
from tests.e2e.conftest import HeldHouse, House
from tests.e2e.held import HeldOrigin
from tests.e2e.processes import Edge, running
from tests.e2e.sse import SSE

pytestmark = pytest.mark.anyio

LINES = {"Accept": "application/x-ndjson"}
TOKENS = 6
BODY = {"model": "demo", "prompt": "Once", "max_tokens": TOKENS, "seed": 1, "ignore_eos": True}
ASKED = {"messages": [{"id": "u", "role": "user", "parts": [{"type": "text", "text": "Hi"}]}]}


class Event(NamedTuple):
    """An event of a chat; `id` is empty for one that is not numbered."""

    id: str
    name: str
    data: dict[str, Any]


async def follow(
    client: httpx.AsyncClient, url: str, chat: str, query: str = "", **headers: str
) -> AsyncGenerator[Event, None]:
    """Yield the events of a chat."""
    target = f"{url}/v1/chats/{chat}?{query}"
    async with client.stream("GET", target, headers=SSE | headers) as response:
        assert response.status_code == 200, await response.aread()
        fields: dict[str, str] = {}
        async for line in response.aiter_lines():
            name, _, value = line.partition(": ")
            if line:
                fields[name] = value
            elif "data" in fields:
                named = fields.get("event", "message")
                yield Event(fields.get("id", ""), named, json.loads(fields["data"]))
                fields = {}


async def numbered(
    client: httpx.AsyncClient, url: str, chat: str, last: str, query: str = "", **headers: str
) -> list[Event]:
    """Return the numbered events of a chat up to the one with the id `last`."""
    found = list[Event]()
    async with aclosing(follow(client, url, chat, query, **headers)) as reading:
        async for event in reading:
            found += [event] if event.id else []
            if event.id == last:
                return found
    raise AssertionError(f"the response ended before {last}: {found}")


async def turn_of(client: httpx.AsyncClient, url: str, chat: str, **more: Any) -> str:
    """Generate a turn of a chat; return the id of its stream."""
    answer = await client.post(f"{url}/v1/generate", json=BODY | {"chat": chat} | more)
    assert answer.status_code == 200, answer.text
    stream = answer.headers["Tailrace-Stream"]
    assert answer.json()["id"] == stream
    return stream


async def begin(client: httpx.AsyncClient, url: str, chat: str, **headers: str) -> str:
    """Begin a turn, which the origin holds, and leave it; return the id of its stream."""
    asked = BODY | {"chat": chat, "max_tokens": 400}
    target, headers = f"{url}/v1/generate", SSE | headers
    async with client.stream("POST", target, json=asked, headers=headers) as answer:
        assert answer.status_code == 200, await answer.aread()
        stream: str = answer.headers["Tailrace-Stream"]
    return stream


async def listed(client: httpx.AsyncClient, url: str, chat: str, query: str = "") -> dict[str, Any]:
    answer = await client.get(f"{url}/v1/chats/{chat}?{query}")
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


@pytest.fixture
def chat() -> str:
    return f"chat-{uuid4()}"


async def test_a_device_follows_the_turns_of_all_devices(
    standing_house: House, client: httpx.AsyncClient, chat: str
) -> None:
    one, two = (edge.url for edge in standing_house.edges)
    assert (await client.put(f"{one}/v1/chats/{chat}")).status_code == 204
    async with aclosing(follow(client, two, chat)) as reading:
        assert await anext(reading) == Event("", "presence", {"readers": 1})
        asked = ASKED | {"id": chat, "model": "demo", "max_tokens": TOKENS, "ignore_eos": True}
        for number in range(3):
            if number == 1:
                answer = await client.post(f"{one}/api/chat", json=asked)
                stream = answer.headers["Tailrace-Stream"]
            else:
                stream = await turn_of(client, one, chat)
            begun = await anext(reading)
            assert (begun.id, begun.name) == (str(number), "turn")
            assert begun.data["stream"] == stream and begun.data["started_ms"] > 0
            text = ""
            async for event in reading:
                assert event.id == f"{number}.{event.data['index']}"
                if event.name == "end":
                    break
                text += event.data["text"]
            assert text == (await client.get(f"{two}/v1/generate/{stream}")).json()["text"] != ""
    while (found := await listed(client, one, chat))["readers"]:
        pass  # the edge has not seen yet that the reader has left
    assert [turn["state"] for turn in found["turns"]] == ["ended"] * 3
    assert (found["id"], found["next_turn"]) == (chat, 3)


async def test_a_reader_that_is_cut_after_any_event_gets_exactly_the_rest(
    standing_house: House, client: httpx.AsyncClient, chat: str
) -> None:
    one, two = (edge.url for edge in standing_house.edges)
    for seed in range(3):
        await turn_of(client, one, chat, seed=seed)
    end = (await listed(client, one, chat))["turns"][-1]["next_index"] - 1
    whole = await numbered(client, one, chat, f"2.{end}")
    assert len(whole) > 3 * TOKENS
    for place, event in enumerate(whole[:-1], 1):
        rest = await numbered(client, two, chat, f"2.{end}", f"after={event.id}")
        assert rest == whole[place:], event.id
    by_header = {"Last-Event-ID": whole[4].id}
    assert await numbered(client, two, chat, f"2.{end}", **by_header) == whole[5:]
    newest = [event for event in whole if event.id.startswith("2")]
    assert await numbered(client, two, chat, f"2.{end}", "tail=1") == newest
    turns = [event for event in whole if event.name == "turn"]
    assert await numbered(client, two, chat, "2", "turns=1") == turns
    assert await numbered(client, two, chat, "2", "turns=1&after=0.3") == turns[1:]
    text = "".join(event.data["text"] for event in newest if event.name == "message")
    folded = await numbered(client, two, chat, f"2.{end}", "tail=1&snapshot=1")
    assert [event.name for event in folded] == ["turn", "snapshot", "end"]
    assert folded[1].data["text"] == text


async def test_json_lines_have_the_same_turns(
    standing_house: House, client: httpx.AsyncClient, chat: str
) -> None:
    url = standing_house.edges[0].url
    await turn_of(client, url, chat)
    end = (await listed(client, url, chat))["turns"][0]["next_index"] - 1
    events = await numbered(client, url, chat, f"0.{end}")
    lines = list[dict[str, Any]]()
    async with client.stream("GET", f"{url}/v1/chats/{chat}", headers=LINES) as answer:
        assert answer.headers["Content-Type"] == "application/x-ndjson"
        async for line in answer.aiter_lines():
            lines.append(json.loads(line))
            if lines[-1]["type"] == "end":
                break
    shown = [line for line in lines if line["type"] != "presence"]
    names = {"message": "token"}
    assert shown == [
        {"type": names.get(event.name, event.name), "turn": 0, **event.data} for event in events
    ]


async def test_a_turn_is_listed_once_however_often_its_request_is_repeated(
    standing_house: House, client: httpx.AsyncClient, chat: str
) -> None:
    url = standing_house.edges[0].url
    asked, key = BODY | {"chat": chat}, {"Idempotency-Key": chat}
    for view in ({}, SSE, LINES):
        answer = await client.post(f"{url}/v1/generate", json=asked, headers=key | view)
        assert answer.status_code == 200
    stream = answer.headers["Tailrace-Stream"]
    branched = {"index": 2, "chat": chat, "max_tokens": TOKENS}
    answer = await client.post(f"{url}/v1/generate/{stream}/branch", json=branched)
    turns = (await listed(client, url, chat))["turns"]
    assert [turn["stream"] for turn in turns] == [stream, answer.headers["Tailrace-Stream"]]


async def test_any_device_stops_the_running_turn_for_all(
    house: HeldHouse, client: httpx.AsyncClient, chat: str
) -> None:
    one, two = (edge.url for edge in house.edges)
    ended = await turn_of(client, one, chat)
    house.origin.hold(1)
    for turn, path in ((1, f"/v1/chats/{chat}/stop"), (2, f"/api/chat/{chat}/stop")):
        stream = await begin(client, one, chat)
        async with aclosing(follow(client, one, chat, "tail=1")) as reading:
            begun = [await anext(reading), await anext(reading)]
            assert {event.name for event in begun} == {"turn", "presence"}
            assert stream in [event.data.get("stream") for event in begun]
            answer = await client.post(two + path)
            assert answer.status_code == 200, answer.text
            [stopped] = answer.json()["stopped"]
            assert (stopped["stream"], stopped["turn"]) == (stream, turn)
            async for event in reading:
                if event.name == "end":
                    assert event.data["finish_reason"] == "cancelled"
                    break
        again = await client.post(two + path)
        assert again.json() == {"id": chat, "stopped": []}
    document = (await client.get(f"{two}/v1/generate/{ended}")).json()
    assert document["finish_reason"] == "length"


async def test_readers_are_counted_while_they_read(
    standing_house: House, client: httpx.AsyncClient, chat: str
) -> None:
    one, two = (edge.url for edge in standing_house.edges)
    await client.put(f"{one}/v1/chats/{chat}")
    async with aclosing(follow(client, one, chat)) as first:
        assert (await anext(first)).data == {"readers": 1}
        async with aclosing(follow(client, two, chat)) as second:
            assert (await anext(second)).data == {"readers": 2}
            assert (await anext(first)).data == {"readers": 2}
            assert (await listed(client, one, chat))["readers"] == 2
        assert (await anext(first)).data == {"readers": 1}


async def test_a_turn_whose_stream_is_gone_is_named_and_skipped(
    standing_house: House, client: httpx.AsyncClient, chat: str
) -> None:
    url = standing_house.edges[0].url
    gone = await turn_of(client, url, chat)
    kept = await turn_of(client, url, chat)
    assert (await client.delete(f"{url}/v1/responses/resp_{gone}")).status_code == 200
    turns = (await listed(client, url, chat))["turns"]
    assert [turn["state"] for turn in turns] == ["gone", "ended"]
    for query, names in (("", ["turn", "error", "turn"]), ("after=0", ["error", "turn"])):
        async with aclosing(follow(client, url, chat, query)) as reading:
            found = list[Event]()
            async for event in reading:
                found += [event] if event.name != "presence" else []
                if event.name == "turn" and event.data["stream"] == kept:
                    break
        assert [event.name for event in found] == names
        [error] = [event for event in found if event.name == "error"]
        assert (error.id, error.data["turn"]) == ("", 0)
        assert error.data["error"]["code"] == "unknown_stream"


async def test_what_is_refused_is_named(
    standing_house: House, client: httpx.AsyncClient, chat: str
) -> None:
    url = standing_house.edges[0].url
    await turn_of(client, url, chat)
    last = (await listed(client, url, chat))["turns"][0]
    refused = {
        "/v1/chats/nobody-has-it": (404, "unknown_chat"),
        f"/v1/chats/{'x' * 129}": (400, "invalid_request"),
        f"/v1/chats/{chat}?after=1": (416, "beyond_end"),
        f"/v1/chats/{chat}?after=0.{last['next_index']}": (416, "beyond_end"),
        f"/v1/chats/{chat}?after=x": (400, "invalid_request"),
        f"/v1/chats/{chat}?after=0&tail=1": (400, "invalid_request"),
        f"/v1/chats/{chat}?tail=0": (400, "invalid_request"),
        f"/v1/chats/{chat}?turns=2": (400, "invalid_request"),
    }
    for path, wanted in refused.items():
        answer = await client.get(url + path, headers=SSE)
        assert (answer.status_code, answer.json()["error"]["code"]) == wanted, path
    frames = {"Accept": "application/vnd.tailrace.frames"}
    answer = await client.get(f"{url}/v1/chats/{chat}", headers=frames)
    assert (answer.status_code, answer.json()["error"]["code"]) == (406, "not_acceptable")
    for more, field in (({"chat": "a/b"}, "chat"), ({"chat": chat, "n": 2}, "n")):
        answer = await client.post(f"{url}/v1/generate", json=BODY | more)
        assert (answer.status_code, answer.json()["error"]["field"]) == (400, field)
    answer = await client.post(f"{url}/v1/chats/nobody-has-it/stop")
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "unknown_chat")
    answer = await client.post(f"{url}/api/chat/nobody-has-it/stop")
    assert answer.status_code == 404 and answer.headers["Content-Type"].startswith("text/plain")
    assert "no such chat" in answer.text


async def test_a_chat_survives_its_origin(tmp_path: Path, client: httpx.AsyncClient) -> None:
    origin = HeldOrigin(tmp_path / "data")
    edge = Edge(origin)
    again = HeldOrigin(tmp_path / "data", port=origin.port)
    async with running(origin, edge, late=[again]):
        first = await turn_of(client, edge.url, "c")
        origin.hold(1)
        running_one = await begin(client, edge.url, "c")
        before = await listed(client, edge.url, "c")
        await origin.kill()
        await again.ready()
        await edge.saw("origin link up", 2)
        after = await listed(client, edge.url, "c")
        kept = [
            [{name: turn[name] for name in ("turn", "stream", "started_ms")} for turn in each]
            for each in (before["turns"], after["turns"])
        ]
        assert kept[0] == kept[1]
        assert [turn["stream"] for turn in after["turns"]] == [first, running_one]
        stopped = (await client.post(f"{edge.url}/v1/chats/c/stop")).json()["stopped"]
        assert [turn["stream"] for turn in stopped] == [running_one]


class Keyed(NamedTuple):
    """An edge with API keys, and the header of the key of each name."""

    url: str
    headers: dict[str, dict[str, str]]


KEYS = {
    "owner": (),
    "reader": ("--rights", "generate,read"),
    "stopper": ("--rights", "cancel"),
    "stranger": ("--tenant", "other"),
}


@pytest.fixture
async def keyed(tmp_path: Path) -> AsyncIterator[Keyed]:
    file, headers = tmp_path / "api-keys.json", dict[str, dict[str, str]]()
    for name, options in KEYS.items():
        words = ["key", "add", name, "--keys", str(file), *options, "--json"]
        result = CliRunner().invoke(app, words)
        assert result.exit_code == 0, result.output
        headers[name] = {"Authorization": f"Bearer {json.loads(result.stdout)['key']}"}
    origin = HeldOrigin(tmp_path / "data")
    origin.hold(1)
    edge = Edge(origin)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TAILRACE_EDGE_API_KEYS", str(file))
        async with running(origin, edge):
            yield Keyed(edge.url, headers)


async def test_a_chat_belongs_to_its_tenant_and_needs_rights(
    keyed: Keyed, client: httpx.AsyncClient, chat: str
) -> None:
    path = f"{keyed.url}/v1/chats/{chat}"

    async def status(name: str, method: str, target: str = path) -> tuple[int, str]:
        answer = await client.request(method, target, headers=keyed.headers.get(name, {}))
        error = answer.json()["error"]["code"] if answer.status_code >= 400 else ""
        return answer.status_code, error

    await begin(client, keyed.url, chat, **keyed.headers["owner"])
    assert await status("nobody", "GET") == (401, "no_key")
    assert await status("stranger", "GET") == (404, "unknown_chat")
    assert await status("stranger", "POST", f"{path}/stop") == (404, "unknown_chat")
    assert await status("reader", "GET") == (200, "")
    assert await status("reader", "POST", f"{path}/stop") == (403, "missing_right")
    assert await status("stopper", "GET") == (403, "missing_right")
    assert await status("stopper", "PUT") == (403, "missing_right")
    answer = await client.post(f"{path}/stop", headers=keyed.headers["stopper"])
    assert [turn["turn"] for turn in answer.json()["stopped"]] == [0]
    assert (await client.put(path, headers=keyed.headers["stranger"])).status_code == 204
    found = (await client.get(path, headers=keyed.headers["stranger"])).json()
    assert (found["turns"], found["next_turn"]) == ([], 0)
