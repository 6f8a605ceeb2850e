"""Streams of OpenAI's routes, past the application, which answers everything else of them."""

from __future__ import annotations

import re

from edge.access.head import Head
from edge.openai.answers import Dialect
from edge.openai.chat import CHAT
from edge.openai.completions import COMPLETIONS
from edge.openai.errors import RESPONSES_PATH
from edge.openai.request import read_body
from edge.openai.responses import request as responses
from edge.openai.responses.events import PREFIX, ResponseEvents
from edge.server.fast_route import FastRoute, Wanted, query_of
from edge.server.outlet import Request
from ledger.frame import Caller, Resume

_asks_for_a_stream = re.compile(rb'"stream"\s*:\s*true').search
_READS_BY = b"stream=true"
_goes_on = re.compile(rb'"previous_response_id"\s*:\s*"|"item_reference"').search
_asks_for_choices = re.compile(rb'"n"\s*:\s*(?!1\b|null)').search


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


OPENAI_ROUTES = (ChunkRoute(CHAT), ChunkRoute(COMPLETIONS), ResponseRoute())
