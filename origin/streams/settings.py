"""The settings of all streams of an origin."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tailrace.ledger.wire.schema import Durability
from tailrace.origin.streams.events import StreamEvent


@dataclass(frozen=True, slots=True)
class StreamSettings:
    """Settings of all streams.

    `on_event` is called once for each change, in order within a stream.
    """

    long_poll_s: float = 20.0
    """Maximum seconds that a long poll waits."""
    sse_s: float = 60.0
    """Maximum seconds of an event stream, so that caches can share it among readers."""
    max_body_bytes: int = 8 * 1024 * 1024
    """Maximum bytes that one PUT or POST may append."""
    durability: Durability = Durability.PROCESS
    on_event: Callable[[StreamEvent], None] | None = None
