"""Retention by hand: what a running origin does by itself, now and to its end."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from ledger.interface import Ledger
from ledger.tools.reader import reading


@dataclass(frozen=True, slots=True)
class Collected:
    """What went, and what the ledger took before and takes now."""

    removed_streams: int
    before_bytes: int
    after_bytes: int


def collect(place: Path | str, open_ledger: Callable[[], Awaitable[Ledger]]) -> Collected:
    """Remove what has expired from the ledger at `place`, which `open_ledger` opens.

    Raises `ConfigError` where there is none, or while another process owns the file.
    """
    with reading(place) as reader:  # what is no ledger is refused, not made into one
        before = reader.ledger_bytes()
    removed = asyncio.run(_expire(open_ledger))
    with reading(place) as reader:
        return Collected(removed, before, reader.ledger_bytes())


async def _expire(open_ledger: Callable[[], Awaitable[Ledger]]) -> int:
    ledger = await open_ledger()
    try:
        return await ledger.expire()
    finally:
        await ledger.close()
