"""The next alarm of a store, for tests."""

from __future__ import annotations

from tailrace.ledger.interface import ObjectStore
from tailrace.ledger.objects.runtime import HORIZON_MS


async def next_alarm_ms(objects: ObjectStore) -> int | None:
    """Return when the earliest alarm is, in Unix ms."""
    rows = await objects.due(HORIZON_MS, 1)
    return rows[0][1].at_ms if rows else None
