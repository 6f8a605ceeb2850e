"""Vocabulary of the Durable Streams protocol: headers, names, content types, errors as JSON.

Names of header fields are in lower case here, as in the requests that edges send to objects. The
name of a stream is its path after `/v1/stream/`. A generation can be read like a stream whose name
is the generation's id.
"""

from __future__ import annotations

import json
import math
import re
from urllib.parse import unquote, urlsplit

from tailrace.ledger.errors import CallerError, NotFound, TailraceError, error_body
from tailrace.ledger.frame import CALL_METHODS, RESERVED_NAME, SAFE_METHODS, STREAM_PATH
from tailrace.ledger.objects.object import MAX_KEY_CHARS, Headers, ObjectResponse
from tailrace.origin.streams.json_messages import JSON_TYPE
from tailrace.origin.streams.offsets import Offset
from tailrace.origin.streams.page import Tip

CONTENT_TYPE = "content-type"
CACHE_CONTROL = "cache-control"
ETAG = "etag"
IF_NONE_MATCH = "if-none-match"
LOCATION = "location"
ALLOW = "allow"

NEXT_OFFSET = "stream-next-offset"
UP_TO_DATE = "stream-up-to-date"
CLOSED = "stream-closed"
CURSOR = "stream-cursor"
SEQ = "stream-seq"
TTL = "stream-ttl"
EXPIRES_AT = "stream-expires-at"
DATA_ENCODING = "stream-sse-data-encoding"

FORKED_FROM = "stream-forked-from"
FORK_OFFSET = "stream-fork-offset"
FORK_SUB_OFFSET = "stream-fork-sub-offset"

PRODUCER_ID = "producer-id"
PRODUCER_EPOCH = "producer-epoch"
PRODUCER_SEQ = "producer-seq"
PRODUCER_EXPECTED_SEQ = "producer-expected-seq"
PRODUCER_RECEIVED_SEQ = "producer-received-seq"

TRUE = "true"
"""The only value of a header that sets a flag; case does not matter."""

_GENERATION = re.compile("[0-9a-f]{32}")
_UNSAFE = re.compile(r"[\x00-\x1f\x7f\\]")

DEFAULT_TYPE = "application/octet-stream"
GENERATION_TYPE = "text/plain; charset=utf-8"
SSE_TYPE = "text/event-stream"
MAX_TYPE_CHARS = 256

_TOKEN = r"[!#$%&'*+.^_`|~0-9A-Za-z-]+"
_TYPE = re.compile(rf"{_TOKEN}/{_TOKEN}\s*(;[\x20-\x7e]*)?")

SECURITY: Headers = (
    ("x-content-type-options", "nosniff"),
    ("cross-origin-resource-policy", "cross-origin"),
)
"""Headers of every answer: browsers must take a stream only for its declared type, and from any
site."""

NO_STORE = (CACHE_CONTROL, "no-store")
NO_CACHE = (CACHE_CONTROL, "no-cache")
"""Header of a read at the end of an open stream: a cached answer would hide later appends."""

READ_METHODS = ", ".join(SAFE_METHODS)
METHODS = ", ".join(CALL_METHODS)


def check_name(name: str) -> str:
    """Return `name` if a stream can have it: path segments none of which is `.` or `..`.

    Raises NotFound otherwise, as for any stream that does not exist.
    """
    segments = name.split("/")
    fits = 0 < len(name) <= MAX_KEY_CHARS and not _UNSAFE.search(name)
    if (
        not fits
        or segments[0] == RESERVED_NAME
        or any(part in ("", ".", "..") for part in segments)
    ):
        raise NotFound("no stream can have this name")
    return name


TENANT_MARK = "/"
"""Prefix of the object names of a tenant's streams; no client can write it in a name."""


def parted(key: str) -> tuple[str, str]:
    """Split the name of a stream's object into the tenant, if any, and the stream's name."""
    if not key.startswith(TENANT_MARK):
        return "", key
    _, tenant, name = key.split("/", 2)
    return f"{TENANT_MARK}{tenant}/", name


def within(tenant: str, name: str) -> str:
    """Return the object name of the stream `name`, with the tenant, if any, as its prefix."""
    return f"{TENANT_MARK}{tenant}/{name}" if tenant else name


def named_by(link: str) -> str:
    """Return the name of the stream at a path or URL. Raises NotFound if `link` is neither."""
    try:
        path = urlsplit(link).path
    except ValueError:
        path = ""
    if not path.startswith(STREAM_PATH):
        raise NotFound(
            f"no stream is at {link!r}", hint=f"the path of a stream begins with {STREAM_PATH}"
        )
    return check_name(unquote(path[len(STREAM_PATH) :]))


def generation_id(name: str) -> bytes | None:
    """Return the generation id that `name` spells; None if no generation can have that name."""
    return bytes.fromhex(name) if _GENERATION.fullmatch(name) else None


def parse_type(text: str | None) -> str | None:
    """Return a media type as the client wrote it (RFC 9110, 8.3.1).

    The result is None if no type is given. Raises CallerError if it is malformed.
    """
    if text is None or not text.strip():
        return None
    text = text.strip()
    if len(text) > MAX_TYPE_CHARS or not _TYPE.fullmatch(text):
        raise CallerError(
            "the content type is not a valid media type",
            field=CONTENT_TYPE,
            hint=f"send a media type such as {DEFAULT_TYPE}",
        )
    return text


def essence(content_type: str) -> str:
    """Return the type without its parameters, in lower case, as appends must match it."""
    return content_type.partition(";")[0].strip().lower()


def is_json(content_type: str) -> bool:
    return essence(content_type) == JSON_TYPE


def is_text(content_type: str) -> bool:
    """Return True if server-sent events can carry the type as text; others need base64."""
    return essence(content_type).startswith("text/") or is_json(content_type)


def answer(status: int, *headers: tuple[str, str], body: bytes = b"") -> ObjectResponse:
    return ObjectResponse(status, SECURITY + headers, body)


def error_answer(error: TailraceError, *headers: tuple[str, str]) -> ObjectResponse:
    """Return an error with the protocol's headers, in the JSON form of all errors."""
    body = json.dumps(error_body(error)).encode()
    if (after_ms := error.draw_retry_ms()) is not None:
        headers += (("retry-after", str(math.ceil(after_ms / 1000))),)
    return answer(error.status, (CONTENT_TYPE, "application/json"), NO_STORE, *headers, body=body)


def not_allowed(methods: str) -> ObjectResponse:
    """Return the answer to a method that a stream does not support (RFC 9110, 15.5.6)."""
    error = CallerError("method not allowed for this stream", code="method_not_allowed", status=405)
    return error_answer(error, (ALLOW, methods))


def tip_headers(tip: Tip) -> Headers:
    return position(tip.offset, closed=tip.closed)


def position(offset: Offset, *, closed: bool) -> Headers:
    return ((NEXT_OFFSET, str(offset)), *(((CLOSED, TRUE),) if closed else ()))
