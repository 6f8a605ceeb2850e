"""The JSON bodies of the subscription API, checked."""

from __future__ import annotations

from typing import Annotated, Literal, Self, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from ledger.errors import CallerError, NotFound
from ledger.streams.name import check_name

MIN_LEASE_MS = 1_000
MAX_LEASE_MS = 600_000
DEFAULT_LEASE_MS = 30_000
MAX_STREAMS = 1_000
"""Streams named, or acknowledged, in one request."""
MAX_TEXT_CHARS = 1_024

B = TypeVar("B", bound=BaseModel)


def _is_name(text: str) -> str:
    try:
        return check_name(text.strip("/"))
    except NotFound as error:
        raise ValueError(error.message) from None


def _is_pattern(text: str) -> str:
    pattern = text.strip("/")
    if not pattern:
        raise ValueError("the pattern is empty")
    return pattern


Text = Annotated[str, Field(min_length=1, max_length=MAX_TEXT_CHARS)]
Name = Annotated[str, AfterValidator(_is_name)]
Names = Annotated[list[Name], Field(max_length=MAX_STREAMS)]


class Body(BaseModel):
    """Fields that we do not know are for other servers, and are left alone."""

    model_config = ConfigDict(strict=True, frozen=True)


class WebhookBody(Body):
    url: Text


class CreateBody(Body):
    type: Literal["webhook", "pull-wake"]
    pattern: Annotated[Text, AfterValidator(_is_pattern)] | None = None
    streams: Names = []
    webhook: WebhookBody | None = None
    wake_stream: Name | None = None
    lease_ttl_ms: int = Field(DEFAULT_LEASE_MS, ge=MIN_LEASE_MS, le=MAX_LEASE_MS)
    description: Annotated[str, Field(max_length=MAX_TEXT_CHARS)] | None = None

    @model_validator(mode="after")
    def _is_whole(self) -> Self:
        if self.pattern is None and not self.streams:
            raise ValueError("give a pattern or streams")
        if self.type == "webhook" and self.webhook is None:
            raise ValueError("a webhook subscription needs webhook.url")
        if self.type == "pull-wake" and self.wake_stream is None:
            raise ValueError("a pull-wake subscription needs wake_stream")
        return self


class StreamsBody(Body):
    streams: Annotated[Names, Field(min_length=1)]


class ClaimBody(Body):
    worker: Text


class AckBody(Body):
    """The protocol's name for the stream is `stream`; `path` is an older one."""

    stream: str | None = None
    path: str | None = None
    offset: str

    @property
    def name(self) -> str:
        return (self.stream or self.path or "").strip("/")


class HolderBody(Body):
    """What whoever was woken says: for which wake, what it has done, whether that is all."""

    wake_id: str | None = None
    generation: int | None = None
    acks: Annotated[list[AckBody], Field(max_length=MAX_STREAMS)] = []
    done: bool = False


def parse(model: type[B], body: bytes) -> B:
    """The body as `model`; CallerError (INVALID_REQUEST) naming the field at fault."""
    try:
        return model.model_validate_json(body or b"{}")
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        message = first["msg"].removeprefix("Value error, ")
        raise CallerError(message, code="INVALID_REQUEST", field=where or None) from None
