"""Memory for request bodies that are being gathered, shared by all connections of a process."""

from __future__ import annotations

from dataclasses import dataclass

from tailrace.ledger.errors import Overloaded

MAX_BODIES_BYTES = 256 << 20
"""Maximum bytes of request bodies under way, of all connections together."""


@dataclass(slots=True, eq=False)
class BodyBudget:
    """The bytes of bodies that have come and whose request has not been answered."""

    most_bytes: int = MAX_BODIES_BYTES
    used_bytes: int = 0

    def take(self, size: int) -> None:
        """Count bytes in. Raises Overloaded where there is no room for them; they do not count."""
        if self.used_bytes + size > self.most_bytes:
            raise Overloaded(
                f"over {self.most_bytes >> 20} MiB of request bodies are under way at this edge",
                hint="send the request again later",
            )
        self.used_bytes += size

    def give(self, size: int) -> None:
        """Count bytes out again."""
        self.used_bytes -= size
