"""The web pages that may use the edge: the check of the `Origin` header, and the CORS headers.

A browser names the page's origin in the header `Origin`. The same-origin policy only hides a
response from a page: the request is still carried out, and WebSockets are not hidden at all. So the
request of a page that is not allowed is refused before any work is done for it. Programs send no
`Origin`, and these rules do not apply to them. The edge uses no cookies: a page can only use
credentials that it sends itself, so allowing any origin exposes no more than the network does.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from tailrace.edge.access.head import Head
from tailrace.ledger.errors import Forbidden

ANY_ORIGIN = "*"
"""Value in the setting `edge.allowed_origins` that allows the pages of every origin."""
DEFAULT_PORTS = (":80", ":443")
PROXY_HINT = (
    "behind a proxy, let the proxy pass the Host header on, or send X-Forwarded-Host and be named"
    " in edge.trusted_proxies"
)
"""Hint about the edge's own pages, which look foreign if a proxy replaces the Host header."""


class OriginRule:
    """The origins whose pages may use the edge, as browsers spell them, or `*`.

    Pages that the edge itself serves are always allowed.
    """

    def __init__(self, allowed: Collection[str]) -> None:
        self._allowed = frozenset(allowed)
        self.any = ANY_ORIGIN in self._allowed
        """True if every page is allowed, so that all of them get the same response."""
        self.none = not self._allowed
        """True if no page of another origin is allowed."""

    def names(self, origin: str) -> bool:
        """Return True if the setting allows this origin."""
        return self.any or origin in self._allowed

    def check(self, head: Head) -> None:
        """Raise Forbidden if the request is from a page that is not allowed."""
        origin = head.value(b"origin")
        if origin is None or self.names(origin) or _is_own(origin, head.host):
            return
        raise Forbidden(
            "pages of this origin may not use this edge",
            code="foreign_origin",
            field="Origin",
            hint=f"the edge's operator can name it in edge.allowed_origins; {PROXY_HINT}",
        )


def _is_own(origin: str, host: str) -> bool:
    """Return True if a page's origin has the same name and port as the `Host` header.

    Schemes are not compared: behind a proxy that terminates TLS, the edge does not know the
    scheme that the browser used.
    """
    _, separator, authority = origin.partition("://")
    return bool(separator and authority) and _bare(authority) == _bare(host)


def _bare(authority: str) -> str:
    """Return an authority in lower case, without a default port."""
    lower = authority.lower()
    for port in DEFAULT_PORTS:
        lower = lower.removesuffix(port)
    return lower


PREFLIGHT_AGE_S = 600

ALLOWED_METHODS = "GET, HEAD, PUT, POST, DELETE, OPTIONS"
ALLOWED_HEADERS = ", ".join(
    (
        *("Authorization", "Content-Type", "If-None-Match", "Last-Event-ID"),
        *("Idempotency-Key", "Tailrace-Token", "Traceparent", "X-Request-Id"),
        *("Stream-Seq", "Stream-TTL", "Stream-Expires-At", "Stream-Closed"),
        *("Stream-Forked-From", "Stream-Fork-Offset", "Stream-Fork-Sub-Offset"),
        *("Producer-Id", "Producer-Epoch", "Producer-Seq"),
        # SDKs of other APIs send many headers of their own. Allowing all headers is safe, because
        # only pages of allowed origins get this list. `*` does not include Authorization, which is
        # listed above.
        "*",
    )
)
EXPOSED_HEADERS = ", ".join(
    (
        *("Tailrace-Stream", "Tailrace-Token", "Tailrace-Siblings", "Tailrace-Ignored"),
        "Tailrace-Schema",
        *("Stream-Next-Offset", "Stream-Cursor", "Stream-Up-To-Date", "Stream-Closed"),
        *("Stream-TTL", "Stream-Expires-At", "Stream-SSE-Data-Encoding"),
        *("Producer-Epoch", "Producer-Seq", "Producer-Expected-Seq", "Producer-Received-Seq"),
        *("ETag", "Location", "Retry-After", "Content-Encoding", "Vary"),
        *("X-Request-Id", "Request-Id", "Retry-After-Ms", "X-Should-Retry"),
        *("RateLimit", "RateLimit-Policy"),
        *("X-RateLimit-Limit-Requests", "X-RateLimit-Remaining-Requests"),
        *("X-RateLimit-Reset-Requests", "X-RateLimit-Limit-Tokens"),
        *("X-RateLimit-Remaining-Tokens", "X-RateLimit-Reset-Tokens"),
    )
)


def access_headers(rule: OriginRule, origin: str | None) -> dict[str, str]:
    """Return the CORS headers of any response, errors included; `origin` is the request's Origin.

    Starlette's CORSMiddleware is not used: it sends `Vary: Origin` even if every origin may read
    the response, so a cache could not share a stream between its readers.
    """
    if rule.none:
        return {"Cross-Origin-Resource-Policy": "same-origin"}
    # Other origins may read the response, so pages with a Cross-Origin-Embedder-Policy may, too.
    headers = {"Cross-Origin-Resource-Policy": "cross-origin"}
    if rule.any:
        headers["Access-Control-Allow-Origin"] = ANY_ORIGIN
    else:
        headers["Vary"] = "Origin"  # a cache must not give one origin the response for another
        if origin is None or not rule.names(origin):
            return headers
        headers["Access-Control-Allow-Origin"] = origin
    headers["Access-Control-Expose-Headers"] = EXPOSED_HEADERS
    return headers


def preflight_headers(access: Mapping[str, str]) -> dict[str, str]:
    """Return the headers of the response to a preflight; a refused origin gets no permissions."""
    headers = {**access, "X-Content-Type-Options": "nosniff"}
    if "Access-Control-Allow-Origin" in access:
        headers["Access-Control-Allow-Methods"] = ALLOWED_METHODS
        headers["Access-Control-Allow-Headers"] = ALLOWED_HEADERS
        headers["Access-Control-Max-Age"] = str(PREFLIGHT_AGE_S)
    return headers
