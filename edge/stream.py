"""`/v1/stream/{name}`: HTTP for the objects of the origin, above all Durable Streams.

The edge checks the name and the size, and passes the request on whole as one Call. What it
means is the object's to say; its answer comes back as it is.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from contextlib import ExitStack
from urllib.parse import unquote_to_bytes

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Scope

from edge.access.middleware import caller_of
from edge.body import StreamedBody, answer_of
from edge.origins.link import Reader, attended, link_of
from edge.parameters import read_body
from ledger.errors import CallerError, NotFound
from ledger.frame import CALL_METHODS, RESERVED_NAME, SAFE_METHODS, STREAM_PATH, Call, Header
from ledger.objects.object import MAX_KEY_CHARS

PREFIX = STREAM_PATH.encode()
RESERVED = RESERVED_NAME.encode()

_HOST = re.compile(r"[A-Za-z0-9._~-]+(:[0-9]{1,5})?|\[[0-9A-Fa-f:.]+\](:[0-9]{1,5})?")
# An encoded slash would make two names out of one for whoever decodes at another place.
_ENCODED_SLASH = re.compile(rb"%2f", re.IGNORECASE)

# Not empty, no step up or down, nothing that a log or a terminal would act on.
_SEGMENT = re.compile(rb"(?!\.{1,2}\Z)[^\x00-\x1f\x7f]+")

METHODS = [*CALL_METHODS]

# RFC 9110, 7.6.1: about one connection only, so not for the object.
_HOP_BY_HOP = frozenset(
    ("connection", "keep-alive", "proxy-connection", "te", "transfer-encoding", "upgrade")
)

_NOT_A_VALUE = re.compile(rb"[\x00\r\n]")
"""RFC 9110, 5.5. HTTP/1.1 cannot carry them; the binary framing of HTTP/2 and 3 can."""


async def call(request: Request) -> Response:
    """Any method of /v1/stream/{name}"""
    return await pass_on(request, *parse_target(request.scope["raw_path"]))


async def pass_on(request: Request, object_class: str, name: str) -> Response:
    """What the object answers."""
    return await _answer(request, await _call(request, object_class, name))


async def _call(request: Request, object_class: str, name: str) -> Call:
    """The request as a Call; raises CallerError for one that cannot be."""
    body = await read_body(request)
    if any(_NOT_A_VALUE.search(value) for _, value in request.headers.raw):
        raise CallerError("a header holds a character that none can", field="headers")
    return Call(
        object=object_class,
        name=name,
        method=request.method,
        url=request_url(request.scope),
        headers=end_to_end(
            (name.decode("latin-1"), value.decode("latin-1")) for name, value in request.headers.raw
        ),
        # Content of a GET or HEAD means nothing (RFC 9110, 9.3.1).
        body=b"" if request.method in SAFE_METHODS else body,
        caller=caller_of(request),
    )


async def _answer(request: Request, wanted: Call) -> Response:
    reader = Reader(link_of(request))
    with ExitStack() as unless_handed_on:
        unless_handed_on.callback(reader.close)
        answer = await attended(request.receive, reader.call(wanted))
        unless_handed_on.pop_all()  # the body closes it when it has been sent
    body = StreamedBody(reader, answer_of(reader), answer.status)
    body.raw_headers = [
        (header.name.encode("latin-1"), header.value.encode("latin-1"))
        for header in end_to_end((h.name, h.value) for h in answer.headers)
    ]
    body.headers["X-Content-Type-Options"] = "nosniff"
    return body


def end_to_end(fields: Iterable[tuple[str, str]]) -> tuple[Header, ...]:
    """The header fields that are for the far end; names in lower case."""
    lower = [(name.lower(), value) for name, value in fields]
    listed = ",".join(value for name, value in lower if name == "connection")
    dropped = _HOP_BY_HOP | {name.strip().lower() for name in listed.split(",")}
    return tuple(Header(name, value) for name, value in lower if name not in dropped)


def parse_target(raw_path: bytes) -> tuple[str, str]:
    """Class and name of the object that a path, as it came, names.

    A stream's name is the rest of the path, percent-decoded; that of the subscription API is
    left as it is. Raises NotFound for whatever can be no name, CallerError for one too long.
    """
    if not raw_path.startswith(PREFIX) or not raw_path.isascii():
        raise _nothing_here()
    rest = raw_path.removeprefix(PREFIX)
    if len(rest) > 12 * MAX_KEY_CHARS:  # four bytes a character, each written as three
        raise _too_long()
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
        raise _too_long()
    return name


def request_url(scope: Scope) -> str:
    """The absolute URL as the client sent it; CallerError for a Host that is none."""
    host = next((value for name, value in scope["headers"] if name == b"host"), None)
    if host is None:  # HTTP/1.0 needs none
        address, port = scope["server"]
        host = f"{address}:{port}".encode()
    text = host.decode("latin-1")
    if _HOST.fullmatch(text) is None:
        raise CallerError("not a host", field="Host")
    target = scope["raw_path"]
    if scope["query_string"]:
        target += b"?" + scope["query_string"]
    if not target.isascii():  # HTTP/1.1 cannot carry it; the binary framing of HTTP/2 and 3 can
        raise CallerError("a character that no URL holds", field="query", hint="percent-encode it")
    return f"{scope['scheme']}://{text}{target.decode('ascii')}"


def _nothing_here() -> NotFound:
    return NotFound(
        "no such stream",
        code="unknown_stream",
        field="path",
        hint="a stream's name is one or more segments, none of them empty, . or ..",
    )


def _too_long() -> CallerError:
    return CallerError(
        "the stream's name is too long",
        field="path",
        hint=f"at most {MAX_KEY_CHARS} characters",
    )
