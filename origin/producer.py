"""What may be served besides our own token decoder: any Python object that gives outputs.

A `Producer` answers one request with a series of outputs and an `End`. How they become logged
frames is the business of `origin.producers.production`; no producer knows of indexes, frames or
resumption.

    class Speech:
        about = About(name="speech", fingerprint="speech 1", resumption=Resumption.REPEATS)

        async def produce(self, request: Request) -> AsyncGenerator[Output, None]:
            yield Revision("wreck a nice")
            yield Revision("recognise speech", final=True)

        async def close(self) -> None: ...

`[origin] producer = "module:factory"` serves what `factory()` gives, or awaits to; it is written
as Python's entry points are. A producer runs on the event loop of its worker process: what
computes for long belongs in a thread (`asyncio.to_thread`), or a cancel cannot be heard.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol, cast

from tailrace.ledger.errors import ConfigError
from tailrace.ledger.frame import FinishReason, TokenScores
from tailrace.origin.generations.recipe import Recipe
from tailrace.origin.plugin import load_plugin
from tailrace.origin.tool_calls import CallPiece

# ---- what a producer is given ----


@dataclass(frozen=True, slots=True)
class Request:
    """A stream to produce, or the rest of one: `delivered` is its text so far, which has
    `next_index` frames. Both are empty at first, and always where the producer repeats itself.
    """

    recipe: Recipe
    delivered: str = ""
    next_index: int = 0
    calls: int = 0
    """Of tools, among what was delivered."""


# ---- what it gives ----


@dataclass(frozen=True, slots=True)
class Text:
    """Text that follows the text before it, and the scores of its tokens where they are known."""

    text: str
    scores: tuple[TokenScores, ...] = ()


@dataclass(frozen=True, slots=True)
class Reasoning:
    """What a model thinks apart from its text; not shown where a filter judges what is."""

    text: str


@dataclass(frozen=True, slots=True)
class Revision:
    """Text in the place of all since the last `final` one (or Text); until then it may change."""

    text: str
    final: bool = False


@dataclass(frozen=True, slots=True)
class Data:
    """A message of bytes, of any size."""

    data: bytes


@dataclass(frozen=True, slots=True)
class Vector:
    """An embedding: finite numbers, kept as fp32.

    One that is too large for a frame goes out as a Data message: its numbers as little-endian
    fp32, one after the other.
    """

    values: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Label:
    """A class and how sure of it the classifier is, 0 to 1."""

    name: str
    confidence: float


@dataclass(frozen=True, slots=True)
class Remark:
    """Something that readers should know of the stream; `code` is a word such as `inexact`."""

    code: str
    message: str


@dataclass(frozen=True, slots=True)
class End:
    """The last output; a producer that just returns means `End()`.

    `total_tokens` were generated, from `prompt_tokens` of input; 0 where nobody counts them.
    """

    reason: FinishReason = FinishReason.STOP
    total_tokens: int = 0
    prompt_tokens: int = 0
    message: str | None = None
    retryable: bool = False


Output = Text | Reasoning | CallPiece | Revision | Data | Vector | Label | Remark | End


# ---- the producer ----


class Resumption(StrEnum):
    """How the stream of a worker that died goes on."""

    REPEATS = "repeats"
    """The same request gives the same outputs: it is run again, and what was logged is dropped."""
    CONTINUES = "continues"
    """It goes on from `Request.delivered`, not exactly; the stream says so with a Notice."""
    ENDS = "ends"
    """It cannot: the stream ends as `origin_lost`, to be asked again."""


@dataclass(frozen=True, slots=True)
class About:
    """`name` in requests, unless the settings give another; a stream is gone on with only by a
    producer of the same `fingerprint`; `device` is what it runs on, for people. It `offers` those
    fields of an Open that others refuse: `logprobs`, `format`, `tools`."""

    name: str
    fingerprint: str
    resumption: Resumption
    device: str = "cpu"
    offers: tuple[str, ...] = ()


class Producer(Protocol):
    """Many requests are produced at the same time, up to the worker's limit."""

    @property
    def about(self) -> About: ...

    def produce(self, request: Request) -> AsyncGenerator[Output, None]:
        """Return the outputs of one request, not faster than they are taken.

        A cancel raises CancelledError or GeneratorExit in it. An error of
        `tailrace.ledger.errors` ends the stream as failed with its message; of any other the
        reader learns only that there was one.
        """

    async def close(self) -> None:
        """Nothing is asked any more."""


async def load_producer(place: str) -> Producer:
    """What the factory at `module:factory` makes; ConfigError says what is wrong with it."""
    shape = "write module:factory; install the module, or start the origin in its folder"
    factory = load_plugin(place, "origin.producer", shape)
    if not callable(factory):
        raise _is_no_producer(place, "names nothing that can be called")
    try:
        inspect.signature(factory).bind()
    except TypeError as error:
        raise _is_no_producer(place, "needs arguments") from error
    made = factory()
    if inspect.isawaitable(made):
        made = await made
    if not isinstance(getattr(made, "about", None), About):
        raise _is_no_producer(place, f"gave a {type(made).__name__} without `about`")
    if not inspect.isasyncgenfunction(getattr(made, "produce", None)):
        raise _is_no_producer(place, "has no `async def produce` that yields")
    if not inspect.iscoroutinefunction(getattr(made, "close", None)):
        raise _is_no_producer(place, "has no `async def close`")
    return cast("Producer", made)


def _is_no_producer(place: str, what: str) -> ConfigError:
    return ConfigError(
        f"{place!r} {what}",
        field="origin.producer",
        hint="name a function without arguments that gives a tailrace.origin.producer.Producer",
    )
