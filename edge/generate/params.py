"""Parts of a request's line, headers and body, checked before anything is asked of the origin."""

from __future__ import annotations

import re
from collections.abc import Sequence
from enum import Enum

from starlette.requests import Request

from tailrace.edge.access.bodies import BodyBudget
from tailrace.ledger.errors import CallerError, NotFound, TooLarge
from tailrace.ledger.frame import FRAMES_TYPE, MAX_IDEMPOTENCY_KEY_CHARS
from tailrace.ledger.wire.bare import U64_MAX

MAX_DISCARDED_BYTES = 16 << 20  # of a body over its limit

# Spelt out: \d would admit digits of other scripts.
_STREAM_ID = re.compile(r"[0-9a-f]{32}")
_NUMBER = re.compile(r"[0-9]{1,20}")


async def read_body(request: Request) -> bytes:
    """Return the request's body.

    Raises TooLarge if it exceeds the limit of the settings, Overloaded if the bodies of all
    requests together leave no room for it.

    What is over the limit is read and thrown away, within reason: a client that is still
    sending when the connection closes would see a reset, not the answer (RFC 9112, 9.6).
    """
    limit_bytes: int = request.app.state.config.max_body_bytes
    most_bytes = limit_bytes + MAX_DISCARDED_BYTES
    declared = request.headers.get("Content-Length", "")
    if _NUMBER.fullmatch(declared) and int(declared) > most_bytes:
        raise _too_large(limit_bytes)
    budget: BodyBudget = request.app.state.bodies
    body = bytearray()
    size = 0
    try:
        async for chunk in request.stream():
            size += len(chunk)
            if size <= limit_bytes:
                budget.take(len(chunk))
                body += chunk
            elif size > most_bytes:
                break
    finally:
        budget.give(len(body))
    if size > limit_bytes:
        raise _too_large(limit_bytes)
    return bytes(body)


def _too_large(limit_bytes: int) -> TooLarge:
    return TooLarge("the request body is too large", hint=f"at most {limit_bytes} bytes")


def parse_stream_id(text: str) -> bytes:
    """The stream id that a path names; NotFound for whatever cannot be one."""
    if _STREAM_ID.fullmatch(text) is None:
        raise NotFound(
            "no such stream",
            code="unknown_stream",
            field="id",
            hint="a stream id is 32 hex digits",
        )
    return bytes.fromhex(text)


def parse_after(after: Sequence[str], last_event_id: str | None) -> int | None:
    """The index to resume after, from the values of `?after=` and from `Last-Event-ID`.

    Raises CallerError for what is no index, and for two that differ.
    """
    given = {_index(text, "after") for text in after}
    if last_event_id:  # EventSource sends an empty one where it would send none: it asks for all
        given.add(_index(last_event_id, "Last-Event-ID"))
    if len(given) > 1:
        raise CallerError(
            "two different indexes to resume after",
            field="after",
            hint="give either ?after= or Last-Event-ID",
        )
    return given.pop() if given else None


def _index(text: str, field: str) -> int:
    if _NUMBER.fullmatch(text) is None or int(text) > U64_MAX:
        raise CallerError(
            "not an index",
            field=field,
            hint="the index of the last frame you have, in decimal digits",
        )
    return int(text)


def check_idempotency_key(key: str) -> str:
    """The key as given; CallerError unless it is 1 to 255 printable ASCII characters."""
    if 0 < len(key) <= MAX_IDEMPOTENCY_KEY_CHARS and key.isascii() and key.isprintable():
        return key
    raise CallerError(
        "not a usable idempotency key",
        field="Idempotency-Key",
        hint=f"1 to {MAX_IDEMPOTENCY_KEY_CHARS} printable ASCII characters",
    )


class View(Enum):
    """A way to read a stream; the value is its media type."""

    SSE = "text/event-stream"
    FRAMES = FRAMES_TYPE
    JSON = "application/json"


_VIEWS = {
    "text/event-stream": View.SSE,
    "text/*": View.SSE,
    FRAMES_TYPE: View.FRAMES,
    "application/octet-stream": View.FRAMES,
    "application/json": View.JSON,
    "application/*": View.JSON,
    "*/*": View.JSON,
}


def choose_view(accept: str | None) -> View:
    """The view that an Accept header likes best (RFC 9110, 12.5.1); JSON without one.

    Raises CallerError (406) if it admits none of them.
    """
    if accept is None or not accept.strip():
        return View.JSON
    liked: list[tuple[tuple[float, int], View]] = []
    for media_range in accept.split(","):
        name, _, parameters = media_range.strip().lower().partition(";")
        view, quality = _VIEWS.get(name.strip()), _quality(parameters)
        if view is not None and quality > 0:
            # Of two ranges liked alike the one without a wildcard says more.
            liked.append(((quality, -name.count("*")), view))
    if not liked:
        raise CallerError(
            f"no view of a stream is {accept!r}",
            code="not_acceptable",
            status=406,
            field="Accept",
            hint="one of " + ", ".join(view.value for view in View),
        )
    return max(liked, key=lambda each: each[0])[1]


def _quality(parameters: str) -> float:
    """The weight `q` of a media range; 0 where it is not a number."""
    for parameter in parameters.split(";"):
        name, _, value = parameter.partition("=")
        if name.strip() == "q":
            try:
                return float(value)
            except ValueError:
                return 0.0
    return 1.0
