"""The body of `POST /api/chat`: what the AI SDK's `useChat` sends, and what an application adds."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from edge.openai.messages import missing, read_tools, text_of
from edge.openai.request import ALL_THERE_IS, compact, invalid, open_of
from edge.request import Count, Settings
from ledger.errors import CallerError
from ledger.frame import MAX_MESSAGES, Caller, Message, Open

EXAMPLE = (
    '{"id": "chat-1", "messages": [{"role": "user", "parts": [{"type": "text", "text": "Hi"}]}]}'
)
MAX_CHAT_CHARS = 128
ROLES = ("system", "user", "assistant")
SKIPPED = ("reasoning", "source-url", "source-document")
"""Parts that are shown, and were no part of what was said."""


class ChatBody(Settings):
    """The request's JSON document. `model` may be left out where an edge has one."""

    model: str | None = Field(None, min_length=1, description='a model, such as "demo"')  # type: ignore[assignment]
    id: str | None = Field(None, description="the id of a chat, a string")
    messages: list[Any] = Field(description="a list of messages with parts")
    trigger: str | None = Field(None, description="a string")
    messageId: str | None = Field(None, description="a string")  # noqa: N815, as it is sent
    system: str | None = Field(None, description="a string")
    max_tokens: Count | None = Field(None, ge=1, description="an integer of at least 1")
    tools: list[Any] | None = Field(None, description="a list of functions")
    tool_choice: Any = None


def to_open(body: ChatBody, key: str | None, caller: Caller | None) -> Open:
    """The request for a stream; `body` names a model."""
    system = () if body.system is None else (Message("system", body.system),)
    said = read_messages(body.messages)
    messages = (*system, *said)
    if not said or len(messages) > MAX_MESSAGES:
        raise CallerError(f"{len(messages)} messages", field="messages", hint=_COUNT)
    return open_of(
        body,
        key,
        caller,
        messages=messages,
        max_tokens=ALL_THERE_IS if body.max_tokens is None else body.max_tokens,
        tools=read_tools(body.tools, body.tool_choice, None),
    )


_COUNT = f"from 1 to {MAX_MESSAGES}"


def check_chat(name: str) -> str:
    """The id of a chat as given; CallerError unless it is one that can be asked for again."""
    if 0 < len(name) <= MAX_CHAT_CHARS and name.isprintable() and "/" not in name:
        return name
    raise CallerError(
        "not a usable id of a chat",
        field="id",
        hint=f"1 to {MAX_CHAT_CHARS} printable characters without a slash",
    )


# ---- messages with parts ----


def read_messages(given: list[Any]) -> tuple[Message, ...]:
    """The turns of a conversation; CallerError names the part that cannot be one."""
    return tuple(turn for at, one in enumerate(given) for turn in _turns(one, f"messages[{at}]"))


def _turns(message: object, place: str) -> list[Message]:
    if not isinstance(message, dict):
        raise invalid(place, message, "an object")
    role, parts = message.get("role"), message.get("parts")
    if role not in ROLES:
        raise invalid(f"{place}.role", role, "one of " + ", ".join(ROLES))
    if not isinstance(parts, list):
        raise missing(f"{place}.parts")
    turns, step = list[Message](), _Step(str(role))
    for at, part in enumerate(parts):
        if isinstance(part, dict) and part.get("type") == "step-start":
            turns += step.turns()
            step = _Step(str(role))
        else:
            step.add(part, f"{place}.parts[{at}]")
    return turns + step.turns()


class _Step:
    """What of a message was said at once: text, calls of tools, and then what those gave."""

    def __init__(self, role: str) -> None:
        self._role = role
        self._texts: list[str] = []
        self._calls: list[dict[str, str]] = []
        self._outputs: list[Message] = []

    def add(self, part: object, place: str) -> None:
        if not isinstance(part, dict) or not isinstance(part.get("type"), str):
            raise invalid(place, part, "an object with a type")
        kind: str = part["type"]
        if kind == "text":
            self._texts.append(text_of(part, "text", place))
        elif kind == "dynamic-tool" or kind.startswith("tool-"):
            self._add_call(part, kind, place)
        elif not (kind in SKIPPED or kind.startswith("data-")):
            raise CallerError(f"a model of text takes no part of type {kind!r}", field=place)

    def _add_call(self, part: dict[str, Any], kind: str, place: str) -> None:
        call_id, state = text_of(part, "toolCallId", place), part.get("state")
        name = text_of(part, "toolName", place) if kind == "dynamic-tool" else kind[len("tool-") :]
        if state not in ("input-available", "output-available", "output-error"):
            return  # a call that was never whole was never made
        arguments = compact(part.get("input", {}))
        self._calls.append({"id": call_id, "name": name, "arguments": arguments})
        if state == "output-available":
            output = part.get("output")
            text = output if isinstance(output, str) else compact(output)
            self._outputs.append(Message("tool", text, tool_call_id=call_id))
        elif state == "output-error":
            error = text_of(part, "errorText", place)
            self._outputs.append(Message("tool", error, tool_call_id=call_id))

    def turns(self) -> list[Message]:
        if not (self._texts or self._calls):
            return []
        calls = compact(self._calls) if self._calls else None
        return [Message(self._role, "".join(self._texts), tool_calls=calls), *self._outputs]
