"""`/v1/messages` as the official SDKs of Anthropic use it, against real edges."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests import python_packages
from tests.e2e.conftest import House
from tests.e2e.processes import Edge, Origin, running
from tests.sdks.adder import WORDS
from tests.sdks.conftest import HERE, Script, said_by

pytestmark = pytest.mark.anyio

CLIENTS = ("python 2", "python 1", "npm 1", "npm 0")
"""The SDKs in their newest major version, and in the one before."""
ADDER = "tests.sdks.adder:adder"
TOKENS = 40
ASKED: dict[str, Any] = {
    "model": "demo",
    "max_tokens": TOKENS,
    "messages": [{"role": "user", "content": "Tell me a story about a fox."}],
}
FIXED: dict[str, Any] = {"temperature": 0.8, "seed": 7, "ignore_eos": True}
"""Fields that make every message have the same text."""
ADD: dict[str, Any] = {
    "name": "add",
    "description": "Adds numbers.",
    "input_schema": {
        "type": "object",
        "properties": {"numbers": {"type": "array", "items": {"type": "number"}}},
    },
}
NOW: dict[str, Any] = {"name": "now", "input_schema": {"type": "object"}}
SUM: dict[str, Any] = {
    "model": "adder",
    "max_tokens": 2000,
    "messages": [{"role": "user", "content": "What is 12 + 30?"}],
    "tools": [ADD, NOW],
}
THINKING = {"thinking": {"type": "enabled", "budget_tokens": 1024}}


@pytest.fixture(params=CLIENTS)
def sdk(request: pytest.FixtureRequest) -> Script:
    """Return a function that gives a request to an SDK, and returns what the SDK makes of it.

    The arguments are the addresses of two edges, the request, and fields that SDKs do not know.
    """
    kind, major = request.param.split()
    if kind == "npm":
        node: Script = request.getfixturevalue("node")

        def by_node(edge: str, other: str, asked: dict[str, Any], more: dict[str, Any]) -> Any:
            return node("anthropic.mjs", major, edge, other, json.dumps(asked | more))

        return by_node
    commands = python_packages.installed(HERE / f"anthropic_{major}.txt")

    def by_python(edge: str, other: str, asked: dict[str, Any], more: dict[str, Any]) -> Any:
        extended = asked | ({"extra_body": more} if more else {})
        script = HERE / "anthropic_client.py"
        return said_by(commands / "python", script, edge, other, json.dumps(extended))

    return by_python


@pytest.fixture(scope="module")
async def adder(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[list[Edge]]:
    """Two edges of an origin whose producer thinks and calls tools."""
    origin = Origin(tmp_path_factory.mktemp("adder"), producer=ADDER)
    edges = [Edge(origin), Edge(origin)]
    async with running(origin, *edges):
        yield edges


def prompt_tokens(usage: dict[str, Any]) -> int:
    """Return the tokens of a prompt: those that were computed, and those from the cache."""
    computed: int = usage["input_tokens"]
    cached: int = usage["cache_read_input_tokens"]
    return computed + cached


def without_id(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message without what differs from stream to stream, and from SDK to SDK."""
    content = [
        {name: value for name, value in block.items() if name not in ("signature", "parsed_output")}
        for block in message["content"]
    ]
    return message | {"id": "", "content": content, "_request_id": ""}


async def test_a_text_is_the_same_whole_streamed_and_cut_off_after_any_event(
    house: House, client: httpx.AsyncClient, sdk: Script
) -> None:
    edge, other = (each.url for each in house.edges)
    told = await sdk(edge, other, ASKED, FIXED)
    native = await client.post(f"{edge}/v1/generate", json=ASKED | FIXED)
    text = native.json()["text"]
    assert told["types"][:2] == ["message_start", "content_block_start"]
    assert set(told["types"][2:-3]) == {"content_block_delta"}
    assert told["types"][-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert told["broken"] == []
    assert told["text"] == text
    for message in (told["final"], told["whole"], told["again"]):
        [block] = message["content"]
        assert (block["type"], block["text"]) == ("text", text)
        assert (message["stop_reason"], message["stop_sequence"]) == ("max_tokens", None)
        assert message["usage"]["output_tokens"] == TOKENS
        assert prompt_tokens(message["usage"]) == native.json()["prompt_tokens"]
    assert told["counted"] == native.json()["prompt_tokens"]
    assert told["request_id"] is True
    names = ["NotFoundError", "BadRequestError", "BadRequestError", "BadRequestError"]
    kinds = ["not_found_error", *["invalid_request_error"] * 3]
    for refusal, name, kind in zip(told["refusals"], names, kinds, strict=False):
        assert [refusal[0], refusal[2], refusal[4]] == [name, kind, True]
    assert "'max_tokens': 0 is not valid" in told["refusals"][1][3]
    assert "'image' is not supported" in told["refusals"][2][3]


async def test_a_stop_sequence_that_ended_the_text_is_named_also_after_a_resume(
    house: House, client: httpx.AsyncClient, sdk: Script
) -> None:
    edge, other = (each.url for each in house.edges)
    native = await client.post(f"{edge}/v1/generate", json=ASKED | FIXED)
    text = native.json()["text"]
    stop = text[len(text) // 2 :][:6]
    asked = ASKED | {"stop_sequences": ["it never says this", stop]}
    told = await sdk(edge, other, asked, FIXED)
    assert told["broken"] == []
    for message in (told["final"], told["whole"], told["again"]):
        assert message["content"][0]["text"] == text[: text.index(stop)]
        assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", stop)


async def test_a_prompt_that_was_computed_before_is_read_from_the_cache(
    house: House, client: httpx.AsyncClient, sdk: Script
) -> None:
    words = " ".join(f"The {n}th fox ran over the hill." for n in range(12))
    asked = ASKED | {"messages": [{"role": "user", "content": words}], "max_tokens": 4}
    told = await sdk(*(each.url for each in house.edges), asked, FIXED)
    whole, again = told["whole"]["usage"], told["again"]["usage"]
    assert whole["cache_read_input_tokens"] > 0
    assert again["cache_read_input_tokens"] > 0  # read by its id, at another edge
    assert prompt_tokens(whole) == prompt_tokens(again) == told["counted"]
    assert told["final"]["usage"] == again  # what the events add up to is the document
    assert told["broken"] == []


@pytest.mark.parametrize("thinks", [True, False])
async def test_thinking_and_tools_are_assembled_by_the_helper(
    adder: list[Edge], sdk: Script, thinks: bool
) -> None:
    edge, other = (each.url for each in adder)
    told = await sdk(edge, other, SUM | (THINKING if thinks else {}), {})
    assert told["broken"] == []
    thoughts = {"type": "thinking", "thinking": "Numbers. I have them added."}
    content = [
        *([thoughts] if thinks else []),
        {"type": "text", "text": "Let me see."},
        {"type": "tool_use", "id": "call_add", "name": "add", "input": {"numbers": [12, 30]}},
        {"type": "tool_use", "id": "call_now", "name": "now", "input": {}},
    ]
    for message in (told["final"], told["whole"], told["again"]):
        assert without_id(message)["content"] == content
        assert message["stop_reason"] == "tool_use"
    assert told["counted"] == "invalid_request_error"  # a producer reads its prompts itself
    if "blocks" in told:  # as the helper of npm reports them
        assert without_id({"content": told["blocks"]})["content"] == content


async def test_the_results_of_tools_go_back_with_all_that_the_model_said(
    adder: list[Edge], sdk: Script
) -> None:
    edge, other = (each.url for each in adder)
    first = await sdk(edge, other, SUM | THINKING, {})
    results = [
        {"type": "tool_result", "tool_use_id": "call_add", "content": "42"},
        {
            "type": "tool_result",
            "tool_use_id": "call_now",
            "content": [{"type": "text", "text": "noon"}],
        },
    ]
    said = {"role": "assistant", "content": first["final"]["content"]}
    messages = [*SUM["messages"], said, {"role": "user", "content": results}]
    second = await sdk(edge, other, SUM | {"messages": messages}, {})
    assert second["text"] == "They gave 42 and noon."
    assert second["final"]["stop_reason"] == "end_turn"


async def test_a_forced_tool_has_input_that_fits_its_schema(house: House, sdk: Script) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"enum": [1, 2, 3]}, "b": {"enum": [1, 2, 3]}},
        "required": ["a", "b"],
        "additionalProperties": False,
    }
    asked = ASKED | {
        "max_tokens": 400,
        "tools": [{"name": "add", "input_schema": schema}],
        "tool_choice": {"type": "tool", "name": "add"},
    }
    told = await sdk(*(each.url for each in house.edges), asked, {"seed": 7})
    assert told["broken"] == []
    [call] = told["final"]["content"]
    assert (call["name"], call["input"].keys()) == ("add", {"a", "b"})
    assert told["final"]["stop_reason"] == "tool_use"
    assert told["final"]["content"][0]["input"] == told["whole"]["content"][0]["input"]


@pytest.mark.parametrize("kind", CLIENTS)
async def test_the_helpers_run_tools_and_fill_a_schema(
    request: pytest.FixtureRequest, house: House, adder: list[Edge], kind: str
) -> None:
    language, major = kind.split()
    edges = adder[0].url, house.edges[0].url
    if language == "npm":
        node: Script = request.getfixturevalue("node")
        told = await node("anthropic_helpers.mjs", major, *edges)
    else:
        commands = python_packages.installed(HERE / f"anthropic_{major}.txt")
        told = await said_by(commands / "python", HERE / "anthropic_helpers.py", *edges)
    assert told["run"] == ["They gave 42 and noon."] * 2
    assert told["parsed"].keys() == {"town", "sunny"} and told["parsed"]["sunny"] in (True, False)


async def test_a_message_that_waits_is_cancelled_from_another_edge(
    adder: list[Edge], client: httpx.AsyncClient
) -> None:
    asked = SUM | {"messages": [{"role": "user", "content": "Count, and wait."}], "stream": True}
    headers, path = {"anthropic-version": "2026-10-21"}, "/v1/messages"
    here, there = (each.url for each in adder)
    events: list[str] = []
    async with client.stream("POST", f"{here}{path}", json=asked, headers=headers) as answer:
        message = f"msg_{answer.headers['tailrace-stream']}"
        async for line in answer.aiter_lines():
            events += [line.removeprefix("data: ")] if line.startswith("data: ") else []
            if len(events) == len(WORDS) + 2:
                done = await client.post(f"{there}{path}/{message}/cancel")
    assert done.json()["stop_reason"] == "cancelled"
    assert done.json()["content"] == [{"type": "text", "text": "".join(WORDS)}]
    assert json.loads(events[-1]) == {
        "type": "error",
        "error": {"type": "invalid_request_error", "message": "the stream was cancelled"},
    }
    # It can be read as a message of every other API, too.
    chat = await client.get(f"{there}/v1/responses/resp_{message.removeprefix('msg_')}")
    assert chat.json()["status"] == "cancelled"


async def test_the_death_of_an_origin_is_a_pause_in_the_same_message(
    tmp_path: Path, client: httpx.AsyncClient
) -> None:
    origin = Origin(tmp_path, producer=ADDER)
    successor = Origin(tmp_path, origin.port, producer=ADDER)
    edge, path = Edge(origin), "/v1/messages"
    asked = SUM | {"messages": [{"role": "user", "content": "Count, and wait."}], "stream": True}
    deltas: list[str] = []
    identifiers: list[int] = []
    async with running(origin, edge, late=[successor]):
        headers = {"anthropic-version": "2023-06-01"}
        async with client.stream("POST", edge.url + path, json=asked, headers=headers) as answer:
            message = f"msg_{answer.headers['tailrace-stream']}"
            async for line in answer.aiter_lines():
                name, _, value = line.partition(": ")
                if name == "id":
                    identifiers.append(int(value))
                if name == "data" and "text_delta" in value:
                    deltas.append(json.loads(value)["delta"]["text"])
                if name == "data" and len(deltas) == 3 and len(identifiers) == 5:
                    await origin.kill()
                    await successor.ready()
                    assert (await edge.saw("origin link up", 2))["streams"] == 1
                if deltas == list(WORDS):
                    await client.post(f"{edge.url}{path}/{message}/cancel")
    assert deltas == list(WORDS)
    assert identifiers == list(range(len(identifiers)))
