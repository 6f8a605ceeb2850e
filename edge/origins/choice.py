"""Which origin is asked: the one that works, has the model and is likely to have the prefix.

Sans-I/O. The choice is without memory. A key (a prompt's beginning, an object's name, a stream)
always goes to the same origin as long as the same ones can be chosen from (rendezvous hashing: of
one that goes, only its own keys move), and for new generations as long as that one has not much
more to do than the others (bounded loads, after Mirrokni, Thorup and Zadimoghaddam, 2018).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

from tailrace.ledger.flow.backoff import Backoff
from tailrace.ledger.flow.circuit_breaker import CircuitBreaker

LOAD_SLACK = 0.25
"""How far above the average load an origin may be and still get what belongs to it..."""
STREAMS_SLACK = 4
"""...and so many streams more: with few streams every load is far from the average."""
PREFIX_CHARS = 256
"""What begins alike in so many characters goes to the same origin, whose cache has the prefix. A
shorter prompt goes to whoever has least to do: computing it again is cheap."""
SHARED = "postgresql:"
"""Begins the name of a ledger that origins can share."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """An origin as an edge knows it. `streams` run or wait there, of `room` that may."""

    address: str
    up: bool = True
    ready: bool = True
    allowed: bool = True  # by its breaker, and by the corrs of its link
    models: tuple[str, ...] = ()
    cold: frozenset[str] = frozenset()  # of those, which it would have to load first
    ledger: str = ""
    streams: int = 0
    room: int = 0

    @property
    def load(self) -> float:
        return self.streams / self.room if self.room else float(self.streams)


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a request needs. Without a `key` it goes to whoever has least to do."""

    key: bytes | None = None
    model: str | None = None
    spreads: bool = False  # is a new generation: its key counts only while loads are alike
    named: bool = False  # is for an object, which exists in one ledger only
    only: str | None = None  # is for the origin of this address, and no other


ANYBODY = Wanted()


def choose(
    candidates: Sequence[Candidate],
    wanted: Wanted,
    tried: frozenset[str] = frozenset(),
    ledger: str | None = None,
) -> Candidate | None:
    """The origin to ask, or None while there is none; never one of those that were `tried`.

    With `ledger`, only one that has this ledger.
    """
    if wanted.named:
        ledger = ledger_of(candidates, wanted.key or b"")
        if ledger is None:
            return None
    those = [c for c in candidates if c.up and c.address not in tried]
    if wanted.only is not None:
        those = [c for c in those if c.address == wanted.only]
    if ledger is not None:
        those = [c for c in those if c.ledger == ledger]
    # Each of these is dropped where nobody would be left: a refusal says more than silence.
    those = [c for c in those if c.allowed] or those
    those = [c for c in those if wanted.model in c.models] or those
    those = [c for c in those if c.ready] or those
    if wanted.spreads:
        those = [c for c in those if wanted.model not in c.cold] or those
    if not those:
        return None
    least = min(those, key=lambda c: c.load)
    if wanted.key is None:
        return least
    order = by_key(those, wanted.key)
    return next((c for c in order if not wanted.spreads or _has_room(c, those)), least)


def by_key(candidates: Sequence[Candidate], key: bytes) -> list[Candidate]:
    """The first one is the key's own; the next ones stand in for it."""
    return sorted(candidates, key=lambda c: _weight(c.address, key), reverse=True)


def ledger_of(candidates: Sequence[Candidate], key: bytes) -> str | None:
    """The ledger in which an object of this name is, whoever is up; None while that is not known.

    It follows from the addresses alone. One whose ledger was never told shares that of the others
    if it can be shared: most do.
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


TRIPS = 5
"""Failures in a row: a request that one bad input fails is no reason to leave an origin."""
REST_MIN_S = 0.5
REST_MAX_S = 30.0
PROBE_S = 10.0
"""Timeout for the answer to a probe; after it another probe is let through."""


def origin_breaker(rest: Backoff | None = None) -> CircuitBreaker:
    """Return the breaker of one origin: when it gets no new requests, and when it is probed."""
    return CircuitBreaker(TRIPS, rest or Backoff(REST_MIN_S, REST_MAX_S), PROBE_S)
