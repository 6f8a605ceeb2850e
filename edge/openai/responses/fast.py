"""Streams of `/v1/responses`, past the application, which answers everything else of them.

So go those that need nothing but one stream: a response that does not go on from earlier ones,
and the events of one from the beginning.
"""

from __future__ import annotations

import re
from urllib.parse import parse_qsl

from edge.access.head import Head
from edge.openai.fast import PathRoute, asks_for_a_stream
from edge.openai.request import read_body
from edge.openai.responses.events import PREFIX, ResponseEvents, renamed
from edge.openai.responses.request import EXAMPLE, ResponseBody, to_open
from edge.server.fast_route import Wanted
from edge.server.outlet import Request
from ledger.errors import TailraceError
from ledger.frame import Caller, Resume

PATH = "/v1/responses"
_goes_on = re.compile(rb'"previous_response_id"\s*:\s*"|"item_reference"').search


class ResponseRoute(PathRoute):
    def __init__(self) -> None:
        super().__init__(PATH, f"{PREFIX}[0-9a-f]{{32}}")

    def is_streamed(self, request: Request) -> bool:
        if request.method == "GET":
            # Where a number is asked for, the log is read before the answer has a status.
            return not any(name == "starting_after" for name, _ in _query(request))
        body = request.body
        return asks_for_a_stream(body) is not None and _goes_on(body) is None

    def wanted(self, request: Request, head: Head, caller: Caller | None) -> Wanted | None:
        if request.method == "GET":
            return self._resumed(request, head, caller)
        try:
            body, headers = read_body(ResponseBody, request.body, EXAMPLE)
            if not body.stream or body.previous_response_id is not None:
                return None
            wanted = to_open(body, [], body.items(), head.value(b"idempotency-key"), caller)
        except TailraceError as error:
            raise renamed(error) from None
        return Wanted(wanted, ResponseEvents(), headers)

    def _resumed(self, request: Request, head: Head, caller: Caller | None) -> Wanted | None:
        if dict(_query(request)).get("stream") != "true":
            return None
        stream = bytes.fromhex(self.named(request).removeprefix(PREFIX))
        token = head.value(b"tailrace-token")
        return Wanted(Resume(stream, token=token, caller=caller), ResponseEvents())


def _query(request: Request) -> list[tuple[str, str]]:
    return parse_qsl(request.query.decode("latin-1"), keep_blank_values=True)
