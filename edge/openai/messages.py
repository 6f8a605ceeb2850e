"""Parses the messages and tools of OpenAI's API into the fields of an Open frame."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from tailrace.edge.openai.request import compact, invalid
from tailrace.ledger.errors import CallerError
from tailrace.ledger.frame import MAX_MESSAGES, Message, ToolChoice, Tools

MAX_TOOLS = 128
ROLES = {
    "developer": "system",
    "system": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}
"""Maps the roles of OpenAI's API to those of chat templates."""
_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}")
_STRING = {"type": "string"}
_TEXT_PART = {
    "type": "object",
    "properties": {"type": {"enum": ["text", "input_text", "output_text"]}, "text": _STRING},
    "required": ["type", "text"],
}
_REFUSAL_PART = {
    "type": "object",
    "properties": {"type": {"const": "refusal"}, "refusal": _STRING},
    "required": ["type", "refusal"],
}
_CALL = {
    "type": "object",
    "properties": {
        "id": _STRING,
        "type": {"const": "function"},
        "function": {
            "type": "object",
            "properties": {"name": _STRING, "arguments": _STRING},
            "required": ["name", "arguments"],
        },
    },
    "required": ["id", "function"],
}
MESSAGE_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "role": {"enum": [*ROLES]},
        "content": {
            "anyOf": [
                _STRING,
                {"type": "array", "items": {"anyOf": [_TEXT_PART, _REFUSAL_PART]}},
                {"type": "null"},
            ],
            "description": "The text. Optional only in a message with `tool_calls`.",
        },
        "tool_calls": {"anyOf": [{"type": "array", "items": _CALL}, {"type": "null"}]},
        "tool_call_id": {"description": "In a message of the role `tool`: the call it answers."},
    },
    "required": ["role"],
}
"""The JSON schema of one message that `read_messages` accepts."""
_FUNCTION: dict[str, Any] = {
    "name": {"type": "string", "pattern": f"^{_NAME.pattern}$"},
    "description": {"type": ["string", "null"]},
    "parameters": {"type": ["object", "null"], "description": "a JSON schema"},
}
FLAT_TOOL_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"type": {"const": "function"}, **_FUNCTION},
    "required": ["type", "name"],
}
"""The JSON schema of a tool in the Responses API, whose fields are not nested."""
TOOL_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "type": {"const": "function"},
        "function": {"type": "object", "properties": _FUNCTION, "required": ["name"]},
    },
    "required": ["type", "function"],
}
"""The JSON schema of a tool in the chat API."""


def read_messages(given: list[Any]) -> tuple[Message, ...]:
    """Return the messages of a conversation; raise CallerError with the name of an invalid part."""
    if not given or len(given) > MAX_MESSAGES:
        raise CallerError(
            f"Invalid 'messages': there are {len(given)}; 1 to {MAX_MESSAGES} are expected.",
            code="invalid_value",
            field="messages",
        )
    return tuple(_message(turn, f"messages[{at}]") for at, turn in enumerate(given))


def _message(turn: object, place: str) -> Message:
    if not isinstance(turn, dict):
        raise invalid(place, turn, "an object")
    role = role_of(turn, ROLES, place)
    calls = turn.get("tool_calls") or []
    answers = turn.get("tool_call_id")
    if role == "tool" and not isinstance(answers, str):
        raise missing(f"{place}.tool_call_id")
    if turn.get("content") is None and not (role == "assistant" and calls):
        raise missing(f"{place}.content")
    return Message(
        role=role,
        content=read_content(turn.get("content"), f"{place}.content"),
        tool_calls=_calls(calls, f"{place}.tool_calls") if role == "assistant" and calls else None,
        tool_call_id=answers if role == "tool" else None,
    )


def role_of(turn: Mapping[str, Any], roles: Mapping[str, str], place: str) -> str:
    """Return the role of a message as in chat templates; raise CallerError if it is unknown."""
    said = turn.get("role")
    role = roles.get(said) if isinstance(said, str) else None
    if role is None:
        raise invalid(f"{place}.role", said, "one of " + ", ".join(roles))
    return role


def read_content(content: object, place: str) -> str:
    """Return the text of a message whose content is a string or a list of text parts."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise invalid(place, content, "a string or a list of parts")
    return "".join(_part(part, f"{place}[{at}]") for at, part in enumerate(content))


def _part(part: object, place: str) -> str:
    if not isinstance(part, dict):
        raise invalid(place, part, "an object")
    kind = part.get("type")
    if kind not in ("text", "input_text", "output_text", "refusal"):
        raise CallerError(
            f"Invalid content type. {kind} is only supported by certain models.",
            field=f"{place}.type",
        )
    text = part.get("refusal" if kind == "refusal" else "text")
    if not isinstance(text, str):
        raise invalid(f"{place}.text", text, "a string")
    return text


def _calls(calls: object, place: str) -> str:
    if not isinstance(calls, list):
        raise invalid(place, calls, "a list of calls")
    return compact([_call(call, f"{place}[{at}]") for at, call in enumerate(calls)])


def _call(call: object, place: str) -> dict[str, str]:
    if not isinstance(call, dict) or call.get("type", "function") != "function":
        raise invalid(place, call, 'an object of type "function"')
    function = call.get("function")
    if not isinstance(function, dict):
        raise invalid(f"{place}.function", function, "an object")
    said = {"id": call.get("id"), **{part: function.get(part) for part in ("name", "arguments")}}
    fields: dict[str, str] = {}
    for name, value in said.items():
        if not isinstance(value, str):
            raise invalid(f"{place}.{name}", value, "a string")
        fields[name] = value
    return fields


# ---- tools ----


def read_tools(
    given: list[Any] | None, choice: object, parallel: bool | None, *, nested: bool = True
) -> Tools | None:
    """Return the tools that the model may call; None if there are none.

    Args:
        given: The field `tools`.
        choice: The field `tool_choice`.
        parallel: The field `parallel_tool_calls`.
        nested: True if the fields of a function are below `function`, as in the chat API; False
            if they are not nested, as in the Responses API.

    Raises:
        CallerError: A field is not valid; the error names it.
    """
    if not given:
        if choice not in (None, "none", "auto"):
            raise CallerError(
                "'tool_choice' is only allowed when 'tools' are specified.", field="tool_choice"
            )
        return None
    if len(given) > MAX_TOOLS:
        raise CallerError(f"{len(given)} tools; at most {MAX_TOOLS} are allowed.", field="tools")
    functions = [_tool(tool, f"tools[{at}]", nested=nested) for at, tool in enumerate(given)]
    names = [function["name"] for function in functions]
    for at, name in enumerate(names):
        if name in names[:at]:
            raise CallerError(f"two tools have the name {name!r}", field=f"tools[{at}]")
    how, only = _choice(choice, nested=nested)
    if only is not None and only not in names:
        raise CallerError(
            f"Tool choice '{only}' not found in 'tools' parameter.", field="tool_choice"
        )
    return Tools(compact(functions), how, only, parallel is not False)


def _tool(tool: object, place: str, *, nested: bool) -> dict[str, Any]:
    if not isinstance(tool, dict):
        raise invalid(place, tool, "an object")
    if tool.get("type") != "function":
        raise invalid(f"{place}.type", tool.get("type"), "function")
    function: object = tool.get("function") if nested else tool
    inner = f"{place}.function" if nested else place
    if not isinstance(function, dict):
        raise invalid(inner, function, "an object")
    return _function(function, inner)


def _function(function: Mapping[str, Any], place: str) -> dict[str, Any]:
    name, description = function.get("name"), function.get("description")
    parameters = function.get("parameters")
    if not isinstance(name, str) or _NAME.fullmatch(name) is None:
        raise invalid(f"{place}.name", name, "1 to 64 of the characters a-z, A-Z, 0-9, _, . and -")
    if description is not None and not isinstance(description, str):
        raise invalid(f"{place}.description", description, "a string")
    if parameters is not None and not isinstance(parameters, dict):
        raise CallerError(
            f"Invalid schema for function '{name}': it is not an object.",
            code="invalid_function_parameters",
            field=f"{place}.parameters",
        )
    return {
        "name": name,
        **({} if description is None else {"description": description}),
        "parameters": {"type": "object", "properties": {}} if parameters is None else parameters,
    }


def _choice(choice: object, *, nested: bool) -> tuple[ToolChoice, str | None]:
    if choice is None or choice == "auto":
        return ToolChoice.AUTO, None
    if choice in ("none", "required"):
        return ToolChoice.from_word(str(choice)), None
    if isinstance(choice, dict) and choice.get("type") == "function":
        named: object = choice.get("function") if nested else choice
        name = named.get("name") if isinstance(named, dict) else None
        if isinstance(name, str):
            return ToolChoice.REQUIRED, name
        raise missing("tool_choice.function.name" if nested else "tool_choice.name")
    raise invalid("tool_choice", choice, "none, auto, required, or an object that names a function")


def text_of(item: Mapping[str, Any], name: str, place: str) -> str:
    """Return the string in the field `name` of an item; raise CallerError if it is no string."""
    value = item.get(name)
    if value is None:
        raise missing(f"{place}.{name}")
    if not isinstance(value, str):
        raise invalid(f"{place}.{name}", value, "a string")
    return value


def missing(field: str) -> CallerError:
    """Return the error for a required parameter that is missing, in OpenAI's words."""
    return CallerError(
        f"Missing required parameter: '{field}'.", code="missing_required_parameter", field=field
    )
