"""For whom a request is asked: by its API key, or by nobody's where a resume token speaks.

The gate says who it is and how much that tenant may ask at once; what its rights allow, the
origin decides, which also knows whose stream a request is about. Nothing that is a key goes on
to the application or the origin.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime
from math import ceil
from random import Random
from typing import NamedTuple

from edge.access.head import Head
from edge.access.keys import PREFIX, KeyRing, Limits
from ledger.backoff import spread_ms
from ledger.bucket import Bucket
from ledger.errors import CallerError, Unauthorized
from ledger.frame import STREAM_PATH, Caller

BURST_S = 2.0
"""After a quiet time a tenant may ask so much at once as it may in so long; once at least."""
CONCURRENT_RETRY_MS = 500
"""At least; not all are told the same."""
FIRST_PAGE = "/"
WEB_PATH = "/web/"
"""Below it are the files that browsers get: the first page's, and the client that pages import."""
OPEN_PATHS = frozenset(("/healthz", "/health", "/readyz", "/version", FIRST_PAGE))
"""What who asks needs no key for; nor for what is below `WEB_PATH`."""
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


class Grant(NamedTuple):
    """Who asks: None where the edge has no keys. `head` is without the key."""

    caller: Caller | None
    head: Head


@dataclass(slots=True)
class Gate:
    """Asked once for each request; `done` is to be called when a granted one has ended.

    Without a `ring` everybody is let in, as nobody in particular. `clock` gives seconds, `now`
    the time of day.
    """

    ring: KeyRing | None
    clock: Callable[[], float]
    now: Callable[[], datetime]
    random: Random = field(default_factory=Random)
    _buckets: dict[str, Bucket] = field(default_factory=dict)
    _under_way: Counter[str] = field(default_factory=Counter)

    def admit(self, head: Head, *, has_token: bool = False) -> Grant:
        """Who asks; `has_token` says that the request has a resume token besides its headers.

        Raises Unauthorized, or CallerError (429) where a tenant asks too much.
        """
        if self.ring is None:
            return Grant(None, head)
        text, head = _take_key(head)
        if head.path in OPEN_PATHS or head.path.startswith(WEB_PATH) or head.method == "OPTIONS":
            return Grant(NOBODY, head)
        if text is None:
            self._require_token(head, has_token)
            return Grant(NOBODY, head)
        key = self.ring.find(text, self.now())
        limits = self.ring.limits(key.tenant)
        self._count(key.tenant, limits)
        self._under_way[key.tenant] += 1
        return Grant(
            Caller(key.tenant, key.rights, limits.max_unfinished, limits.tokens_per_s), head
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

    def _count(self, tenant: str, limits: Limits) -> None:
        most = limits.max_concurrent
        if most is not None and self._under_way[tenant] >= most:
            raise _too_many(
                f"{most} requests of this tenant are under way",
                f"at most {most} at once",
                spread_ms(CONCURRENT_RETRY_MS, self.random),
            )
        rate, now = limits.requests_per_s, self.clock()
        if rate is None:
            self._buckets.pop(tenant, None)
            return
        burst = max(1.0, rate * BURST_S)
        bucket = self._buckets.setdefault(tenant, Bucket(rate, burst, now))
        bucket.set_rate(rate, burst, now)
        wait_s = bucket.take(1, now)
        if wait_s > 0:
            raise _too_many(
                "this tenant asks too often",
                f"{rate:g} requests a second on average",
                spread_ms(ceil(wait_s * 1000), self.random),
            )


def _too_many(message: str, hint: str, after_ms: int) -> CallerError:
    return CallerError(
        message,
        code="too_many_requests",
        status=429,
        retryable=True,
        hint=hint,
        retry_after_ms=after_ms,
    )


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
