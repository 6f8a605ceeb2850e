"""Parses the body of `POST /v1/responses` into an Open frame.

A GET of a response must show parts of the request that created it. Edges keep no state, so these
parts are stored with the stream in the ledger, as the stream's note.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field

from tailrace.edge.generate.schema import Count
from tailrace.edge.openai.messages import (
    FLAT_TOOL_SCHEMA,
    ROLES,
    missing,
    read_content,
    read_tools,
    role_of,
    text_of,
)
from tailrace.edge.openai.request import (
    ALL_THERE_IS,
    StreamedSettings,
    compact,
    invalid,
    open_of,
    output_format,
)
from tailrace.edge.unread import DEFAULT_AFTER_S
from tailrace.ledger.errors import CallerError
from tailrace.ledger.frame import MAX_MESSAGES, Caller, Message, Open, Overflow, Unread

MAX_INPUT_CHARS = 128 * 1024
"""Maximum size of an input that is stored with a stream, in characters of its JSON. A response to a
longer input cannot be continued with `previous_response_id`, and its input cannot be listed."""
MAX_ASKED_CHARS = 64 * 1024
"""Maximum size of all fields of the request that a response repeats, in characters of their JSON.
If they are longer, the longest fields are left out."""


@dataclass(frozen=True, slots=True)
class ResponseNote:
    """The parts of a request that are stored with its stream."""

    asked: Mapping[str, Any]
    """Fields of the request that the response repeats, by name."""
    input: Sequence[dict[str, Any]] | None = None
    """The input items that the model was given, for a later request that continues this response.
    None if they are too long, or if the client asked not to store them."""

    def write(self) -> str:
        """Return the note as JSON, without the parts that exceed the limits."""
        items = self.input
        if items is not None and len(compact(items)) > MAX_INPUT_CHARS:
            items = None
        sizes = {name: len(compact(value)) for name, value in self.asked.items()}
        while sum(sizes.values()) > MAX_ASKED_CHARS:
            del sizes[max(sizes, key=lambda name: sizes[name])]
        return compact({"response": {name: self.asked[name] for name in sizes}, "input": items})


def read_note(text: str | None) -> ResponseNote:
    """Return the parsed note of a stream; an empty one if another route created the stream."""
    try:
        said = json.loads(text or "")
        return ResponseNote(dict(said["response"]), said["input"])
    except (ValueError, KeyError, TypeError):
        return ResponseNote({})


EXAMPLE = '{"model": "demo", "input": "Once upon"}'
REFERENCE = "item_reference"
"""The type of an input item that names an item of an earlier response's output by its id."""
LOGPROBS = "message.output_text.logprobs"
"""The value in the field `include` by which a client asks for the scores of tokens."""
MAX_METADATA = 16
MAX_METADATA_NAME_CHARS = 64
MAX_METADATA_CHARS = 512

Items = list[dict[str, Any]]

_ROLES = {said: role for said, role in ROLES.items() if said != "tool"}
_TRUNCATION = {"auto": Overflow.DROP_OLDEST, "disabled": Overflow.REFUSE}


class TextBody(BaseModel):
    """The field `text`: the format that the answer's text must match."""

    model_config = ConfigDict(extra="ignore", strict=True)

    format: dict[str, Any] | None = Field(
        None, description='an object with a type, such as {"type": "json_object"}'
    )


class ResponseBody(StreamedSettings):
    """The JSON body of `POST /v1/responses`."""

    cannot: ClassVar = {"n": (1,), "conversation": (), "prompt": (), "max_tool_calls": ()}

    input: str | list[Any] = Field(description="a string or a list of input items")
    instructions: str | None = Field(None, description="a string: the system prompt")
    max_output_tokens: Count | None = Field(None, ge=1, description="an integer of at least 1")
    metadata: dict[str, str] | None = Field(None, description="an object whose values are strings")
    tools: list[Any] | None = Field(
        None,
        description="a list of functions that the model may call",
        json_schema_extra={"items": FLAT_TOOL_SCHEMA},
    )
    tool_choice: Any = None
    parallel_tool_calls: bool | None = Field(None, description="true or false")
    text: TextBody | None = Field(
        None, description='an object such as {"format": {"type": "json_object"}}'
    )
    top_logprobs: Count | None = Field(
        None, description="an integer from 0 to 20: the number of alternatives to each token"
    )
    include: list[str] | None = Field(
        None, description="a list of strings: the optional parts of the response"
    )
    truncation: str | None = Field(None, description='"auto" or "disabled"')
    background: bool | None = Field(None, description="true or false")
    store: bool | None = Field(None, description="true or false")
    previous_response_id: str | None = Field(
        None, description="the id of an earlier response, a string"
    )
    reasoning: dict[str, Any] | None = Field(
        None, description='an object such as {"effort": "low"}'
    )
    user: str | None = Field(None, description="a string: the id of your end user")

    def items(self) -> Items:
        """Return the input as a list of items; raise CallerError if an item is invalid."""
        if isinstance(self.input, str):
            part = {"type": "input_text", "text": self.input}
            return [{"type": "message", "role": "user", "content": [part]}]
        for at, item in enumerate(self.input):
            if not isinstance(item, dict):
                raise invalid(f"input[{at}]", item, "an object")
        return [{"type": "message", **item} for item in self.input]


def to_open(
    body: ResponseBody, earlier: Items, given: Items, key: str | None, caller: Caller | None
) -> Open:
    """Return the Open for a request.

    Args:
        body: The request.
        earlier: The input and output items of the response that the request continues.
        given: The request's own input items.
        key: The value of the header Idempotency-Key.
        caller: The caller that the API key identifies.

    Raises:
        CallerError: A field is not valid; the error names it.
    """
    _check_metadata(body.metadata or {})
    instructions = () if body.instructions is None else (Message("system", body.instructions),)
    said = read_items(given)
    messages = (*instructions, *read_items(earlier), *said)
    if not said or len(messages) > MAX_MESSAGES:
        raise CallerError(
            f"Invalid 'input': {len(messages)} messages; 1 to {MAX_MESSAGES} are expected.",
            code="invalid_value",
            field="input",
        )
    wants_scores = body.top_logprobs is not None or LOGPROBS in (body.include or ())
    more: dict[str, Any] = {}
    if body.truncation is not None:
        if body.truncation not in _TRUNCATION:
            raise invalid("truncation", body.truncation, "auto or disabled")
        more["overflow"] = _TRUNCATION[body.truncation]
    # A background response has no reader, so it must run on without one. The explicit seconds keep
    # the edge's default (`UnreadDefault`) from replacing RUN.
    if body.background and body.unread is None:
        more |= {"unread": Unread.RUN, "unread_after_s": DEFAULT_AFTER_S}
    return open_of(
        body,
        key,
        caller,
        messages=messages,
        max_tokens=ALL_THERE_IS if body.max_output_tokens is None else body.max_output_tokens,
        logprobs=(body.top_logprobs or 0) if wants_scores else None,
        format=_format(body.text),
        tools=read_tools(body.tools, body.tool_choice, body.parallel_tool_calls, nested=False),
        note=_note(body, [*earlier, *given]).write(),
        **more,
    )


UNSAID: dict[str, Any] = {
    "background": False,
    "instructions": None,
    "max_output_tokens": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "previous_response_id": None,
    "reasoning": {"effort": None, "summary": None},
    "store": True,
    "temperature": None,
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [],
    "top_logprobs": 0,
    "top_p": None,
    "truncation": "disabled",
    "user": None,
}
"""The fields of a request that the response repeats, with the value to show if the request has no
such field. None means that the model's default applies."""


def _note(body: ResponseBody, items: Items) -> ResponseNote:
    said = body.model_dump(include=set(UNSAID), exclude_none=True)
    return ResponseNote(said, None if body.store is False else items)


def _format(text: TextBody | None) -> Any:
    if text is None or text.format is None:
        return None
    return output_format(text.format.get("type"), text.format.get("schema"), "text.format")


def _check_metadata(metadata: dict[str, str]) -> None:
    if len(metadata) > MAX_METADATA:
        raise CallerError(
            f"{len(metadata)} pairs; at most {MAX_METADATA} are allowed.", field="metadata"
        )
    for name, value in metadata.items():
        if len(name) > MAX_METADATA_NAME_CHARS or len(value) > MAX_METADATA_CHARS:
            raise CallerError(
                f"A name may have at most {MAX_METADATA_NAME_CHARS} characters, "
                f"and a value at most {MAX_METADATA_CHARS}.",
                field="metadata",
            )


# ---- items ----


def read_items(items: Items) -> tuple[Message, ...]:
    """Return the messages for the items of an input or of an earlier output."""
    turns: list[Message] = []
    calls: list[dict[str, str]] = []  # tool calls of the last message; further items may add more
    for at, item in enumerate(items):
        place, kind = f"input[{at}]", item.get("type")
        if kind == "reasoning":
            continue  # reasoning is not sent to the model again
        if kind == "function_call":
            calls.append(_call(item, place))
            spoken = turns.pop() if turns and turns[-1].role == "assistant" else None
            text = "" if spoken is None else spoken.content
            turns.append(Message("assistant", text, tool_calls=compact(calls)))
            continue
        calls = []
        if kind == "message":
            turns.append(_turn(item, place))
        elif kind == "function_call_output":
            output = read_content(item.get("output"), f"{place}.output")
            turns.append(Message("tool", output, tool_call_id=text_of(item, "call_id", place)))
        else:
            raise invalid(f"{place}.type", kind, _KINDS)
    return tuple(turns)


_KINDS = f"one of message, function_call, function_call_output, reasoning, {REFERENCE}"


def _turn(item: dict[str, Any], place: str) -> Message:
    role = role_of(item, _ROLES, place)
    if item.get("content") is None:
        raise missing(f"{place}.content")
    return Message(role, read_content(item["content"], f"{place}.content"))


def _call(item: dict[str, Any], place: str) -> dict[str, str]:
    return {
        "id": text_of(item, "call_id", place),
        "name": text_of(item, "name", place),
        "arguments": text_of(item, "arguments", place),
    }
