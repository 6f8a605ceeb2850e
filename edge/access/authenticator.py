"""Checks API keys and the limits of the tenants that the keys belong to.

A request's API key belongs to a tenant; a resume token does not. The authenticator checks the key
and the tenant's limits. The origin decides what the key's rights allow, because only the origin
knows who owns the stream. Keys are removed before the application sees a request.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from math import ceil
from typing import NamedTuple

from tailrace.edge.access.head import Head
from tailrace.edge.access.keys import PREFIX, UNBOUNDED, ApiKey, KeyRing, Limits
from tailrace.edge.access.quotas import (
    Quota,
    burst,
    concurrency_quota,
    quota_headers,
    quotas_of_origins,
    request_quota,
)
from tailrace.edge.errors import is_openai_path
from tailrace.ledger.errors import TooManyRequests, Unauthorized
from tailrace.ledger.flow.backoff import spread_ms
from tailrace.ledger.flow.token_bucket import TokenBucket
from tailrace.ledger.frame import STREAM_PATH, Caller, Priority

CONCURRENT_RETRY_MS = 500
"""Minimum `Retry-After`, in milliseconds, if the tenant has too many requests under way."""
FIRST_PAGE = "/"
WEB_PATH = "/web/"
"""Path prefix of static files: those of the first page, and the client library for web pages."""
READY_PATH = "/readyz"
"""Path of the readiness check, which needs no key but shows more to callers with one."""
DESCRIPTIONS = ("/openapi.json", "/llms.txt")
"""Machine-readable descriptions of the API, the same at every edge."""
OPEN_PATHS = frozenset(("/healthz", "/health", READY_PATH, "/version", FIRST_PAGE, *DESCRIPTIONS))
"""Paths that need no API key. Paths below `WEB_PATH` need none either."""
KEY_HEADER = b"tailrace-key"
API_KEY_HEADER = b"x-api-key"
"""The header in which clients of Anthropic's API send their key."""
TOKEN_HEADER = b"tailrace-token"
PROTOCOLS = b"sec-websocket-protocol"
KEY_PROTOCOL = "tailrace-key."
"""Prefix of the WebSocket subprotocol that carries an API key: a page that opens a WebSocket can
set no other header."""
SESSION_PATH = "/v1/ws"

ANONYMOUS = Caller("", 0)
"""The caller of a request without an API key. Only a resume token can authorize such a request."""

_STREAMS = "/v1/(?:generate|chat/completions|completions|responses|messages)"
_OF_A_STREAM = re.compile(rf"{_STREAMS}/[^/]+(/\w+)?|{STREAM_PATH}[0-9a-f]{{32}}")


NO_HEADERS: Mapping[str, str] = {}


class Grant(NamedTuple):
    """The result for an admitted request.

    `caller` is None if the edge has no keys. `head` is the request's head without its key.
    `headers` are response headers that show the tenant how much of its limits is left. `priority`
    is the priority class that the key is bound to, if any.
    """

    caller: Caller | None
    head: Head
    headers: Mapping[str, str] = NO_HEADERS
    priority: Priority | None = None


class OverLimit(TooManyRequests):
    """The tenant exceeds a limit; `headers` are response headers that show the limits."""

    def __init__(
        self, message: str, *, hint: str, retry_after_ms: int, headers: Mapping[str, str]
    ) -> None:
        super().__init__(message, hint=hint, retry_after_ms=retry_after_ms)
        self.headers = headers


@dataclass(slots=True)
class Authenticator:
    """Checks the API key and the limits of each request.

    The caller must call `done` when a granted request has ended. Without a `ring` every request is
    granted, with None for its caller. `clock` returns seconds, `now` the date and time.
    """

    ring: KeyRing | None
    clock: Callable[[], float]
    now: Callable[[], datetime]
    _buckets: dict[str, TokenBucket] = field(default_factory=dict)
    _under_way: Counter[str] = field(default_factory=Counter)

    def admit(self, head: Head, *, has_token: bool = False) -> Grant:
        """Admit a request; `has_token` means that its query has a resume token.

        Raises Unauthorized for a missing or invalid key, OverLimit for a tenant over its limits.
        """
        if self.ring is None:
            return Grant(None, head)
        text, head = _take_key(head)
        if _is_open(head) and (text is None or head.path != READY_PATH):
            return Grant(ANONYMOUS, head)
        if text is None:
            self._require_token(head, has_token)
            return Grant(ANONYMOUS, head)
        key = self.ring.find(text, self.now())
        limits = self.ring.limits(key.tenant)
        quotas = self._count(key, limits, openai=is_openai_path(head.path))
        self._under_way[key.tenant] += 1
        return Grant(
            Caller(
                key.tenant,
                key.granted,
                limits.max_unfinished,
                limits.tokens_per_s,
                key.id,
                key.tokens_per_day,
                key.tokens_per_month,
            ),
            head,
            quotas,
            key.priority,
        )

    def done(self, caller: Caller | None) -> None:
        """Stop counting a granted request, whose response has ended or whose client has left."""
        if caller is not None and caller.tenant:
            self._under_way[caller.tenant] -= 1
            if not self._under_way[caller.tenant]:
                del self._under_way[caller.tenant]

    def _require_token(self, head: Head, has_token: bool) -> None:
        """Raise Unauthorized for a request without API key, unless a resume token may authorize it.

        A request has its token in a header or in the query, and a WebSocket in its frames. The
        origin checks the token.
        """
        has_token = has_token or head.value(TOKEN_HEADER) is not None
        if head.path == SESSION_PATH or (has_token and _OF_A_STREAM.fullmatch(head.path)):
            return
        raise Unauthorized(
            "an API key is required",
            code="no_key",
            field="Authorization",
            hint="send Authorization: Bearer KEY, or X-Api-Key: KEY",
        )

    def _count(self, key: ApiKey, limits: Limits, *, openai: bool) -> Mapping[str, str]:
        """Count one more request of a key's tenant; return response headers that show its limits.

        Raises OverLimit if the tenant may send no request now. `openai` adds the headers of
        OpenAI's API.
        """
        tenant, origins = key.tenant, quotas_of_origins(limits, key)
        rate, most = limits.requests_per_s, limits.max_concurrent
        if rate is None:
            self._buckets.pop(tenant, None)
        if limits is UNBOUNDED:
            return quota_headers(origins, openai=openai) if origins else NO_HEADERS
        under_way, now, quotas = self._under_way[tenant], self.clock(), list[Quota]()
        refusal: tuple[str, str, int] | None = None
        if most is not None and under_way >= most:
            message = f"this tenant already has {most} requests under way"
            after_ms = spread_ms(CONCURRENT_RETRY_MS)
            refusal = message, f"at most {most} requests at the same time are allowed", after_ms
            quotas.append(concurrency_quota(most, under_way, after_ms / 1000))
        if rate is not None:
            size = burst(rate)
            bucket = self._buckets.setdefault(tenant, TokenBucket(rate, size, now))
            bucket.set_rate(rate, size, now)
            wait_s = bucket.take(1, now) if refusal is None else 0.0
            reset_s = bucket.full_in_s(now)
            if wait_s > 0:
                after_ms = spread_ms(ceil(wait_s * 1000))
                hint = f"at most {rate:g} requests a second on average are allowed"
                refusal = "this tenant sends requests too often", hint, after_ms
                reset_s = after_ms / 1000
            quotas.append(request_quota(rate, bucket.level(now), reset_s))
        if most is not None and under_way < most:
            quotas.append(concurrency_quota(most, under_way + (refusal is None)))
        headers = quota_headers([*quotas, *origins], openai=openai)
        if refusal is not None:
            message, hint, after_ms = refusal
            raise OverLimit(message, hint=hint, retry_after_ms=after_ms, headers=headers)
        return headers


def _is_open(head: Head) -> bool:
    """Return True if the request needs no key."""
    path = head.path
    return path in OPEN_PATHS or path.startswith(WEB_PATH) or head.method == "OPTIONS"


def _take_key(head: Head) -> tuple[str | None, Head]:
    """Return the API key, or None, and the request without it."""
    text, kept = None, []
    for name, value in head.headers:
        said = value.decode("latin-1")
        scheme, _, credentials = said.partition(" ")
        if name == KEY_HEADER:
            text = said.strip()
        elif (
            name == b"authorization"
            and scheme.lower() == "bearer"
            # Any other bearer token stays in the request, because it is for the origin. A webhook's
            # receiver sends one, for instance.
            and credentials.strip().startswith(PREFIX)
        ):
            text = credentials.strip()
        elif name == API_KEY_HEADER and said.strip().startswith(PREFIX):
            text = said.strip()
        elif name == PROTOCOLS:
            offered = [part.strip() for part in said.split(",")]
            others = [part for part in offered if not part.startswith(KEY_PROTOCOL)]
            keys = [part.removeprefix(KEY_PROTOCOL) for part in offered if part not in others]
            text = keys[0] if keys else text
            if others:
                kept.append((name, ", ".join(others).encode("latin-1")))
        else:
            kept.append((name, value))
    return text, head._replace(headers=tuple(kept))
