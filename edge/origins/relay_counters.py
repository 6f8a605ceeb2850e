"""The counters of a relay, which the metrics show."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class RelayCounters:
    """Counts since the start of the edge."""

    frames: int = 0
    """Number of stream frames received, without repeated ones."""
    repeated: int = 0
    """Number of stream frames that were received again after a lost link, and dropped."""
    replayed: int = 0
    """Number of older frames that origins had to replay when clients opened or resumed streams."""
    renewals: int = 0
    """Number of times that a stream was requested again after a lost link."""
    losses: int = 0
    """Number of times that the link was lost."""
