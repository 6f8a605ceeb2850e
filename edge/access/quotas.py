"""Response headers that tell a tenant its limits and how much of them is left.

`RateLimit-Policy` and `RateLimit` follow draft-ietf-httpapi-ratelimit-headers-11. Responses of the
OpenAI routes also have OpenAI's `x-ratelimit-*` headers, which its clients read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

from tailrace.edge.access.keys import ApiKey, Limits
from tailrace.edge.errors import DAY_QUOTA, MONTH_QUOTA, TOKENS_QUOTA, go_duration

REQUEST_BURST_S = 2.0
"""Burst size of a tenant's requests, in seconds of its request rate; at least one request."""
TOKEN_WINDOW_S = 60
"""Burst size of a tenant's tokens, in seconds of its token rate. The origin uses the same value."""

DAY_S = 86_400
MAX_INTEGER = 999_999_999_999_999
"""Maximum of an integer in a structured field (RFC 9651, 3.3.1)."""


@dataclass(frozen=True, slots=True)
class Quota:
    """One limit of a tenant. `unit` is None for requests, which are the default unit of the draft.

    `remaining` is None if only the origin knows it. `reset_s`, the seconds until the quota is
    restored, is None if it is not restored by time.
    """

    name: str
    size: int
    window_s: int | None = None
    unit: str | None = None
    remaining: int | None = None
    reset_s: float | None = None

    @property
    def policy(self) -> str:
        """The item for this quota in the header `RateLimit-Policy`."""
        unit = "" if self.unit is None else f';qu="{self.unit}"'
        window = "" if self.window_s is None else f";w={self.window_s}"
        return f'"{self.name}";q={self.size}{unit}{window}'

    @property
    def state(self) -> str:
        """The item for this quota in the header `RateLimit`."""
        reset = "" if self.reset_s is None else f";t={ceil(self.reset_s)}"
        return f'"{self.name}";r={self.remaining}{reset}'


def burst(requests_per_s: float) -> float:
    """Return the number of requests that a tenant may send at once after a quiet time."""
    return max(1.0, requests_per_s * REQUEST_BURST_S)


def request_quota(requests_per_s: float, level: float, reset_s: float) -> Quota:
    """Return the quota of a tenant's rate of requests; `level` requests may be sent at once now."""
    most = burst(requests_per_s)
    window_s = ceil(min(most / requests_per_s, MAX_INTEGER))
    remaining = int(min(max(0.0, level), MAX_INTEGER))
    size = int(min(most, MAX_INTEGER))
    reset_s = min(reset_s, MAX_INTEGER)
    return Quota("requests", size, window_s, remaining=remaining, reset_s=reset_s)


def concurrency_quota(size: int, under_way: int, reset_s: float | None = None) -> Quota:
    """Return the quota of requests that may be under way at the same time."""
    remaining = max(0, size - under_way)
    unit = "concurrent-requests"
    return Quota("concurrent", size, unit=unit, remaining=remaining, reset_s=reset_s)


def quotas_of_origins(limits: Limits, key: ApiKey) -> list[Quota]:
    """Return the quotas that origins enforce; the edge does not know how much of them is left.

    A month has no fixed length, so the quota of a monthly budget has no window.
    """
    quotas = []
    if key.tokens_per_day is not None:
        quotas.append(Quota(DAY_QUOTA, key.tokens_per_day, DAY_S, TOKENS_QUOTA))
    if key.tokens_per_month is not None:
        quotas.append(Quota(MONTH_QUOTA, key.tokens_per_month, unit=TOKENS_QUOTA))
    if limits.max_unfinished is not None:
        quotas.append(Quota("unfinished", limits.max_unfinished, unit="streams"))
    if limits.tokens_per_s is not None:
        size = min(limits.tokens_per_s * TOKEN_WINDOW_S, MAX_INTEGER)
        quotas.append(Quota(TOKENS_QUOTA, size, TOKEN_WINDOW_S, TOKENS_QUOTA))
    return quotas


def quota_headers(quotas: Sequence[Quota], *, openai: bool) -> dict[str, str]:
    """Return the headers for these quotas; `openai` adds OpenAI's own."""
    headers: dict[str, str] = {}
    if policies := ", ".join(each.policy for each in quotas):
        headers["RateLimit-Policy"] = policies
    if states := ", ".join(each.state for each in quotas if each.remaining is not None):
        headers["RateLimit"] = states
    if not openai:
        return headers
    for each in quotas:
        if each.name in ("requests", TOKENS_QUOTA):
            headers[f"X-RateLimit-Limit-{each.name.title()}"] = str(each.size)
            if each.remaining is not None:
                headers[f"X-RateLimit-Remaining-{each.name.title()}"] = str(each.remaining)
            if each.reset_s is not None:
                headers[f"X-RateLimit-Reset-{each.name.title()}"] = go_duration(each.reset_s)
    return headers
