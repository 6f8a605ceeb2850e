"""Counts the open requests of clients at the origins, by address and by tenant.

A link to an origin carries a bounded number of requests, for all clients of an edge together. One
client may use only a part of this number, however many connections it spreads its requests over.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from math import inf
from typing import NamedTuple

from tailrace.edge.access.connections import client_key
from tailrace.ledger.errors import TooManyRequests

REMEMBERED_ADDRESSES = 4096

_client_key = lru_cache(REMEMBERED_ADDRESSES)(client_key)


class Owner(NamedTuple):
    """The client of a request. An empty `address` or `tenant` is not counted."""

    address: str = ""
    tenant: str = ""


UNCOUNTED = Owner()


@dataclass(slots=True, eq=False)
class OpenRequests:
    """Counts the open requests of an edge process, by address and by tenant.

    Requests from `exempt` addresses are only counted by tenant.
    """

    most_per_address: float = inf
    most_per_tenant: float = inf
    exempt: Callable[[str], bool] = lambda _: False
    _by_address: Counter[str] = field(default_factory=Counter)
    _by_tenant: Counter[str] = field(default_factory=Counter)

    def owner(self, address: str, tenant: str) -> Owner:
        return Owner("" if not address or self.exempt(address) else _client_key(address), tenant)

    def refusal(self, owner: Owner) -> TooManyRequests | None:
        """Return the error for another request if the client is at its limit, or None."""
        if owner.address and self._by_address[owner.address] >= self.most_per_address:
            return self._too_many(self.most_per_address, "address")
        if owner.tenant and self._by_tenant[owner.tenant] >= self.most_per_tenant:
            return self._too_many(self.most_per_tenant, "tenant")
        return None

    def add(self, owner: Owner) -> None:
        self._count(owner, 1)

    def remove(self, owner: Owner) -> None:
        self._count(owner, -1)

    def _count(self, owner: Owner, change: int) -> None:
        for counts, key in ((self._by_address, owner.address), (self._by_tenant, owner.tenant)):
            if key:
                counts[key] += change
                if not counts[key]:
                    del counts[key]

    def _too_many(self, most: float, of: str) -> TooManyRequests:
        return TooManyRequests(
            f"this {of} has {most:g} streams and other requests open on this edge",
            code="too_many_streams",
            hint="detach or finish some first; the limit is the operator's"
            f" edge.max_streams_per_{of}",
        )
