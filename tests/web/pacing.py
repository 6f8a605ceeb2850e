"""A producer of words at the pace of a reader, for what happens to a page in the meantime."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

from origin.producer import About, Output, Request, Resumption, Text

WORDS_PER_S = 20
WORDS = 80
"""Where the request says no number."""


class Pacing:
    about = About("demo", "pacing 1", Resumption.REPEATS)

    async def produce(self, request: Request) -> AsyncGenerator[Output, None]:
        said = request.recipe.prompt or ""
        for number in range(int(said) if said.isdecimal() else WORDS):
            yield Text(f"word{number} ")
            await asyncio.sleep(1 / WORDS_PER_S)

    async def close(self) -> None: ...


pacing = Pacing
