"""`/v1/stream/{name}` and `/v1/objects/{BINDING}/{name}`: HTTP for the objects of the origin.

The first are above all Durable Streams, the second of the origin's own classes, by the names of a
file's bindings; origins are told of that file's classes and crons. The edge checks the name and the
size, and passes the request on whole as one Call. What it means is the object's to say; its answer
comes back as it is.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Iterable
from contextlib import ExitStack, asynccontextmanager
from urllib.parse import unquote_to_bytes

import structlog
from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Scope

from tailrace.edge.access.middleware import caller_of
from tailrace.edge.generate.encoders import LIVE_HEADERS, NO_TRANSFORM, UNBUFFERED
from tailrace.edge.generate.params import View, read_body
from tailrace.edge.origins.link import Link, Reader, attended, link_of, whole_answer
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
from tailrace.ledger.objects.deployment import DEPLOYMENT, Deployment
from tailrace.ledger.objects.object import MAX_KEY_CHARS
from tailrace.ledger.process.tasks import beside

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
    answer = await pass_on(request, *parse_target(request.scope["raw_path"]))
    make_inert(answer.headers)
    return answer


INERT_POLICY = "sandbox; default-src 'none'"
"""The Content-Security-Policy of streams: what writers put there runs no script, has no origin and
loads nothing, also where a browser shows it as a page."""
SHOWN_TYPES = frozenset(
    (
        *("text/plain", "text/csv", "text/markdown", "text/event-stream"),
        *("application/json", "application/x-ndjson", "application/octet-stream", FRAMES_TYPE),
        *("image/png", "image/jpeg", "image/gif", "image/webp", "image/avif"),
    )
)
"""Media types that a browser may show. It is told to save all others, known and unknown, as a file:
HTML, SVG, XML, JavaScript and PDF can hold scripts. Audio and video are also shown."""
LIVE_TYPES = frozenset((View.SSE.value, View.FRAMES.value))


def make_inert(headers: MutableHeaders) -> None:
    """Set the headers that keep what a stream holds from acting as a part of the edge's site."""
    headers["Content-Security-Policy"] = INERT_POLICY
    essence = essence_of(headers)
    is_media = essence.startswith(("audio/", "video/"))
    if essence and essence not in SHOWN_TYPES and not is_media:
        headers["Content-Disposition"] = "attachment"


def essence_of(headers: MutableHeaders) -> str:
    """Return the media type without its parameters, in lower case; empty if there is none."""
    return headers.get("Content-Type", "").partition(";")[0].strip().lower()


def make_live(headers: MutableHeaders, *, waits: bool) -> None:
    """Set the headers of an answer that is sent while it is made, if this is one.

    `waits` says that the client asked the object to wait for news. The answer to that may be kept
    by caches if the object says so: it is never sent again under the same URL.
    """
    if essence_of(headers) in LIVE_TYPES:
        of_streams = "no-cache" in headers.get("Cache-Control", "")
        headers.update(LIVE_HEADERS)
        if of_streams:  # clients of Durable Streams look for it
            headers["Cache-Control"] = f"no-cache, {LIVE_HEADERS['Cache-Control']}"
    elif waits:
        stated = headers.get("Cache-Control")
        headers["Cache-Control"] = f"{stated}, {NO_TRANSFORM}" if stated else NO_TRANSFORM
        headers.update(UNBUFFERED)
    elif "Content-Length" not in headers:
        headers.update(UNBUFFERED)


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


def _too_long(what: str) -> CallerError:
    hint = f"at most {MAX_KEY_CHARS} characters"
    return CallerError(f"the {what}'s name is too long", field="path", hint=hint)


OBJECTS = "/v1/objects/"
AGAIN_S = 5.0
"""After so long an origin is told again that has refused; its operator may have mended it."""

log = structlog.get_logger("tailrace.edge")


class Deploying:
    """Tells each origin of a deployment, again where one has not heard of it."""

    def __init__(self, link: Link, deployment: Deployment) -> None:
        self.deployment = deployment
        self._link = link
        self._refusals: dict[str, str] = {}
        self._told: set[str] = set()
        self._lost = asyncio.Event()

    @property
    def faults(self) -> list[str]:
        """Why this edge is not ready."""
        if not self._told and not self._refusals:
            return ["no origin knows of this edge's deployment yet"]
        return [f"{self._refusals[address]}" for address in sorted(self._refusals)]

    def lost(self) -> None:
        """An origin does not know of it: its ledger is another one."""
        self._lost.set()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async with beside(self._tell_on(one.address) for one in self._link.origins):
            yield

    async def _tell_on(self, address: str) -> None:
        script, body = self.deployment.script, self.deployment.encoded()
        call = Call(DEPLOYMENT, script, "PUT", f"http://deployment/{script}", body=body)
        while True:
            self._lost.clear()
            try:
                await whole_answer(self._link, call, address)
            except TailraceError as error:
                if not error.retryable and self._refusals.get(address) != str(error):
                    self._refusals[address] = str(error)
                    log.error("deployment refused", origin=address, error=str(error))
                await asyncio.sleep(AGAIN_S)
            else:
                self._refusals.pop(address, None)
                self._told.add(address)
                await self._lost.wait()


async def call_bound(request: Request) -> Response:
    """Any method of /v1/objects/{BINDING}/{name}, and of what is below it"""
    deploying: Deploying | None = request.app.state.deploying
    binding, name = parse_bound(request.scope["raw_path"])
    if deploying is None or binding not in deploying.deployment.bindings:
        names = () if deploying is None else sorted(deploying.deployment.bindings)
        raise NotFound(
            "no such binding",
            code="unknown_binding",
            field="path",
            hint="this edge has " + (", ".join(names) or "none"),
        )
    try:
        return await pass_on(request, deploying.deployment.called(binding), name)
    except TailraceError as error:
        if error.code == "not_deployed":
            deploying.lost()
        raise


def parse_bound(raw_path: bytes) -> tuple[str, str]:
    """Of a binding and an object. Raises NotFound for what can be no name."""
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
