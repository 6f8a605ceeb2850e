"""The circuit breaker of an origin: when it gets no new requests, and when it is probed."""

from __future__ import annotations

from tailrace.ledger.flow.backoff import Backoff
from tailrace.ledger.flow.circuit_breaker import CircuitBreaker

TRIPS = 5
"""Number of failures in a row that open the breaker; a single one may be due to a bad request."""
REST_MIN_S = 0.5
"""Minimum time that an open breaker refuses requests, in seconds."""
REST_MAX_S = 30.0
"""Maximum time that an open breaker refuses requests, in seconds."""
PROBE_S = 10.0
"""Timeout for the answer to a probe, in seconds. Afterwards another request is sent as a probe."""


def origin_breaker(rest: Backoff | None = None) -> CircuitBreaker:
    """Return the breaker of one origin; `rest` sets how long it stays open."""
    return CircuitBreaker(TRIPS, rest or Backoff(REST_MIN_S, REST_MAX_S), PROBE_S)
