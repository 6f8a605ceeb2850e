"""Which requests are answered past the application: the streams of `/v1/generate`.

The same routes exist in the application, with the same words for what is asked and the same rules
for who may ask. So whatever is not plain here is left to it, above all what it would refuse.
"""

from __future__ import annotations

import re
from urllib.parse import parse_qsl, unquote

from edge.access.head import Head
from edge.access.rules import Rules
from edge.generate import asked_to_read, asked_to_start
from edge.origins.link import Link
from edge.parameters import View, choose_view
from edge.server.deadlines import Deadlines
from edge.server.outlet import Handler, Outlet, Request, Turn
from edge.server.stream_reader import StreamReader
from ledger.errors import TailraceError
from ledger.frame import Open, Resume

START = b"/v1/generate"
_READ = re.compile(rb"/v1/generate/([0-9a-f]{32})")


class StreamRoutes:
    """The `Routes` of every protocol."""

    def __init__(self, link: Link, turn: Turn, deadlines: Deadlines, rules: Rules) -> None:
        self._link = link
        self._turn = turn
        self._deadlines = deadlines
        self._rules = rules

    def claims(self, request: Request) -> bool:
        """A stream that is started or read as events or frames."""
        is_ours = (request.method == "POST" and request.path == START) or (
            request.method == "GET" and _READ.fullmatch(request.path) is not None
        )
        if not is_ours:
            return False
        try:
            return choose_view(request.text(b"accept")) is not View.JSON
        except TailraceError:
            return False

    def serve(self, request: Request, outlet: Outlet) -> Handler | None:
        head = Head(
            method=request.method,
            path=unquote(request.path.decode("ascii")),
            scheme=request.scheme,
            address=request.peer[0] if request.peer else "",
            headers=tuple(request.headers),
        )
        admission = self._rules.admit(head)
        if admission.refusal is not None:
            return None
        try:
            view = choose_view(request.text(b"accept"))
            wanted = self._wanted(request)
        except TailraceError:
            return None
        access = [(n.lower().encode(), v.encode()) for n, v in admission.headers.items()]
        reader = StreamReader(self._link, self._turn, self._deadlines, outlet, view, wanted, access)
        reader.ask()
        return reader

    def _wanted(self, request: Request) -> Open | Resume:
        if request.method == "POST":
            return asked_to_start(request.body, request.text(b"idempotency-key"))
        query = parse_qsl(request.query.decode("latin-1"), keep_blank_values=True)
        found = _READ.fullmatch(request.path)
        assert found is not None  # it was claimed
        return asked_to_read(
            found[1].decode(),
            [value for name, value in query if name == "after"],
            request.text(b"last-event-id"),
            request.text(b"tailrace-token"),
        )
