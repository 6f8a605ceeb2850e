"""Parses the requests of OpenAI's routes into Open frames: the part that all routes share.

Clients of OpenAI's API send parameters of other servers, too. Unknown parameters are ignored, and
listed in the response header `Tailrace-Ignored`. Known parameters that are not supported are
refused if they would change the answer. Requests may also have the parameters of
`POST /v1/generate` (`top_k`, `min_p`, `priority`, `durability`, `unread`, …).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from secrets import token_hex
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import to_json

from tailrace.edge.generate.group_request import GROUP, GroupField
from tailrace.edge.generate.params import check_idempotency_key
from tailrace.edge.generate.schema import Count, Settings, read_object
from tailrace.ledger.errors import CallerError
from tailrace.ledger.frame import Caller, FormatKind, Open, OutputFormat
from tailrace.ledger.validation import first_fault, shown

IGNORED = "Tailrace-Ignored"
"""The response header that lists the request's parameters that were ignored."""
MAX_NAMED_IGNORED = 20
MIN_SEED = -(2**63)
ALL_THERE_IS = 1 << 20
"""The `max_tokens` of a request that sets no limit. The origin reduces it to the number of tokens
that fit into the model's context."""

_FLAGS = {"true": True, "1": True, "false": False, "0": False}


class StreamOptions(BaseModel):
    """The field `stream_options`: whether the stream also contains token counts."""

    model_config = ConfigDict(extra="ignore", strict=True)

    include_usage: bool | None = Field(None, description="true or false")
    continuous_usage_stats: bool | None = Field(None, description="true or false")


class OpenAiBody(BaseModel):
    """Base class of the pydantic models of request bodies."""

    cannot: ClassVar[Mapping[str, Sequence[object]]] = {}
    """Maps each unsupported parameter to values that are accepted, because they change nothing."""


class StreamedSettings(Settings, OpenAiBody):
    """Parameters of a route that can stream its answer."""

    stream: bool | None = Field(None, description="true or false")
    stream_options: StreamOptions | None = Field(
        None, description='an object such as {"include_usage": true}'
    )


class ChoiceSettings(StreamedSettings):
    """Parameters of a route that answers with choices, streamed in chunks or as one document."""

    group: GroupField = GROUP


Body = TypeVar("Body", bound=OpenAiBody)


def parse_body(model: type[Body], body: bytes, example: str) -> tuple[Body, dict[str, str]]:
    """Parse the body into the pydantic class `model`.

    Returns the parsed body, and response headers that name the ignored parameters. A parameter that
    is null counts as left out. Raises CallerError if the body is not valid; `example` is a valid
    body, which the error shows.
    """
    document = {
        name: _ours(name, value)
        for name, value in read_object(body, example).items()
        if value is not None
    }
    for name, neutral in model.cannot.items():
        if document.get(name) not in (None, *neutral):
            raise CallerError(
                f"Unsupported parameter: '{name}' is not supported with this model.",
                code="unsupported_parameter",
                field=name,
            )
    known = {*model.model_fields, *model.cannot}
    unknown = [name for name in document if name not in known]
    try:
        parsed = model.model_validate(document)
    except ValidationError as error:
        raise _refusal(error, model) from None
    named = [name for name in unknown if name.isascii() and name.isidentifier()]
    return parsed, {IGNORED: ", ".join(named[:MAX_NAMED_IGNORED])} if named else {}


def _ours(name: str, value: object) -> object:
    """Return the value of a parameter, converted if other servers use another value than we do."""
    if name == "top_k" and value == -1 and type(value) is int:  # vLLM and SGLang: -1 means off
        return 0
    # Other servers take a signed 64-bit seed, an Open frame an unsigned one.
    if name == "seed" and type(value) is int and MIN_SEED <= value < 0:
        return value + (1 << 64)
    return value


def open_of(settings: Settings, key: str | None, caller: Caller | None, **more: Any) -> Open:
    """Return the Open for these settings.

    `key` is the request's Idempotency-Key; `more` are further fields of Open.
    """
    # An origin starts no second stream for the same key. So the edge, which generates a key if the
    # client has sent none, can send the request again when the link to the origin breaks.
    key = token_hex(16) if key is None else check_idempotency_key(key)
    return replace(settings.to_open(idempotency_key=key), caller=caller, **more)


def output_format(kind: object, schema: object, field: str) -> OutputFormat | None:
    """Return the format that the text must match; None for `text`, which allows anything.

    Args:
        kind: The format's `type`: `json_schema`, `json_object` or `text`.
        schema: The JSON schema.
        field: The name of the format's field, for errors.

    Raises:
        CallerError: The type is unknown, or the schema is not an object.
    """
    if kind == "text":
        return None
    if kind == "json_object":
        return OutputFormat(FormatKind.JSON_SCHEMA, '{"type":"object"}')
    if kind != "json_schema":
        raise invalid(f"{field}.type", kind, "one of text, json_object, json_schema")
    if not isinstance(schema, dict):
        raise invalid(f"{field}.schema", schema, "a JSON schema, an object")
    source = to_json(schema, inf_nan_mode="constants").decode()
    return OutputFormat(FormatKind.JSON_SCHEMA, source)


def flag(query: Mapping[str, str], name: str) -> bool:
    """Return the boolean parameter `name` of a query; False if it is missing."""
    said = query.get(name, "false")
    if said not in _FLAGS:
        raise CallerError(f"{said!r} is not true or false", field=name)
    return _FLAGS[said]


def invalid(field: str, value: object, right: str) -> CallerError:
    """Return the error for an invalid value, worded as by OpenAI; `right` says what is expected."""
    return CallerError(
        f"Invalid value for '{field}': {shown(value)} is not {right}.",
        code="invalid_value",
        field=field,
    )


TEXTS: dict[str, Any] = {
    "anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}, "minItems": 1}]
}
"""The JSON schema of the values that `read_texts` accepts."""


def read_texts(field: str, given: object, most: int, called: str) -> list[str]:
    """Return the list of texts in `given`, which may also be a single string.

    Raises CallerError if there are none, or more than `most`. `called` is the word for the texts in
    this error, such as "prompts".
    """
    texts = [given] if isinstance(given, str) else given
    if not isinstance(texts, list):
        raise invalid(field, texts, "a string or a list of strings")
    if not 0 < len(texts) <= most:
        raise CallerError(f"{len(texts)} {called}; 1 to {most} are expected.", field=field)
    for at, text in enumerate(texts):
        if not isinstance(text, str):
            raise invalid(f"{field}[{at}]", text, "a string: token ids are not accepted")
    return texts


def compact(value: object) -> str:
    """Return `value` as JSON without spaces, the form that frames contain."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _refusal(error: ValidationError, model: type[BaseModel]) -> CallerError:
    """Return the error for the first fault that pydantic found, worded as by OpenAI."""
    fault = first_fault(error, model)
    if fault.kind == "missing":
        return CallerError(
            f"Missing required parameter: '{fault.field}'.",
            code="missing_required_parameter",
            field=fault.field,
        )
    refusal = invalid(fault.field, fault.value, fault.right or "of its type")
    if fault.kind.endswith("_type"):
        refusal.code = "invalid_type"
    return refusal


MaxTokens = Annotated[Count | None, Field(ge=1, description="an integer of at least 1")]
