"""The response of an endpoint that answers with a stream.

An endpoint parses its request, and returns a `StreamAnswer` of the frame to ask the origin for and
of the encoder that shows the stream. The server does the rest: back-pressure, resumption behind a
lost link, keepalives, metrics. A server that offers the ASGI extension `tailrace.writer`, as our
own does, takes the response over and the ASGI task ends: no token crosses ASGI. On every other
ASGI server the same object sends plain ASGI messages.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tailrace.edge.asgi_writer import AsgiWriter
from tailrace.edge.flush import FlushBatch
from tailrace.edge.generate.encoders import Encoder
from tailrace.edge.origins.origin_pool import OriginPool
from tailrace.edge.origins.reader import Reader
from tailrace.edge.response_context import ResponseContext, fields_of
from tailrace.edge.server.asgi import EXTENSION
from tailrace.edge.server.deadlines import Deadlines, nothing
from tailrace.edge.server.interfaces import ResponseSource, ResponseWriter
from tailrace.edge.server.stream_reader import StreamReader
from tailrace.edge.telemetry.request_metrics import NOWHERE, PROTOCOLS, RequestMetrics, current
from tailrace.edge.telemetry.request_metrics import route_of as route_of_scope
from tailrace.ledger.frame import Open, Opened, Resume


class DetachableResponse(Protocol):
    """What a server offers under the extension, for one request."""

    @property
    def batch(self) -> FlushBatch:
        """The batch that the server flushes."""

    @property
    def deadlines(self) -> Deadlines:
        """The deadlines of the server."""

    @property
    def writer(self) -> ResponseWriter:
        """The way of the response to the client."""

    def detach(self, source: ResponseSource) -> None:
        """Let `source` send the response, which outlives the ASGI task."""


class StreamAnswer(Response):
    """A response that shows one stream, asked for by `request` and encoded by `encoder`.

    `headers` are added to those that every stream has.
    """

    def __init__(
        self,
        request: Open | Resume | None,
        encoder: Encoder,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__()
        self._request = request
        self._encoder = encoder
        self._more_headers = dict(headers or {})
        self._reader: Reader | None = None
        self._opened: Opened | None = None
        self._begin = b""

    @classmethod
    def reading(
        cls,
        reader: Reader,
        opened: Opened,
        encoder: Encoder,
        headers: Mapping[str, str] | None = None,
        begin: bytes = b"",
    ) -> StreamAnswer:
        """Return the response that goes on where `reader` is, with `begin` before its frames.

        The endpoint has opened the stream itself, and told the encoder.
        """
        answer = cls(None, encoder, headers)
        answer._reader, answer._opened, answer._begin = reader, opened, begin
        return answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response, or hand it over to the server."""
        link: OriginPool = scope["app"].state.link
        context = ResponseContext.of(scope)
        context.reports_writes = True
        server: DetachableResponse | None = scope.get("extensions", {}).get(EXTENSION)
        if server is not None:
            context.detached = True
            source = self._source(scope, link, server, context)
            server.detach(source)
            self._start(source)
            return
        fallback = AsgiWriter(link.batch, receive, send)
        source = self._source(scope, link, fallback, context)
        fallback.detach(source)
        self._start(source)
        await fallback.run()

    def _source(
        self, scope: Scope, link: OriginPool, server: DetachableResponse, context: ResponseContext
    ) -> StreamReader:
        metrics = current.get() or RequestMetrics(
            None,
            PROTOCOLS.get(scope.get("http_version", ""), NOWHERE),
            scope["method"],
            NOWHERE,
            (),
        )
        metrics.route = route_of_scope(scope)
        # Plain ASGI messages pass through the middlewares, which add the headers themselves.
        access = context.headers if context.detached else []
        return StreamReader(
            link,
            server.batch,
            server.deadlines,
            server.writer,
            self._encoder,
            [*access, *fields_of(self._more_headers)],
            context.end if context.detached else nothing,
            metrics,
            head_only=scope["method"] == "HEAD",
        )

    def _start(self, source: StreamReader) -> None:
        if self._request is not None:
            source.ask(self._request)
        elif self._reader is not None and self._opened is not None:
            source.take_over(self._reader, self._opened, self._begin)
