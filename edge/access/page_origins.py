"""The web pages that may use the edge: the check of `Origin`, and the CORS headers.

A browser names the origin of the page in `Origin`. The same-origin policy only hides a response
from a page; the request is carried out all the same, and WebSockets are not hidden at all. So the
request of a page that is not allowed is refused before anything is done for it. Programs send no
`Origin`, and these rules do not apply to them. The edge uses no cookies: a page can only use
credentials that it sends itself, so allowing any origin exposes no more than the network does.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from tailrace.edge.access.head import Head
from tailrace.ledger.errors import Forbidden

ANY_ORIGIN = "*"
"""Pages of every origin."""
DEFAULT_PORTS = (":80", ":443")


class OriginRule:
    """`allowed` are origins as browsers spell them, or `*`; an edge's own pages always may."""

    def __init__(self, allowed: Collection[str]) -> None:
        self._allowed = frozenset(allowed)
        self.any = ANY_ORIGIN in self._allowed
        """Whether every page may ask, so that the answer to all of them is the same."""
        self.none = not self._allowed
        """Whether no page of another origin may."""

    def names(self, origin: str) -> bool:
        """Whether the setting allows this origin."""
        return self.any or origin in self._allowed

    def check(self, head: Head) -> None:
        """Raises Forbidden where a page asks that may not."""
        origin = head.value(b"origin")
        if origin is None or self.names(origin) or _is_own(origin, head.host):
            return
        raise Forbidden(
            "pages of this origin may not use this edge",
            code="foreign_origin",
            field="Origin",
            hint="the edge's operator can name it in edge.allowed_origins",
        )


def _is_own(origin: str, host: str) -> bool:
    """Whether a page is of the name and port that it asks.

    Schemes are not compared: behind a proxy that ends TLS the edge would not know its own.
    """
    _, separator, authority = origin.partition("://")
    return bool(separator and authority) and _bare(authority) == _bare(host)


def _bare(authority: str) -> str:
    """Without a port that goes without saying."""
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
        # Clients of other APIs say much about themselves. It takes away nothing: it is for pages
        # that may ask, and says nothing of Authorization, which is why that stands above.
        "*",
    )
)
EXPOSED_HEADERS = ", ".join(
    (
        *("Tailrace-Stream", "Tailrace-Token", "Tailrace-Siblings", "Tailrace-Ignored"),
        *("Stream-Next-Offset", "Stream-Cursor", "Stream-Up-To-Date", "Stream-Closed"),
        *("Stream-TTL", "Stream-Expires-At", "Stream-SSE-Data-Encoding"),
        *("Producer-Epoch", "Producer-Seq", "Producer-Expected-Seq", "Producer-Received-Seq"),
        *("ETag", "Location", "Retry-After", "Content-Encoding", "Vary"),
        *("X-Request-Id", "Retry-After-Ms", "X-Should-Retry", "RateLimit", "RateLimit-Policy"),
        *("X-RateLimit-Limit-Requests", "X-RateLimit-Remaining-Requests"),
        *("X-RateLimit-Reset-Requests", "X-RateLimit-Limit-Tokens"),
        *("X-RateLimit-Remaining-Tokens", "X-RateLimit-Reset-Tokens"),
    )
)


def access_headers(rule: OriginRule, origin: str | None) -> dict[str, str]:
    """Of every answer, an error's too: who may read it; `origin` is the request's Origin.

    Starlette's own would have all answers vary by Origin, even where any origin may read them:
    a cache could not share what all readers of a stream get.
    """
    if rule.none:
        return {"Cross-Origin-Resource-Policy": "same-origin"}
    # The answer is for any page that may ask at all, so a page that is isolated from
    # others (COEP) may embed it too.
    headers = {"Cross-Origin-Resource-Policy": "cross-origin"}
    if rule.any:
        headers["Access-Control-Allow-Origin"] = ANY_ORIGIN
    else:
        headers["Vary"] = "Origin"  # a cache must not show one origin the answer for another
        if origin is None or not rule.names(origin):
            return headers
        headers["Access-Control-Allow-Origin"] = origin
    headers["Access-Control-Expose-Headers"] = EXPOSED_HEADERS
    return headers


def preflight_headers(access: Mapping[str, str]) -> dict[str, str]:
    """Of the answer to OPTIONS; without an origin that is allowed they promise nothing."""
    headers = {**access, "X-Content-Type-Options": "nosniff"}
    if "Access-Control-Allow-Origin" in access:
        headers["Access-Control-Allow-Methods"] = ALLOWED_METHODS
        headers["Access-Control-Allow-Headers"] = ALLOWED_HEADERS
        headers["Access-Control-Max-Age"] = str(PREFLIGHT_AGE_S)
    return headers
