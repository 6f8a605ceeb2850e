"""Requests of Anthropic's API: the Open that they become, and the errors that name their faults."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tailrace.edge.anthropic.request import Thinking, parse_body, read_note
from tailrace.edge.errors import messages_error_fields
from tailrace.ledger.errors import CallerError
from tailrace.ledger.frame import (
    MAX_MESSAGES,
    FormatKind,
    Message,
    Open,
    OutputFormat,
    Sampling,
    ToolChoice,
    Tools,
)

HELLO: dict[str, Any] = {"role": "user", "content": "Hello"}
PLAIN: dict[str, Any] = {"model": "demo", "max_tokens": 2000, "messages": [HELLO]}
TOOL: dict[str, Any] = {
    "name": "add",
    "description": "adds",
    "input_schema": {"type": "object", "properties": {"a": {"type": "integer"}}},
}
PNG = {"type": "image", "source": {"type": "url", "url": "https://x.example/y.png"}}


def opened(**more: Any) -> Open:
    """Return what an origin is asked for by such a request."""
    parsed, _ = parse_body(json.dumps(PLAIN | more).encode())
    return parsed.to_stream("key", None)


def messages_of(*messages: dict[str, Any], system: Any = None) -> tuple[Message, ...]:
    return opened(messages=list(messages), system=system).messages


def refused(**more: Any) -> str:
    """Return the message of the error that a request gets."""
    with pytest.raises(CallerError) as error:
        opened(**more)
    fields = messages_error_fields(error.value)
    assert fields["type"] == "invalid_request_error"
    return str(fields["message"])


def test_a_request_is_an_open_with_all_of_its_settings() -> None:
    wanted = opened(
        system=[{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}],
        temperature=0.5,
        top_p=0.9,
        top_k=40,
        stop_sequences=["END", "\n\n"],
        seed=7,
        priority="batch",
        metadata={"user_id": "me"},
        thinking={"type": "enabled", "budget_tokens": 1024},
        tools=[TOOL, TOOL | {"name": "add_all", "type": "custom", "description": None}],
        tool_choice={"type": "tool", "name": "add", "disable_parallel_tool_use": True},
        output_config={"format": {"type": "json_schema", "schema": {"type": "object"}}},
        stream=True,
    )
    assert wanted.messages == (Message("system", "Be brief."), Message("user", "Hello"))
    assert wanted.sampling == Sampling(temperature=0.5, top_p=0.9, top_k=40, seed=7)
    assert (wanted.max_tokens, wanted.stop) == (2000, ("END", "\n\n"))
    assert (wanted.idempotency_key, wanted.priority.word, wanted.n) == ("key", "batch", 1)
    schema = '"parameters":{"type":"object","properties":{"a":{"type":"integer"}}}'
    functions = f'[{{"name":"add","description":"adds",{schema}}},{{"name":"add_all",{schema}}}]'
    assert wanted.tools == Tools(functions, ToolChoice.REQUIRED, "add", parallel=False)
    assert wanted.format == OutputFormat(FormatKind.JSON_SCHEMA, '{"type":"object"}')
    assert read_note(wanted.note) is Thinking.SHOWN


@pytest.mark.parametrize(
    ("choice", "how"),
    [
        (None, ToolChoice.AUTO),
        ({"type": "auto"}, ToolChoice.AUTO),
        ({"type": "any"}, ToolChoice.REQUIRED),
        ({"type": "none"}, ToolChoice.NONE),
    ],
)
def test_a_choice_of_tools_has_our_word(choice: object, how: ToolChoice) -> None:
    tools = opened(tools=[TOOL], tool_choice=choice).tools
    assert tools is not None
    assert (tools.choice, tools.only, tools.parallel) == (how, None, True)


@pytest.mark.parametrize(
    ("thinking", "shown"),
    [
        (None, Thinking.HIDDEN),
        ({"type": "disabled"}, Thinking.HIDDEN),
        ({"type": "adaptive"}, Thinking.SHOWN),
        ({"type": "adaptive", "display": "omitted"}, Thinking.OMITTED),
        ({"type": "enabled", "budget_tokens": 1999, "display": "summarized"}, Thinking.SHOWN),
    ],
)
def test_thinking_says_how_reasoning_is_shown(thinking: object, shown: Thinking) -> None:
    assert read_note(opened(thinking=thinking).note) is shown


@pytest.mark.parametrize("note", [None, "", "[]", '{"response": {}, "input": []}', '{"message":1}'])
def test_a_stream_of_another_route_shows_its_reasoning(note: str | None) -> None:
    assert read_note(note) is Thinking.SHOWN


def test_a_conversation_with_tools_has_a_message_for_each_result() -> None:
    call = {"type": "tool_use", "id": "t1", "name": "add", "input": {"a": 1}}
    said = messages_of(
        HELLO,
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": "x"},
                {"type": "redacted_thinking", "data": "x"},
                {"type": "text", "text": "I ", "cache_control": {"type": "ephemeral"}},
                {"type": "text", "text": "add."},
                call,
                call | {"id": "t2", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "And now?"},
                {"type": "tool_result", "tool_use_id": "t1", "content": "2"},
                {
                    "type": "tool_result",
                    "tool_use_id": "t2",
                    "content": [{"type": "text", "text": "no"}, {"type": "text", "text": "ne"}],
                    "is_error": True,
                },
                {"type": "tool_result", "tool_use_id": "t3"},
            ],
        },
        system="Be kind.",
    )
    calls = (
        '[{"id":"t1","name":"add","arguments":"{\\"a\\":1}"},'
        '{"id":"t2","name":"add","arguments":"{}"}]'
    )
    assert said == (
        Message("system", "Be kind."),
        Message("user", "Hello"),
        Message("assistant", "I add.", calls),
        Message("tool", "2", tool_call_id="t1"),
        Message("tool", "none", tool_call_id="t2"),
        Message("tool", "", tool_call_id="t3"),
        Message("user", "And now?"),
    )


def test_consecutive_messages_of_one_role_are_one_turn() -> None:
    thought = {"role": "assistant", "content": [{"type": "thinking", "thinking": "Hm."}]}
    answer = {"role": "assistant", "content": "Yes."}
    later = {"role": "system", "content": "Be brief."}
    assert messages_of(HELLO, thought, HELLO, answer, answer, later, HELLO) == (
        Message("user", "Hello\n\nHello"),
        Message("assistant", "Yes.\n\nYes."),
        Message("system", "Be brief."),
        Message("user", "Hello"),
    )


def test_a_setting_without_effect_is_named() -> None:
    body = PLAIN | {
        "service_tier": "auto",
        "cache_control": {"type": "ephemeral"},
        "output_config": {"effort": "high"},
        "container": None,
        "mcp_servers": [],
        "speed": "standard",
    }
    _, headers = parse_body(json.dumps(body).encode())
    assert headers == {"Tailrace-Ignored": "cache_control, service_tier, output_config.effort"}
    assert parse_body(json.dumps(PLAIN).encode())[1] == {}


def content(*blocks: object) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(blocks)}]}


RESULT = {"type": "tool_result", "tool_use_id": "t"}


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"container": "c"}, "'container' is not supported"),
        ({"mcp_servers": [{"url": "x"}]}, "'mcp_servers' is not supported"),
        ({"context_management": {}}, "'context_management' is not supported"),
        ({"inference_geo": "eu"}, "'inference_geo' is not supported"),
        ({"speed": "fast"}, "'speed' is not supported"),
        ({"sparkle": 1}, "sparkle: unknown field"),
        ({"stop": "x"}, "'stop' is not supported (use stop_sequences)"),
        ({"n": 2}, "'n': 2 is not valid (only 1)"),
        ({"max_tokens": None}, "max_tokens: this field is required (an integer of at least 1)"),
        ({"max_tokens": 0}, "'max_tokens': 0 is not valid (an integer of at least 1)"),
        ({"temperature": "hot"}, 'temperature: "hot" is not valid (a number from 0 to 2)'),
        ({"messages": []}, "'messages' has 0 items; 1 to 1024 are expected"),
        (
            {"messages": [HELLO] * MAX_MESSAGES, "system": "x"},
            "'messages' has 1024 items; 1 to 1023 are expected",
        ),
        ({"messages": ["x"]}, "Invalid value for 'messages[0]': \"x\" is not an object."),
        (
            {"messages": [{"role": "robot", "content": "x"}]},
            "Invalid value for 'messages[0].role': \"robot\" is not one of user, assistant,"
            " system.",
        ),
        (
            {"messages": [{"role": "user"}]},
            "Missing required parameter: 'messages[0].content'.",
        ),
        (
            content(),
            "Invalid value for 'messages[0].content': [] is not a string, or a list of at least one"
            " block.",
        ),
        (
            content(PNG),
            "messages[0].content[0]: a block of the type 'image' is not supported here (one of"
            " text, tool_result)",
        ),
        (
            content({"type": "document"}),
            "messages[0].content[0]: a block of the type 'document' is not supported here (one of"
            " text, tool_result)",
        ),
        (
            content(RESULT | {"content": [PNG]}),
            "messages[0].content[0].content[0]: a block of the type 'image' is not supported here"
            " (one of text)",
        ),
        (
            content({"type": "tool_result"}),
            "Missing required parameter: 'messages[0].content[0].tool_use_id'.",
        ),
        (content({"type": "text"}), "Missing required parameter: 'messages[0].content[0].text'."),
        (
            {"messages": [HELLO, {"role": "assistant", "content": [{"type": "server_tool_use"}]}]},
            "messages[1].content[0]: a block of the type 'server_tool_use' is not supported here"
            " (one of text, tool_use, thinking, redacted_thinking)",
        ),
        (
            {"messages": [HELLO, {"role": "assistant", "content": "The answer is ("}]},
            "messages[1]: the last message has the role 'assistant'; a conversation must end with a"
            " user's message, because the beginning of an answer (prefill) is not supported",
        ),
        ({"system": 1}, "Invalid value for 'system': 1 is not a string or a list of text blocks."),
        (
            {"system": [PNG]},
            "system[0]: a block of the type 'image' is not supported here (one of text)",
        ),
        (
            {"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
            "tools[0]: a tool of the type 'web_search_20250305' is not supported (a tool of your"
            " own has a name, a description and an input_schema)",
        ),
        (
            {"tools": [TOOL | {"name": "a b"}]},
            "Invalid value for 'tools[0].name': \"a b\" is not 1 to 128 of the characters a-z, A-Z,"
            " 0-9, _, . and -.",
        ),
        (
            {"tools": [{"name": "add"}]},
            "Missing required parameter: 'tools[0].input_schema'.",
        ),
        ({"tools": [TOOL, TOOL]}, "tools[1]: two tools have the name 'add'"),
        (
            {"tools": [TOOL | {"defer_loading": True}]},
            "tools[0]: 'defer_loading' is not supported, because it needs the tool search",
        ),
        (
            {"tool_choice": {"type": "any"}},
            "'tool_choice' is only allowed when 'tools' are specified",
        ),
        (
            {"tools": [TOOL], "tool_choice": {"type": "tool", "name": "sub"}},
            "tool_choice.name: no tool has the name 'sub'",
        ),
        (
            {"tools": [TOOL], "tool_choice": {"type": "some"}},
            "Invalid value for 'tool_choice.type': \"some\" is not one of auto, any, tool, none.",
        ),
        (
            {"thinking": {"type": "between_tools"}},
            "Invalid value for 'thinking.type': \"between_tools\" is not one of enabled, disabled,"
            " adaptive.",
        ),
        (
            {"thinking": {"type": "enabled", "budget_tokens": 2000}},
            "Invalid value for 'thinking.budget_tokens': 2000 is not an integer of at least 1024"
            " and less than 'max_tokens'.",
        ),
        (
            {"thinking": {"type": "adaptive", "display": "all"}},
            "Invalid value for 'thinking.display': \"all\" is not one of summarized, omitted.",
        ),
        (
            {"output_config": {"format": {"type": "xml"}}},
            "Invalid value for 'output_config.format.type': \"xml\" is not one of text,"
            " json_object, json_schema.",
        ),
        ({"output_config": {"task_budget": 1}}, "output_config.task_budget: unknown field"),
    ],
)
def test_a_fault_is_named_with_its_value_and_what_would_be_right(
    more: dict[str, Any], said: str
) -> None:
    assert refused(**more) == said


def test_an_sdk_that_wants_a_thread_is_told_to_go_on_without_one() -> None:
    with pytest.raises(CallerError) as refused:
        opened(thread={"type": "create"})
    assert messages_error_fields(refused.value) == {
        "type": "invalid_request_error",
        "message": "'thread' is not supported: edges hold no conversations (send the whole"
        " conversation in messages)",
        "details": {"error_code": "thread_unsupported_request"},
    }


def test_errors_of_origins_have_the_names_of_the_api() -> None:
    stop = CallerError("has 200 characters", field="stop[0]", hint="1 to 128 characters")
    assert messages_error_fields(stop)["message"] == (
        "'stop_sequences' has 200 characters (1 to 128 characters)"
    )
    hot = CallerError("is 9.0", field="temperature", hint="a number from 0 to 2")
    assert messages_error_fields(hot)["message"] == ("'temperature' is 9.0 (a number from 0 to 2)")
