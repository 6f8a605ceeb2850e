"""The counters of a relay, which the metrics show."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class RelayCounters:
    """Counts since the start of the edge."""

    frames: int = 0
    """Frames of streams received."""
    repeated: int = 0
    """Frames of them that had passed before."""
    replayed: int = 0
    """Frames by which readers were behind the end of their stream when it was opened."""
    renewals: int = 0
    """Streams requested again."""
    losses: int = 0
    """Times that the link was lost."""
