"""A producer whose streams have a few words and then a long pause, as while a model thinks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

from tailrace.origin.producer import About, Output, Request, Resumption, Text

WORDS = 16


class Waiting:
    """Says `WORDS` words at once, and no more until it is cancelled."""

    about = About("waiting", "waiting 1", Resumption.REPEATS)

    async def produce(self, request: Request) -> AsyncGenerator[Output, None]:
        for number in range(WORDS):
            yield Text(f"{number} ")
        await asyncio.Event().wait()

    async def close(self) -> None:
        """Hold nothing."""


def waiting() -> Waiting:
    return Waiting()
