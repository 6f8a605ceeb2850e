"""Parses and checks the parameters of HTTP requests, before anything is sent to an origin."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import datetime
from enum import Enum
from typing import TypeVar

from starlette.requests import Request

from tailrace.edge.access.bodies import BodyBudget
from tailrace.ledger.errors import CallerError, NotFound, TooLarge
from tailrace.ledger.frame import FRAMES_TYPE, MAX_IDEMPOTENCY_KEY_CHARS
from tailrace.ledger.wire.bare import U64_MAX

MAX_DISCARDED_BYTES = 16 << 20
"""Maximum number of bytes over the limit that are read and dropped before a body is refused."""

Position = TypeVar("Position")

# [0-9] instead of \d, which would also match digits of other scripts.
_STREAM_ID = re.compile(r"[0-9a-f]{32}")
_NUMBER = re.compile(r"[0-9]{1,20}")
_RFC_3339 = re.compile(
    r"[0-9]{4}-[0-9]{2}-[0-9]{2}[Tt][0-9]{2}:[0-9]{2}:[0-9]{2}(\.[0-9]+)?"
    r"([Zz]|[+ -][0-9]{2}:[0-9]{2})"
)
MIN_UNIX_MS = 10**11
"""Smallest Unix time in ms that `since` accepts (1973). Smaller numbers are times in seconds."""


async def read_body(request: Request) -> bytes:
    """Return the request's body.

    Raises TooLarge if it exceeds `edge.max_body_bytes`, Overloaded if it exceeds the memory for the
    bodies of all requests.

    Up to MAX_DISCARDED_BYTES over the limit are read and dropped: a client that is still sending
    when the connection closes would see a reset instead of the response (RFC 9112, 9.6).
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
    """Return the stream id in a path; raise NotFound if it is not a valid one."""
    if _STREAM_ID.fullmatch(text) is None:
        raise NotFound(
            "no such stream",
            code="unknown_stream",
            field="id",
            hint="a stream id is 32 hex digits",
        )
    return bytes.fromhex(text)


def parse_after(after: Sequence[str], last_event_id: str | None) -> int | None:
    """Return the index to resume after, from the values of `?after=` and from `Last-Event-ID`.

    Raises CallerError for an invalid index, and for two that differ.
    """
    return only_position(after, last_event_id, _index, "indexes to resume after")


def only_position(
    after: Sequence[str],
    last_event_id: str | None,
    parse: Callable[[str, str], Position],
    positions: str,
) -> Position | None:
    """Return the position after which a client resumes, or None if the request has none.

    Args:
        after: The values of `?after=`.
        last_event_id: The value of `Last-Event-ID`; one that is empty counts as absent.
        parse: Parses a position, given its text and the field that has it.
        positions: The word for positions in the error.

    Raises:
        CallerError: Two positions differ, or `parse` has refused one.
    """
    given = {parse(text, "after") for text in after}
    if last_event_id:  # an EventSource that has received no event may send an empty header
        given.add(parse(last_event_id, "Last-Event-ID"))
    if len(given) > 1:
        raise CallerError(
            f"the request has two different {positions}",
            field="after",
            hint="send either ?after= or Last-Event-ID",
        )
    return given.pop() if given else None


def _index(text: str, field: str) -> int:
    if _NUMBER.fullmatch(text) is None or int(text) > U64_MAX:
        raise CallerError(
            "not the index of a frame",
            field=field,
            hint="send the index of the last frame you have, in decimal digits",
        )
    return int(text)


def parse_tail(given: Sequence[str]) -> int | None:
    """Return the number of newest frames that `?tail=` asks for, or None if it is absent.

    Raises CallerError if the value is not a number, or if there are several values.
    """
    return _count(given, "tail", "frames") if given else None


def parse_offset(given: Sequence[str]) -> int:
    """Return the number of bytes that `?offset=` says, or 0 if it is absent.

    Raises CallerError if the value is not a number, or if there are several values.
    """
    return _count(given, "offset", "bytes") if given else 0


def _count(given: Sequence[str], field: str, things: str) -> int:
    if len(given) > 1 or _NUMBER.fullmatch(given[0]) is None or int(given[0]) > U64_MAX:
        raise CallerError(
            f"{field} is not a number of {things}",
            field=field,
            hint=f"send one number in decimal digits, such as {field}=100",
        )
    return int(given[0])


def parse_since(given: Sequence[str]) -> int | None:
    """Return the time that `?since=` asks for as Unix time in ms, or None if it is absent.

    The value is a time of RFC 3339, or a Unix time in ms. Raises CallerError for anything else.
    """
    if not given:
        return None
    text = given[0]
    if len(given) == 1 and _NUMBER.fullmatch(text) and MIN_UNIX_MS <= int(text) <= U64_MAX:
        return int(text)
    if len(given) == 1 and _RFC_3339.fullmatch(text):
        with suppress(ValueError):  # the text is not a valid time: it has a month 13, for example
            # In a query, an unescaped + is a space.
            at = datetime.fromisoformat(text.upper().replace(" ", "+"))
            return max(0, int(at.timestamp() * 1000))
    raise CallerError(
        f"since is not a time: {', '.join(given)!r}",
        field="since",
        hint="send one time of RFC 3339, such as since=2026-11-28T09:30:00Z, or Unix milliseconds",
    )


def parse_flag(given: Sequence[str], field: str) -> bool:
    """Return True if the parameter is 1; raise CallerError unless it is 0, 1 or absent."""
    if len(given) > 1 or not {*given} <= {"0", "1"}:
        hint = f"send {field}=1 or {field}=0"
        raise CallerError(f"{field} is neither 0 nor 1", field=field, hint=hint)
    return given == ["1"]


def check_idempotency_key(key: str) -> str:
    """Return the key; raise CallerError unless it is 1 to 255 printable ASCII characters."""
    if 0 < len(key) <= MAX_IDEMPOTENCY_KEY_CHARS and key.isascii() and key.isprintable():
        return key
    raise CallerError(
        "the idempotency key is not valid",
        field="Idempotency-Key",
        hint=f"1 to {MAX_IDEMPOTENCY_KEY_CHARS} printable ASCII characters",
    )


class View(Enum):
    """The representation in which a client reads a stream; the value is its media type."""

    SSE = "text/event-stream"
    FRAMES = FRAMES_TYPE
    NDJSON = "application/x-ndjson"
    JSONL = "application/jsonl"
    JSON = "application/json"


_VIEWS = {
    "text/event-stream": View.SSE,
    "text/*": View.SSE,
    FRAMES_TYPE: View.FRAMES,
    "application/octet-stream": View.FRAMES,
    "application/x-ndjson": View.NDJSON,
    "application/jsonl": View.JSONL,
    "application/json": View.JSON,
    "application/*": View.JSON,
    "*/*": View.JSON,
}


def choose_view(accept: str | None) -> View:
    """Return the view that an Accept header prefers (RFC 9110, 12.5.1); without a header, JSON.

    Raises CallerError (406) if the header accepts none of the views.
    """
    if accept is None or not accept.strip():
        return View.JSON
    liked: list[tuple[tuple[float, int], View]] = []
    for media_range in accept.split(","):
        name, _, parameters = media_range.strip().lower().partition(";")
        view, quality = _VIEWS.get(name.strip()), _quality(parameters)
        if view is not None and quality > 0:
            # If two ranges have the same weight, the one with fewer wildcards wins.
            liked.append(((quality, -name.count("*")), view))
    if not liked:
        raise CallerError(
            f"a stream cannot be shown as {accept!r}",
            code="not_acceptable",
            status=406,
            field="Accept",
            hint="one of " + ", ".join(view.value for view in View),
        )
    return max(liked, key=lambda each: each[0])[1]


def _quality(parameters: str) -> float:
    """Return the weight `q` of a media range; 0 if it is not a number."""
    for parameter in parameters.split(";"):
        name, _, value = parameter.partition("=")
        if name.strip() == "q":
            try:
                return float(value)
            except ValueError:
                return 0.0
    return 1.0
