"""Requests to a chat server and its answers beside text: tool calls and log probabilities."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tailrace.ledger.frame import (
    FinishReason,
    Score,
    ScoredToken,
    StreamEnd,
    Token,
    TokenScores,
    ToolCall,
)
from tailrace.origin.producer import Request
from tailrace.origin.tool_calls import ToolUse
from tests.origin.producers.asked import recipe, request
from tests.origin.producers.raw_server import (
    DONE,
    STREAM_HEAD,
    chat,
    event,
    finish,
    serving,
    usage,
)
from tests.origin.producers.test_upstream import asked_of

pytestmark = pytest.mark.anyio

FUNCTIONS = [{"name": "add", "description": "Adds.", "parameters": {"type": "object"}}]
TOOLS = ToolUse(functions=json.dumps(FUNCTIONS), choice="auto")
CALLS = json.dumps([{"id": "call_0", "name": "add", "arguments": '{"a":1}'}])
CHAT: dict[str, Any] = {
    "prompt": None,
    "messages": (
        ("user", "1 + 1?"),
        ("assistant", "", CALLS, None),
        ("tool", "2", None, "call_0"),
    ),
    "tools": TOOLS,
}


def call(index: int | None, **said: Any) -> bytes:
    piece = {"function": said.pop("function", {}), **said}
    numbered = piece if index is None else {"index": index, **piece}
    return event({"choices": [{"index": 0, "delta": {"tool_calls": [numbered]}}]})


async def test_calls_are_carried_as_they_come_and_numbered_anew() -> None:
    said = (
        STREAM_HEAD
        + chat("So: ")
        + call(0, id="a", type="function", function={"name": "add", "arguments": ""})
        + call(0, function={"arguments": '{"x"'})
        + call(0, function={"arguments": ":1}"})
        # A server that has one number for all, and one that numbers none and sends objects.
        + call(0, id="b", function={"name": "add", "arguments": "{}"})
        + call(None, id="c", function={"name": "now", "arguments": {"z": 1}})
        + finish("tool_calls")
        + usage(9, 30)
        + DONE
    )
    async with serving(said) as server:
        made = await asked_of(server, request(**CHAT))
    assert made == [
        Token("So: ", 0),
        ToolCall(0, "a", "add", "", 1),
        ToolCall(0, "", "", '{"x"', 2),
        ToolCall(0, "", "", ":1}", 3),
        ToolCall(1, "b", "add", "", 4),
        ToolCall(1, "", "", "{}", 5),
        ToolCall(2, "c", "now", "", 6),
        ToolCall(2, "", "", '{"z": 1}', 7),
        StreamEnd(30, FinishReason.TOOL_CALLS, 8, 9),
    ]
    body = server.asked[0].body
    assert body["tools"] == [{"type": "function", "function": FUNCTIONS[0]}]
    assert body["tool_choice"] == "auto" and "parallel_tool_calls" not in body
    assert body["messages"][1:] == [
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {
                    "id": "call_0",
                    "type": "function",
                    "function": {"name": "add", "arguments": '{"a":1}'},
                }
            ],
        },
        {"role": "tool", "content": "2", "tool_call_id": "call_0"},
    ]


async def test_a_forced_choice_a_format_and_an_open_length_are_asked_for() -> None:
    tools = TOOLS.model_copy(update={"choice": "required", "only": "add", "parallel": False})
    said = STREAM_HEAD + call(0, id="a", function={"name": "add", "arguments": "{}"}) + finish()
    async with serving(said + DONE) as server:
        made = await asked_of(server, request(**CHAT | {"tools": tools}, max_tokens=1 << 20))
    assert made[-1].finish_reason is FinishReason.TOOL_CALLS
    body = server.asked[0].body
    assert body["tool_choice"] == {"type": "function", "function": {"name": "add"}}
    assert body["parallel_tool_calls"] is False and "max_tokens" not in body
    for source, right in (
        ('{"type":"object"}', {"type": "json_object"}),
        (
            '{"type":"array"}',
            {"type": "json_schema", "json_schema": {"name": "answer", "schema": {"type": "array"}}},
        ),
    ):
        plain: dict[str, Any] = {"prompt": None, "messages": (("user", "Hi"),)}
        async with serving(STREAM_HEAD + chat("{}") + finish() + DONE) as server:
            await asked_of(server, request(**plain, format=("json-schema", source)))
        assert server.asked[0].body["response_format"] == right


async def test_a_stream_with_a_call_in_it_is_never_gone_on_with() -> None:
    """Half a call cannot be continued, and made anew it would be made twice."""
    broken = STREAM_HEAD + call(0, id="a", function={"name": "add", "arguments": '{"x'})
    async with serving(broken) as server:
        made = await asked_of(server, request(**CHAT), upstream_lost="continue")
        assert len(server.asked) == 1
    assert made[-1].finish_reason is FinishReason.ORIGIN_LOST and made[-1].retryable
    async with serving(broken) as server:  # nor by the worker after one that died
        made = await asked_of(server, Request(recipe(**CHAT), "So: ", 2, calls=1))
        assert server.asked == []
    assert made[-1].finish_reason is FinishReason.ORIGIN_LOST


async def test_logprobs_of_both_routes_are_carried() -> None:
    a, b = Score(0, b"a", -0.5), Score(0, b"\xc3", -1.0)
    of_chat = {
        "content": [
            {
                "token": "a",
                "logprob": -0.5,
                "bytes": [97],
                "top_logprobs": [
                    {"token": "a", "logprob": -0.5},
                    {"token": "?", "logprob": -1.0, "bytes": [0xC3]},
                    {"token": "no number", "logprob": None},
                ],
            }
        ]
    }
    of_completion = {
        "tokens": ["a"],
        "token_logprobs": [-0.5],
        "top_logprobs": [{"b": -1.0, "a": -0.5}],
    }
    scored: list[tuple[dict[str, Any], tuple[Score, ...]]] = [
        ({"delta": {"content": "a"}, "logprobs": of_chat}, (a, b)),
        ({"text": "a", "logprobs": of_completion}, (a, Score(0, b"b", -1.0))),
    ]
    asked: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"prompt": None, "messages": (("user", "Hi"),)}, {"logprobs": True, "top_logprobs": 2}),
        ({"prompt": "Hi"}, {"logprobs": 2}),
    ]
    for (choice, top), (source, right) in zip(scored, asked, strict=True):
        script = STREAM_HEAD + event({"choices": [{"index": 0, **choice}]}) + finish() + DONE
        async with serving(script) as server:
            made = await asked_of(server, request(**source, logprobs=2))
        assert made[0] == ScoredToken("a", (TokenScores(a, top),), 0)
        body = server.asked[0].body
        assert {name: body[name] for name in body if "logprobs" in name} == right


@pytest.mark.parametrize(
    "said",
    [
        {"tool_calls": {}},
        {"tool_calls": [{"index": 0}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": "{}"}}]},
        {"tool_calls": [{"index": 0, "function": {"name": 7}}]},
        {"tool_calls": [{"index": "0", "function": {"name": "add"}}]},
    ],
)
async def test_calls_that_are_none_are_rubbish(said: Any) -> None:
    async with serving(STREAM_HEAD + event({"choices": [{"index": 0, "delta": said}]})) as server:
        made = await asked_of(server, request(**CHAT), upstream_retry_s=0)
    assert made[-1].finish_reason is FinishReason.ORIGIN_LOST
