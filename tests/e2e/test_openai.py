"""OpenAI's SDK while processes die and before an upstream server."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.e2e.conftest import HeldHouse
from tests.e2e.held import HeldOrigin
from tests.e2e.processes import Edge, Origin, running
from tests.origin.producers.raw_server import (
    DONE,
    STREAM_HEAD,
    Asked,
    answer,
    chat,
    event,
    finish,
    serving,
    thought,
    usage,
)

pytestmark = pytest.mark.anyio

NUMBERS = {"type": "array", "items": {"enum": [1, 2, 3]}, "minItems": 120, "maxItems": 120}
COUNT: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "count",
        "parameters": {
            "type": "object",
            "properties": {"numbers": NUMBERS},
            "required": ["numbers"],
            "additionalProperties": False,
        },
    },
}
CALLING: dict[str, Any] = {
    "model": "demo",
    "messages": [{"role": "user", "content": "Count."}],
    "tools": [COUNT],
    "tool_choice": "required",
    "parallel_tool_calls": False,
    "temperature": 1,
    "seed": 5,
}
HALF = 200
"""Characters of a call."""
MODELS = answer(200, {"data": [{"id": "m"}]})


def sdk_of(edge: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(api_key="none", base_url=f"{edge}/v1", max_retries=0)


async def calls_of(chunks: Any, *, after: int = -1, then: Any = None) -> list[tuple[str, str]]:
    """(id, arguments) of each call; `then` is awaited when so many chunks have come."""
    calls: list[tuple[str, str]] = []
    seen = 0
    async for chunk in chunks:
        seen += 1
        if seen == after:
            await then()
        for choice in chunk.choices:
            for piece in choice.delta.tool_calls or ():
                if piece.id:
                    calls.append((piece.id, ""))
                id_, said = calls[piece.index]
                calls[piece.index] = (id_, said + piece.function.arguments)
    return calls


async def test_a_call_goes_on_in_the_same_response_when_its_worker_or_its_origin_dies(
    house: HeldHouse,
) -> None:
    async with sdk_of(house.edges[0].url) as sdk:
        whole = await sdk.chat.completions.create(**CALLING)
        message: Any = whole.choices[0].message
        [call] = message.tool_calls
        expected = [(call.id, call.function.arguments)]
        assert len(json.loads(call.function.arguments)["numbers"]) == 120

        async def kill_worker() -> None:
            await house.origin.kill_worker()
            house.origin.go_on()

        house.origin.hold(HALF)
        stream = await sdk.chat.completions.create(**CALLING, stream=True)
        assert await calls_of(stream, after=9, then=kill_worker) == expected
        await house.origin.saw("stream.taken_over")

        again = HeldOrigin(house.origin.data, house.origin.port)

        async def restart() -> None:
            await house.origin.kill()
            again.go_on()
            await again.start()

        async with running(late=(again,)):
            house.origin.hold(HALF)
            stream = await sdk.chat.completions.create(**CALLING, stream=True)
            assert await calls_of(stream, after=9, then=restart) == expected


async def test_what_an_upstream_server_says_comes_through(tmp_path: Path) -> None:
    async def script(asked: Asked, writer: asyncio.StreamWriter) -> None:
        if asked.path.endswith("/models"):
            writer.write(MODELS)
            return
        called = [
            {"index": 0, "id": "c1", "function": {"name": "add", "arguments": ""}},
            {"index": 0, "function": {"arguments": '{"a":1}'}},
        ]
        pieces = [event({"choices": [{"index": 0, "delta": {"tool_calls": [c]}}]}) for c in called]
        scores = {"content": [{"token": "Sum", "logprob": -0.5, "bytes": None, "top_logprobs": []}]}
        said = {"choices": [{"index": 0, "delta": {"content": "Sum"}, "logprobs": scores}]}
        writer.write(STREAM_HEAD + thought("Hm.") + event(said) + b"".join(pieces))
        writer.write(finish("tool_calls") + usage(9, 12) + DONE)

    asked: dict[str, Any] = {
        "model": "m",
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "1 + 1?"}]},
            {
                "role": "assistant",
                "tool_calls": [
                    {
                        "id": "c0",
                        "type": "function",
                        "function": {"name": "add", "arguments": "{}"},
                    }
                ],
            },
            {"role": "tool", "tool_call_id": "c0", "content": "2"},
        ],
        "tools": [COUNT],
        "logprobs": True,
        "response_format": None,
    }
    async with serving(script) as server:
        origin = Origin(tmp_path, upstream=server.url)
        edge = Edge(origin)
        async with running(origin, edge), sdk_of(edge.url) as sdk:
            whole = await sdk.chat.completions.create(**asked)
            [choice] = whole.choices
            message: Any = choice.message
            assert (message.content, message.reasoning_content) == ("Sum", "Hm.")
            assert message.tool_calls[0].function.arguments == '{"a":1}'
            assert choice.finish_reason == "tool_calls"
            scores = choice.logprobs
            assert scores is not None and scores.content is not None
            assert (scores.content[0].token, scores.content[0].bytes) == ("Sum", [83, 117, 109])
            assert whole.usage is not None and whole.usage.completion_tokens == 12
            chunks = [c async for c in await sdk.chat.completions.create(**asked, stream=True)]
            deltas: list[Any] = [choice.delta for c in chunks for choice in c.choices]
            thoughts = [getattr(delta, "reasoning_content", None) for delta in deltas]
            assert [each for each in thoughts if each] == ["Hm."]
            with pytest.raises(openai.BadRequestError) as caught:
                await sdk.completions.create(model="m", prompt="x", logprobs=9)
            assert caught.value.param == "logprobs"
    said = server.asked[-1].body
    assert said["messages"][1]["tool_calls"][0]["function"] == {"name": "add", "arguments": "{}"}
    assert said["messages"][2] == {"role": "tool", "tool_call_id": "c0", "content": "2"}
    assert said["logprobs"] is True and "max_tokens" not in said


async def test_a_server_that_is_lost_in_the_middle_ends_the_stream_with_an_error(
    tmp_path: Path,
) -> None:
    async def script(asked: Asked, writer: asyncio.StreamWriter) -> None:
        writer.write(MODELS if asked.path.endswith("/models") else STREAM_HEAD + chat("Half"))

    async with serving(script) as server:
        flags: dict[str, Any] = {"upstream-lost": "end"}
        origin = Origin(tmp_path, upstream=server.url, **flags)
        edge = Edge(origin)
        async with running(origin, edge), sdk_of(edge.url) as sdk:
            asked: Any = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}
            stream = await sdk.chat.completions.create(**asked, stream=True)
            text: list[str] = []

            async def read() -> None:
                async for chunk in stream:
                    text.extend(choice.delta.content or "" for choice in chunk.choices)

            with pytest.raises(openai.APIError) as caught:
                await read()
            assert ("".join(text), caught.value.code) == ("Half", "origin_lost")
            with pytest.raises(openai.InternalServerError) as whole:
                await sdk.chat.completions.create(**asked)
            assert whole.value.status_code == 503
            assert len(whole.value.response.headers["tailrace-stream"]) == 32
