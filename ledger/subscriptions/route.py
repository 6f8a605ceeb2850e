"""What a path below /v1/stream/__ds/ means, and which object it is for."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple
from urllib.parse import quote, unquote, urlsplit

from ledger.errors import CallerError, NotFound
from ledger.interface import ObjectKey

ROOT = "/v1/stream/__ds/"
JWKS = "jwks.json"
SUBSCRIPTIONS = "subscriptions"
MAX_ID_CHARS = 256

SUBSCRIPTION = "subscription"
"""The class of objects that are subscriptions, each under its id."""
INDEX_KEY = ObjectKey("subscription-index", "index")
"""The one object that knows them all, and keeps the key that signs webhooks."""


class Action(Enum):
    """What is asked of a subscription; the value is the path's last segment."""

    ITSELF = ""
    STREAMS = "streams"
    STREAM = "stream"
    CALLBACK = "callback"
    CLAIM = "claim"
    ACK = "ack"
    RELEASE = "release"


_PLAIN = {action.value: action for action in Action if action is not Action.STREAM}


class Route(NamedTuple):
    """`stream` is the name in a path that takes a stream away."""

    id: str
    action: Action
    stream: str = ""


def object_of(path: str) -> ObjectKey:
    """The object that `path`, as it came, below ROOT, is for. NotFound if there is none."""
    if path == JWKS:
        return INDEX_KEY
    return ObjectKey(SUBSCRIPTION, parse_route(path).id)


def route_of(url: str) -> Route:
    """The route in the URL of a request to a subscription."""
    return parse_route(urlsplit(url).path.removeprefix(ROOT))


def parse_route(path: str) -> Route:
    first, *rest = path.split("/")
    if first != SUBSCRIPTIONS or not rest or not rest[0]:
        raise _nothing_here()
    name = _decoded(rest[0])
    if len(name) > MAX_ID_CHARS or not name.isprintable():
        raise CallerError(
            "no id of a subscription",
            code="INVALID_REQUEST",
            hint=f"1 to {MAX_ID_CHARS} printable characters",
        )
    tail = rest[1:]
    if len(tail) > 1 and tail[0] == Action.STREAMS.value:
        return Route(name, Action.STREAM, _decoded("/".join(tail[1:])))
    action = _PLAIN.get("/".join(tail))
    if action is None or (tail and not tail[0]):
        raise _nothing_here()
    return Route(name, action)


def url_of(base: str, name: str, action: Action) -> str:
    """The URL of an action, under the scheme and host that `base` is."""
    return f"{base}{ROOT}{SUBSCRIPTIONS}/{quote(name, safe='')}/{action.value}"


def base_of(url: str) -> str:
    """Scheme and host of a request's URL."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc}"


def _decoded(text: str) -> str:
    try:
        return unquote(text, errors="strict")
    except UnicodeDecodeError:
        raise _nothing_here() from None


def _nothing_here() -> NotFound:
    return NotFound("nothing is served here", code="SUBSCRIPTION_NOT_FOUND")
