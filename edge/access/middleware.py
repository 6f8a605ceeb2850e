"""ASGI middleware that applies the access rules: refused requests never reach the application."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial

from starlette.datastructures import MutableHeaders
from starlette.requests import HTTPConnection
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tailrace.edge.access.head import Head
from tailrace.edge.access.key_class import bound_class
from tailrace.edge.access.page_origins import preflight_headers
from tailrace.edge.access.rules import Admission, Rules
from tailrace.edge.errors import AI_SDK_PATH, MESSAGES_PATH, OPENAI_PATHS, noted_response
from tailrace.edge.response_context import ResponseContext, fields_of
from tailrace.edge.telemetry.request_metrics import current
from tailrace.ledger.frame import STREAM_PATH, Caller

PREFIXES = ("/v1/generate", AI_SDK_PATH, STREAM_PATH, MESSAGES_PATH, *OPENAI_PATHS)
"""Prefixes of the paths whose CORS preflights (OPTIONS) are answered."""

CALLER = "tailrace.caller"
"""Key of the ASGI scope under which the request's `Caller` is stored."""
TOKEN_QUERY = re.compile(rb"(?:^|&)token=")


class Access:
    """Middleware that passes an allowed request on, and answers a refused one itself.

    The application sees the request as the client sent it to the outermost trusted proxy, without
    the API key.
    """

    def __init__(self, app: ASGIApp, rules: Rules) -> None:
        self._app = app
        self._rules = rules

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        has_token = TOKEN_QUERY.search(scope.get("query_string", b"")) is not None
        admission = self._rules.admit(head_of(scope), has_token=has_token)
        context = ResponseContext.of(scope)
        context.headers += fields_of(admission.headers)
        with context.ending(partial(self._rules.done, admission)):
            await self._answer(admission, scope, receive, send)

    async def _answer(
        self, admission: Admission, scope: Scope, receive: Receive, send: Send
    ) -> None:
        head, headers, refusal, caller, priority = admission
        with_access = _adding(headers, send)
        if refusal is not None:
            await noted_response(refusal, head.path)(scope, receive, with_access)
        elif head.method == "OPTIONS" and head.path.startswith(PREFIXES):
            await Response(None, 204, preflight_headers(headers))(scope, receive, send)
        else:
            scope[CALLER] = caller
            bound_class.set(priority)
            if (metrics := current.get()) is not None:
                metrics.address = head.address
            await self._app(_with(scope, head), receive, with_access)


def head_of(scope: Scope) -> Head:
    client = scope.get("client")
    return Head(
        method=scope.get("method", "GET"),
        path=scope["path"],
        scheme=scope.get("scheme", "http"),
        address=client[0] if client else "",
        headers=tuple((bytes(name), bytes(value)) for name, value in scope["headers"]),
    )


def caller_of(request: HTTPConnection) -> Caller | None:
    """Return the caller that the API key identifies; None if the edge has no keys."""
    caller: Caller | None = request.scope.get(CALLER)
    return caller


def _with(scope: Scope, head: Head) -> Scope:
    client = scope.get("client")
    # Proxies do not report the client's port.
    port = client[1] if client and client[0] == head.address else 0
    scope["client"] = (head.address, port) if head.address else None
    scope["scheme"], scope["headers"] = head.scheme, list(head.headers)
    return scope


def _adding(headers: Mapping[str, str], send: Send) -> Send:
    async def send_with_access(message: Message) -> None:
        if message["type"] == "http.response.start":
            sent = MutableHeaders(scope=message)
            for name, value in headers.items():
                if name == "Vary":
                    sent.add_vary_header(value)
                # The application may have sent this header, too; send both.
                elif name == "RateLimit":
                    sent.append(name, value)
                else:
                    sent[name] = value
        await send(message)

    return send_with_access
