"""Streams of OpenAI's routes, past the application, which answers everything else of them."""

from __future__ import annotations

import re
from urllib.parse import parse_qsl

from edge.access.head import Head
from edge.openai.chat import CHAT
from edge.openai.completions import COMPLETIONS
from edge.openai.dialect import Dialect
from edge.openai.request import read_body
from edge.server.fast_route import FastRoute, Wanted
from edge.server.outlet import Request
from ledger.frame import Caller

_asks_for_a_stream = re.compile(rb'"stream"\s*:\s*true').search
_asks_for_choices = re.compile(rb'"n"\s*:\s*(?!1\b|null)').search


class ChunkRoute:
    """A dialect's streams that have one choice: one stream, one response."""

    def __init__(self, dialect: Dialect) -> None:
        self._dialect = dialect
        self._path = dialect.path.encode()
        prefix = re.escape(dialect.shape.prefix).encode()
        self._read = re.compile(re.escape(self._path) + rb"/((?:%b)?[0-9a-f]{32})" % prefix)

    def claims(self, request: Request) -> bool:
        if request.method == "POST":
            return request.path == self._path
        return (
            request.method == "GET"
            and b"stream=true" in request.query
            and self._read.fullmatch(request.path) is not None
        )

    def name(self, request: Request) -> str:
        path = self._dialect.path
        return path if request.method == "POST" else f"{path}/{{id}}"

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
        found = self._read.fullmatch(request.path)
        assert found is not None  # it was claimed
        query = parse_qsl(request.query.decode("latin-1"), keep_blank_values=True)
        token = head.value(b"tailrace-token")
        resume, streamed, options = self._dialect.resume(found[1].decode(), query, token, caller)
        if not streamed:
            return None
        encoder = self._dialect.encoder(options, resumes=resume.after is not None)
        return Wanted(resume, encoder)


OPENAI_ROUTES: tuple[FastRoute, ...] = (ChunkRoute(CHAT), ChunkRoute(COMPLETIONS))
