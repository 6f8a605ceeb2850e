"""Events: the changes of a stream, for subscriptions to it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from tailrace.origin.streams.offsets import BEGINNING


class Change(Enum):
    """Kind of a change of a stream."""

    CREATED = "created"
    APPENDED = "appended"
    """Data was appended, the stream was closed, or both."""
    DELETED = "deleted"


@dataclass(frozen=True, slots=True)
class StreamEvent:
    """A durable change of the stream named `path`, which now ends at `tail_offset`.

    `since_offset` is where it ended before; `BEGINNING` for a stream that did not exist.
    """

    kind: Change
    path: str
    tail_offset: str
    since_offset: str = BEGINNING
