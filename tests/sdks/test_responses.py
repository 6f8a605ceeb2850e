"""`/v1/responses` as the official SDKs of OpenAI use it, against real edges."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest
from openai import AsyncOpenAI
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import BaseModel

from tests.e2e.conftest import House
from tests.e2e.processes import Edge
from tests.e2e.sse import TIMEOUT
from tests.sdks.conftest import MAJORS, Script

pytestmark = pytest.mark.anyio

TOKENS = 60
FIXED: dict[str, Any] = {"seed": 7, "ignore_eos": True}
"""Fields of ours: every response has the same text."""
ASKED: dict[str, Any] = {
    "model": "demo",
    "input": "Once upon a time",
    "max_output_tokens": TOKENS,
    "temperature": 0.8,
}
CUTS = 50


def sdk(edge: Edge, **more: Any) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=f"{edge.url}/v1", api_key="unused", max_retries=0, **more)


@pytest.fixture(scope="module")
async def clients(house: House) -> AsyncIterator[list[AsyncOpenAI]]:
    made = [sdk(edge) for edge in house.edges]
    yield made
    for client in made:
        await client.close()


@pytest.fixture(scope="module")
async def whole(clients: list[AsyncOpenAI]) -> list[ResponseStreamEvent]:
    """Return the events of a response that was read without a break."""
    return [event async for event in await streamed(clients[0])]


async def streamed(client: AsyncOpenAI, **more: Any) -> openai.AsyncStream[ResponseStreamEvent]:
    asked = client.responses.create(**ASKED, **more, stream=True, extra_body=FIXED)
    stream: openai.AsyncStream[ResponseStreamEvent] = await asked
    return stream


def text_of(events: list[ResponseStreamEvent]) -> str:
    return "".join(event.delta for event in events if event.type == "response.output_text.delta")


def final(events: list[ResponseStreamEvent]) -> Response:
    last = events[-1]
    assert last.type == "response.incomplete", last.type  # max_tokens was reached
    return last.response


def cut_points(events: int) -> list[int]:
    """Numbers of events to be cut off behind, the first and the last ones among them."""
    points = {0, 1, 2, 3, events - 5, events - 4, events - 3, events - 2}
    between = (4 + at * (events - 9) // CUTS for at in range(CUTS))
    for point in between:
        if len(points) < CUTS:
            points.add(point)
    return sorted(points)


async def test_a_response_that_is_cut_off_anywhere_goes_on_at_another_edge(
    clients: list[AsyncOpenAI], whole: list[ResponseStreamEvent]
) -> None:
    text = final(whole).output_text
    assert text == text_of(whole) and len(text) > TOKENS
    points = cut_points(len(whole))
    assert len(points) == CUTS

    async def cut_and_resumed(point: int) -> list[ResponseStreamEvent]:
        events = []
        async with await streamed(clients[0]) as stream:
            async for event in stream:
                events.append(event)
                if event.sequence_number == point:
                    break
        assert events[0].type == "response.created"
        rest = await clients[1].responses.retrieve(
            events[0].response.id, stream=True, starting_after=point
        )
        return events + [event async for event in rest]

    for point, events in zip(
        points, await asyncio.gather(*map(cut_and_resumed, points)), strict=True
    ):
        assert [event.sequence_number for event in events] == list(range(len(whole))), point
        assert [event.type for event in events] == [event.type for event in whole]
        assert text_of(events) == final(events).output_text == text


@pytest.mark.parametrize("major", MAJORS)
async def test_both_sdks_of_npm_and_python_have_the_same_text_after_each_cut(
    house: House, node: Script, whole: list[ResponseStreamEvent], major: str
) -> None:
    points = cut_points(len(whole))
    told = await node(
        "responses.mjs",
        major,
        *(edge.url for edge in house.edges),
        ",".join(map(str, points)),
    )
    numbers, text = list(range(len(whole))), text_of(whole)
    assert [cut["point"] for cut in told["cuts"]] == points
    for cut in told["cuts"]:
        assert (cut["numbers"], cut["text"], cut["final"]) == (numbers, text, text), cut["point"]
    assert told["helper"] == {"text": text, "parsed": True}
    assert told["missing"] == {"status": 404, "code": "unknown_stream", "param": "id"}


async def test_a_response_that_is_waited_for_is_the_one_that_is_read_again(
    clients: list[AsyncOpenAI],
) -> None:
    asked = dict(ASKED, instructions="Tell a story.", metadata={"for": "tests"}, user="me")
    made = await clients[0].responses.create(**asked, extra_body=FIXED)
    assert (made.status, made.incomplete_details and made.incomplete_details.reason) == (
        "incomplete",
        "max_output_tokens",
    )
    assert made.usage and made.usage.output_tokens == TOKENS
    assert (made.instructions, made.metadata) == ("Tell a story.", {"for": "tests"})
    again = await clients[1].responses.retrieve(made.id)
    assert again.to_dict() == made.to_dict()
    items = [item async for item in clients[1].responses.input_items.list(made.id)]
    assert [item.to_dict()["content"] for item in items] == [
        [{"type": "input_text", "text": "Once upon a time"}]
    ]


class Weather(BaseModel):
    """A schema for the model's answer."""

    town: str
    sunny: bool


async def test_the_helper_reads_streams_and_what_they_say_as_a_schema(
    clients: list[AsyncOpenAI],
) -> None:
    async with clients[0].responses.stream(
        model="demo", input="The weather?", text_format=Weather
    ) as stream:
        response = await stream.get_final_response()
    assert response.status == "completed" and isinstance(response.output_parsed, Weather)
    # It can also read an existing response from a number on.
    async with clients[1].responses.stream(
        response_id=response.id, starting_after=4, text_format=Weather
    ) as stream:
        numbers = [event.sequence_number async for event in stream]
        again = await stream.get_final_response()
    assert numbers[0] == 5 and again.output_parsed == response.output_parsed


async def test_scores_are_asked_for_as_the_api_says(clients: list[AsyncOpenAI]) -> None:
    asked = dict(ASKED, max_output_tokens=3, include=["message.output_text.logprobs"])
    made = await clients[0].responses.create(**asked, top_logprobs=2, extra_body=FIXED)
    content = made.output[0].to_dict()["content"]
    assert isinstance(content, list)
    scores = content[0]["logprobs"]
    assert "".join(score["token"] for score in scores) == made.output_text
    assert [len(score["top_logprobs"]) for score in scores] == [2, 2, 2]


async def test_a_conversation_goes_on_from_any_response_that_is_kept(
    clients: list[AsyncOpenAI],
) -> None:
    first = await clients[0].responses.create(
        model="demo", input="Hello", instructions="Be kind.", max_output_tokens=8
    )
    second = await clients[1].responses.create(
        model="demo", input="And then?", previous_response_id=first.id, max_output_tokens=8
    )
    said: Any = [
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": first.output_text},
        {"role": "user", "content": "And then?"},
    ]
    alone = await clients[0].responses.create(model="demo", input=said, max_output_tokens=8)
    # The earlier conversation counts, the first response's instructions do not.
    assert second.usage and alone.usage
    assert second.usage.input_tokens == alone.usage.input_tokens
    items = [i async for i in clients[0].responses.input_items.list(second.id, order="asc")]
    assert [item.to_dict()["role"] for item in items] == ["user", "assistant", "user"]
    stored = await clients[0].responses.create(
        model="demo", input="Hello", store=False, max_output_tokens=1
    )
    for previous, code in (
        (stored.id, "input_not_kept"),
        (f"resp_{'0' * 32}", "previous_response_not_found"),
    ):
        with pytest.raises(openai.BadRequestError) as refused:
            await clients[0].responses.create(
                model="demo", input="x", previous_response_id=previous
            )
        assert (refused.value.code, refused.value.param) == (code, "previous_response_id")


IMAGE = [{"role": "user", "content": [{"type": "input_image", "image_url": "http://x/y.png"}]}]


@pytest.mark.parametrize(
    ("change", "status", "param"),
    [
        ({"model": "gpt"}, 404, "model"),
        ({"input": []}, 400, "input"),
        ({"input": IMAGE}, 400, "input[0].content[0].type"),
        ({"input": [{"type": "computer_call", "id": "x"}]}, 400, "input[0].type"),
        ({"input": [{"role": "robot", "content": "x"}]}, 400, "input[0].role"),
        ({"input": [{"type": "function_call_output", "output": "1"}]}, 400, "input[0].call_id"),
        ({"temperature": 9.0}, 400, "temperature"),
        ({"temperature": "hot"}, 400, "temperature"),
        ({"max_output_tokens": 0}, 400, "max_output_tokens"),
        ({"top_logprobs": 21}, 400, "top_logprobs"),
        ({"tools": [{"type": "web_search"}]}, 400, "tools[0].type"),
        ({"text": {"format": {"type": "xml"}}}, 400, "text.format.type"),
        ({"truncation": "some"}, 400, "truncation"),
        ({"conversation": "conv_1"}, 400, "conversation"),
        ({"metadata": {"a" * 65: "b"}}, 400, "metadata"),
        ({"priority": "soon"}, 400, "priority"),
    ],
)
async def test_what_cannot_be_done_is_refused_in_the_shape_of_the_api(
    clients: list[AsyncOpenAI], change: dict[str, Any], status: int, param: str
) -> None:
    for stream in (False, True):  # by the application, and past it
        with pytest.raises(openai.APIStatusError) as refused:
            await clients[0].responses.create(**ASKED, extra_body=change | {"stream": stream})
        error = refused.value
        assert (error.status_code, error.param, error.type) == (
            *(status, param, "invalid_request_error"),
        ), error.body
        assert error.request_id and error.response.headers["x-should-retry"] == "false"


async def test_what_is_not_known_is_ignored_and_named(clients: list[AsyncOpenAI]) -> None:
    for stream in (False, True):
        answer = await clients[0].responses.with_raw_response.create(
            **dict(ASKED, max_output_tokens=1),
            extra_body={"stream": stream, "sparkle": 1, "safety_identifier": "me"},
        )
        assert answer.headers["tailrace-ignored"] == "sparkle, safety_identifier"
        assert len(answer.headers["tailrace-stream"]) == 32


@pytest.mark.parametrize(
    ("name", "query", "status", "param"),
    [
        ("resp_x", "", 404, "id"),
        (f"resp_{'0' * 32}", "", 404, None),
        (f"resp_{'0' * 32}", "?stream=true", 404, None),
        (f"resp_{'0' * 32}", "?stream=true&starting_after=1", 404, None),
        ("", "?stream=maybe", 400, "stream"),
        ("", "?stream=true&starting_after=one", 400, "starting_after"),
        ("", "?stream=true&starting_after=-1", 400, "starting_after"),
        ("", "?stream=true&starting_after=1000000", 400, "starting_after"),
        ("", "/input_items?limit=0", 400, "limit"),
        ("", "/input_items?after=item_x", 400, "after"),
    ],
)
async def test_what_is_asked_of_a_response_that_is_not_there_or_not_so(
    clients: list[AsyncOpenAI],
    whole: list[ResponseStreamEvent],
    name: str,
    query: str,
    status: int,
    param: str | None,
) -> None:
    path = f"/responses/{name or final(whole).id}{query}"
    with pytest.raises(openai.APIStatusError) as refused:
        await clients[0].get(path, cast_to=object)
    error = refused.value
    assert (error.status_code, error.param) == (status, param), error.body
    assert error.type == "invalid_request_error"


async def test_a_stream_of_another_route_can_be_read_as_a_response(
    house: House, clients: list[AsyncOpenAI]
) -> None:
    chat = await clients[0].chat.completions.create(
        model="demo", messages=[{"role": "user", "content": "Hello"}], max_tokens=8
    )
    async with httpx.AsyncClient(base_url=house.edges[0].url, timeout=TIMEOUT) as http:
        body = {"model": "demo", "prompt": "Once", "max_tokens": 8}
        native = (await http.post("/v1/generate", json=body)).json()
    for stream, text in (
        (chat.id.removeprefix("chatcmpl-"), chat.choices[0].message.content),
        (native["id"], native["text"]),
    ):
        response = await clients[1].responses.retrieve(f"resp_{stream}")
        assert (response.output_text, response.instructions) == (text, None)
        with pytest.raises(openai.BadRequestError) as refused:
            await clients[1].responses.input_items.list(response.id)
        assert refused.value.code == "input_not_kept"


async def test_the_same_key_is_the_same_response(clients: list[AsyncOpenAI]) -> None:
    key = {"Idempotency-Key": "responses-1"}
    first = await clients[0].responses.create(**ASKED, extra_headers=key)
    again = await clients[1].responses.create(**ASKED, extra_headers=key)
    assert again.to_dict() == first.to_dict()
    with pytest.raises(openai.ConflictError) as refused:
        await clients[1].responses.create(**dict(ASKED, input="Other"), extra_headers=key)
    assert refused.value.code == "conflict"
