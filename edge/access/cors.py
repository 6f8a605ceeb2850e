"""What browsers are told of who may read an answer, as the Fetch standard asks (CORS).

Nothing here goes with cookies: a page's rights are in what it sends by itself, so "any origin"
gives away no more than the network does.
"""

from __future__ import annotations

from collections.abc import Mapping

from edge.access.pages import ANY_ORIGIN, OriginRule

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
        *("X-Request-Id", "Retry-After-Ms", "X-Should-Retry"),
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
