"""Requests of `useChat`, read as a conversation."""

from __future__ import annotations

from typing import Any

import pytest

from tailrace.edge.ai_sdk import ChatBody, read_messages, to_open
from tailrace.edge.chats.chat_id import check_chat
from tailrace.ledger.errors import CallerError
from tailrace.ledger.frame import Message


def said(role: str, *parts: Any) -> dict[str, Any]:
    return {"id": "m", "role": role, "parts": list(parts)}


def text(what: str) -> dict[str, str]:
    return {"type": "text", "text": what}


STEP = {"type": "step-start"}
ADD = {"type": "tool-add", "toolCallId": "a", "input": {"n": [1, 2]}}
NOW = {"type": "dynamic-tool", "toolName": "now", "toolCallId": "b", "input": {}}


def test_steps_are_turns_with_what_their_calls_gave() -> None:
    turns = read_messages(
        [
            said("user", text("What is "), text("1 + 2?")),
            said(
                "assistant",
                *(STEP, {"type": "reasoning", "text": "Hm."}, text("Let me see.")),
                ADD | {"state": "output-available", "output": {"sum": 3}},
                NOW | {"state": "output-error", "errorText": "no clock"},
                NOW | {"toolCallId": "c", "state": "input-streaming"},
                *({"type": "data-revised", "data": {}}, {"type": "source-url", "url": "x"}),
                *(STEP, text("It is 3.")),
            ),
            said("user", text("Thanks.")),
        ]
    )
    calls = (
        '[{"id":"a","name":"add","arguments":"{\\"n\\":[1,2]}"},'
        '{"id":"b","name":"now","arguments":"{}"}]'
    )
    assert turns == (
        Message("user", "What is 1 + 2?"),
        Message("assistant", "Let me see.", tool_calls=calls),
        Message("tool", '{"sum":3}', tool_call_id="a"),
        Message("tool", "no clock", tool_call_id="b"),
        Message("assistant", "It is 3."),
        Message("user", "Thanks."),
    )


@pytest.mark.parametrize(
    ("message", "field"),
    [
        ("hello", "messages[0]"),
        ({"role": "robot", "parts": []}, "messages[0].role"),
        ({"role": "user"}, "messages[0].parts"),
        ({"role": "user", "content": "x"}, "messages[0]"),
        (said("user", "x"), "messages[0].parts[0]"),
        (said("user", {"type": "text"}), "messages[0].parts[0].text"),
        (said("user", {"type": "file", "mediaType": "image/png"}), "messages[0].parts[0]"),
        (said("assistant", {"type": "tool-add"}), "messages[0].parts[0].toolCallId"),
    ],
)
def test_a_part_that_no_model_of_text_takes_is_named(message: Any, field: str) -> None:
    with pytest.raises(CallerError) as refused:
        read_messages([message])
    assert refused.value.field == field


def test_a_message_of_another_api_is_told_where_that_is() -> None:
    with pytest.raises(CallerError) as refused:
        read_messages([{"role": "user", "content": "Hi"}])  # the form of Ollama's client
    assert "AI SDK" in refused.value.message
    assert refused.value.hint is not None and "/v1/chat/completions" in refused.value.hint


def test_a_chat_of_nothing_is_refused() -> None:
    for messages in ([], [said("user")]):
        body = ChatBody.model_validate({"model": "demo", "messages": messages})
        with pytest.raises(CallerError) as refused:
            to_open(body, None, None)
        assert refused.value.field == "messages"


@pytest.mark.parametrize("name", ["", "a/b", "a\nb", "x" * 129])
def test_a_name_that_cannot_be_asked_for_is_none_of_a_chat(name: str) -> None:
    with pytest.raises(CallerError):
        check_chat(name)
    assert check_chat("chat é-1") == "chat é-1"
