"""Which pages of other origins may use a route, as the Fetch standard asks (CORS).

Nothing here goes with cookies: a page's rights are in its `Tailrace-Token`, which the browser
does not send by itself, so "any origin" gives away no more than the network does.
"""

from __future__ import annotations

from collections.abc import Sequence

ANY_ORIGIN = "*"
PREFLIGHT_AGE_S = 600

ALLOWED_METHODS = "GET, HEAD, PUT, POST, DELETE, OPTIONS"
ALLOWED_HEADERS = ", ".join(
    (
        *("Authorization", "Content-Type", "If-None-Match", "Last-Event-ID", "Tailrace-Token"),
        *("Stream-Seq", "Stream-TTL", "Stream-Expires-At", "Stream-Closed"),
        *("Stream-Forked-From", "Stream-Fork-Offset", "Stream-Fork-Sub-Offset"),
        *("Producer-Id", "Producer-Epoch", "Producer-Seq"),
    )
)
EXPOSED_HEADERS = ", ".join(
    (
        *("Stream-Next-Offset", "Stream-Cursor", "Stream-Up-To-Date", "Stream-Closed"),
        *("Stream-TTL", "Stream-Expires-At", "Stream-SSE-Data-Encoding"),
        *("Producer-Epoch", "Producer-Seq", "Producer-Expected-Seq", "Producer-Received-Seq"),
        *("ETag", "Location", "Retry-After", "Content-Encoding", "Vary"),
    )
)


def access_headers(origin: str | None, allowed: Sequence[str]) -> dict[str, str]:
    """The headers of every answer: who may read it; `origin` is the request's Origin."""
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


def preflight_headers(origin: str | None, allowed: Sequence[str]) -> dict[str, str]:
    """The headers of the answer to OPTIONS; an origin that is not allowed learns nothing."""
    headers = access_headers(origin, allowed)
    if "Access-Control-Allow-Origin" in headers:
        headers["Access-Control-Allow-Methods"] = ALLOWED_METHODS
        headers["Access-Control-Allow-Headers"] = ALLOWED_HEADERS
        headers["Access-Control-Max-Age"] = str(PREFLIGHT_AGE_S)
    return headers
