"""Every rule about who may ask, in the order in which they apply; the same for all transports.

A browser says in `Origin` whose page asks. What the same-origin policy only hides from a page
has been carried out all the same, and a WebSocket it does not even hide: so a page that is not
allowed is refused before anything is done for it. Programs send no `Origin` and are not meant.
Nothing of what browsers are told (CORS) goes with cookies: a page's rights are in what it sends by
itself, so "any origin" gives away no more than the network does.

A page may also have its own name point to this machine (DNS rebinding), and is of the same
origin then. It cannot choose what the browser says in `Host`: an edge that listens on loopback
alone, where no key is asked for, answers to loopback's own names.

The API key of a request names its tenant; a resume token names none. The authenticator checks the
key and the tenant's limits. The origin decides what the key's rights allow, because only the origin
knows whose stream a request is about. Keys are removed before the application sees a request.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from math import ceil
from typing import NamedTuple

import structlog

from tailrace.edge.access.connections import parsed_address
from tailrace.edge.access.head import Head, Proxies
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
from tailrace.ledger.errors import (
    CallerError,
    Forbidden,
    TailraceError,
    TooManyRequests,
    Unauthorized,
)
from tailrace.ledger.flow.backoff import spread_ms
from tailrace.ledger.flow.token_bucket import TokenBucket
from tailrace.ledger.frame import STREAM_PATH, Caller

ANY_ORIGIN = "*"
"""Pages of every origin."""
LOCALHOST = "localhost"
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


class HostRule:
    """Answers to loopback's names, to addresses, and to `names`; to any where it is not `on`."""

    def __init__(self, names: Collection[str], *, on: bool) -> None:
        self._names = frozenset(name.lower() for name in names)
        self._on = on

    def check(self, head: Head) -> None:
        """Raises CallerError (421; RFC 9110, 15.5.20) for a request that was meant for another."""
        name = name_of(head.host)
        # Only a name can be pointed elsewhere. Without any it is no browser (HTTP/1.0).
        if not self._on or not name or name in self._names or _is_local(name):
            return
        shown = name if _SHOWN_HOST.fullmatch(name) else "edge.example"
        raise CallerError(
            "this edge does not answer for that host name",
            code="foreign_host",
            status=421,
            field="Host",
            hint=f'the edge\'s operator can set edge.hosts = ["{shown}"], and behind a proxy also'
            ' edge.trusted_proxies = ["ADDRESS OF THE PROXY"], such as "127.0.0.1"',
        )


_SHOWN_HOST = re.compile(r"[a-z0-9.-]{1,253}")


def name_of(host: str) -> str:
    """Return a Host without its port, the brackets of IPv6 and a final dot, in lower case."""
    name, separator, port = host.rpartition(":")
    if not separator or not port.isdecimal():
        name = host
    return name.removeprefix("[").removesuffix("]").removesuffix(".").lower()


def _is_local(name: str) -> bool:
    """Localhost (RFC 6761, 6.3), or an address."""
    return name == LOCALHOST or name.endswith(f".{LOCALHOST}") or parsed_address(name) is not None


def is_loopback(host: str) -> bool:
    """Whether what listens there can only be reached from this machine."""
    address = parsed_address(host)
    return host.lower() == LOCALHOST or (address is not None and address.is_loopback)


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


MAX_LOGGED_REFUSALS = 64
"""Maximum number of different page origins and hosts whose refusal is logged."""
MAX_LOGGED_CHARS = 300
"""Maximum length of such a name: a host name has at most 253 characters."""

log = structlog.get_logger("tailrace.edge")


class RefusalLog:
    """Logs once for each page origin and each host that a setting keeps out.

    The answer says the same, but a page cannot read it, and a proxy's log does not show it.
    """

    def __init__(self) -> None:
        self._logged: set[tuple[str, str]] = set()

    def note(self, error: TailraceError, head: Head) -> None:
        names = {"foreign_origin": head.value(b"origin"), "foreign_host": head.host}
        name = names.get(error.code)
        if not name or len(name) > MAX_LOGGED_CHARS or (error.code, name) in self._logged:
            return
        if len(self._logged) < MAX_LOGGED_REFUSALS:
            self._logged.add((error.code, name))
            if error.code == "foreign_origin":
                hint = f"to let its pages use this edge add {name!r} to edge.allowed_origins"
                log.warning("page origin refused", origin=name, hint=hint)
            else:
                log.warning("host refused", host=name, hint=error.hint)


class Admission(NamedTuple):
    """What becomes of a request: `refusal` is the answer, unless there is none.

    `head` is the request as the client sent it, without its API key; `headers` go with whatever
    is answered. The requests that it makes of an origin say `caller`. Where there is no refusal
    `Rules.done` is to be called when the answer has ended.
    """

    head: Head
    headers: Mapping[str, str]
    refusal: TailraceError | None
    caller: Caller | None = None


@dataclass(frozen=True, slots=True)
class Rules:
    """Of one edge. `admit` is asked once for a request, before anything else is done for it."""

    proxies: Proxies
    hosts: HostRule
    pages: OriginRule
    authenticator: Authenticator
    refusals: RefusalLog = field(default_factory=RefusalLog)

    def admit(self, head: Head, *, has_token: bool = False) -> Admission:
        """`has_token`: the request has a resume token besides its headers, in its query."""
        head = self.proxies.resolve(head)
        headers = access_headers(self.pages, head.value(b"origin"))
        try:
            self.hosts.check(head)
            self.pages.check(head)
            grant = self.authenticator.admit(head, has_token=has_token)
        except OverLimit as error:
            return Admission(head, {**headers, **error.headers}, error)
        except TailraceError as error:
            self.refusals.note(error, head)
            return Admission(head, headers, error)
        if grant.headers:
            headers = {**headers, **grant.headers}
        return Admission(grant.head, headers, None, grant.caller)

    def done(self, admission: Admission) -> None:
        if admission.refusal is None:
            self.authenticator.done(admission.caller)
