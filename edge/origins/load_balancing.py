"""Load balancing: selects an origin that works, has the model and probably cached the prefix.

Sans-I/O and without state. Requests with the same key go to the same origin as long as the
candidates are the same. A key is the beginning of a prompt, the name of an object or a stream id.
With rendezvous hashing, the loss of an origin moves only the origin's own keys. A new generation
goes to another origin if the key's origin has much more to do than the others (bounded loads, after
Mirrokni, Thorup and Zadimoghaddam, 2018).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

LOAD_SLACK = 0.25
"""Fraction by which an origin may exceed the average load and still get new generations by key."""
STREAMS_SLACK = 4
"""Number of streams that an origin may have in addition to LOAD_SLACK: with few streams in total,
every origin is far from the average."""
PREFIX_CHARS = 256
"""Length in characters of the prompt prefix that selects an origin: prompts with the same prefix go
to the origin that has the prefix in its KV cache. A shorter prompt goes to the least loaded origin,
because its KV cache is cheap to compute again."""
SHARED = "postgresql:"
"""Prefix of the names of ledgers that several origins can share."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """An origin as load balancing sees it.

    `streams` is the number of streams that run or wait at the origin, and `room` the maximum.
    """

    address: str
    up: bool = True
    ready: bool = True
    allowed: bool = True  # the circuit breaker and the link of the origin accept requests
    models: tuple[str, ...] = ()
    cold: frozenset[str] = frozenset()  # models that the origin would have to load first
    ledger: str = ""
    streams: int = 0
    room: int = 0

    @property
    def load(self) -> float:
        return self.streams / self.room if self.room else float(self.streams)


@dataclass(frozen=True, slots=True)
class Needs:
    """The needs of a request. Without a `key`, the request goes to the least loaded origin."""

    key: bytes | None = None
    model: str | None = None
    # A new generation: its key chooses the origin only while the loads of the origins are similar.
    spreads: bool = False
    named: bool = False  # a request to an object, which exists in one ledger only
    only: str | None = None  # the address of the only origin to ask


NO_NEEDS = Needs()


def choose(
    candidates: Sequence[Candidate],
    needs: Needs,
    tried: frozenset[str] = frozenset(),
    ledger: str | None = None,
) -> Candidate | None:
    """Return the origin to ask, or None if there is none.

    Args:
        candidates: all origins.
        needs: what the request needs.
        tried: addresses of origins that have refused the request.
        ledger: the ledger that the origin must have; any if None.
    """
    if needs.named:
        ledger = ledger_of(candidates, needs.key or b"")
        if ledger is None:
            return None
    those = [c for c in candidates if c.up and c.address not in tried]
    if needs.only is not None:
        those = [c for c in those if c.address == needs.only]
    if ledger is not None:
        those = [c for c in those if c.ledger == ledger]
    # Ignore a condition that no candidate meets: the origin's refusal tells the client more than
    # waiting would.
    those = [c for c in those if c.allowed] or those
    those = [c for c in those if needs.model in c.models] or those
    those = [c for c in those if c.ready] or those
    if needs.spreads:
        those = [c for c in those if needs.model not in c.cold] or those
    if not those:
        return None
    least = min(those, key=lambda c: c.load)
    if needs.key is None:
        return least
    order = by_key(those, needs.key)
    return next((c for c in order if not needs.spreads or _has_room(c, those)), least)


def by_key(candidates: Sequence[Candidate], key: bytes) -> list[Candidate]:
    """Return the origins in the order of rendezvous hashing; the key's own origin is first."""
    return sorted(candidates, key=lambda c: _weight(c.address, key), reverse=True)


def ledger_of(candidates: Sequence[Candidate], key: bytes) -> str | None:
    """Return the ledger that has the object with this key, or None while it is not known.

    The choice depends on the origins' addresses, not on which of them are up. An origin that has
    not reported its ledger yet is assumed to use the others' ledger, if that ledger can be shared.
    """
    known = {c.ledger for c in candidates if c.ledger}
    if len(known) <= 1:
        only = next(iter(known), "")
        if not only or only.startswith(SHARED) or all(c.ledger for c in candidates):
            return only
    own = by_key(candidates, key)[0].ledger
    return own or None


def _has_room(candidate: Candidate, those: Sequence[Candidate]) -> bool:
    room = sum(c.room for c in those)
    average = sum(c.streams for c in those) / (room or len(those))
    most = average * (1 + LOAD_SLACK) * (candidate.room or 1) + STREAMS_SLACK
    return candidate.streams < most


def _weight(address: str, key: bytes) -> bytes:
    return blake2b(key, digest_size=8, key=address.encode()[:64]).digest()
