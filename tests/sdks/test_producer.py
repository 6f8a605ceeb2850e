"""The SDKs with a producer that calls tools, and never ends if it is asked to wait."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, NamedTuple

import openai
import pytest
from openai import AsyncOpenAI
from openai.types.responses import ResponseStreamEvent

from tests.e2e.processes import Edge, Origin, running
from tests.sdks.adder import WORDS
from tests.sdks.conftest import MAJORS, Script

pytestmark = pytest.mark.anyio

ADDER = "tests.sdks.adder:adder"
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


class House(NamedTuple):
    """An origin with a producer of our own, and its edges."""

    origin: Origin
    edges: list[Edge]


def sdk(edge: Edge) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=f"{edge.url}/v1", api_key="unused", max_retries=0)


WAITING: dict[str, Any] = {"model": "adder", "input": "Count, and wait."}
TEXT = "".join(WORDS)


@pytest.fixture(scope="module")
async def house(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[House]:
    origin = Origin(tmp_path_factory.mktemp("adder"), producer=ADDER)
    made = House(origin, [Edge(origin), Edge(origin)])
    async with running(origin, *made.edges):
        yield made


@pytest.fixture
async def clients(house: House) -> AsyncIterator[list[AsyncOpenAI]]:
    made = [sdk(edge) for edge in house.edges]
    yield made
    for each in made:
        await each.close()


@pytest.fixture
def client(clients: list[AsyncOpenAI]) -> AsyncOpenAI:
    return clients[0]


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


@pytest.mark.parametrize("major", MAJORS)
async def test_the_ai_sdk_calls_tools_and_goes_on_by_itself(
    house: House, node: Script, major: str
) -> None:
    told = await node("tools.mjs", major, house.edges[0].url)
    assert told["chat"]["status"] == "ready" and told["chat"].get("error") is None
    assert told["chat"]["parts"] == [
        *("step-start", "reasoning", "text", "tool-add", "tool-now", "step-start", "text"),
    ]
    answer = "They gave 42 and noon."
    assert told["chat"]["text"] == f"Let me see.{answer}"
    assert told["responses"] == {"steps": 2, "text": answer, "called": ["add", "now"]}
    assert told["compatible"] == {"steps": 2, "text": answer, "called": ["add", "now"]}


async def test_one_in_the_background_is_polled_cancelled_and_deleted(
    clients: list[AsyncOpenAI],
) -> None:
    begun = await clients[0].responses.create(**WAITING, background=True)
    assert (begun.status, begun.background, begun.output) == ("queued", True, [])
    response = begun
    while response.status == "queued" or response.output_text != TEXT:
        response = await clients[1].responses.retrieve(begun.id)
    assert response.status == "in_progress" and response.usage is None
    cancelled = await clients[1].responses.cancel(begun.id)
    assert (cancelled.status, cancelled.output_text) == ("cancelled", TEXT)
    for each in (clients[0].responses.retrieve, clients[0].responses.cancel):
        assert (await each(begun.id)).to_dict() == cancelled.to_dict()
    events = [e async for e in await clients[0].responses.retrieve(begun.id, stream=True)]
    assert [event.type for event in events[:3]] == [
        *("response.created", "response.queued", "response.in_progress"),
    ]
    last = events[-1]
    assert last.type == "response.incomplete"
    assert last.response.to_dict() == cancelled.to_dict()
    await clients[0].responses.delete(begun.id)
    for gone in (
        clients[1].responses.retrieve(begun.id),
        clients[1].responses.cancel(begun.id),
        clients[1].responses.delete(begun.id),
        clients[1].responses.input_items.list(begun.id),
    ):
        with pytest.raises(openai.NotFoundError):
            await gone


async def test_one_that_is_being_made_is_deleted_with_all_that_it_would_have_said(
    clients: list[AsyncOpenAI],
) -> None:
    begun = await clients[0].responses.create(**WAITING, background=True)
    await clients[1].responses.delete(begun.id)
    with pytest.raises(openai.NotFoundError):
        await clients[0].responses.retrieve(begun.id)


async def test_what_an_edge_that_dies_was_sending_goes_on_at_another_one(
    house: House, clients: list[AsyncOpenAI]
) -> None:
    edge, events = Edge(house.origin), list[ResponseStreamEvent]()

    async def read_until_it_dies() -> None:
        async with sdk(edge) as client:
            async for event in await client.responses.create(**WAITING, stream=True):
                events.append(event)
                if len(events) == 6:
                    await edge.kill()

    async with running(edge):
        with pytest.raises(openai.APIConnectionError):
            await read_until_it_dies()
    first, last = events[0], events[-1].sequence_number
    assert first.type == "response.created"
    rest = await clients[1].responses.retrieve(first.response.id, stream=True, starting_after=last)
    await clients[0].responses.cancel(first.response.id)
    events += [event async for event in rest]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert deltas == list(WORDS)


async def test_the_death_of_an_origin_is_a_pause_in_the_same_response(tmp_path: Path) -> None:
    origin = Origin(tmp_path, producer=ADDER)
    successor = Origin(tmp_path, origin.port, producer=ADDER)
    edge, events = Edge(origin), list[ResponseStreamEvent]()
    async with running(origin, edge, late=[successor]), sdk(edge) as client:
        async for event in await client.responses.create(**WAITING, stream=True):
            events.append(event)
            if len(events) == 6:
                await origin.kill()
                await successor.ready()
                assert (await edge.saw("origin link up", 2))["streams"] == 1
                assert events[0].type == "response.created"
                # All that the successor knows of it is what was logged.
                while (await client.responses.retrieve(events[0].response.id)).output_text != TEXT:
                    pass
                await client.responses.cancel(events[0].response.id)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert deltas == list(WORDS)
    last = events[-1]
    assert last.type == "response.incomplete" and last.response.output_text == TEXT


@pytest.mark.parametrize("major", MAJORS)
async def test_a_chat_that_is_being_answered_is_had_whole_by_who_comes_back(
    house: House, node: Script, major: str
) -> None:
    told = await node("waiting.mjs", major, *(edge.url for edge in house.edges))
    assert told == {
        "header": "v1",
        "roles": ["user", "assistant"],
        "text": TEXT,
        "status": "ready",
        "unknown": 204,
        "later": ["Count, and wait.", TEXT],
        "badName": 400,
    }
