"""Streams of OpenAI's routes, past the application, which answers everything else of them."""

from __future__ import annotations

import re
from urllib.parse import parse_qsl

from edge.access.head import Head
from edge.openai.chat import CHAT
from edge.openai.completions import COMPLETIONS
from edge.openai.events import Dialect
from edge.openai.request import read_body
from edge.server.fast_route import FastRoute, Wanted
from edge.server.outlet import Request
from ledger.frame import Caller

asks_for_a_stream = re.compile(rb'"stream"\s*:\s*true').search
_asks_for_choices = re.compile(rb'"n"\s*:\s*(?!1\b|null)').search


class PathRoute:
    """What is asked by POST at a path, and read below it under a name that `names` matches."""

    def __init__(self, path: str, names: str) -> None:
        self._path = path
        self._read = re.compile(f"{re.escape(path)}/({names})".encode())

    def claims(self, request: Request) -> bool:
        if request.method == "POST":
            return request.path == self._path.encode()
        return (
            request.method == "GET"
            and b"stream=true" in request.query
            and self._read.fullmatch(request.path) is not None
        )

    def name(self, request: Request) -> str:
        return self._path if request.method == "POST" else f"{self._path}/{{id}}"

    def named(self, request: Request) -> str:
        """What is read."""
        found = self._read.fullmatch(request.path)
        assert found is not None  # it was claimed
        return found[1].decode()


class ChunkRoute(PathRoute):
    """A dialect's streams that have one choice: one stream, one response."""

    def __init__(self, dialect: Dialect) -> None:
        super().__init__(dialect.path, f"(?:{re.escape(dialect.shape.prefix)})?[0-9a-f]{{32}}")
        self._dialect = dialect

    def is_streamed(self, request: Request) -> bool:
        if request.method == "GET":
            return True
        body = request.body
        return asks_for_a_stream(body) is not None and _asks_for_choices(body) is None

    def wanted(self, request: Request, head: Head, caller: Caller | None) -> Wanted | None:
        if request.method == "GET":
            return self._resumed(request, head, caller)
        parsed, headers = read_body(self._dialect.body, request.body, self._dialect.example)
        opens = parsed.opens(head.value(b"idempotency-key"), caller)
        if not parsed.stream or len(opens) > 1 or opens[0].n > 1:
            return None
        return Wanted(opens[0], self._dialect.encoder(parsed.stream_options), headers)

    def _resumed(self, request: Request, head: Head, caller: Caller | None) -> Wanted | None:
        query = parse_qsl(request.query.decode("latin-1"), keep_blank_values=True)
        token = head.value(b"tailrace-token")
        resume, streamed, options = self._dialect.resume(self.named(request), query, token, caller)
        if not streamed:
            return None
        encoder = self._dialect.encoder(options, resumes=resume.after is not None)
        return Wanted(resume, encoder)


OPENAI_ROUTES: tuple[FastRoute, ...] = (ChunkRoute(CHAT), ChunkRoute(COMPLETIONS))
