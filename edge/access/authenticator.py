"""The check of API keys, and of the limits of the tenants that they name.

The API key of a request names its tenant; a resume token names none. The authenticator checks the
key and the tenant's limits. The origin decides what the key's rights allow, because only the origin
knows whose stream a request is about. Keys are removed before the application sees a request.
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
from tailrace.edge.access.keys import PREFIX, UNBOUNDED, KeyRing, Limits
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
from tailrace.ledger.frame import STREAM_PATH, Caller

CONCURRENT_RETRY_MS = 500
"""Minimum wait before another try, while as many requests as allowed are under way."""
FIRST_PAGE = "/"
WEB_PATH = "/web/"
"""Below it are the files that browsers get: the first page's, and the client that pages import."""
READY_PATH = "/readyz"
"""An open path that tells more to callers with a key."""
DESCRIPTIONS = ("/openapi.json", "/llms.txt")
"""Descriptions of the API for machines; they say nothing of this edge."""
OPEN_PATHS = frozenset(("/healthz", "/health", READY_PATH, "/version", FIRST_PAGE, *DESCRIPTIONS))
"""Paths that need no key; nor does what is below `WEB_PATH`."""
KEY_HEADER = b"tailrace-key"
TOKEN_HEADER = b"tailrace-token"
PROTOCOLS = b"sec-websocket-protocol"
KEY_PROTOCOL = "tailrace-key."
"""A subprotocol with the key behind it: a page can say no more when it opens a WebSocket."""
SESSION_PATH = "/v1/ws"

NOBODY = Caller("", 0)
"""Who has no key: only a resume token can speak for it."""

_STREAMS = "/v1/(?:generate|chat/completions|completions|responses)"
_OF_A_STREAM = re.compile(rf"{_STREAMS}/[^/]+(/\w+)?|{STREAM_PATH}[0-9a-f]{{32}}")


NO_HEADERS: Mapping[str, str] = {}


class Grant(NamedTuple):
    """Return the caller, or None if the edge has no keys. `head` is without the key.

    `headers` tell the tenant what is left of its limits; they go with the answer.
    """

    caller: Caller | None
    head: Head
    headers: Mapping[str, str] = NO_HEADERS


class OverLimit(TooManyRequests):
    """A tenant asks more than it may. `headers` tell it its limits."""

    def __init__(
        self, message: str, *, hint: str, retry_after_ms: int, headers: Mapping[str, str]
    ) -> None:
        super().__init__(message, hint=hint, retry_after_ms=retry_after_ms)
        self.headers = headers


@dataclass(slots=True)
class Authenticator:
    """Asked once for each request; `done` is to be called when a granted one has ended.

    Without a `ring` everybody is let in, as nobody in particular. `clock` gives seconds, `now`
    the time of day.
    """

    ring: KeyRing | None
    clock: Callable[[], float]
    now: Callable[[], datetime]
    _buckets: dict[str, TokenBucket] = field(default_factory=dict)
    _under_way: Counter[str] = field(default_factory=Counter)

    def admit(self, head: Head, *, has_token: bool = False) -> Grant:
        """Return who asks; `has_token` says that the request has a resume token in its query.

        Raises Unauthorized, or OverLimit where a tenant asks too much.
        """
        if self.ring is None:
            return Grant(None, head)
        text, head = _take_key(head)
        if _is_open(head) and (text is None or head.path != READY_PATH):
            return Grant(NOBODY, head)
        if text is None:
            self._require_token(head, has_token)
            return Grant(NOBODY, head)
        key = self.ring.find(text, self.now())
        limits = self.ring.limits(key.tenant)
        quotas = self._count(key.tenant, limits, openai=is_openai_path(head.path))
        self._under_way[key.tenant] += 1
        return Grant(
            Caller(key.tenant, key.granted, limits.max_unfinished, limits.tokens_per_s),
            head,
            quotas,
        )

    def done(self, caller: Caller | None) -> None:
        """A request that was granted has been answered, or has gone."""
        if caller is not None and caller.tenant:
            self._under_way[caller.tenant] -= 1
            if not self._under_way[caller.tenant]:
                del self._under_way[caller.tenant]

    def _require_token(self, head: Head, has_token: bool) -> None:
        """Where a resume token can speak for a request, the origin hears what it says."""
        has_token = has_token or head.value(TOKEN_HEADER) is not None
        if head.path == SESSION_PATH or (has_token and _OF_A_STREAM.fullmatch(head.path)):
            return
        raise Unauthorized(
            "an API key is needed",
            code="no_key",
            field="Authorization",
            hint="send Authorization: Bearer KEY",
        )

    def _count(self, tenant: str, limits: Limits, *, openai: bool) -> Mapping[str, str]:
        """Count one more request of a tenant, and return the headers about its limits.

        Raises OverLimit if the tenant may not send one now. `openai` adds the headers of that API.
        """
        rate, most = limits.requests_per_s, limits.max_concurrent
        if rate is None:
            self._buckets.pop(tenant, None)
        if limits is UNBOUNDED:
            return NO_HEADERS
        under_way, now, quotas = self._under_way[tenant], self.clock(), list[Quota]()
        refusal: tuple[str, str, int] | None = None
        if most is not None and under_way >= most:
            message = f"{most} requests of this tenant are under way"
            after_ms = spread_ms(CONCURRENT_RETRY_MS)
            refusal = message, f"at most {most} at once", after_ms
            quotas.append(concurrency_quota(most, under_way, after_ms / 1000))
        if rate is not None:
            size = burst(rate)
            bucket = self._buckets.setdefault(tenant, TokenBucket(rate, size, now))
            bucket.set_rate(rate, size, now)
            wait_s = bucket.take(1, now) if refusal is None else 0.0
            reset_s = bucket.full_in_s(now)
            if wait_s > 0:
                after_ms = spread_ms(ceil(wait_s * 1000))
                hint = f"{rate:g} requests a second on average"
                refusal = "this tenant asks too often", hint, after_ms
                reset_s = after_ms / 1000
            quotas.append(request_quota(rate, bucket.level(now), reset_s))
        if most is not None and under_way < most:
            quotas.append(concurrency_quota(most, under_way + (refusal is None)))
        headers = quota_headers([*quotas, *quotas_of_origins(limits)], openai=openai)
        if refusal is not None:
            message, hint, after_ms = refusal
            raise OverLimit(message, hint=hint, retry_after_ms=after_ms, headers=headers)
        return headers


def _is_open(head: Head) -> bool:
    """Return True if the request needs no key."""
    path = head.path
    return path in OPEN_PATHS or path.startswith(WEB_PATH) or head.method == "OPTIONS"


def _take_key(head: Head) -> tuple[str | None, Head]:
    """The API key, if there is one, and the request without it."""
    text, kept = None, []
    for name, value in head.headers:
        said = value.decode("latin-1")
        scheme, _, credentials = said.partition(" ")
        if name == KEY_HEADER:
            text = said.strip()
        elif (
            name == b"authorization"
            and scheme.lower() == "bearer"
            # Others are for the origin: whoever was woken by a subscription sends one.
            and credentials.strip().startswith(PREFIX)
        ):
            text = credentials.strip()
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
