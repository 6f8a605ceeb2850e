"""`/v1/stream/{name}`: HTTP for the objects of the origin, above all Durable Streams.

The edge checks the name and the size, and passes the request on whole as one Call. What it
means is the object's to say; its answer comes back as it is, with the headers that let pages
of other origins read it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from contextlib import ExitStack

import structlog
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from edge.attend import attended
from edge.caller import WINDOW_BODIES, Caller
from edge.config import EdgeConfig
from edge.cors import access_headers, preflight_headers
from edge.parameters import read_body
from edge.problem import problem_response
from edge.target import parse_target, request_url
from ledger.errors import CallerError, TailraceError
from ledger.frame import Answer, Call, Header

METHODS = ["GET", "HEAD", "PUT", "POST", "DELETE", "OPTIONS"]
CLIENT_GONE = 499
"""The status of an answer that nobody is left to read."""

# RFC 9110, 7.6.1: about one connection only, so not for the object.
_HOP_BY_HOP = frozenset(
    ("connection", "keep-alive", "proxy-connection", "te", "transfer-encoding", "upgrade")
)

_NOT_A_VALUE = re.compile(rb"[\x00\r\n]")
"""RFC 9110, 5.5. HTTP/1.1 cannot carry them; the binary framing of HTTP/2 and 3 can."""

log = structlog.get_logger("tailrace.edge")


async def call(request: Request) -> Response:
    """Any method of /v1/stream/{name}"""
    config: EdgeConfig = request.app.state.config
    origin = request.headers.get("Origin")
    if request.method == "OPTIONS":
        allowed = preflight_headers(origin, config.allowed_origins)
        return Response(status_code=204, headers=allowed | {"X-Content-Type-Options": "nosniff"})
    access = access_headers(origin, config.allowed_origins)
    try:
        return await _answer(request, await _call(request, config.max_body_bytes), access)
    except TailraceError as error:
        response = problem_response(error)
        response.headers.update(access)
        return response
    except ClientDisconnect:
        return Response(status_code=CLIENT_GONE)


async def _call(request: Request, limit_bytes: int) -> Call:
    """The request as a Call; raises CallerError for one that cannot be."""
    body = await read_body(request, limit_bytes)
    if any(_NOT_A_VALUE.search(value) for _, value in request.headers.raw):
        raise CallerError("a header holds a character that none can", field="headers")
    target = parse_target(request.scope["raw_path"])
    return Call(
        object=target.object,
        name=target.name,
        method=request.method,
        url=request_url(request.scope),
        headers=end_to_end(
            (name.decode("latin-1"), value.decode("latin-1")) for name, value in request.headers.raw
        ),
        # Content of a GET or HEAD means nothing (RFC 9110, 9.3.1).
        body=b"" if request.method in ("GET", "HEAD") else body,
        credit=WINDOW_BODIES,
    )


async def _answer(request: Request, wanted: Call, access: dict[str, str]) -> Response:
    caller = Caller(request.app.state.link)
    with ExitStack() as unless_handed_on:
        unless_handed_on.callback(caller.close)
        answer = await attended(request.receive, caller.call(wanted))
        unless_handed_on.pop_all()  # the body closes it when it has been sent
    return AnswerBody(caller, answer, access)


def end_to_end(fields: Iterable[tuple[str, str]]) -> tuple[Header, ...]:
    """The header fields that are for the far end; names in lower case."""
    lower = [(name.lower(), value) for name, value in fields]
    listed = ",".join(value for name, value in lower if name == "connection")
    dropped = _HOP_BY_HOP | {name.strip().lower() for name in listed.split(",")}
    return tuple(Header(name, value) for name, value in lower if name not in dropped)


class AnswerBody(Response):
    """Sends an answer's body as it comes, until it is whole or the client goes."""

    def __init__(self, caller: Caller, answer: Answer, access: dict[str, str]) -> None:
        self.status_code = answer.status
        self.background = None
        self.raw_headers = [
            (header.name.encode("latin-1"), header.value.encode("latin-1"))
            for header in end_to_end((h.name, h.value) for h in answer.headers)
        ]
        self.headers["X-Content-Type-Options"] = "nosniff"
        for name, value in access.items():
            if name == "Vary":
                self.headers.add_vary_header(value)
            else:
                self.headers[name] = value
        self._caller = caller

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await attended(receive, self._send(scope, send))
        except ClientDisconnect:
            pass  # it asks again, from the offset that it has
        except TailraceError as error:
            log.warning("stream.cut", url=scope["path"], error=str(error))
            await _break_off(scope, send)
        finally:
            self._caller.close()

    async def _send(self, scope: Scope, send: Send) -> None:
        head = {"status": self.status_code, "headers": self.raw_headers}
        await send({"type": "http.response.start", **head})
        ended = False
        while not ended:
            data, ended = await self._caller.take()
            if scope["method"] == "HEAD":
                data = b""
            await send({"type": "http.response.body", "body": data, "more_body": not ended})


async def _break_off(scope: Scope, send: Send) -> None:
    """End a body that is not whole, so that a client can see it where its protocol lets it.

    HTTP/1.1 closes the connection before the last chunk. The server cannot reset a stream of
    HTTP/2 or 3, and one without an end hangs: there the body just ends, short of the length
    that a finite answer declares; where a live one ends says nothing in any case.
    """
    if scope["http_version"] not in ("1.0", "1.1"):
        await send({"type": "http.response.body", "body": b"", "more_body": False})
