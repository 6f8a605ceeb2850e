"""Retention by hand: what a running origin does by itself, now and to its end."""

from __future__ import annotations

import asyncio
from pathlib import Path

from ledger.reader import LedgerReader, reading
from ledger.sqlite import SqliteLedger


def expired(reader: LedgerReader, now_ms: int) -> int:
    """How many streams have outlived their retention at `now_ms` (Unix time)."""
    return reader.number(
        "SELECT count(*) FROM stream WHERE ended = 1 AND kind = 0 AND expires_ms <= ?", now_ms
    )


def collect(path: Path, now_ms: int) -> dict[str, int]:
    """Remove what has expired; `ConfigError` while another process owns the ledger."""
    with reading(path) as reader:  # a file that is no ledger is refused, not made into one
        before = reader.file_bytes
    removed = asyncio.run(_expire(path, now_ms))
    with reading(path) as reader:
        return {
            "removed_streams": removed,
            "file_bytes_before": before,
            "file_bytes": reader.file_bytes,
        }


async def _expire(path: Path, now_ms: int) -> int:
    ledger = await SqliteLedger.open(path, lambda: now_ms)
    try:
        return await ledger.expire()
    finally:
        await ledger.close()
