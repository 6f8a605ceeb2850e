"""How much each tenant may have made, as far as its API key says: streams, tokens a second.

What is made is counted as it is made; a request is let in while there is something left, so a
tenant that is in debt waits. Every origin counts what it makes itself.
"""

from __future__ import annotations

from collections.abc import Callable
from math import ceil
from random import Random

from ledger.backoff import spread_ms
from ledger.bucket import Bucket
from ledger.errors import CallerError
from ledger.wire.schema import Caller

UNFINISHED_RETRY_MS = 1_000
"""At least; not all are told the same."""
BURST_S = 60.0
"""After a quiet time a tenant may have as many tokens at once as it may in so long."""


class Allowances:
    """A bucket for each tenant that has been seen here; `clock` gives seconds."""

    def __init__(self, clock: Callable[[], float], random: Random | None = None) -> None:
        self._clock = clock
        self._random = random or Random()
        self._buckets: dict[str, Bucket] = {}

    def admit(self, caller: Caller | None, streams: int, unfinished: int) -> None:
        """Let in so many more streams of the caller's tenant, which has so many unfinished ones.

        Raises CallerError (429) where it has, or has had, as much as it may.
        """
        if caller is None:
            return
        most_streams = caller.max_unfinished
        if most_streams is not None and unfinished + streams > most_streams:
            raise CallerError(
                f"{unfinished} streams of this tenant have not ended",
                code="too_many_streams",
                status=429,
                retryable=True,
                hint=f"at most {most_streams}: let some end, or cancel them",
                retry_after_ms=spread_ms(UNFINISHED_RETRY_MS, self._random),
            )
        now, rate = self._clock(), caller.tokens_per_s
        if rate is None:
            self._buckets.pop(caller.tenant, None)
            return
        most = rate * BURST_S
        bucket = self._buckets.setdefault(caller.tenant, Bucket(rate, most, now))
        bucket.set_rate(rate, most, now)
        wait_s = bucket.take(min(1.0, most), now)
        if wait_s > 0:
            raise CallerError(
                "this tenant has had more tokens than it may have for now",
                code="too_many_tokens",
                status=429,
                retryable=True,
                hint=f"{rate} tokens a second on average",
                retry_after_ms=spread_ms(ceil(wait_s * 1000), self._random),
            )

    def charge(self, tenant: str, tokens: int) -> None:
        """So many tokens were read or made for it."""
        if (bucket := self._buckets.get(tenant)) is not None:
            bucket.charge(tokens, self._clock())
