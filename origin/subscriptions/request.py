"""Requests to subscriptions: paths below /v1/stream/__ds/, and validated JSON bodies."""

from __future__ import annotations

from enum import Enum
from typing import Annotated, Literal, NamedTuple, Self, TypeVar
from urllib.parse import quote, unquote, urlsplit

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from tailrace.ledger.errors import CallerError, NotFound
from tailrace.ledger.frame import RESERVED_NAME, STREAM_PATH
from tailrace.ledger.interface import ObjectKey
from tailrace.ledger.validation import invalid_document
from tailrace.origin.streams.protocol import check_name
from tailrace.origin.subscriptions.subscription import Glob

ROOT = f"{STREAM_PATH}{RESERVED_NAME}/"
JWKS = "jwks.json"
SUBSCRIPTIONS = "subscriptions"
MAX_ID_CHARS = 256

SUBSCRIPTION = "subscription"
"""Class of the objects that are subscriptions, each under its id."""
INDEX_KEY = ObjectKey("subscription-index", "index")
"""Key of the object that lists all subscriptions and holds the signing key of webhooks."""

MIN_LEASE_MS = 1_000
MAX_LEASE_MS = 600_000
DEFAULT_LEASE_MS = 30_000
MAX_STREAMS = 1_000
"""Maximum streams that one request names or acknowledges."""
MAX_TEXT_CHARS = 1_024

B = TypeVar("B", bound=BaseModel)


class Action(Enum):
    """Action of a request; the value is the path's last segment."""

    ITSELF = ""
    STREAMS = "streams"
    STREAM = "stream"
    CALLBACK = "callback"
    CLAIM = "claim"
    ACK = "ack"
    RELEASE = "release"


_PLAIN = {action.value: action for action in Action if action is not Action.STREAM}


class Route(NamedTuple):
    """Parts of a subscription's path; `stream` is the name in a path that removes a stream."""

    id: str
    action: Action
    stream: str = ""


def object_of(path: str) -> ObjectKey:
    """Return the key of the object that serves `path`, the percent-encoded path below ROOT.

    Raises NotFound if no object serves this path.
    """
    if path == JWKS:
        return INDEX_KEY
    return ObjectKey(SUBSCRIPTION, parse_route(path).id)


def route_of(url: str) -> Route:
    """Return the route in the URL of a request to a subscription."""
    return parse_route(urlsplit(url).path.removeprefix(ROOT))


def parse_route(path: str) -> Route:
    first, *rest = path.split("/")
    if first != SUBSCRIPTIONS or not rest or not rest[0]:
        raise _nothing_here()
    name = _decoded(rest[0])
    if len(name) > MAX_ID_CHARS or not name.isprintable():
        raise CallerError(
            "the id of the subscription is not valid",
            code="INVALID_REQUEST",
            hint=f"use 1 to {MAX_ID_CHARS} printable characters",
        )
    tail = rest[1:]
    if len(tail) > 1 and tail[0] == Action.STREAMS.value:
        return Route(name, Action.STREAM, _decoded("/".join(tail[1:])))
    action = _PLAIN.get("/".join(tail))
    if action is None or (tail and not tail[0]):
        raise _nothing_here()
    return Route(name, action)


def url_of(base: str, name: str, action: Action) -> str:
    """Return the URL of an action, under the scheme and host of `base`."""
    return f"{base}{ROOT}{SUBSCRIPTIONS}/{quote(name, safe='')}/{action.value}"


def base_of(url: str) -> str:
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc}"


def _decoded(text: str) -> str:
    try:
        return unquote(text, errors="strict")
    except UnicodeDecodeError:
        raise _nothing_here() from None


def _nothing_here() -> NotFound:
    return NotFound("nothing is served here", code="SUBSCRIPTION_NOT_FOUND")


def _is_name(text: str) -> str:
    try:
        return check_name(text.strip("/"))
    except NotFound as error:
        raise ValueError(error.message) from None


def _is_pattern(text: str) -> str:
    pattern = text.strip("/")
    if not pattern:
        raise ValueError("the pattern is empty")
    Glob(pattern)
    return pattern


Text = Annotated[str, Field(min_length=1, max_length=MAX_TEXT_CHARS)]
Name = Annotated[str, AfterValidator(_is_name)]
Names = Annotated[list[Name], Field(max_length=MAX_STREAMS)]


class JsonBody(BaseModel):
    """Base class of JSON request bodies.

    Unknown fields are ignored: they may be extensions of the protocol in other servers.
    """

    model_config = ConfigDict(strict=True, frozen=True)


class WebhookBody(JsonBody):
    """The webhook of a subscription."""

    url: Text


class CreateBody(JsonBody):
    """Body of a request to create a subscription."""

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


class StreamsBody(JsonBody):
    """Body of a request to add streams to a subscription."""

    streams: Annotated[Names, Field(min_length=1)]


class ClaimBody(JsonBody):
    """Body of a worker's request to claim a wake, which gives it the lease of the subscription."""

    worker: Text


class AckBody(JsonBody):
    """An acknowledgement; the protocol's field is `stream`, `path` is its older name."""

    stream: str | None = None
    path: str | None = None
    offset: str

    @property
    def name(self) -> str:
        return (self.stream or self.path or "").strip("/")


class HolderBody(JsonBody):
    """A callback of the worker or webhook that was woken.

    It may acknowledge offsets, and end the lease.
    """

    wake_id: str | None = None
    generation: int | None = None
    acks: Annotated[list[AckBody], Field(max_length=MAX_STREAMS)] = []
    done: bool = False


def parse(model: type[B], body: bytes) -> B:
    """Parse a JSON body as an instance of the class `model`.

    Raises CallerError (INVALID_REQUEST) that names the invalid field.
    """
    try:
        return model.model_validate_json(body or b"{}")
    except ValidationError as error:
        raise invalid_document(error, code="INVALID_REQUEST") from None
