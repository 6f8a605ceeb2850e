"""Parses the body of `POST /v1/messages` into an Open frame.

Parameters that would change the answer and are not supported are refused by name, as are unknown
ones. Requests may also have the parameters of `POST /v1/generate` (`seed`, `min_p`, `priority`,
`durability`, `unread`, …).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tailrace.edge.anthropic.conversation import (
    MESSAGE_SCHEMA,
    TEXT_SCHEMA,
    TOOL_SCHEMA,
    read_conversation,
    read_tools,
)
from tailrace.edge.errors import THREAD_UNSUPPORTED
from tailrace.edge.generate.schema import Count, Settings, Text, read_object
from tailrace.edge.openai.request import (
    ALL_THERE_IS,
    IGNORED,
    compact,
    invalid,
    open_of,
    output_format,
)
from tailrace.ledger.errors import CallerError
from tailrace.ledger.frame import Caller, Open
from tailrace.ledger.validation import invalid_document

EXAMPLE = '{"model": "demo", "max_tokens": 100, "messages": [{"role": "user", "content": "Hello"}]}'
MIN_BUDGET_TOKENS = 1024
"""Minimum of `thinking.budget_tokens`, the same as Anthropic's."""
WITHOUT_EFFECT = (
    *("cache_control", "service_tier", "diagnostics", "user_profile_id", "workspace_id"),
)
"""Parameters that are accepted without effect, and named in the header `Tailrace-Ignored`."""
CANNOT: Mapping[str, Sequence[object]] = {
    "container": (),
    "context_management": (),
    "inference_geo": (),
    "mcp_servers": ([],),
    "speed": ("standard",),
    "stop": (),
}
"""Unsupported parameters, with the values that are accepted because they change nothing."""


NO_DEFAULTS: Mapping[str, Any] = {}
COUNT_DEFAULTS: Mapping[str, Any] = {"max_tokens": ALL_THERE_IS}
"""The defaults of a request whose tokens are only counted, which has no `max_tokens`."""


class Thinking(Enum):
    """How clients get the reasoning of the model.

    The value is stored with the stream, in `Open.note`, so that a resumed response shows the
    reasoning in the same way.
    """

    SHOWN = "shown"
    OMITTED = "omitted"
    """Blocks without text are sent in place of the reasoning."""
    HIDDEN = "hidden"


class _Part(BaseModel):
    """Base class of the nested objects in a request body; unknown fields are refused."""

    model_config = ConfigDict(extra="forbid", strict=True)


class ThinkingBody(_Part):
    """The field `thinking` of a request: if and how the client wants the model's reasoning."""

    type: Annotated[Text, Field(json_schema_extra={"enum": ["enabled", "disabled", "adaptive"]})]
    budget_tokens: Count | None = Field(
        None, description=f"an integer of at least {MIN_BUDGET_TOKENS}, less than max_tokens"
    )
    display: str | None = Field(
        None,
        description="summarized or omitted",
        json_schema_extra={"enum": ["summarized", "omitted", None]},
    )

    def shown(self, max_tokens: int) -> Thinking:
        """Return how the reasoning is shown; raise CallerError for an invalid combination."""
        if self.type not in ("enabled", "disabled", "adaptive"):
            raise invalid("thinking.type", self.type, "one of enabled, disabled, adaptive")
        if self.display not in (None, "summarized", "omitted"):
            raise invalid("thinking.display", self.display, "one of summarized, omitted")
        budget = self.budget_tokens
        if self.type == "enabled" and (
            budget is None or not MIN_BUDGET_TOKENS <= budget < max_tokens
        ):
            right = f"an integer of at least {MIN_BUDGET_TOKENS} and less than 'max_tokens'"
            raise invalid("thinking.budget_tokens", budget, right)
        if self.type == "disabled":
            return Thinking.HIDDEN
        return Thinking.OMITTED if self.display == "omitted" else Thinking.SHOWN


class MetadataBody(_Part):
    """The field `metadata`, which has no effect."""

    user_id: str | None = Field(None, description="a string")


class OutputBody(_Part):
    """The field `output_config` of a request, which sets the format of the answer."""

    effort: str | None = Field(None, description="a string; it has no effect")
    format: dict[str, Any] | None = Field(
        None, description='an object such as {"type": "json_schema", "schema": {...}}'
    )


class MessagesBody(Settings):
    """The JSON body of a request."""

    model_config = ConfigDict(extra="forbid", strict=True)

    max_tokens: Annotated[Count, Field(ge=1, description="an integer of at least 1")]
    messages: list[Any] = Field(
        description="a list of messages", json_schema_extra={"items": MESSAGE_SCHEMA}
    )
    system: Any = Field(
        None, description="a string or a list of text blocks", json_schema_extra=TEXT_SCHEMA
    )
    stop_sequences: Annotated[list[str], Field(fail_fast=True)] | None = Field(
        None, description="a list of strings"
    )
    stream: bool | None = Field(None, description="true or false")
    tools: list[Any] | None = Field(
        None, description="a list of tools", json_schema_extra={"items": TOOL_SCHEMA}
    )
    tool_choice: dict[str, Any] | None = Field(
        None, description='an object such as {"type": "auto"}'
    )
    thinking: ThinkingBody | None = Field(
        None, description='an object such as {"type": "enabled", "budget_tokens": 1024}'
    )
    metadata: MetadataBody | None = Field(None, description='an object such as {"user_id": "u"}')
    output_config: OutputBody | None = Field(None, description="an object with a format")
    # The API has other names for these parameters, or none.
    stop: None = Field(None, description="in this API its name is stop_sequences")
    n: Literal[1] | None = Field(None, description="only 1")

    def to_stream(self, key: str | None, caller: Caller | None) -> Open:
        """Return the Open for the request; raise CallerError, which names an invalid field."""
        thinking = (
            Thinking.HIDDEN if self.thinking is None else self.thinking.shown(self.max_tokens)
        )
        form = None if self.output_config is None else self.output_config.format
        return open_of(
            self,
            key,
            caller,
            messages=read_conversation(self.system, self.messages),
            max_tokens=self.max_tokens,
            stop=tuple(self.stop_sequences or ()),
            tools=read_tools(self.tools, self.tool_choice),
            format=None
            if form is None
            else output_format(form.get("type"), form.get("schema"), "output_config.format"),
            note=compact({"message": {"thinking": thinking.value}}),
        )


def parse_body(
    body: bytes, defaults: Mapping[str, Any] = NO_DEFAULTS
) -> tuple[MessagesBody, dict[str, str]]:
    """Return the request in a body, and response headers that name the ignored parameters.

    A parameter that is null counts as left out; `defaults` has values for such parameters. Raises
    CallerError if the body is not valid.
    """
    given = read_object(body, EXAMPLE).items()
    document = {**defaults, **{name: value for name, value in given if value is not None}}
    if "thread" in document:
        raise CallerError(
            "'thread' is not supported: edges hold no conversations",
            code=THREAD_UNSUPPORTED,
            field="thread",
            hint="send the whole conversation in messages",
        )
    for name, neutral in CANNOT.items():
        if name in document and document.pop(name) not in neutral:
            raise CallerError(
                f"'{name}' is not supported",
                code="unsupported_parameter",
                field=name,
                hint="use stop_sequences" if name == "stop" else None,
            )
    ignored = [name for name in WITHOUT_EFFECT if document.pop(name, None) is not None]
    try:
        parsed = MessagesBody.model_validate(document)
    except ValidationError as error:
        raise invalid_document(error, MessagesBody) from None
    if parsed.output_config is not None and parsed.output_config.effort is not None:
        ignored.append("output_config.effort")
    return parsed, {IGNORED: ", ".join(ignored)} if ignored else {}


def read_note(text: str | None) -> Thinking:
    """Return how the reasoning of a stream is shown; `text` is the stream's note.

    The note holds what the request asked for. If another route has opened the stream, the note has
    no such field, and the reasoning is shown.
    """
    try:
        return Thinking(json.loads(text or "")["message"]["thinking"])
    except (ValueError, KeyError, TypeError):
        return Thinking.SHOWN
