"""OpenAI's own SDKs, unmodified, on the routes for chats, completions and models."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any, cast

import httpx
import openai
import pytest

from tests.e2e.conftest import House
from tests.e2e.sse import TIMEOUT
from tests.sdks.conftest import MAJORS, Script

pytestmark = pytest.mark.anyio

FOX: Any = [{"role": "user", "content": "Tell me a story about a fox."}]
CHAT: dict[str, Any] = {"model": "demo", "messages": FOX, "max_tokens": 40, "seed": 7}
ADD: Any = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds two digits.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"enum": [1, 2, 3]}, "b": {"enum": [1, 2, 3]}},
            "required": ["a", "b"],
            "additionalProperties": False,
        },
    },
}


def of(edge: str, **more: Any) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(api_key="none", base_url=f"{edge}/v1", **more)


@pytest.fixture
async def sdk(house: House) -> AsyncIterator[openai.AsyncOpenAI]:
    async with of(house.edges[0].url, max_retries=0) as made:
        yield made


async def streamed(sdk: openai.AsyncOpenAI, **asked: Any) -> list[Any]:
    return [chunk async for chunk in await sdk.chat.completions.create(**asked, stream=True)]


def text_of(chunks: list[Any]) -> str:
    return "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)


async def test_a_chat_is_the_same_whole_streamed_and_over_the_native_route(
    house: House, sdk: openai.AsyncOpenAI, client: httpx.AsyncClient
) -> None:
    whole = await sdk.chat.completions.create(**CHAT)
    chunks = await streamed(sdk, **CHAT, stream_options={"include_usage": True})
    native = await client.post(f"{house.edges[1].url}/v1/generate", json=CHAT)
    assert whole.choices[0].message.content == text_of(chunks) == native.json()["text"]
    assert whole.choices[0].finish_reason == native.json()["finish_reason"]
    first, *_, end, used = chunks
    assert first.choices[0].delta.role == "assistant"
    assert end.choices[0].finish_reason == whole.choices[0].finish_reason
    assert used.choices == [] and used.usage == whole.usage
    assert whole.usage is not None and whole.usage.completion_tokens <= 40
    assert {chunk.id for chunk in chunks} == {first.id} and first.id.startswith("chatcmpl-")
    assert len({chunk.created for chunk in chunks}) == 1 and first.created > 1.7e9


async def test_a_stream_that_is_cut_at_any_chunk_goes_on_at_the_other_edge(
    house: House, sdk: openai.AsyncOpenAI, client: httpx.AsyncClient
) -> None:
    usage: Any = {"include_usage": True}
    stream = await sdk.chat.completions.create(**CHAT, stream=True, stream_options=usage)
    token = stream.response.headers["tailrace-token"]
    seen: list[Any] = [chunk async for chunk in stream]
    name, whole = seen[0].id, [c.model_dump(exclude_unset=True) for c in seen]
    url = f"{house.edges[1].url}/v1/chat/completions/{name}"
    for cut in range(len(whole)):
        numbers = [c["sequence_number"] for c in whole[: cut + 1] if "sequence_number" in c]
        query = {"stream": "true", "include_usage": "true"}
        if numbers:
            query["starting_after"] = str(numbers[-1])
        answer = await client.get(url, params=query, headers={"Tailrace-Token": token})
        assert answer.status_code == 200
        *rest, done = answer.text.removesuffix("\n\n").split("\n\n")
        assert done == "data: [DONE]"
        found = [json.loads(event.removeprefix("data: ")) for event in rest]
        had = cut + 1 if numbers else 0
        # A client that was cut off before the usage gets the finish chunk again.
        had -= had == len(whole) - 1
        assert found == whole[had:]
    beyond = await client.get(url, params={"stream": "true", "starting_after": "9999"})
    assert (beyond.status_code, beyond.json()["error"]["param"]) == (400, "starting_after")
    assert (await client.get(url)).json()["choices"][0]["message"]["content"] == text_of(seen)
    frames = await client.get(
        f"{house.edges[1].url}/v1/generate/{name.removeprefix('chatcmpl-')}",
        headers={"Accept": "text/event-stream"},
    )
    assert frames.text.count("\nid: ") + 1 >= len(whole) - 2


async def test_several_choices_come_side_by_side_and_each_is_its_seed(
    sdk: openai.AsyncOpenAI,
) -> None:
    asked = CHAT | {"temperature": 1.5}
    whole = await sdk.chat.completions.create(**asked, n=3)
    chunks = await streamed(sdk, **asked, n=3, stream_options={"include_usage": True})
    texts = ["", "", ""]
    for chunk in chunks:
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == [choice.message.content for choice in whole.choices]
    assert chunks[-1].usage == whole.usage
    alone = await sdk.chat.completions.create(**asked | {"seed": 9})
    assert texts[2] == alone.choices[0].message.content
    assert len({*texts}) == 3


async def test_logprobs_stops_and_usage_in_each_chunk(sdk: openai.AsyncOpenAI) -> None:
    scored = await sdk.chat.completions.create(**CHAT, logprobs=True, top_logprobs=2)
    message, logprobs = scored.choices[0].message.content, scored.choices[0].logprobs
    assert message is not None and logprobs is not None and logprobs.content is not None
    assert "".join(each.token for each in logprobs.content).strip() == message.strip()
    assert all(len(each.top_logprobs) == 2 and each.logprob <= 0 for each in logprobs.content)
    stop = message[10:14]
    stopped = await sdk.chat.completions.create(**CHAT, stop=[stop])
    assert stopped.choices[0].message.content == message[: message.index(stop)]
    assert stopped.choices[0].finish_reason == "stop"
    options: Any = {"include_usage": True, "continuous_usage_stats": True}
    counted = await streamed(sdk, **CHAT, stream_options=options)
    counts = [chunk.usage.completion_tokens for chunk in counted if chunk.usage and chunk.choices]
    assert counts[:-1] == sorted(counts[:-1]) and counts[-2] > 10
    assert (
        scored.usage is not None and counted[-1].usage.prompt_tokens == scored.usage.prompt_tokens
    )


async def test_what_must_be_json_is(sdk: openai.AsyncOpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {"animal": {"enum": ["fox", "owl"]}, "legs": {"enum": [2, 4]}},
        "required": ["animal", "legs"],
        "additionalProperties": False,
    }
    form: Any = {"type": "json_schema", "json_schema": {"name": "animal", "schema": schema}}
    room = CHAT | {"max_tokens": 300}  # the whole document must fit
    answer = await sdk.chat.completions.create(**room, response_format=form)
    assert json.loads(answer.choices[0].message.content or "").keys() == {"animal", "legs"}
    kind: Any = {"type": "json_object"}
    answer = await sdk.chat.completions.create(**CHAT, response_format=kind)
    assert (answer.choices[0].message.content or "").startswith("{")


async def test_a_required_tool_is_called_whole_streamed_and_resumed(
    house: House, sdk: openai.AsyncOpenAI, client: httpx.AsyncClient
) -> None:
    asked = CHAT | {"tools": [ADD], "tool_choice": "required", "parallel_tool_calls": False}
    asked["max_tokens"] = 100
    whole = await sdk.chat.completions.create(**asked)
    [choice] = whole.choices
    assert choice.finish_reason == "tool_calls" and choice.message.content is None
    assert choice.message.tool_calls is not None
    [call] = cast(Any, choice.message.tool_calls)
    assert call.function.name == "add"
    arguments = json.loads(call.function.arguments)
    assert arguments.keys() == {"a", "b"} and {*arguments.values()} <= {1, 2, 3}
    chunks = await streamed(sdk, **asked)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[0].choices[0].delta.content is None
    pieces = [c.choices[0].delta.tool_calls[0] for c in chunks if c.choices[0].delta.tool_calls]
    assert (pieces[0].id, pieces[0].type, pieces[0].function.name) == (call.id, "function", "add")
    assert "".join(p.function.arguments for p in pieces) == call.function.arguments
    assert len(pieces) > 5
    at = pieces[4]
    number = next(c.sequence_number for c in chunks if c.choices[0].delta.tool_calls == [at])
    url = f"{house.edges[1].url}/v1/chat/completions/{chunks[0].id}"
    rest = await client.get(url, params={"stream": "true", "starting_after": number})
    assert '"arguments"' in rest.text and '"name"' not in rest.text
    id_ = whole.id.removeprefix("chatcmpl-")
    native = await client.get(f"{house.edges[1].url}/v1/generate/{id_}")
    assert native.json()["tool_calls"] == [
        {"id": call.id, "name": "add", "arguments": call.function.arguments}
    ]
    assert native.json()["finish_reason"] == "tool-calls"
    kind: Any = {"type": "json_object"}  # the format of an answer, which will not come
    both = await sdk.chat.completions.create(**asked, response_format=kind)
    assert both.choices[0].message == choice.message
    named: Any = {"type": "function", "function": {"name": "add"}}
    answer = await sdk.chat.completions.create(**asked | {"tool_choice": named})
    assert answer.choices[0].message.tool_calls


async def test_a_result_of_a_tool_is_answered_in_text(sdk: openai.AsyncOpenAI) -> None:
    """Tutorials on tools do this: one call is required, and the rest is left to the model."""
    asked = CHAT | {"tools": [ADD], "parallel_tool_calls": False, "max_tokens": 100}
    first = await sdk.chat.completions.create(**asked, tool_choice="required")
    message = first.choices[0].message
    [call] = cast(Any, message.tool_calls)
    result = {"role": "tool", "tool_call_id": call.id, "content": "12 + 30 = 42"}
    turns: Any = [*CHAT["messages"], message.to_dict(), result]
    chunks = await streamed(sdk, **asked | {"messages": turns, "tool_choice": "auto"})
    said = [c.choices[0] for c in chunks if c.choices]
    assert "".join(choice.delta.content or "" for choice in said)
    assert said[-1].finish_reason in ("stop", "length")
    notices = [chunk.notice["code"] for chunk in chunks if hasattr(chunk, "notice")]
    assert notices == ["tools_unused"]


async def test_completions_of_several_prompts_and_the_models(sdk: openai.AsyncOpenAI) -> None:
    prompts = ["Once upon a time", "The fox"]
    asked: dict[str, Any] = {"model": "demo", "max_tokens": 12, "seed": 3, "n": 2}
    whole = await sdk.completions.create(**asked, prompt=prompts, logprobs=1)
    assert [choice.index for choice in whole.choices] == [0, 1, 2, 3]
    texts = ["", "", "", ""]
    async for chunk in await sdk.completions.create(**asked, prompt=prompts, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == [choice.text for choice in whole.choices]
    scores = whole.choices[0].logprobs
    assert scores is not None and "".join(scores.tokens or ()) == texts[0]
    alone = await sdk.completions.create(model="demo", prompt=prompts[1], max_tokens=12, seed=3)
    assert alone.choices[0].text == texts[2]
    assert [model.id async for model in sdk.models.list()] == ["demo"]
    assert (await sdk.models.retrieve("demo")).id == "demo"
    with pytest.raises(openai.NotFoundError):
        await sdk.models.retrieve("other")


async def test_more_prompts_than_are_made_at_a_time(sdk: openai.AsyncOpenAI) -> None:
    prompts = [f"Once upon a time {nth}" for nth in range(20)]  # the form of langchain's OpenAI
    asked: dict[str, Any] = {"model": "demo", "max_tokens": 6, "prompt": prompts}
    whole = await sdk.completions.create(**asked)
    texts = [""] * len(prompts)
    used = None
    options: Any = {"include_usage": True}
    async for chunk in await sdk.completions.create(**asked, stream=True, stream_options=options):
        used = chunk.usage or used
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == [choice.text for choice in whole.choices] and len({*texts}) > 10
    assert used == whole.usage is not None


@pytest.mark.parametrize(
    ("change", "status", "param", "code"),
    [
        ({"temperature": "hot"}, 400, "temperature", "invalid_type"),
        ({"temperature": 3}, 400, "temperature", None),
        ({"max_tokens": 0}, 400, "max_tokens", "invalid_value"),
        ({"messages": []}, 400, "messages", "invalid_value"),
        ({"messages": [{"role": "wizard", "content": ""}]}, 400, "messages[0].role", None),
        ({"messages": [{"role": "user"}]}, 400, "messages[0].content", None),
        (
            {
                "messages": [
                    {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}
                ]
            },
            400,
            "messages[0].content[0].type",
            None,
        ),
        ({"model": "gpt-4"}, 404, "model", "model_not_found"),
        ({"max_completion_tokens": 40}, 400, "max_tokens", "invalid_parameter_combination"),
        ({"logit_bias": {"1": 5}}, 400, "logit_bias", "unsupported_parameter"),
        ({"top_logprobs": 2}, 400, "top_logprobs", None),
        ({"tool_choice": "required"}, 400, "tool_choice", None),
        (
            {
                "tools": [
                    {
                        "type": "function",
                        "function": {"name": "x", "parameters": {"type": "wizard"}},
                    }
                ],
                "tool_choice": "required",
            },
            400,
            "tools[0].parameters",
            "invalid_function_parameters",
        ),
        ({"response_format": {"type": "xml"}}, 400, "response_format.type", None),
        ({"messages": [{"role": "user", "content": "fox " * 5000}]}, 400, "messages", None),
    ],
)
async def test_bad_input_is_refused_as_the_reference_does(
    sdk: openai.AsyncOpenAI, change: dict[str, Any], status: int, param: str, code: str | None
) -> None:
    for more in ({}, {"stream": True}):
        with pytest.raises(openai.APIStatusError) as caught:
            await sdk.chat.completions.create(**CHAT | change | more)
        error = caught.value
        assert (error.status_code, error.param) == (status, param), error.body
        assert error.type == "invalid_request_error"
        assert code is None or error.code == code
        assert error.request_id is not None


async def test_what_is_not_known_is_ignored_and_named(
    sdk: openai.AsyncOpenAI,
) -> None:
    answer = await sdk.chat.completions.with_raw_response.create(
        **CHAT | {"max_tokens": openai.omit},
        max_completion_tokens=3,
        extra_body={"frobnicate": 1, "min_p": 0.1, "priority": "batch", "user": None},
        extra_headers={"X-Request-Id": "mine-1"},
    )
    assert answer.headers["tailrace-ignored"] == "frobnicate"
    assert answer.headers["x-request-id"] == "mine-1"
    parsed = answer.parse()
    assert parsed.usage is not None and parsed.usage.completion_tokens == 3
    assert answer.headers["tailrace-stream"] == parsed.id.removeprefix("chatcmpl-")


async def test_the_same_key_is_the_same_stream_and_another_request_under_it_a_conflict(
    house: House, sdk: openai.AsyncOpenAI
) -> None:
    headers = {"Idempotency-Key": "chat-1"}
    async with of(house.edges[1].url, max_retries=0) as other:
        asked = {key: value for key, value in CHAT.items() if key != "seed"}
        one = await sdk.chat.completions.create(**asked, extra_headers=headers)
        two = await other.chat.completions.create(**asked, extra_headers=headers)
        assert one == two
        with pytest.raises(openai.ConflictError) as caught:
            await other.chat.completions.create(**CHAT, extra_headers=headers)
        assert caught.value.response.headers["x-should-retry"] == "false"


async def test_a_stream_that_is_cancelled_ends_with_an_error_and_never_in_silence(
    house: House, sdk: openai.AsyncOpenAI, client: httpx.AsyncClient
) -> None:
    endless = {"ignore_eos": True, "max_tokens": 900}
    stream = await sdk.chat.completions.create(
        model="demo", messages=FOX, stream=True, extra_body=endless
    )
    id_ = stream.response.headers["tailrace-stream"]
    chunks = aiter(stream)
    while not (await anext(chunks)).choices[0].delta.content:
        pass  # the first chunk has only the role
    cancelled = await client.post(f"{house.edges[1].url}/v1/generate/{id_}/cancel")
    assert cancelled.json()["state"] == "ended"
    with pytest.raises(openai.APIError, match="cancelled"):
        async for _ in chunks:
            pass
    native = (await client.get(f"{house.edges[0].url}/v1/generate/{id_}")).json()
    later = await client.get(f"{house.edges[1].url}/v1/chat/completions/chatcmpl-{id_}")
    [choice] = later.json()["choices"]
    assert (later.status_code, choice["finish_reason"]) == (200, "cancelled")
    assert choice["message"]["content"] == native["text"] != ""


async def test_leaving_does_not_cancel(
    house: House, sdk: openai.AsyncOpenAI, client: httpx.AsyncClient
) -> None:
    stream = await sdk.chat.completions.create(**CHAT, stream=True)
    id_ = stream.response.headers["tailrace-stream"]
    await stream.close()
    async with asyncio.timeout(TIMEOUT.read or 60):
        read = await client.get(
            f"{house.edges[1].url}/v1/chat/completions/chatcmpl-{id_}?stream=true"
        )
    assert read.text.endswith("data: [DONE]\n\n")
    assert "chat.completion.chunk" in read.text


@pytest.mark.parametrize("major", MAJORS)
async def test_the_sdk_of_node_streams_and_calls(house: House, node: Script, major: str) -> None:
    asked = (json.dumps(CHAT), json.dumps(ADD))
    said = await node("chat_completions.mjs", major, house.edges[0].url, *asked)
    async with of(house.edges[1].url) as sdk:
        whole = await sdk.chat.completions.create(**CHAT)
    assert said["text"] == whole.choices[0].message.content
    assert said["events"] == said["text"]
    assert said["usage"]["completion_tokens"] == whole.usage.completion_tokens
    assert said["call"]["name"] == "add" and json.loads(said["call"]["arguments"]).keys() == {
        "a",
        "b",
    }
    assert said["models"] == ["demo"]
    assert said["error"] == [404, "model_not_found"]
