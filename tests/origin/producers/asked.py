"""Requests for producers, and the frames that come of them."""

from __future__ import annotations

from typing import Any

from tailrace.ledger.frame import SAMPLING, Frame, Sampling, decode
from tailrace.origin.generations.recipe import Recipe, packed_ids, prompt_hash
from tailrace.origin.producer import Producer, Request
from tailrace.origin.producers.production import Production


def recipe(prompt: str | None = "Say it.", **more: Any) -> Recipe:
    """Return a recipe as admission makes it for a producer: with the words, and without ids."""
    given: dict[str, Any] = {
        "model": "served",
        "fingerprint": "1",
        "prompt_ids": packed_ids(()),
        "prompt_sha256": prompt_hash(()),
        "max_tokens": 100,
        "stop": (),
        "ignore_eos": False,
        "priority": "standard",
        "prompt": prompt,
        "messages": (),
        **more,
    }
    said = {"temperature": 0.0, "seed": 1} | given
    sampling = Sampling(**{name: said.get(name, it.neutral) for name, it in SAMPLING.items()})
    more = {name: it for name, it in given.items() if name not in SAMPLING}
    return Recipe(sampling=sampling, **{"given": tuple(said.keys() & SAMPLING.keys())} | more)


def request(delivered: str = "", next_index: int = 0, **more: Any) -> Request:
    return Request(recipe(**more), delivered, next_index)


async def frames(producer: Producer, asked: Request) -> list[Frame]:
    """Return all frames of a stream, whose indexes are checked to be contiguous."""
    made: list[Frame] = []
    async for index, raw in Production(producer, asked, run=1).frames():
        frame: Any = decode(raw)[1]
        assert frame.index == index == asked.next_index + len(made)
        made.append(frame)
    return made
