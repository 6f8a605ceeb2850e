"""Which requests are answered past the application: those that are answered by a stream.

The same routes exist in the application, with the same words for what is asked and the same rules
for who may ask. Whatever is not plain is left to it.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from time import perf_counter
from urllib.parse import parse_qsl, unquote

from tailrace.edge.access.head import Head
from tailrace.edge.access.middleware import TOKEN_QUERY
from tailrace.edge.access.rules import Rules
from tailrace.edge.errors import RESPONSES_PATH, error_response
from tailrace.edge.generate.encoders import ENCODERS, Encoder
from tailrace.edge.generate.params import View, choose_view
from tailrace.edge.generate.routes import asked_to_read, asked_to_start
from tailrace.edge.openai.answers import Dialect
from tailrace.edge.openai.chat import CHAT
from tailrace.edge.openai.completions import COMPLETIONS
from tailrace.edge.openai.request import read_body
from tailrace.edge.openai.responses import request as responses
from tailrace.edge.openai.responses.events import PREFIX, ResponseEvents
from tailrace.edge.origins.link import Link, credited
from tailrace.edge.server.deadlines import Deadlines
from tailrace.edge.server.flush import FlushBatch
from tailrace.edge.server.interfaces import (
    NOBODY,
    Admitted,
    Headers,
    Request,
    ResponseSource,
    ResponseWriter,
)
from tailrace.edge.server.stream_reader import StreamReader, fields_of
from tailrace.edge.telemetry.request_metrics import PROTOCOLS, Counts, RequestMetrics, with_trace
from tailrace.ledger.errors import TailraceError
from tailrace.ledger.frame import Caller, Open, Resume


@dataclass(frozen=True, slots=True)
class Wanted:
    """What to ask the origin for, how to show it, and what else the answer's head says."""

    request: Open | Resume
    encoder: Encoder
    headers: Mapping[str, str] = field(default_factory=dict)


class FastRoute(ABC):
    """One of the routes of `StreamRoutes`; the application has its twin, which answers the rest.

    A stream is asked for by POST at `path`, and read below it under a name that `names` matches,
    if the query has the words `reads_by`.
    """

    def __init__(self, path: str, names: str, reads_by: bytes = b"") -> None:
        self._path = path
        self._read = re.compile(f"{re.escape(path)}/({names})".encode())
        self._reads_by = reads_by

    def claims(self, request: Request) -> bool:
        """Whether it may be for this route, as far as the head tells; `body` is empty."""
        if request.method == "POST":
            return request.path == self._path.encode()
        return (
            request.method == "GET"
            and self._reads_by in request.query
            and self._read.fullmatch(request.path) is not None
        )

    def name(self, request: Request) -> str:
        """The path that it serves, as telemetry calls it."""
        return self._path if request.method == "POST" else f"{self._path}/{{id}}"

    def named(self, request: Request) -> str:
        """What is read."""
        found = self._read.fullmatch(request.path)
        assert found is not None  # it was claimed
        return found[1].decode()

    @abstractmethod
    def is_streamed(self, request: Request) -> bool:
        """Whether that is so with the body at hand; at a glance, for nobody is let in yet."""

    @abstractmethod
    def wanted(self, request: Request, head: Head, caller: Caller | None) -> Wanted | None:
        """What is asked by who was let in; None where it is the application's after all.

        Raises TailraceError for what cannot be asked.
        """


def query_of(request: Request) -> list[tuple[str, str]]:
    return parse_qsl(request.query.decode("latin-1"), keep_blank_values=True)


_asks_for_a_stream = re.compile(rb'"stream"\s*:\s*true').search
_READS_BY = b"stream=true"
_goes_on = re.compile(rb'"previous_response_id"\s*:\s*"|"item_reference"').search
_asks_for_choices = re.compile(rb'"n"\s*:(?!\s*(?:1\b|null\b))').search


class ChunkRoute(FastRoute):
    """A dialect's streams that have one choice: one stream, one response."""

    def __init__(self, dialect: Dialect) -> None:
        names = f"(?:{re.escape(dialect.shape.prefix)})?[0-9a-f]{{32}}"
        super().__init__(dialect.path, names, _READS_BY)
        self._dialect = dialect

    def is_streamed(self, request: Request) -> bool:
        if request.method == "GET":
            return True
        body = request.body
        return _asks_for_a_stream(body) is not None and _asks_for_choices(body) is None

    def wanted(self, request: Request, head: Head, caller: Caller | None) -> Wanted | None:
        if request.method == "GET":
            return self._resumed(request, head, caller)
        parsed, headers = read_body(self._dialect.body, request.body, self._dialect.example)
        opens = parsed.opens(head.value(b"idempotency-key"), caller)
        if not parsed.stream or len(opens) > 1 or opens[0].n > 1:
            return None
        return Wanted(opens[0], self._dialect.encoder(parsed.stream_options), headers)

    def _resumed(self, request: Request, head: Head, caller: Caller | None) -> Wanted | None:
        token = head.value(b"tailrace-token")
        resume, encoder = self._dialect.resume(
            self.named(request), query_of(request), token, caller
        )
        return None if encoder is None else Wanted(resume, encoder)


class ResponseRoute(FastRoute):
    """Responses that need nothing but one stream: a response that does not go on from earlier
    ones, and the events of one from the beginning."""

    def __init__(self) -> None:
        super().__init__(RESPONSES_PATH, f"{PREFIX}[0-9a-f]{{32}}", _READS_BY)

    def is_streamed(self, request: Request) -> bool:
        if request.method == "GET":
            # Where a number is asked for, the log is read before the answer has a status.
            return not any(name == "starting_after" for name, _ in query_of(request))
        body = request.body
        return _asks_for_a_stream(body) is not None and _goes_on(body) is None

    def wanted(self, request: Request, head: Head, caller: Caller | None) -> Wanted | None:
        if request.method == "GET":
            return self._resumed(request, head, caller)
        body, headers = read_body(responses.ResponseBody, request.body, responses.EXAMPLE)
        if not body.stream or body.previous_response_id is not None:
            return None
        key = head.value(b"idempotency-key")
        wanted = responses.to_open(body, [], body.items(), key, caller)
        return Wanted(wanted, ResponseEvents(), headers)

    def _resumed(self, request: Request, head: Head, caller: Caller | None) -> Wanted | None:
        if dict(query_of(request)).get("stream") != "true":
            return None
        stream = bytes.fromhex(self.named(request).removeprefix(PREFIX))
        token = head.value(b"tailrace-token")
        return Wanted(Resume(stream, token=token, caller=caller), ResponseEvents())


def head_of(request: Request, scheme: str | None = None) -> Head:
    """What the rules look at; `scheme` is another than the request's, a WebSocket's."""
    return Head(
        method=request.method,
        path=unquote(request.path.decode("ascii")),
        scheme=scheme or request.scheme,
        address=request.peer[0] if request.peer else "",
        headers=tuple(request.headers),
    )


@dataclass(frozen=True, slots=True)
class StreamRoutes:
    """The `Routes` of every protocol."""

    link: Link
    batch: FlushBatch
    deadlines: Deadlines
    rules: Rules
    counts: Counts | None = None

    def claims(self, request: Request) -> bool:
        """A stream that is started or read as events or frames."""
        return _route_of(request) is not None

    def admit(self, request: Request, writer: ResponseWriter) -> Admitted | None:
        began_s = perf_counter()
        has_token = TOKEN_QUERY.search(request.query) is not None
        admission = self.rules.admit(head_of(request), has_token=has_token)
        admitted = Admitted(request, admission, began_s, self.rules.done)
        if admission.refusal is None:
            return admitted
        self._refuse(admitted, admission.refusal, writer)
        return None

    def serve(
        self, admitted: Admitted, body: bytes, writer: ResponseWriter
    ) -> ResponseSource | None:
        request, admission = replace(admitted.request, body=body), admitted.admission
        route = _route_of(request)
        if route is None or not route.is_streamed(request):
            return None
        try:
            wanted = route.wanted(request, admission.head, admission.caller)
        except TailraceError as error:
            return self._refuse(admitted, error, writer)
        if wanted is None:
            return None
        metrics = self._metrics(admitted)
        metrics.address = admission.head.address
        access = [*fields_of(admission.headers), *metrics.headers]
        reader = StreamReader(
            self.link,
            self.batch,
            self.deadlines,
            writer,
            wanted.encoder,
            with_trace(credited(self.link.unread.applied(wanted.request)), metrics),
            [*access, *fields_of(wanted.headers)],
            admitted.done,
            metrics,
        )
        reader.ask()
        return reader

    def _metrics(self, admitted: Admitted) -> RequestMetrics:
        """Begin the telemetry of a request that is answered here."""
        request = admitted.request
        route = _route_of(request)
        assert route is not None  # it was claimed
        protocol, name = PROTOCOLS[request.http_version], route.name(request)
        began_s = admitted.began_s
        return RequestMetrics(self.counts, protocol, request.method, name, request.headers, began_s)

    def _refuse(
        self, admitted: Admitted, error: TailraceError, writer: ResponseWriter
    ) -> ResponseSource:
        admitted.done()
        metrics, admission = self._metrics(admitted), admitted.admission
        access = [*fields_of(admission.headers), *metrics.headers]
        return _refused(error, admission.head.path, access, writer, metrics)


def _refused(
    error: TailraceError,
    path: str,
    access: Headers,
    writer: ResponseWriter,
    metrics: RequestMetrics,
) -> ResponseSource:
    answer = error_response(error, path)
    writer.start(answer.status_code, [*answer.raw_headers, *access])
    writer.write(bytes(answer.body))
    writer.end()
    metrics.failed(error.code)
    metrics.answered(answer.status_code)
    metrics.ended()
    return NOBODY


class NativeRoute(FastRoute):
    """`/v1/generate`, in the two views that are streams."""

    def __init__(self) -> None:
        super().__init__("/v1/generate", "[0-9a-f]{32}")

    def claims(self, request: Request) -> bool:
        try:
            return super().claims(request) and (
                choose_view(request.text(b"accept")) is not View.JSON
            )
        except TailraceError:
            return False

    def is_streamed(self, request: Request) -> bool:
        return True

    def wanted(self, request: Request, head: Head, caller: Caller | None) -> Wanted:
        encoder = ENCODERS[choose_view(head.value(b"accept"))]()
        if request.method == "POST":
            key, media_type = head.value(b"idempotency-key"), head.value(b"content-type")
            return Wanted(asked_to_start(request.body, key, caller, media_type), encoder)
        query = query_of(request)
        tokens = [value for name, value in query if name == "token"]
        resume = asked_to_read(
            self.named(request),
            [value for name, value in query if name == "after"],
            head.value(b"last-event-id"),
            head.value(b"tailrace-token") or (tokens[-1] if tokens else None),
            caller,
        )
        return Wanted(resume, encoder)


ROUTES = (NativeRoute(), ChunkRoute(CHAT), ChunkRoute(COMPLETIONS), ResponseRoute())


def _route_of(request: Request) -> FastRoute | None:
    return next((route for route in ROUTES if route.claims(request)), None)
