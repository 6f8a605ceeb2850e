"""A producer that does what the prompt says, and waits where a test wants it to wait."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tailrace.ledger.frame import Score, TokenScores
from tailrace.origin.producer import (
    About,
    Data,
    Label,
    Output,
    Reasoning,
    Remark,
    Request,
    Resumption,
    Revision,
    Text,
    Vector,
)
from tailrace.origin.tool_calls import CallPiece

POLL_S = 0.005
EVERY_KIND: tuple[Output, ...] = (
    Reasoning("a thought"),
    CallPiece(0, name="weather", id="call-1"),
    CallPiece(0, arguments='{"city": "Zürich"}'),
    CallPiece(1, name="time", arguments="{}", id="call-2"),
    Text("scored", (TokenScores(Score(7, b"\xc3", -0.5), (Score(8, b"s", -1.5),)),)),
    Revision("interim"),
    Revision("final", final=True),
    Data(b"\x00\xff"),
    Vector((0.5, -2.0)),
    Label("calm", 0.75),
    Remark("inexact", "a remark"),
)
"""Outputs that become every kind of logged frame besides Token and StreamEnd."""


@dataclass(frozen=True, slots=True)
class Script:
    """A number of words, each followed by `padding` bytes.

    Before word `hold` the producer waits until the file `gate` exists. With `fails` it breaks after
    the last word. With `every_kind` the outputs of EVERY_KIND follow the last word.
    """

    words: int
    gate: str = ""
    hold: int | None = None
    pace_s: float = 0.0
    padding: int = 0
    fails: bool = False
    every_kind: bool = False

    @property
    def body(self) -> dict[str, Any]:
        """Return the body of the request that has it played."""
        return {"model": "script", "prompt": json.dumps(asdict(self))}

    @property
    def texts(self) -> list[str]:
        """Return the text of each frame."""
        return [f"{number} {'x' * self.padding}" for number in range(self.words)]

    @property
    def text(self) -> str:
        return "".join(self.texts)

    def go_on(self) -> None:
        """Past `hold`, however often it is played."""
        Path(self.gate).touch()


class Scripted:
    """A producer that plays the script in its prompt."""

    about = About("script", "script 1", Resumption.REPEATS)

    async def produce(self, request: Request) -> AsyncGenerator[Output, None]:
        script = Script(**json.loads(request.recipe.prompt or ""))
        gate = Path(script.gate)
        for number, text in enumerate(script.texts):
            while number == script.hold and not gate.exists():  # noqa: ASYNC110 of another process
                await asyncio.sleep(POLL_S)
            yield Text(text)
            await asyncio.sleep(script.pace_s)
        for output in EVERY_KIND if script.every_kind else ():
            yield output
        if script.fails:
            raise RuntimeError("as the script has it")

    async def close(self) -> None:
        """Hold nothing."""


make = Scripted
