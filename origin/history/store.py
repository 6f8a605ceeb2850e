"""What keeps a history: a file, or the tables of a shared PostgreSQL."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from origin.history.schema import HistoryEntry, Keeping

Row = tuple[Any, ...]


class HistoryStore(Protocol):
    """Raises `Damaged`, `Unavailable` or `ConfigError`, as fits what is wrong."""

    @property
    def name(self) -> str:
        """Where it lies; no password in it."""

    async def write(self, entries: Sequence[HistoryEntry]) -> None:
        """All of them, or none."""

    async def keep(self, keeping: Keeping, now_ms: int) -> None:
        """Roll up and forget what is too old."""

    async def rows(self, query: str, *values: str | int) -> Sequence[Row]:
        """What one SELECT gives, with `$1` for values."""

    async def close(self) -> None: ...
