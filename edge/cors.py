"""Which pages of other origins may use which routes, as the Fetch standard asks (CORS).

Nothing here goes with cookies: a page's rights are in its `Tailrace-Token`, which the browser
does not send by itself, so "any origin" gives away no more than the network does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from edge.config import ANY_ORIGIN

PREFLIGHT_AGE_S = 600

ALLOWED_METHODS = "GET, HEAD, PUT, POST, DELETE, OPTIONS"
ALLOWED_HEADERS = ", ".join(
    (
        *("Authorization", "Content-Type", "If-None-Match", "Last-Event-ID"),
        *("Idempotency-Key", "Tailrace-Token"),
        *("Stream-Seq", "Stream-TTL", "Stream-Expires-At", "Stream-Closed"),
        *("Stream-Forked-From", "Stream-Fork-Offset", "Stream-Fork-Sub-Offset"),
        *("Producer-Id", "Producer-Epoch", "Producer-Seq"),
    )
)
EXPOSED_HEADERS = ", ".join(
    (
        *("Tailrace-Stream", "Tailrace-Token", "Tailrace-Siblings"),
        *("Stream-Next-Offset", "Stream-Cursor", "Stream-Up-To-Date", "Stream-Closed"),
        *("Stream-TTL", "Stream-Expires-At", "Stream-SSE-Data-Encoding"),
        *("Producer-Epoch", "Producer-Seq", "Producer-Expected-Seq", "Producer-Received-Seq"),
        *("ETag", "Location", "Retry-After", "Content-Encoding", "Vary"),
    )
)


class Cors:
    """Answers preflights, and adds to all other answers who may read them: errors as well.

    Starlette's own would have every answer vary by Origin, even where any origin may read it:
    a cache could not share what all readers of a stream get. And it is the same for all routes.
    """

    def __init__(self, app: ASGIApp, allowed: Mapping[str, Sequence[str]]) -> None:
        """`allowed` has, by the beginning of a path, the origins that may use it."""
        self._app = app
        self._allowed = allowed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"] if scope["type"] == "http" else ""
        route = next((each for each in self._allowed if path.startswith(each)), None)
        if route is None:
            await self._app(scope, receive, send)
            return
        access = _access(Headers(scope=scope).get("Origin"), self._allowed[route])
        if scope["method"] == "OPTIONS":
            await Response(None, 204, _preflight(access))(scope, receive, send)
            return

        async def send_with_access(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in access.items():
                    if name == "Vary":
                        headers.add_vary_header(value)
                    else:
                        headers[name] = value
            await send(message)

        await self._app(scope, receive, send_with_access)


def _access(origin: str | None, allowed: Sequence[str]) -> dict[str, str]:
    """Who may read the answer; `origin` is the request's Origin."""
    if not allowed:
        return {}
    # The resource is for any page that may ask at all, so a page that is isolated from
    # others (COEP) may embed it too.
    headers = {"Cross-Origin-Resource-Policy": "cross-origin"}
    if ANY_ORIGIN in allowed:
        headers["Access-Control-Allow-Origin"] = ANY_ORIGIN
    else:
        headers["Vary"] = "Origin"  # a cache must not show one origin the answer for another
        if origin is None or origin not in allowed:
            return headers
        headers["Access-Control-Allow-Origin"] = origin
    headers["Access-Control-Expose-Headers"] = EXPOSED_HEADERS
    return headers


def _preflight(access: Mapping[str, str]) -> dict[str, str]:
    """The headers of the answer to OPTIONS; an origin that is not allowed learns nothing."""
    headers = {**access, "X-Content-Type-Options": "nosniff"}
    if "Access-Control-Allow-Origin" in access:
        headers["Access-Control-Allow-Methods"] = ALLOWED_METHODS
        headers["Access-Control-Allow-Headers"] = ALLOWED_HEADERS
        headers["Access-Control-Max-Age"] = str(PREFLIGHT_AGE_S)
    return headers
