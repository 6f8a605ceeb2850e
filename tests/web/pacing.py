"""A producer of words at the pace of a reader, for what happens to a page in the meantime."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator
from pathlib import Path

from tailrace.origin.producer import About, Output, Request, Resumption, Text
from tests.origin.held_text import PLACE, POLL_S, Brake

WORDS_PER_S = 20
WORDS = 80
"""Number of words if the request gives none."""


class Pacing:
    """A producer of numbered words that stops at the test's brake."""

    about = About("demo", "pacing 1", Resumption.REPEATS)

    async def produce(self, request: Request) -> AsyncGenerator[Output, None]:
        said, brake = request.recipe.prompt or "", Brake(Path(os.environ[PLACE]))
        characters = 0
        for number in range(int(said) if said.isdecimal() else WORDS):
            characters += len(word := f"word{number} ")
            while characters > brake.most():  # noqa: ASYNC110 - of another process
                await asyncio.sleep(POLL_S)
            yield Text(word)
            await asyncio.sleep(1 / WORDS_PER_S)

    async def close(self) -> None: ...


pacing = Pacing
