"""What the owner of an origin decides about its streams."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from ledger.schema import Durability


class Change(Enum):
    """What has happened to a stream."""

    CREATED = "created"
    APPENDED = "appended"
    """Data, the end, or both."""
    DELETED = "deleted"


@dataclass(frozen=True, slots=True)
class StreamEvent:
    """A change that is durable; `path` is the stream's name, `tail_offset` where it ends now."""

    kind: Change
    path: str
    tail_offset: str


@dataclass(frozen=True, slots=True)
class StreamSettings:
    """`on_event` is told of every change of a stream, each once, those of one in order."""

    long_poll_s: float = 20.0
    """Longest a long poll waits."""
    sse_s: float = 60.0
    """An event stream ends after so long, for the caches that many readers may share."""
    max_body_bytes: int = 8 * 1024 * 1024
    """Most that one PUT or POST may append."""
    durability: Durability = Durability.PROCESS
    on_event: Callable[[StreamEvent], None] | None = None
