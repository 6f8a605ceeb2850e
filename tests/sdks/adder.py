"""A producer that thinks, calls tools and answers with what they gave, for tests of clients."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncGenerator

from tailrace.ledger.frame import FinishReason
from tailrace.origin.producer import About, End, Output, Reasoning, Request, Resumption, Text
from tailrace.origin.tool_calls import CallPiece

WORDS = tuple(f"{count}, " for count in range(40))


class Adder:
    """Has the numbers of the last turn added by a tool, and asks another one for the time.

    Who tells it to wait is told a few words, and no more: such a stream ends when it is cancelled.
    """

    about = About("adder", "adder 1", Resumption.REPEATS, offers=("tools",))

    async def produce(self, request: Request) -> AsyncGenerator[Output, None]:
        role, said, *_ = request.recipe.messages[-1]
        if role == "tool":
            gave = [turn[1] for turn in request.recipe.messages if turn[0] == "tool"]
            yield Text("They gave ")
            yield Text(f"{' and '.join(map(str, gave))}.")
            return
        if "wait" in (said or ""):
            for word in WORDS:
                yield Text(word)
            await asyncio.Event().wait()
        arguments = json.dumps({"numbers": [int(one) for one in re.findall(r"\d+", said or "")]})
        yield Reasoning("Numbers. ")
        yield Reasoning("I have them added.")
        yield Text("Let me ")
        yield Text("see.")
        yield CallPiece(0, "add", id="call_add")
        for at in range(0, len(arguments), 5):
            yield CallPiece(0, arguments=arguments[at : at + 5])
        yield CallPiece(1, "now", "{}", id="call_now")
        yield End(FinishReason.TOOL_CALLS)

    async def close(self) -> None:
        """Hold nothing."""


adder = Adder
