"""Parses the messages and the tools of Anthropic's API into the fields of an Open frame."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tailrace.edge.openai.messages import MAX_TOOLS, missing, text_of
from tailrace.edge.openai.request import compact, invalid
from tailrace.ledger.errors import CallerError
from tailrace.ledger.frame import MAX_MESSAGES, Message, ToolChoice, Tools

THINKING = ("thinking", "redacted_thinking")
"""Types of blocks that clients send back, but that models are not given."""
BLOCKS = {
    "system": ("text",),
    "user": ("text", "tool_result"),
    "assistant": ("text", "tool_use", *THINKING),
}
"""The types of blocks that a message of each role may have."""
TURN_BREAK = "\n\n"
"""Text between the consecutive messages of one role that are joined into one turn."""
CHOICES = {"auto": ToolChoice.AUTO, "any": ToolChoice.REQUIRED, "none": ToolChoice.NONE}
"""Maps each `tool_choice.type` of Anthropic's API that names no tool to the value in an Open
frame."""
_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,128}")
_STRING = {"type": "string"}
_CACHED = {"cache_control": {"description": "Accepted, and has no effect."}}
_TEXT: dict[str, Any] = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": _STRING, **_CACHED},
    "required": ["type", "text"],
}
TEXT_SCHEMA: dict[str, Any] = {"anyOf": [_STRING, {"type": "array", "items": _TEXT}]}
"""The JSON schema of a text, or of blocks of text."""
_TOOL_USE = {
    "type": "object",
    "properties": {
        "type": {"const": "tool_use"},
        "id": _STRING,
        "name": _STRING,
        "input": {"type": "object"},
    },
    "required": ["type", "id", "name", "input"],
}
_TOOL_RESULT = {
    "type": "object",
    "properties": {
        "type": {"const": "tool_result"},
        "tool_use_id": _STRING,
        "content": TEXT_SCHEMA,
        "is_error": {"type": "boolean"},
    },
    "required": ["type", "tool_use_id"],
}
_THINKING = {
    "type": "object",
    "properties": {"type": {"enum": list(THINKING)}},
    "required": ["type"],
}
MESSAGE_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "role": {"enum": [*BLOCKS]},
        "content": {
            "anyOf": [
                _STRING,
                {
                    "type": "array",
                    "items": {"anyOf": [_TEXT, _TOOL_USE, _TOOL_RESULT, _THINKING]},
                    "minItems": 1,
                },
            ]
        },
    },
    "required": ["role", "content"],
}
"""The JSON schema of a message."""
TOOL_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "type": {"anyOf": [{"const": "custom"}, {"type": "null"}]},
        "name": {"type": "string", "pattern": f"^{_NAME.pattern}$"},
        "description": {"type": ["string", "null"]},
        "input_schema": {"type": "object", "description": "a JSON schema"},
    },
    "required": ["name", "input_schema"],
}
"""The JSON schema of a tool."""


# ---- messages ----


@dataclass(slots=True)
class _Turn:
    """One turn of the conversation while it is collected."""

    role: str
    texts: list[str] = field(default_factory=list)
    calls: list[dict[str, str]] = field(default_factory=list)
    answers: str | None = None

    def message(self) -> Message:
        calls = compact(self.calls) if self.calls else None
        texts = filter(None, self.texts)
        return Message(self.role, TURN_BREAK.join(texts), calls, self.answers)


def read_conversation(system: object, given: list[Any]) -> tuple[Message, ...]:
    """Return the messages of a conversation, with its system prompt first.

    Consecutive messages of the user become one message, and so do those of the assistant. Raises
    CallerError, which names the invalid part.
    """
    turns = [] if system is None else [_Turn("system", [read_text(system, "system")])]
    if not given or len(given) > MAX_MESSAGES - len(turns):
        raise CallerError(
            f"'messages' has {len(given)} items; 1 to {MAX_MESSAGES - len(turns)} are expected",
            field="messages",
        )
    for at, message in enumerate(given):
        for turn in _turns(message, f"messages[{at}]"):
            last = turns[-1] if turns else None
            if last is None or turn.role not in ("user", "assistant") or last.role != turn.role:
                turns.append(turn)
            else:
                last.texts += turn.texts
                last.calls += turn.calls
    if turns[-1].role in ("system", "assistant"):
        raise CallerError(
            f"messages[{len(given) - 1}]: the last message has the role {turns[-1].role!r}; a"
            " conversation must end with a user's message, because the beginning of an answer"
            " (prefill) is not supported",
            field="messages",
        )
    if len(turns) > MAX_MESSAGES:  # each tool result is a turn, and a message may have several
        raise CallerError(
            f"'messages' has {len(turns)} turns; at most {MAX_MESSAGES} are allowed",
            field="messages",
        )
    return tuple(turn.message() for turn in turns)


def _turns(message: object, place: str) -> list[_Turn]:
    """Return the turns of one message: its tool results, then one for its text and tool calls."""
    if not isinstance(message, dict):
        raise invalid(place, message, "an object")
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or role not in BLOCKS:
        raise invalid(f"{place}.role", role, "one of user, assistant, system")
    if content is None:
        raise missing(f"{place}.content")
    if isinstance(content, str):
        return [_Turn(role, [content])]
    if not isinstance(content, list) or not content:
        raise invalid(f"{place}.content", content, "a string, or a list of at least one block")
    results, texts, calls = list[_Turn](), list[str](), list[dict[str, str]]()
    for at, block in enumerate(content):
        where = f"{place}.content[{at}]"
        match _type_of(block, BLOCKS[role], where):
            case "text":
                texts.append(text_of(block, "text", where))
            case "tool_use":
                calls.append(_call(block, where))
            case "tool_result":
                results.append(_result(block, where))
    said = [_Turn(role, ["".join(texts)], calls)] if texts or calls else []
    return [*results, *said]


def _type_of(block: object, allowed: tuple[str, ...], place: str) -> str:
    """Return the type of a block; raise CallerError if it is not one of the allowed types."""
    if not isinstance(block, dict):
        raise invalid(place, block, "an object with a type")
    kind = text_of(block, "type", place)
    if kind not in allowed:
        raise CallerError(
            f"{place}: a block of the type {kind!r} is not supported here",
            field=place,
            hint="one of " + ", ".join(allowed),
        )
    return kind


def read_text(content: object, place: str) -> str:
    """Return the text of a field that is a string or a list of text blocks."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise invalid(place, content, "a string or a list of text blocks")
    texts = []
    for at, block in enumerate(content):
        where = f"{place}[{at}]"
        _type_of(block, ("text",), where)
        texts.append(text_of(block, "text", where))
    return "".join(texts)


def _call(block: Mapping[str, Any], place: str) -> dict[str, str]:
    arguments = block.get("input")
    if not isinstance(arguments, dict):
        raise invalid(f"{place}.input", arguments, "an object")
    return {
        "id": text_of(block, "id", place),
        "name": text_of(block, "name", place),
        "arguments": compact(arguments),
    }


def _result(block: Mapping[str, Any], place: str) -> _Turn:
    content = block.get("content")
    text = "" if content is None else read_text(content, f"{place}.content")
    return _Turn("tool", [text], answers=text_of(block, "tool_use_id", place))


# ---- tools ----


def read_tools(given: list[Any] | None, choice: Mapping[str, Any] | None) -> Tools | None:
    """Return the tools that the model may call; None if there are none.

    Args:
        given: The field `tools`.
        choice: The field `tool_choice`.

    Raises:
        CallerError: A field is not valid, or a tool runs on Anthropic's servers. The error names
            the field.
    """
    how, only = _choice(choice)
    if not given:
        if how is ToolChoice.REQUIRED:
            raise CallerError(
                "'tool_choice' is only allowed when 'tools' are specified", field="tool_choice"
            )
        return None
    if len(given) > MAX_TOOLS:
        raise CallerError(
            f"'tools' has {len(given)} items; at most {MAX_TOOLS} are allowed", field="tools"
        )
    functions = [_tool(tool, f"tools[{at}]") for at, tool in enumerate(given)]
    names = [function["name"] for function in functions]
    for at, name in enumerate(names):
        if name in names[:at]:
            raise CallerError(f"tools[{at}]: two tools have the name {name!r}", field="tools")
    if only is not None and only not in names:
        raise CallerError(f"tool_choice.name: no tool has the name {only!r}", field="tool_choice")
    parallel = choice is None or choice.get("disable_parallel_tool_use") is not True
    return Tools(compact(functions), how, only, parallel)


def _tool(tool: object, place: str) -> dict[str, Any]:
    if not isinstance(tool, dict):
        raise invalid(place, tool, "an object")
    kind, name = tool.get("type"), tool.get("name")
    if kind not in (None, "custom"):
        raise CallerError(
            f"{place}: a tool of the type {kind!r} is not supported",
            field=place,
            hint="a tool of your own has a name, a description and an input_schema",
        )
    if not isinstance(name, str) or _NAME.fullmatch(name) is None:
        right = "1 to 128 of the characters a-z, A-Z, 0-9, _, . and -"
        raise invalid(f"{place}.name", name, right)
    if tool.get("defer_loading") is True:
        raise CallerError(
            f"{place}: 'defer_loading' is not supported, because it needs the tool search",
            field=place,
        )
    description, schema = tool.get("description"), tool.get("input_schema")
    if description is not None and not isinstance(description, str):
        raise invalid(f"{place}.description", description, "a string")
    if schema is None:
        raise missing(f"{place}.input_schema")
    if not isinstance(schema, dict):
        raise invalid(f"{place}.input_schema", schema, "a JSON schema, an object")
    described = {} if description is None else {"description": description}
    return {"name": name, **described, "parameters": schema}


def _choice(choice: Mapping[str, Any] | None) -> tuple[ToolChoice, str | None]:
    """Return how the model chooses a tool, and the one tool that it must call, if any."""
    if choice is None:
        return ToolChoice.AUTO, None
    kind = choice.get("type")
    if kind == "tool":
        return ToolChoice.REQUIRED, text_of(choice, "name", "tool_choice")
    if not isinstance(kind, str) or kind not in CHOICES:
        raise invalid("tool_choice.type", kind, "one of auto, any, tool, none")
    return CHOICES[kind], None
