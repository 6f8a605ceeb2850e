"""The body of `POST /v1/generate`, from JSON to an Open frame.

This module only checks that a frame can carry each value, and its errors say what would be valid.
The origin checks ranges that depend on the model or on policy (temperature, context length),
because it also serves clients that send frames.
"""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, TypeVar, get_type_hints

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, create_model
from pydantic_core import from_json, to_json

from tailrace.edge.access.key_class import bound_class, class_for, with_class
from tailrace.edge.chats.chat_id import check_chat
from tailrace.edge.generate.group_request import GROUP, GroupBody, GroupField, grouping_of
from tailrace.edge.generate.grouping import Grouping
from tailrace.edge.session import caller_not_allowed
from tailrace.edge.unread import DEFAULT_AFTER_S
from tailrace.ledger.errors import CallerError, FrameError
from tailrace.ledger.frame import (
    MAX_MESSAGES,
    MAX_STAGE_SWITCHES,
    SAMPLING,
    Branch,
    Cache,
    Durability,
    FormatKind,
    Message,
    Open,
    OutputFormat,
    Overflow,
    Priority,
    Sampling,
    SamplingRange,
    StageSwitch,
    Unread,
    decode,
)
from tailrace.ledger.validation import Location, invalid_document, path_of, unknown_field
from tailrace.ledger.wire.words import Word

UINT_MAX = 2**64 - 1
GENERATE_EXAMPLE = '{"model": "demo", "prompt": "Once upon"}'
BRANCH_EXAMPLE = '{"index": 2, "temperature": 1.2}'
STAGES_EXAMPLE = '{"stages": {"punctuate": false}}'
STEER_EXAMPLE = '{"text": " But then"}'
MAX_JSON_PARTS = 20_000
"""Maximum number of strings, commas and opening brackets in a body. To parse a megabyte of small
values would block the event loop for a second. Ordinary bodies have fewer parts, because a long
text is one string."""
MAX_JSON_BARE_BYTES = 256 * 1024
"""Maximum number of bytes outside strings in a large body, because it takes long to parse numbers
with many digits."""
# The quantifiers are possessive (`*+`): otherwise the matcher stores 63 bytes for each escape of a
# long text. CPython 3.11.0 to 3.11.4 have a bug in possessive groups. It only affects groups that
# begin to match and then fail, which cannot happen here.
_PART = re.compile(rb""""[^"\\]*+(?:\\.[^"\\]*+)*+"?|[\[{,]""", re.DOTALL)
Body = TypeVar("Body", bound=BaseModel)


def _words(enum: type[Word]) -> str:
    return "one of " + ", ".join(member.word for member in enum)


def _among(enum: type[Word], *more: None) -> dict[str, Any]:
    """Return the JSON schema of a parameter whose value is one of an enum's words, or in `more`.

    The schema only documents the parameter: `to_open` checks the value.
    """
    return {"enum": [*(member.word for member in enum), *more]}


# The description of each field is also the hint in an error about this field.
Text = Annotated[str, Field(description="a string")]
Name = Annotated[str, Field(min_length=1, description="a string that is not empty")]
Count = Annotated[int, Field(ge=0, le=UINT_MAX)]


class MessageBody(BaseModel):
    """One turn of a conversation."""

    model_config = ConfigDict(extra="forbid", strict=True)

    role: Name
    content: Text


class FormatBody(BaseModel):
    """The format that the generated text must match: exactly one of the two fields is given."""

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
        schema = to_json(self.json_schema, inf_nan_mode="constants").decode()
        return OutputFormat(FormatKind.JSON_SCHEMA, schema)


class UnreadBody(BaseModel):
    """The field `unread`: what happens to the stream while it has no reader."""

    model_config = ConfigDict(extra="forbid", strict=True)

    then: Annotated[
        str,
        Field(description=_words(Unread), json_schema_extra=_among(Unread)),
    ]
    after_s: Count | None = Field(
        None,
        description="an integer of at least 1: seconds without a reader after which `then` applies",
    )


def _as_object(value: object) -> object:
    """Return the object form of `unread`; a word such as "pause" stands for `{"then": "pause"}`."""
    return {"then": value} if isinstance(value, str) else value


class _Settings(BaseModel):
    """Settings of every request that starts a stream, in every API; null counts as left out.

    The subclass `Settings` adds the sampling settings.
    """

    model_config = ConfigDict(extra="ignore", strict=True)

    model: Annotated[str, Field(min_length=1, description='a model, such as "demo"')]
    stop: str | Annotated[list[str], Field(fail_fast=True)] | None = Field(
        None, description="a string or a list of strings"
    )
    ignore_eos: bool | None = Field(None, description="true or false")
    overflow: str | None = Field(
        None, description=_words(Overflow), json_schema_extra=_among(Overflow, None)
    )
    n: Count | None = Field(None, ge=1, description="an integer from 1 to 16")
    durability: str | None = Field(
        None, description=_words(Durability), json_schema_extra=_among(Durability, None)
    )
    priority: str | None = Field(
        None, description=_words(Priority), json_schema_extra=_among(Priority, None)
    )
    cache: str | None = Field(
        None, description=_words(Cache), json_schema_extra=_among(Cache, None)
    )
    unread: Annotated[
        UnreadBody | None,
        BeforeValidator(_as_object, json_schema_input_type=UnreadBody | str | None),
    ] = Field(
        None,
        description='"run", "pause" or "cancel", or an object such as'
        ' {"then": "pause", "after_s": 30}',
    )
    stages: dict[str, bool] | None = Field(
        None,
        max_length=MAX_STAGE_SWITCHES,
        description='an object such as {"punctuate": false}: optional stages of a pipeline, each'
        " with false to skip it or with true",
    )

    def to_open(self, *, idempotency_key: str) -> Open:
        """Return the Open frame, with a priority class that the request's key allows.

        Raises:
            CallerError: A word is not a value of its enum.
            Forbidden: The class is more urgent than the key's.
        """
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        # Do not write `self.durability or "process"`: an empty string is an unknown word and is
        # refused.
        durability = "process" if self.durability is None else self.durability
        asked = None if self.priority is None else Priority.from_word(self.priority)
        overflow = "refuse" if self.overflow is None else self.overflow
        unread = UnreadBody(then="run") if self.unread is None else self.unread
        after_s = unread.after_s
        if after_s is None and self.unread is not None and unread.then == "run":
            # Without seconds, `UnreadDefault` would replace the client's "run" by its own policy.
            after_s = DEFAULT_AFTER_S
        return Open(
            model=self.model,
            sampling=Sampling(**{name: getattr(self, name) for name in SAMPLING}),
            stop=stop,
            ignore_eos=bool(self.ignore_eos),
            overflow=Overflow.from_word(overflow),
            cache=None if self.cache is None else Cache.from_word(self.cache),
            n=1 if self.n is None else self.n,
            durability=Durability.from_word(durability),
            priority=class_for(asked, bound_class.get()),
            unread=Unread.from_word(unread.then),
            unread_after_s=after_s,
            idempotency_key=idempotency_key,
            stages=_switches(self.stages),
        )


def _field(hint: object, setting: SamplingRange) -> tuple[Any, Any]:
    """Return the pydantic field of a sampling setting with the type `hint`.

    The field accepts every value that a frame can carry. Its JSON schema shows the allowed range,
    which the origin checks.
    """
    kind: dict[str, Any] = {"allow_inf_nan": False} if hint == float | None else {"le": UINT_MAX}
    least: dict[str, Any] = {"ge": 0} if setting.least >= 0 else {}
    lower = "exclusiveMinimum" if setting.above else "minimum"
    told: dict[str, Any] = {lower: setting.least, "maximum": setting.most}
    return hint, Field(None, description=setting.hint, json_schema_extra=told, **kind, **least)


_HINTS = get_type_hints(Sampling)
_SAMPLING: dict[str, Any] = {name: _field(_HINTS[name], each) for name, each in SAMPLING.items()}
if TYPE_CHECKING:  # type checkers cannot follow `create_model`
    Settings = _Settings
else:
    Settings = create_model("Settings", __base__=_Settings, **_SAMPLING)


CHAT: Any = Field(None, description="a string: the id of the chat that gets the stream as a turn")


class GenerateBody(Settings):
    """The JSON body of `POST /v1/generate`."""

    model_config = ConfigDict(extra="forbid", strict=True)

    prompt: str | None = Field(None, description="a string")
    messages: list[MessageBody] | None = Field(
        None,
        fail_fast=True,
        description='a list of objects such as {"role": "user", "content": "Hello"}',
    )
    max_tokens: Count | None = Field(None, ge=1, description="an integer of at least 1")
    logprobs: Count | None = Field(
        None, description="an integer from 0 to 20: the number of alternatives to each token"
    )
    format: FormatBody | None = Field(
        None, description='an object such as {"json_schema": {...}} or {"regex": "[0-9]+"}'
    )
    chat: str | None = CHAT
    group: GroupField = GROUP

    def to_open(self, *, idempotency_key: str) -> Open:
        return replace(
            super().to_open(idempotency_key=idempotency_key),
            prompt=self.prompt,
            messages=tuple(Message(turn.role, turn.content) for turn in self.messages or ()),
            max_tokens=self.max_tokens,
            logprobs=self.logprobs,
            format=None if self.format is None else self.format.to_format(),
        )


class BranchBody(Settings):
    """The JSON body of `POST /v1/generate/{id}/branch`."""

    model_config = ConfigDict(extra="forbid", strict=True)

    model: Annotated[str, Field(description="the model of the stream, or left out")] = ""
    index: Annotated[
        Count, Field(description="an integer of at least 0: how many frames the branch shares")
    ]
    text: str | None = Field(None, min_length=1, description="a string that is not empty")
    instruction: str | None = Field(None, min_length=1, description="a string that is not empty")
    max_tokens: Count | None = Field(None, ge=1, description="an integer of at least 1")
    logprobs: Count | None = Field(
        None, description="an integer from 0 to 20: the number of alternatives to each token"
    )
    chat: str | None = CHAT
    group: GroupField = GROUP

    def to_branch(self, stream: bytes, token: str | None, *, idempotency_key: str) -> Open:
        """Return the Open frame of a branch of `stream`; `token` is the stream's resume token."""
        return replace(
            super().to_open(idempotency_key=idempotency_key),
            max_tokens=self.max_tokens,
            logprobs=self.logprobs,
            branch=Branch(stream, self.index, token, self.text, self.instruction),
        )


INNER: dict[str, type[BaseModel]] = {
    "messages": MessageBody,
    "format": FormatBody,
    "unread": UnreadBody,
    "group": GroupBody,
}


class SteerBody(BaseModel):
    """The JSON body of `POST /v1/generate/{id}/steer`."""

    model_config = ConfigDict(extra="forbid", strict=True)

    text: Annotated[str, Field(min_length=1, description="a string that is not empty")]


class StagesBody(BaseModel):
    """The JSON body of `POST /v1/generate/{id}/stages`."""

    model_config = ConfigDict(extra="forbid", strict=True)

    stages: Annotated[
        dict[str, bool],
        Field(
            min_length=1,
            max_length=MAX_STAGE_SWITCHES,
            description='an object such as {"punctuate": false}: optional stages of the pipeline,'
            " each with false to switch it off or with true to switch it on",
        ),
    ]


class Start(NamedTuple):
    """A request for a stream: its Open, and choices that concern the edge alone.

    `chat` is the id of the chat that gets the stream as a turn, if any. `grouping` says how the
    text of the response is grouped, if it is.
    """

    wanted: Open
    chat: str | None = None
    grouping: Grouping | None = None


def parse_generate(body: bytes, *, idempotency_key: str) -> Start:
    """Return what a request body asks for.

    Raises CallerError, which names the first invalid field and what would be right.
    """
    given = _parse(GenerateBody, body, GENERATE_EXAMPLE)
    return _start(given.to_open(idempotency_key=idempotency_key), given)


def parse_branch(body: bytes, stream: bytes, token: str | None, *, idempotency_key: str) -> Start:
    """Return what the body of a request to branch `stream` asks for.

    `token` is the resume token of `stream`.

    Raises CallerError, which names the first invalid field and what would be right.
    """
    given = _parse(BranchBody, body, BRANCH_EXAMPLE)
    return _start(given.to_branch(stream, token, idempotency_key=idempotency_key), given)


def _start(wanted: Open, given: GenerateBody | BranchBody) -> Start:
    chat = given.chat
    if chat is not None and wanted.n > 1:
        raise CallerError(
            f"is {wanted.n}, but a turn of a chat is one stream",
            field="n",
            hint="leave out n or chat",
        )
    checked = None if chat is None else check_chat(chat, "chat")
    return Start(wanted, checked, grouping_of(given.group))


def parse_open(body: bytes) -> Open:
    """Return the Open frame in a body of the media type `application/vnd.tailrace.frames`.

    Raises FrameError if the body is not an Open frame, CallerError if the frame's `caller` is set,
    Forbidden if its priority class is more urgent than the key's.
    """
    _, frame = decode(body)
    if not isinstance(frame, Open):
        raise FrameError(
            f"the body is a frame of type {type(frame).__name__}, not Open", field="tag", offset=4
        )
    if frame.caller is not None:
        raise caller_not_allowed()
    return with_class(frame, bound_class.get())


def parse_steer(body: bytes) -> str:
    """Return the text of a request to steer; raise CallerError as `parse_generate` does."""
    return _parse(SteerBody, body, STEER_EXAMPLE).text


def parse_stages(body: bytes) -> tuple[StageSwitch, ...]:
    """Return the stages to switch; raise CallerError as `parse_generate` does."""
    return _switches(_parse(StagesBody, body, STAGES_EXAMPLE).stages)


def _switches(stages: dict[str, bool] | None) -> tuple[StageSwitch, ...]:
    return tuple(StageSwitch(*switch) for switch in (stages or {}).items())


def _parse(model: type[Body], body: bytes, example: str) -> Body:
    """Parse the body into the pydantic class `model`; raise CallerError if it is not valid.

    pydantic collects all faults, and a body of a megabyte can have 400,000. So unknown names and
    long lists, which could cause most faults, are refused before pydantic sees the body. An invalid
    body then takes no more work than a valid one.
    """
    document = read_object(body, example)
    _refuse_unknown(document, model)
    try:
        return model.model_validate(document)
    except ValidationError as error:
        raise invalid_document(error, model) from None


def read_object(body: bytes, example: str) -> dict[str, Any]:
    """Return the JSON object in a body; raise CallerError if there is none or it is too complex.

    `example` is a valid body, shown in the error.
    """
    if len(body) > MAX_JSON_PARTS:
        _check_work(body, example)
    try:
        document = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise _no_document(str(error), example) from None
    if not isinstance(document, dict):
        raise _no_document("it is another kind of JSON value", example)
    return document


def _check_work(body: bytes, example: str) -> None:
    parts = [part.end() - part.start() for part in islice(_PART.finditer(body), MAX_JSON_PARTS + 1)]
    if len(parts) > MAX_JSON_PARTS:
        message = f"it has over {MAX_JSON_PARTS} strings, commas and opening brackets"
        raise _no_document(message, example)
    if len(body) - sum(parts) > MAX_JSON_BARE_BYTES:
        raise _no_document(f"it has over {MAX_JSON_BARE_BYTES} bytes outside strings", example)


def _refuse_unknown(document: object, model: type[BaseModel], place: Location = ()) -> None:
    """Raise CallerError if the body has an unknown name or a list of too many items.

    Unknown names are reported before other faults: a misspelt name explains a missing field.
    """
    if isinstance(document, list) and place:
        if len(document) > MAX_MESSAGES:
            message = f"has {len(document)} items"
            raise CallerError(message, field=path_of(place), hint=f"at most {MAX_MESSAGES} items")
        for at, item in enumerate(document):
            _refuse_unknown(item, model, (*place, at))
    elif isinstance(document, dict):
        for name, value in document.items():
            if name not in model.model_fields:
                raise unknown_field((*place, name), model.model_fields)
            if not place and name in INNER:
                _refuse_unknown(value, INNER[name], (name,))


def _no_document(why: str, example: str) -> CallerError:
    return CallerError(
        f"the body is not a JSON object: {why}",
        code="invalid_json",
        hint=f"send an object such as {example}",
    )
