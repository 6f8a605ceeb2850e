"""Around the whole application, and around every other middleware: what each request was."""

from __future__ import annotations

from collections.abc import Callable

import structlog
from starlette.applications import Starlette
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from edge.telemetry.counts import Counts
from edge.telemetry.exchange import NOWHERE, PROTOCOLS, Exchange, set_current


class Observed:
    """Pure ASGI, so that a body that is sent as it comes is timed to its end."""

    def __init__(self, app: ASGIApp, counts: Counts | None) -> None:
        self._app = app
        self._counts = counts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        protocol = PROTOCOLS.get(scope["http_version"], NOWHERE)
        exchange = Exchange(self._counts, protocol, scope["method"], NOWHERE, scope["headers"])
        set_current(exchange)
        # For as long as the task lives, which is the request's own: also for what is logged when
        # all of this has failed.
        structlog.contextvars.bind_contextvars(request_id=exchange.request_id)
        try:
            await self._app(scope, receive, _watched(exchange, scope, send))
        finally:
            exchange.route = route_of(scope)
            exchange.ended()


def _watched(exchange: Exchange, scope: Scope, send: Send) -> Send:
    async def watched(message: Message) -> None:
        kind = message["type"]
        if kind == "http.response.start":
            exchange.answered(message["status"])
            message["headers"] = [*message.get("headers", ()), *exchange.headers]
        elif kind == "http.response.body" and message.get("body"):
            exchange.route = route_of(scope)
            exchange.wrote(exchange.writes + 1)
        await send(message)

    return watched


def route_of(scope: Scope) -> str:
    """The path of the route that answered, as the application spells it."""
    endpoint: Callable[..., object] | None = scope.get("endpoint")
    app: Starlette | None = scope.get("app")
    if endpoint is None or app is None:
        return NOWHERE
    paths: dict[object, str] | None = getattr(app.state, "paths", None)
    if paths is None:
        named = [route for route in app.routes if isinstance(route, Route)]
        paths = app.state.paths = {r.endpoint: r.path.replace(":path}", "}") for r in named}
    return paths.get(endpoint, NOWHERE)
