"""The body of `POST /v1/generate`, from JSON to an Open frame.

Checked here is what the wire can carry, in words that say what would be right. Ranges
that depend on the model or on policy (temperature, context length) are the origin's to
judge: it also answers clients that send frames.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from ledger.errors import CallerError
from ledger.frame import Durability, FormatKind, Message, Open, OutputFormat, Overflow, Priority

UINT_MAX = 2**64 - 1
GENERATE_EXAMPLE = '{"model": "demo", "prompt": "Once upon"}'
STEER_EXAMPLE = '{"text": " But then"}'
Location = tuple[int | str, ...]
MAX_SHOWN_CHARS = 40  # of a refused value, in the message that refuses it


def _words(enum: type[Durability] | type[Overflow] | type[Priority]) -> str:
    return "one of " + ", ".join(member.word for member in enum)


# Each description is the hint that an error on the field gives.
Text = Annotated[str, Field(description="a string")]
Name = Annotated[str, Field(min_length=1, description="a string that is not empty")]
Count = Annotated[int, Field(ge=0, le=UINT_MAX)]
Weight = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Penalty = Annotated[float, Field(allow_inf_nan=False)]


class MessageBody(BaseModel):
    """One turn of a conversation."""

    model_config = ConfigDict(extra="forbid", strict=True)

    role: Name
    content: Text


class FormatBody(BaseModel):
    """What the text must match: one of the two."""

    model_config = ConfigDict(extra="forbid", strict=True)

    json_schema: dict[str, Any] | None = Field(None, description="a JSON schema, an object")
    regex: Text | None = Field(None, description="a regular expression, a string")

    def to_format(self) -> OutputFormat:
        if (self.json_schema is None) == (self.regex is None):
            raise CallerError(
                "give either json_schema or regex",
                field="format",
                hint=GenerateBody.model_fields["format"].description,
            )
        if self.regex is not None:
            return OutputFormat(FormatKind.REGEX, self.regex)
        schema = json.dumps(self.json_schema, ensure_ascii=False, separators=(",", ":"))
        return OutputFormat(FormatKind.JSON_SCHEMA, schema)


class GenerateBody(BaseModel):
    """The request's JSON document; a field that is null counts as left out."""

    model_config = ConfigDict(extra="forbid", strict=True)

    model: Annotated[str, Field(min_length=1, description='a model, such as "demo"')]
    prompt: str | None = Field(None, description="a string")
    messages: list[MessageBody] | None = Field(
        None, description='a list of objects such as {"role": "user", "content": "Hello"}'
    )
    max_tokens: Count | None = Field(None, ge=1, description="an integer of at least 1")
    temperature: Weight | None = Field(None, description="a number of at least 0")
    top_k: Count | None = Field(None, description="an integer of at least 0; 0 is off")
    top_p: Weight | None = Field(None, description="a number from 0 to 1; 1 is off")
    min_p: Weight | None = Field(None, description="a number from 0 to 1; 0 is off")
    repetition_penalty: Weight | None = Field(None, description="a number above 0; 1 is off")
    presence_penalty: Penalty | None = Field(None, description="a number from -2 to 2; 0 is off")
    frequency_penalty: Penalty | None = Field(None, description="a number from -2 to 2; 0 is off")
    seed: Count | None = Field(None, description="an integer from 0 to 2^64-1")
    stop: str | list[str] | None = Field(None, description="a string or a list of strings")
    ignore_eos: bool | None = Field(None, description="true or false")
    logprobs: Count | None = Field(
        None, description="an integer from 0 to 20: so many alternatives to each token"
    )
    format: FormatBody | None = Field(
        None, description='an object such as {"json_schema": {...}} or {"regex": "[0-9]+"}'
    )
    overflow: str | None = Field(None, description=_words(Overflow))
    n: Count | None = Field(None, ge=1, description="an integer from 1 to 16")
    durability: str | None = Field(None, description=_words(Durability))
    priority: str | None = Field(None, description=_words(Priority))

    def to_open(self, *, idempotency_key: str, credit: int) -> Open:
        """The frame that says the same; CallerError for a word that names no enum member."""
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        turns = tuple(Message(turn.role, turn.content) for turn in self.messages or ())
        # None is the default; "" is a word like any other, and none that is known.
        durability = "process" if self.durability is None else self.durability
        priority = "standard" if self.priority is None else self.priority
        overflow = "refuse" if self.overflow is None else self.overflow
        return Open(
            model=self.model,
            prompt=self.prompt,
            messages=turns,
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            seed=self.seed,
            stop=stop,
            ignore_eos=bool(self.ignore_eos),
            logprobs=self.logprobs,
            format=None if self.format is None else self.format.to_format(),
            overflow=Overflow.from_word(overflow),
            n=1 if self.n is None else self.n,
            durability=Durability.from_word(durability),
            priority=Priority.from_word(priority),
            idempotency_key=idempotency_key,
            credit=credit,
        )


INNER: dict[str, type[BaseModel]] = {"messages": MessageBody, "format": FormatBody}


class SteerBody(BaseModel):
    """The JSON document of a request to steer."""

    model_config = ConfigDict(extra="forbid", strict=True)

    text: Annotated[str, Field(min_length=1, description="a string that is not empty")]


def parse_generate(body: bytes, *, idempotency_key: str, credit: int) -> Open:
    """The Open frame of a request body.

    Raises CallerError naming the first field at fault and what would be right.
    """
    try:
        parsed = GenerateBody.model_validate_json(body)
    except ValidationError as error:
        raise _caller_error(error, GenerateBody, GENERATE_EXAMPLE) from None
    return parsed.to_open(idempotency_key=idempotency_key, credit=credit)


def parse_steer(body: bytes) -> str:
    """The text of a request to steer; raises CallerError as `parse_generate` does."""
    try:
        return SteerBody.model_validate_json(body).text
    except ValidationError as error:
        raise _caller_error(error, SteerBody, STEER_EXAMPLE) from None


# ---- pydantic's findings in our words ----


def _caller_error(error: ValidationError, body: type[BaseModel], example: str) -> CallerError:
    findings = error.errors(include_url=False)
    # A misspelt name explains a missing one, so it is the one to tell of.
    unknown = (item for item in findings if item["type"] == "extra_forbidden")
    finding = next(unknown, findings[0])
    location = finding["loc"]
    if not location:
        return _not_an_object(finding, example)
    fields = _fields_around(location, body)
    if finding["type"] == "extra_forbidden":
        return _unknown_field(location, fields)
    # What lies below `stop` is no field.
    name = next((str(part) for part in reversed(location) if part in fields), None)
    if finding["type"] == "missing":
        message = "this field is required"
    else:
        message = f"{_shown(finding['input'])} is not accepted"
    return CallerError(message, field=_path(location), hint=name and fields[name].description)


def _not_an_object(finding: ErrorDetails, example: str) -> CallerError:
    found = finding.get("ctx", {}).get("error", "it is another kind of value")
    return CallerError(
        f"the body is not a JSON object: {found}",
        code="invalid_json",
        hint=f"send an object such as {example}",
    )


def _unknown_field(location: Location, fields: Mapping[str, FieldInfo]) -> CallerError:
    closest = get_close_matches(str(location[-1]), fields, n=1)
    hint = f'did you mean "{closest[0]}"?' if closest else "one of " + ", ".join(fields)
    return CallerError("unknown field", code="unknown_field", field=_path(location), hint=hint)


def _fields_around(location: Location, body: type[BaseModel]) -> Mapping[str, FieldInfo]:
    """The fields of the object in which the innermost field of the location lies."""
    is_inside = len(location) > 1 and isinstance(location[-1], str)
    inner = INNER.get(str(location[0]))
    return (inner if inner is not None and is_inside else body).model_fields


def _path(location: Location) -> str:
    """`("messages", 0, "role")` as `messages[0].role`."""
    first, *rest = location[:1] if location[0] == "stop" else location
    steps = (f"[{part}]" if isinstance(part, int) else f".{part}" for part in rest)
    return str(first) + "".join(steps)


def _shown(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= MAX_SHOWN_CHARS else text[: MAX_SHOWN_CHARS - 1] + "…"
