"""A producer that writes its prompt back in small pieces, as a model that obeys an attacker."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

from tailrace.origin.producer import About, End, Output, Request, Resumption, Text

PIECE_CHARS = 3
PACE_S = 0.001
"""Between two pieces."""


class Writer:
    """Writes the last message of its request, or the prompt."""

    about = About("writer", "writer 1", Resumption.REPEATS)

    async def produce(self, request: Request) -> AsyncGenerator[Output, None]:
        recipe = request.recipe
        text = recipe.prompt or str(recipe.messages[-1][1])
        for begin in range(0, len(text), PIECE_CHARS):
            yield Text(text[begin : begin + PIECE_CHARS])
            await asyncio.sleep(PACE_S)
        yield End(total_tokens=len(text))

    async def close(self) -> None:
        """Hold nothing."""


writer = Writer
