"""Calls of tools by the SDKs, against a real producer that makes them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI

from tests.e2e.processes import Edge, Origin, running
from tests.sdks.conftest import Node

pytestmark = pytest.mark.anyio

ADD: Any = {
    "type": "function",
    "name": "add",
    "description": "Adds numbers.",
    "parameters": {
        "type": "object",
        "properties": {"numbers": {"type": "array", "items": {"type": "number"}}},
    },
}
NOW: Any = {"type": "function", "name": "now", "parameters": {"type": "object"}}
ASKED: dict[str, Any] = {"model": "adder", "input": "What is 12 + 30?", "tools": [ADD, NOW]}
OUTPUTS: list[Any] = [
    {"type": "function_call_output", "call_id": "call_add", "output": "42"},
    {"type": "function_call_output", "call_id": "call_now", "output": "noon"},
]


@pytest.fixture(scope="module")
async def edge(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Edge]:
    origin = Origin(tmp_path_factory.mktemp("adder"), producer="tests.sdks.adder:adder")
    made = Edge(origin)
    async with running(origin, made):
        yield made


@pytest.fixture
async def client(edge: Edge) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=f"{edge.url}/v1", api_key="unused", max_retries=0) as made:
        yield made


async def test_a_response_with_calls_is_resumed_from_each_of_its_events(
    client: AsyncOpenAI,
) -> None:
    stream = await client.responses.create(**ASKED, stream=True)
    events = [event async for event in stream]
    last = events[-1]
    assert last.type == "response.completed"
    output = [item.to_dict() for item in last.response.output]
    assert [item["type"] for item in output] == [
        *("reasoning", "message", "function_call", "function_call"),
    ]
    calls = [(item["call_id"], item["name"], item["arguments"]) for item in output[2:]]
    assert calls == [("call_add", "add", '{"numbers": [12, 30]}'), ("call_now", "now", "{}")]
    for point in range(len(events) - 1):
        rest = await client.responses.retrieve(last.response.id, stream=True, starting_after=point)
        told = [event.to_dict() async for event in rest]
        assert told == [event.to_dict() for event in events[point + 1 :]]


async def test_what_tools_gave_goes_back_in_any_of_the_ways_that_the_api_has(
    client: AsyncOpenAI,
) -> None:
    async with client.responses.stream(**ASKED) as stream:
        first = await stream.get_final_response()
    asked = {"role": "user", "content": "What is 12 + 30?"}
    said: list[Any] = [item.to_dict() for item in first.output]
    by_reference = [{"type": "item_reference", "id": item["id"]} for item in said]
    ways: list[tuple[Any, dict[str, Any]]] = [
        (OUTPUTS, {"previous_response_id": first.id}),
        ([asked, *said, *OUTPUTS], {}),
        ([asked, *by_reference, *OUTPUTS], {}),
    ]
    for given, more in ways:
        second = await client.responses.create(model="adder", input=given, tools=[ADD, NOW], **more)
        assert second.output_text == "They gave 42 and noon."
        items = [i async for i in client.responses.input_items.list(second.id, order="asc")]
        assert [item.type for item in items] == [
            *("message", "reasoning", "message", "function_call", "function_call"),
            *("function_call_output", "function_call_output"),
        ]
    for name in (
        "msg_x",
        f"msg_{'0' * 36}",
        f"fc_{said[1]['id'][4:]}",
        f"{said[1]['id'][:-4]}00ff",
    ):
        with pytest.raises(openai.NotFoundError) as refused:
            await client.responses.create(
                model="adder", input=[{"type": "item_reference", "id": name}]
            )
        assert (refused.value.code, refused.value.param) == ("item_not_found", "input")


async def test_the_ai_sdk_calls_tools_and_goes_on_by_itself(edge: Edge, node: Node) -> None:
    told = await node("tools.mjs", edge.url)
    assert told["chat"]["status"] == "ready" and told["chat"].get("error") is None
    assert told["chat"]["parts"] == [
        *("step-start", "reasoning", "text", "tool-add", "tool-now", "step-start", "text"),
    ]
    answer = "They gave 42 and noon."
    assert told["chat"]["text"] == f"Let me see.{answer}"
    assert told["responses"] == {"steps": 2, "text": answer, "called": ["add", "now"]}
    assert told["compatible"] == {"steps": 2, "text": answer, "called": ["add", "now"]}
