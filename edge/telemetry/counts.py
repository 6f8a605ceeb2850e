"""What an edge counts as it happens: plain numbers, which a scrape reads.

Nothing here is done for a frame by itself: those of one read of the link are counted together, and
timed together by the `Turn` of that read, one read in a few.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from ledger.telemetry.distribution import Distribution
from ledger.telemetry.traces import Traces

RELAY_BUCKETS_S = (
    *(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05),
    *(0.1, 0.25, 0.5, 1.0, 5.0, 30.0),
)
FIRST_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
REQUEST_BUCKETS_S = (0.005, 0.025, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
MAX_CODES = 200
"""Codes of errors that are counted each by itself. Ours are fewer, but origins may say any."""
OTHER = "other"


class Answered(NamedTuple):
    """A kind of request, by the labels of its counter."""

    route: str
    method: str
    status: int
    protocol: str


class Counts:
    """Of one edge, and its `traces`, if it keeps any."""

    def __init__(self, traces: Traces | None = None) -> None:
        self.traces = traces
        self.requests: Counter[Answered] = Counter()
        self.errors: Counter[str] = Counter()
        self.stalls: Counter[str] = Counter()  # by protocol
        self.relayed = Distribution(
            "tailrace_edge_relay_seconds",
            "From a read of an origin's link to the write for one client, of one read in eight",
            "",
            ("",),
            RELAY_BUCKETS_S,
        )
        self.first = Distribution(
            "tailrace_edge_time_to_first_byte_seconds",
            "From a request's head to the first byte of its answer's body",
            "route",
            (),
            FIRST_BUCKETS_S,
        )
        self.whole = Distribution(
            "tailrace_edge_request_seconds",
            "From a request's head to the end of its answer's body",
            "route",
            (),
            REQUEST_BUCKETS_S,
        )

    def error(self, code: str) -> None:
        """A client was told of an error, as an answer or within one."""
        known = code in self.errors or len(self.errors) < MAX_CODES
        self.errors[code if known else OTHER] += 1

    def refused(self, protocol: str, code: str, status: int) -> None:
        """What was sent was no request, or came too slowly: no route has seen it."""
        self.requests[Answered(OTHER, OTHER, status, protocol)] += 1
        self.error(code)

    def wrote(self, waited_s: float, writes: int) -> None:
        """For the `Turn`: so many writes each had what a read of so long ago brought."""
        self.relayed.observe("", waited_s, writes)
