"""The body of `POST /v1/generate`, from JSON to an Open frame.

Checked here is what the wire can carry, in words that say what would be right. Ranges
that depend on the model or on policy (temperature, context length) are the origin's to
judge: it also answers clients that send frames.
"""

from __future__ import annotations

import json
from difflib import get_close_matches
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import ErrorDetails

from ledger.errors import CallerError
from ledger.frame import Durability, Message, Open, Priority

UINT_MAX = 2**64 - 1
MAX_SHOWN_CHARS = 40  # of a refused value, in the message that refuses it


def _words(enum: type[Durability] | type[Priority]) -> str:
    return "one of " + ", ".join(member.word for member in enum)


# Each description is the hint that an error on the field gives.
Text = Annotated[str, Field(description="a string")]
Name = Annotated[str, Field(min_length=1, description="a string that is not empty")]
Count = Annotated[int, Field(ge=0, le=UINT_MAX)]
Weight = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class MessageBody(BaseModel):
    """One turn of a conversation."""

    model_config = ConfigDict(extra="forbid", strict=True)

    role: Name
    content: Text


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
    seed: Count | None = Field(None, description="an integer from 0 to 2^64-1")
    stop: str | list[str] | None = Field(None, description="a string or a list of strings")
    ignore_eos: bool | None = Field(None, description="true or false")
    durability: str | None = Field(None, description=_words(Durability))
    priority: str | None = Field(None, description=_words(Priority))

    def to_open(self, *, idempotency_key: str, credit: int) -> Open:
        """The frame that says the same; CallerError for a word that names no enum member."""
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        turns = tuple(Message(turn.role, turn.content) for turn in self.messages or ())
        durability, priority = self.durability, self.priority
        return Open(
            model=self.model,
            prompt=self.prompt,
            messages=turns,
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            seed=self.seed,
            stop=stop,
            ignore_eos=bool(self.ignore_eos),
            durability=Durability.from_word("process" if durability is None else durability),
            priority=Priority.from_word("standard" if priority is None else priority),
            idempotency_key=idempotency_key,
            credit=credit,
        )


def parse_generate(body: bytes, *, idempotency_key: str, credit: int) -> Open:
    """The Open frame of a request body.

    Raises CallerError naming the first field at fault and what would be right.
    """
    try:
        parsed = GenerateBody.model_validate_json(body)
    except ValidationError as error:
        raise _caller_error(error) from None
    return parsed.to_open(idempotency_key=idempotency_key, credit=credit)


# ---- pydantic's findings in our words ----


def _caller_error(error: ValidationError) -> CallerError:
    findings = error.errors(include_url=False)
    # A misspelt name explains a missing one, so it is the one to tell of.
    unknown = (item for item in findings if item["type"] == "extra_forbidden")
    finding = next(unknown, findings[0])
    location = finding["loc"]
    if not location:
        return _not_an_object(finding)
    if finding["type"] == "extra_forbidden":
        return _unknown_field(location)
    name = _field_name(location)
    known = GenerateBody.model_fields | MessageBody.model_fields
    if finding["type"] == "missing":
        message = "this field is required"
    else:
        message = f"{_shown(finding['input'])} is not accepted"
    return CallerError(message, field=_path(location), hint=known[name].description)


def _not_an_object(finding: ErrorDetails) -> CallerError:
    found = finding.get("ctx", {}).get("error", "it is another kind of value")
    return CallerError(
        f"the body is not a JSON object: {found}",
        code="invalid_json",
        hint='send an object such as {"model": "demo", "prompt": "Once upon"}',
    )


def _unknown_field(location: tuple[int | str, ...]) -> CallerError:
    known = GenerateBody.model_fields if len(location) == 1 else MessageBody.model_fields
    closest = get_close_matches(str(location[-1]), known, n=1)
    hint = f'did you mean "{closest[0]}"?' if closest else "one of " + ", ".join(known)
    return CallerError("unknown field", code="unknown_field", field=_path(location), hint=hint)


def _field_name(location: tuple[int | str, ...]) -> str:
    """The innermost field that the location names; what lies below `stop` is no field."""
    if location[0] == "messages" and isinstance(location[-1], str):
        return location[-1]
    return str(location[0])


def _path(location: tuple[int | str, ...]) -> str:
    """`("messages", 0, "role")` as `messages[0].role`."""
    first, *rest = location[:1] if location[0] == "stop" else location
    steps = (f"[{part}]" if isinstance(part, int) else f".{part}" for part in rest)
    return str(first) + "".join(steps)


def _shown(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= MAX_SHOWN_CHARS else text[: MAX_SHOWN_CHARS - 1] + "…"
