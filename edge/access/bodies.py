"""The memory budget for request bodies, shared by all connections of a process."""

from __future__ import annotations

from dataclasses import dataclass

from tailrace.ledger.errors import Overloaded

MAX_BODIES_BYTES = 256 << 20
"""Maximum bytes of the bodies of all unanswered requests of a process."""


@dataclass(slots=True, eq=False)
class BodyBudget:
    """Counts the body bytes that were received for requests which are not answered yet."""

    most_bytes: int = MAX_BODIES_BYTES
    used_bytes: int = 0

    def take(self, size: int) -> None:
        """Reserve `size` bytes; raise Overloaded and reserve nothing if they exceed the budget."""
        if self.used_bytes + size > self.most_bytes:
            raise Overloaded(
                f"this edge is already holding {self.most_bytes >> 20} MiB of request bodies",
                hint="send the request again later",
            )
        self.used_bytes += size

    def give(self, size: int) -> None:
        """Release `size` bytes that were reserved."""
        self.used_bytes -= size
