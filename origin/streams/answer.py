"""What a stream object answers: the protocol's headers, and errors as JSON."""

from __future__ import annotations

import hashlib
import json
import math

from ledger.errors import CallerError, TailraceError, error_body
from ledger.frame import CALL_METHODS, SAFE_METHODS
from ledger.objects.object import Headers, ObjectResponse
from origin.streams.config import StreamConfig
from origin.streams.json import join_json
from origin.streams.offset import Offset
from origin.streams.page import Page, Tip
from origin.streams.producer import Place
from origin.streams.protocol import (
    ALLOW,
    CACHE_CONTROL,
    CLOSED,
    CONTENT_TYPE,
    CURSOR,
    ETAG,
    NEXT_OFFSET,
    PRODUCER_EPOCH,
    PRODUCER_SEQ,
    TRUE,
    UP_TO_DATE,
    is_json,
)

SECURITY: Headers = (
    ("x-content-type-options", "nosniff"),
    ("cross-origin-resource-policy", "cross-origin"),
)
"""On every answer: a browser takes streams for what they say they are, from any site."""

NO_STORE = (CACHE_CONTROL, "no-store")
CHANGELESS = (CACHE_CONTROL, "private, max-age=60, stale-while-revalidate=300")
"""For what is the same whenever it is asked for; in no cache that others share, as what a
stream holds may be one person's conversation."""
REVALIDATE = (CACHE_CONTROL, "no-cache")
"""For the end of an open stream: a cache that kept it would hide what is appended next."""

READ_METHODS = ", ".join(SAFE_METHODS)
METHODS = ", ".join(CALL_METHODS)


def answer(status: int, *headers: tuple[str, str], body: bytes = b"") -> ObjectResponse:
    return ObjectResponse(status, SECURITY + headers, body)


def error_answer(error: TailraceError, *headers: tuple[str, str]) -> ObjectResponse:
    """An error with the protocol's headers, in the one JSON shape that all errors have."""
    body = json.dumps(error_body(error)).encode()
    if error.retry_after_ms is not None:
        headers += (("retry-after", str(math.ceil(error.retry_after_ms / 1000))),)
    return answer(error.status, (CONTENT_TYPE, "application/json"), NO_STORE, *headers, body=body)


def not_allowed(methods: str) -> ObjectResponse:
    """A method that this stream does not take (RFC 9110, 15.5.6)."""
    error = CallerError("not a method of this stream", code="method_not_allowed", status=405)
    return error_answer(error, (ALLOW, methods))


def tip_headers(tip: Tip) -> Headers:
    return _position(tip.offset, closed=tip.closed)


def place_headers(place: Place | None) -> Headers:
    """What a producer is told: the last of its requests that was taken."""
    if place is None:
        return ()
    return ((PRODUCER_EPOCH, str(place.epoch)), (PRODUCER_SEQ, str(place.seq)))


def described(config: StreamConfig, tip: Tip) -> ObjectResponse:
    """The answer to HEAD."""
    headers = (*tip_headers(tip), *config.expiry.headers())
    return answer(200, (CONTENT_TYPE, config.content_type), NO_STORE, *headers)


def at_the_end(content_type: str, tip: Tip) -> ObjectResponse:
    """The answer to a read of nothing: `offset=now` without waiting."""
    body = join_json(()) if is_json(content_type) else b""
    headers = (*tip_headers(tip), (UP_TO_DATE, TRUE))
    return answer(200, (CONTENT_TYPE, content_type), NO_STORE, *headers, body=body)


def nothing_new(page: Page, cursor: int) -> ObjectResponse:
    """The answer to a reader that has waited in vain, or waits on a closed stream."""
    headers = ((UP_TO_DATE, TRUE), (CURSOR, str(cursor)), NO_STORE)
    return answer(204, *_position(page.next, closed=page.closed), *headers)


def shown(
    page: Page, config: StreamConfig, if_none_match: str | None, cursor: int | None
) -> ObjectResponse:
    """The answer to a read: the page, or 304 if the reader has it already."""
    # Not the ledger stream's own id: who has that may ask an origin for more than to read.
    version = hashlib.blake2b(config.stream, digest_size=8).hexdigest()
    etag = f'"{version}:{page.start}:{page.next}{":closed" if page.closed else ""}"'
    # With a cursor in its URL the answer is asked for once, and then under another URL.
    settled = page.closed or not page.up_to_date or cursor is not None
    headers = [
        *_position(page.next, closed=page.closed),
        (ETAG, etag),
        CHANGELESS if settled else REVALIDATE,
    ]
    headers += [(UP_TO_DATE, TRUE)] if page.up_to_date else []
    headers += [(CURSOR, str(cursor))] if cursor is not None else []
    if if_none_match is not None and _matches(if_none_match, etag):
        return answer(304, *headers)
    body = join_json(page.data) if is_json(config.content_type) else b"".join(page.data)
    return answer(200, (CONTENT_TYPE, config.content_type), *headers, body=body)


def _position(offset: Offset, *, closed: bool) -> Headers:
    return ((NEXT_OFFSET, str(offset)), *(((CLOSED, TRUE),) if closed else ()))


def _matches(if_none_match: str, etag: str) -> bool:
    """RFC 9110, 13.1.2: `*`, or a list that names it, weakly or not."""
    tags = [tag.strip().removeprefix("W/") for tag in if_none_match.split(",")]
    return "*" in tags or etag in tags
