"""A producer with a pace of its own, so that a page can be seen in the middle of a stream."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator

from tailrace.origin.producer import About, End, Output, Request, Resumption, Text

PACE_S = 0.005
"""Between two words."""


class Teller:
    """Tells of as many waves as the request has in its text, a sentence each."""

    about = About("teller", "teller 1", Resumption.REPEATS)

    async def produce(self, request: Request) -> AsyncGenerator[Output, None]:
        recipe = request.recipe
        said = recipe.prompt or str(recipe.messages[-1][1])
        found = re.search(r"\d+", said)
        waves = int(found[0]) if found else 3
        for number in range(waves):
            for word in told(number):
                yield Text(word)
                await asyncio.sleep(PACE_S)
        yield End(total_tokens=waves * len(told(0)))

    async def close(self) -> None:
        """Hold nothing."""


def told(number: int) -> list[str]:
    return [f"Wave {number} ", "came ", "in ", "from ", "the ", "sea.", "\n"]


def teller() -> Teller:
    return Teller()
