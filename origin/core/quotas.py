"""Limits of each tenant at this origin: unfinished streams, and tokens per second."""

from __future__ import annotations

from math import ceil

from tailrace.ledger.errors import TooManyRequests
from tailrace.ledger.flow.token_bucket import TokenBucket
from tailrace.ledger.frame import Caller

BURST_S = 60.0
"""Burst size of a tenant, in seconds of its rate."""


def tenant_of(caller: Caller | None) -> str:
    """Return the tenant of a caller; empty if the edge has no API keys."""
    return "" if caller is None else caller.tenant


class Quotas:
    """A token bucket for each tenant with a limit of tokens per second.

    Tokens are charged when they are generated, so a bucket can go below zero; a request is
    admitted only if the bucket holds a token. Every origin counts only the tokens that it
    generates. Times are seconds of the core's clock.
    """

    def __init__(self) -> None:
        self._buckets: dict[str, TokenBucket] = {}

    def admit(self, caller: Caller | None, streams: int, unfinished: int, now: float) -> None:
        """Admit `streams` more streams of the caller's tenant, which has `unfinished` ones.

        Raises:
            TooManyRequests: The tenant has reached its limit of streams or of tokens.
        """
        if caller is None:
            return
        most_streams = caller.max_unfinished
        if most_streams is not None and unfinished + streams > most_streams:
            raise TooManyRequests(
                f"{unfinished} streams of this tenant have not ended",
                code="too_many_streams",
                hint=f"the limit is {most_streams}: let some end, or cancel them",
            )
        rate = caller.tokens_per_s
        if rate is None:
            self._buckets.pop(caller.tenant, None)
            return
        most = rate * BURST_S
        bucket = self._buckets.setdefault(caller.tenant, TokenBucket(rate, most, now))
        bucket.set_rate(rate, most, now)
        wait_s = bucket.take(min(1.0, most), now)
        if wait_s > 0:
            raise TooManyRequests(
                "this tenant has used up its tokens for now",
                code="too_many_tokens",
                hint=f"the tenant may use {rate} tokens per second on average",
                min_retry_ms=ceil(wait_s * 1000),
            )

    def charge(self, tenant: str, tokens: int, now: float) -> None:
        """Charge a tenant for tokens of its prompts or output."""
        if (bucket := self._buckets.get(tenant)) is not None:
            bucket.charge(tokens, now)
