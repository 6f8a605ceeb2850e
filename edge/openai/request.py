"""The bodies of OpenAI's routes, from JSON to an Open frame: what all of them have in common.

Clients of that API send whatever some server takes: a parameter that is not known here is ignored,
and named in the header `Tailrace-Ignored`. One that is known and cannot be done is refused by
name, because an answer without it would be another answer. Beside the API's own parameters stand
those of `POST /v1/generate` (`top_k`, `min_p`, `priority`, `durability`, `unread`, …).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from secrets import token_hex
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import to_json

from tailrace.edge.generate.params import check_idempotency_key
from tailrace.edge.generate.schema import Count, Settings, read_object
from tailrace.ledger.errors import CallerError
from tailrace.ledger.frame import Caller, FormatKind, Open, OutputFormat
from tailrace.ledger.validation import first_fault, shown

IGNORED = "Tailrace-Ignored"
"""The header that names the parameters that had no effect."""
MAX_NAMED_IGNORED = 20
MIN_SEED = -(2**63)
ALL_THERE_IS = 1 << 20
"""Tokens of an answer whose length the request leaves open: what the context has room for."""

_FLAGS = {"true": True, "1": True, "false": False, "0": False}


class StreamOptions(BaseModel):
    """What a stream tells beside its text."""

    model_config = ConfigDict(extra="ignore", strict=True)

    include_usage: bool | None = Field(None, description="true or false")
    continuous_usage_stats: bool | None = Field(None, description="true or false")


class OpenAiBody(BaseModel):
    """`cannot` are parameters that would change the answer, by the values that would not."""

    cannot: ClassVar[Mapping[str, Sequence[object]]] = {}


class StreamedSettings(Settings, OpenAiBody):
    """Settings of a route that can answer by a stream of events."""

    stream: bool | None = Field(None, description="true or false")
    stream_options: StreamOptions | None = Field(None, description="an object")


Body = TypeVar("Body", bound=OpenAiBody)


def parse_body(model: type[Body], body: bytes, example: str) -> tuple[Body, dict[str, str]]:
    """The body as a `model`, and headers that say what of it is ignored; CallerError if it is bad.

    What a client says is null counts as left out.
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
    """Return a value as we write it, where other servers have another way to."""
    if name == "top_k" and value == -1 and type(value) is int:  # off, in vLLM and SGLang
        return 0
    if name == "seed" and type(value) is int and MIN_SEED <= value < 0:  # 64 bits with a sign
        return value + (1 << 64)
    return value


def open_of(settings: Settings, key: str | None, caller: Caller | None, **more: Any) -> Open:
    """A request for a stream; `more` are fields of Open. `key` is its Idempotency-Key."""
    # A key of our own lets the request be sent again when the origin link breaks.
    key = token_hex(16) if key is None else check_idempotency_key(key)
    return replace(settings.to_open(idempotency_key=key), caller=caller, **more)


def output_format(kind: object, schema: object, field: str) -> OutputFormat | None:
    """What the text must match: the API's `json_schema`, `json_object` or `text`."""
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
    """What a query says of `name`; false where it does not."""
    said = query.get(name, "false")
    if said not in _FLAGS:
        raise CallerError(f"{said!r} is neither true nor false", field=name)
    return _FLAGS[said]


def invalid(field: str, value: object, right: str) -> CallerError:
    """The refusal of a value of the wrong kind."""
    return CallerError(
        f"Invalid value for '{field}': {shown(value)} is not {right}.",
        code="invalid_value",
        field=field,
    )


TEXTS: dict[str, Any] = {
    "anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}, "minItems": 1}]
}
"""The JSON schema of what `read_texts` takes."""


def read_texts(field: str, given: object, most: int, called: str) -> list[str]:
    """One text, or a list of them."""
    texts = [given] if isinstance(given, str) else given
    if not isinstance(texts, list):
        raise invalid(field, texts, "a string or a list of strings")
    if not 0 < len(texts) <= most:
        raise CallerError(f"{len(texts)} {called}; from 1 to {most} are expected.", field=field)
    for at, text in enumerate(texts):
        if not isinstance(text, str):
            raise invalid(f"{field}[{at}]", text, "a string: token ids are not taken")
    return texts


def compact(value: object) -> str:
    """JSON as it travels in frames."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _refusal(error: ValidationError, model: type[BaseModel]) -> CallerError:
    """Return the error for the first fault, in the API's words."""
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
