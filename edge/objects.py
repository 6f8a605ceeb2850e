"""`/v1/stream/{name}` and `/v1/objects/{BINDING}/{name}`: HTTP requests to objects of the origin.

The first path is for Durable Streams and their subscriptions. The second is for objects of the
classes that the operator's wrangler file declares, by the names of its bindings. The edge checks
the name and the size of a request, and forwards the whole request as one Call. The object decides
what the request means, and its answer is forwarded unchanged.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from contextlib import ExitStack
from urllib.parse import unquote_to_bytes

from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Scope

from tailrace.edge.access.middleware import caller_of
from tailrace.edge.deployment_sync import DeploymentSync
from tailrace.edge.errors import INERT_POLICY
from tailrace.edge.generate.encoders import LIVE_HEADERS, NO_TRANSFORM, UNBUFFERED
from tailrace.edge.generate.params import View, read_body
from tailrace.edge.origins.reader import Reader
from tailrace.edge.starlette_helpers import link_of, unless_disconnected
from tailrace.edge.streamed_body import StreamedBody, answer_of
from tailrace.ledger.errors import CallerError, NotFound, TailraceError
from tailrace.ledger.frame import (
    CALL_METHODS,
    FRAMES_TYPE,
    RESERVED_NAME,
    SAFE_METHODS,
    STREAM_PATH,
    Call,
    Header,
)
from tailrace.ledger.objects.object import MAX_KEY_CHARS

PREFIX = STREAM_PATH.encode()
RESERVED = RESERVED_NAME.encode()

_HOST = re.compile(r"[A-Za-z0-9._~-]+(:[0-9]{1,5})?|\[[0-9A-Fa-f:.]+\](:[0-9]{1,5})?")
# Encoded slashes are refused: a proxy that decodes them would see another name than the edge.
_ENCODED_SLASH = re.compile(rb"%2f", re.IGNORECASE)

# A segment of a name: not empty, not `.` or `..`, and without control characters.
_SEGMENT = re.compile(rb"(?!\.{1,2}\Z)[^\x00-\x1f\x7f]+")

METHODS = [*CALL_METHODS]

# Headers about a single connection (RFC 9110, 7.6.1), which are not forwarded.
_HOP_BY_HOP = frozenset(
    ("connection", "keep-alive", "proxy-connection", "te", "transfer-encoding", "upgrade")
)

_NOT_A_VALUE = re.compile(rb"[\x00\r\n]")
"""Bytes that a header's value must not have (RFC 9110, 5.5). HTTP/2 and HTTP/3 can carry them."""


async def call(request: Request) -> Response:
    """Handle all methods of /v1/stream/{name}."""
    answer = await pass_on(request, *parse_target(request.scope["raw_path"]))
    make_inert(answer.headers)
    return answer


SHOWN_TYPES = frozenset(
    (
        *("text/plain", "text/csv", "text/markdown", "text/event-stream"),
        *("application/json", "application/x-ndjson", "application/octet-stream", FRAMES_TYPE),
        *("image/png", "image/jpeg", "image/gif", "image/webp", "image/avif"),
    )
)
"""Media types that a browser may show, besides audio and video. Content of any other type is sent
as a download (`Content-Disposition: attachment`): HTML, SVG, XML and PDF can hold scripts."""
LIVE_TYPES = frozenset((View.SSE.value, View.FRAMES.value))


def make_inert(headers: MutableHeaders) -> None:
    """Set headers that keep a stream's content from acting as a page of the edge's own site."""
    headers["Content-Security-Policy"] = INERT_POLICY
    essence = essence_of(headers)
    is_media = essence.startswith(("audio/", "video/"))
    if essence and essence not in SHOWN_TYPES and not is_media:
        headers["Content-Disposition"] = "attachment"


def essence_of(headers: MutableHeaders) -> str:
    """Return the media type without its parameters, in lower case; empty if there is none."""
    return headers.get("Content-Type", "").partition(";")[0].strip().lower()


def make_live(headers: MutableHeaders, *, waits: bool) -> None:
    """Set the headers that keep proxies from buffering an answer that is sent while it is made.

    `waits` is True if the client asked the object to wait for new data (a long poll). Such an
    answer keeps its own `Cache-Control`: the object may allow caching, because the next poll has
    another URL.
    """
    if essence_of(headers) in LIVE_TYPES:
        of_streams = "no-cache" in headers.get("Cache-Control", "")
        headers.update(LIVE_HEADERS)
        if of_streams:  # clients of Durable Streams expect `no-cache`
            headers["Cache-Control"] = f"no-cache, {LIVE_HEADERS['Cache-Control']}"
    elif waits:
        stated = headers.get("Cache-Control")
        headers["Cache-Control"] = f"{stated}, {NO_TRANSFORM}" if stated else NO_TRANSFORM
        headers.update(UNBUFFERED)
    elif "Content-Length" not in headers:
        headers.update(UNBUFFERED)


async def pass_on(request: Request, object_class: str, name: str) -> Response:
    """Forward a request to an object and return its answer."""
    return await _answer(request, await _call(request, object_class, name))


async def _call(request: Request, object_class: str, name: str) -> Call:
    """Return the request as a Call frame. Raises CallerError if a header is not valid."""
    body = await read_body(request)
    if any(_NOT_A_VALUE.search(value) for _, value in request.headers.raw):
        raise CallerError("a header's value contains NUL, CR or LF", field="headers")
    return Call(
        object=object_class,
        name=name,
        method=request.method,
        url=request_url(request.scope),
        headers=end_to_end(
            (name.decode("latin-1"), value.decode("latin-1")) for name, value in request.headers.raw
        ),
        # The content of a GET or HEAD has no meaning (RFC 9110, 9.3.1).
        body=b"" if request.method in SAFE_METHODS else body,
        caller=caller_of(request),
    )


async def _answer(request: Request, wanted: Call) -> Response:
    reader = Reader(link_of(request))
    with ExitStack() as unless_handed_on:
        unless_handed_on.callback(reader.close)
        answer = await unless_disconnected(request, reader.call(wanted))
        unless_handed_on.pop_all()  # from now on, `StreamedBody` closes the reader at its end
    body = StreamedBody(reader.close, answer_of(reader), answer.status)
    body.raw_headers = [
        (header.name.encode("latin-1"), header.value.encode("latin-1"))
        for header in end_to_end((h.name, h.value) for h in answer.headers)
    ]
    body.headers["X-Content-Type-Options"] = "nosniff"
    if answer.status < 400:
        make_live(body.headers, waits=wanted.object == "stream" and "live" in request.query_params)
    return body


def end_to_end(fields: Iterable[tuple[str, str]]) -> tuple[Header, ...]:
    """Return the headers that may be forwarded, with names in lower case (RFC 9110, 7.6.1)."""
    lower = [(name.lower(), value) for name, value in fields]
    listed = ",".join(value for name, value in lower if name == "connection")
    dropped = _HOP_BY_HOP | {name.strip().lower() for name in listed.split(",")}
    return tuple(Header(name, value) for name, value in lower if name not in dropped)


def parse_target(raw_path: bytes) -> tuple[str, str]:
    """Return the class and the name of the object that a raw path names.

    A stream's name is the rest of the path, percent-decoded. A subscription's name is not decoded.
    Raises NotFound if the path cannot be a name, CallerError if the name is too long.
    """
    if not raw_path.startswith(PREFIX) or not raw_path.isascii():
        raise _nothing_here()
    rest = raw_path.removeprefix(PREFIX)
    if len(rest) > 12 * MAX_KEY_CHARS:  # a character has up to four bytes, each encoded as %XX
        raise _too_long("stream")
    segments = rest.split(b"/")
    if segments[0] == RESERVED:
        return "subscription", (b"/".join(segments[1:]).decode("ascii") or "/")
    return "stream", _stream_name(rest, segments)


def _stream_name(rest: bytes, segments: list[bytes]) -> str:
    decoded = [unquote_to_bytes(segment) for segment in segments]
    if _ENCODED_SLASH.search(rest) or decoded[0] == RESERVED:
        raise _nothing_here()
    if not all(map(_SEGMENT.fullmatch, decoded)):
        raise _nothing_here()
    try:
        name = b"/".join(decoded).decode("utf-8")
    except UnicodeDecodeError:
        raise _nothing_here() from None
    if len(name) > MAX_KEY_CHARS:
        raise _too_long("stream")
    return name


def request_url(scope: Scope) -> str:
    """Return the absolute URL as the client sent it. Raises CallerError if Host is invalid."""
    host = next((value for name, value in scope["headers"] if name == b"host"), None)
    if host is None:  # HTTP/1.0 does not require a Host header
        address, port = scope["server"]
        host = f"{address}:{port}".encode()
    text = host.decode("latin-1")
    if _HOST.fullmatch(text) is None:
        raise CallerError("not a valid host name", field="Host")
    target = scope["raw_path"]
    if scope["query_string"]:
        target += b"?" + scope["query_string"]
    if not target.isascii():  # HTTP/2 and HTTP/3 parsers allow other characters
        hint = "percent-encode it"
        raise CallerError("the URL contains a non-ASCII character", field="query", hint=hint)
    return f"{scope['scheme']}://{text}{target.decode('ascii')}"


def _nothing_here() -> NotFound:
    return NotFound(
        "no such stream",
        code="unknown_stream",
        field="path",
        hint="a stream's name is one or more segments, none of them empty, . or ..",
    )


def _too_long(kind: str) -> CallerError:
    """Return the error for a stream or an object whose name has over MAX_KEY_CHARS characters."""
    hint = f"the name may have at most {MAX_KEY_CHARS} characters"
    return CallerError(f"the name of the {kind} is too long", field="path", hint=hint)


OBJECTS = "/v1/objects/"


async def call_bound(request: Request) -> Response:
    """Handle all methods of /v1/objects/{BINDING}/{name} and of paths below it."""
    sync: DeploymentSync | None = request.app.state.deployment_sync
    binding, name = parse_bound(request.scope["raw_path"])
    if sync is None or binding not in sync.deployment.bindings:
        names = () if sync is None else sorted(sync.deployment.bindings)
        raise NotFound(
            "no such binding",
            code="unknown_binding",
            field="path",
            hint="this edge has " + (", ".join(names) or "none"),
        )
    try:
        return await pass_on(request, sync.deployment.called(binding), name)
    except TailraceError as error:
        if error.code == "not_deployed":
            sync.lost()
        raise


def parse_bound(raw_path: bytes) -> tuple[str, str]:
    """Return the names of a binding and an object. Raises NotFound if the path has none."""
    binding, _, rest = raw_path.removeprefix(OBJECTS.encode()).partition(b"/")
    try:
        name = unquote_to_bytes(rest.partition(b"/")[0]).decode()
    except UnicodeDecodeError:
        name = ""
    if not name or any(ord(char) < 0x20 or char == "\x7f" for char in name):
        hint = f"{OBJECTS}BINDING/NAME, and what is below it"
        raise NotFound("no such object", code="unknown_object", field="path", hint=hint)
    if len(name) > MAX_KEY_CHARS:
        raise _too_long("object")
    return binding.decode("latin-1"), name


ROUTE = Route(f"{OBJECTS}{{rest:path}}", call_bound, methods=METHODS)
