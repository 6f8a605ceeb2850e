"""The response of an endpoint that answers with a stream.

An endpoint parses its request and returns a `StreamAnswer`, which holds the frame to send to the
origin, and the encoder that turns the stream's frames into the body. The server does the rest:
back-pressure, resuming the stream when the link to the origin is lost, keepalives, metrics. A
server that offers the ASGI extension `tailrace.writer`, as our own does, takes the response over
and the ASGI task ends: no token crosses ASGI. On every other ASGI server the same object sends
plain ASGI messages.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from starlette.datastructures import Headers as RequestHeaders
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tailrace.edge.asgi_writer import AsgiWriter
from tailrace.edge.compressed_encoder import CompressedEncoder
from tailrace.edge.content_coding import StreamCoding, stream_coding
from tailrace.edge.flush import FlushBatch
from tailrace.edge.generate.encoders import LIVE_HEADERS, Encoder
from tailrace.edge.origins.origin_pool import OriginPool
from tailrace.edge.origins.reader import Reader
from tailrace.edge.response_context import ResponseContext, fields_of
from tailrace.edge.server.asgi import EXTENSION
from tailrace.edge.server.deadlines import Deadlines, nothing
from tailrace.edge.server.interfaces import Headers, ResponseSource, ResponseWriter
from tailrace.edge.server.stream_reader import StreamReader
from tailrace.edge.telemetry.request_metrics import (
    NOWHERE,
    PROTOCOLS,
    RequestMetrics,
    current,
    route_of,
)
from tailrace.ledger.errors import CallerError
from tailrace.ledger.frame import Open, Opened, Resume


class DetachableResponse(Protocol):
    """The ASGI extension `tailrace.writer` of one request: takes its response out of ASGI."""

    @property
    def batch(self) -> FlushBatch:
        """The batch of the server. A source that has new data marks itself dirty in this batch."""

    @property
    def deadlines(self) -> Deadlines:
        """The timers of the server."""

    @property
    def writer(self) -> ResponseWriter:
        """The writer of the response."""

    def detach(self, source: ResponseSource) -> None:
        """Let `source` send the response, which goes on after the ASGI task has ended."""


@dataclass(frozen=True, slots=True)
class ResponseParts:
    """The objects that a `ResponseSource` needs to send one response."""

    link: OriginPool
    batch: FlushBatch
    deadlines: Deadlines
    writer: ResponseWriter
    access: Headers
    """Headers that every response to this request gets, whatever its status."""
    done: Callable[[], None]
    """A callback that the source must call once, when the response or the connection has ended."""
    metrics: RequestMetrics
    head_only: bool
    """True if the request was HEAD."""

    def start(self, status: int, headers: Mapping[str, str], media_type: str) -> None:
        """Write the status and headers of a response that streams its body."""
        self.metrics.answered(status)
        live = fields_of({**headers, **LIVE_HEADERS, "Content-Type": media_type})
        self.writer.start(status, [*live, *self.access])

    def refuse(self, answer: Response) -> None:
        """Write the status, the headers and the body of an error response."""
        self.metrics.answered(answer.status_code)
        self.writer.start(answer.status_code, [*answer.raw_headers, *self.access])
        self.writer.write(bytes(answer.body))


S = TypeVar("S", bound=ResponseSource)


class StreamingAnswer(Response, ABC, Generic[S]):
    """A response that a `ResponseSource` sends, without ASGI messages if the server allows it."""

    def __init__(self, headers: Mapping[str, str] | None = None) -> None:
        """Prepare the response; `headers` are added to those that every stream has."""
        super().__init__()
        self._more_headers = dict(headers or {})

    @abstractmethod
    def source(self, parts: ResponseParts) -> S:
        """Return the `ResponseSource` that sends the response."""

    @abstractmethod
    def begin(self, source: S) -> None:
        """Start the source, which then sends its requests to an origin.

        Called when the server knows the source, because a source may write at once.
        """

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let the server send the response if it offers `tailrace.writer`, else send it by ASGI."""
        link: OriginPool = scope["app"].state.link
        context = ResponseContext.of(scope)
        context.reports_writes = True
        server: DetachableResponse | None = scope.get("extensions", {}).get(EXTENSION)
        if server is not None:
            context.detached = True
            source = self.source(self._parts(scope, link, server, context))
            server.detach(source)
            self.begin(source)
            return
        fallback = AsgiWriter(link.batch, receive, send)
        source = self.source(self._parts(scope, link, fallback, context))
        fallback.detach(source)
        self.begin(source)
        await fallback.run()

    def _parts(
        self, scope: Scope, link: OriginPool, server: DetachableResponse, context: ResponseContext
    ) -> ResponseParts:
        metrics = current.get() or RequestMetrics(
            None,
            PROTOCOLS.get(scope.get("http_version", ""), NOWHERE),
            scope["method"],
            NOWHERE,
            (),
        )
        metrics.route = route_of(scope)
        # If the response is sent as ASGI messages, the middlewares add their headers themselves.
        access = context.headers if context.detached else []
        return ResponseParts(
            link,
            server.batch,
            server.deadlines,
            server.writer,
            [*access, *fields_of(self._more_headers)],
            context.end if context.detached else nothing,
            metrics,
            scope["method"] == "HEAD",
        )


class StreamAnswer(StreamingAnswer[StreamReader]):
    """A response that shows one stream: sends `request` to an origin, and encodes its frames."""

    def __init__(
        self,
        request: Open | Resume | None,
        encoder: Encoder,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """Prepare the response; `headers` are added to those that every stream has."""
        super().__init__(headers)
        self._request = request
        self._encoder = encoder
        self._reader: Reader | None = None
        self._opened: Opened | None = None
        self._before = b""

    @classmethod
    def reading(
        cls,
        reader: Reader,
        opened: Opened,
        encoder: Encoder,
        headers: Mapping[str, str] | None = None,
        begin: bytes = b"",
    ) -> StreamAnswer:
        """Return a response for a stream that the endpoint has opened already.

        The response sends `begin`, and then the frames that `reader` has not returned yet. The
        endpoint must have called `encoder.opened` itself.
        """
        answer = cls(None, encoder, headers)
        answer._reader, answer._opened, answer._before = reader, opened, begin
        return answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response, compressed if the client accepts that and the stream is long."""
        try:
            coding = stream_coding(RequestHeaders(scope=scope).getlist("accept-encoding"))
        except CallerError as error:
            if self._reader is not None:
                self._reader.close()
            await self._encoder.refusal(error)(scope, receive, send)
            return
        if coding is not StreamCoding.NEVER:
            encoder = CompressedEncoder(self._encoder, always=coding is StreamCoding.ALWAYS)
            if self._opened is not None:
                encoder.begin(self._opened)
                self._before = encoder.blocks(self._before)
            self._encoder = encoder
        await super().__call__(scope, receive, send)

    def source(self, parts: ResponseParts) -> StreamReader:
        """Return the source that reads the stream from the origin and writes the response."""
        return StreamReader(
            parts.link,
            parts.batch,
            parts.deadlines,
            parts.writer,
            self._encoder,
            parts.access,
            parts.done,
            parts.metrics,
            head_only=parts.head_only,
        )

    def begin(self, source: StreamReader) -> None:
        """Send the request to an origin, or continue the stream that the endpoint has opened."""
        if self._request is not None:
            source.ask(self._request)
        elif self._reader is not None and self._opened is not None:
            source.take_over(self._reader, self._opened, self._before)
