"""Producers: Python objects that may be served instead of our own token decoder.

A `Producer` answers one request with a series of outputs and an `End`.
`origin.producers.production` turns them into logged frames; a producer knows nothing of indexes,
frames or resumption.

    class Speech:
        about = About(name="speech", fingerprint="speech 1", resumption=Resumption.REPEATS)

        async def produce(self, request: Request) -> AsyncGenerator[Output, None]:
            yield Revision("wreck a nice")
            yield Revision("recognise speech", final=True)

        async def close(self) -> None: ...

`[origin] producer = "module:factory"` serves the result of `factory()`, which may be a coroutine;
it is written like Python's entry points. A producer runs on the event loop of its worker process:
long computations belong in a thread (`asyncio.to_thread`), or they delay cancels.
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
    """A stream to produce, or the rest of one.

    `delivered` is its text so far, which has `next_index` frames. Both are empty at first, and
    always for a producer that repeats itself.
    """

    recipe: Recipe
    delivered: str = ""
    next_index: int = 0
    calls: int = 0
    """Number of tool calls in what was delivered."""


# ---- what it gives ----


@dataclass(frozen=True, slots=True)
class Text:
    """Text that follows earlier text, with its tokens' scores if they are known."""

    text: str
    scores: tuple[TokenScores, ...] = ()


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Reasoning of a model, apart from its text; not shown if the stream has a filter."""

    text: str


@dataclass(frozen=True, slots=True)
class Revision:
    """Text that replaces everything since the last `final` revision (or Text)."""

    text: str
    final: bool = False


@dataclass(frozen=True, slots=True)
class Data:
    """A message of bytes, of any size."""

    data: bytes


@dataclass(frozen=True, slots=True)
class Vector:
    """An embedding: finite numbers, stored as fp32.

    One that is too large for a frame is sent as a Data message of little-endian fp32 numbers.
    """

    values: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Label:
    """A class and the classifier's confidence, 0 to 1."""

    name: str
    confidence: float


@dataclass(frozen=True, slots=True)
class Remark:
    """A message about the stream for its readers; `code` is a word such as `inexact`."""

    code: str
    message: str


@dataclass(frozen=True, slots=True)
class End:
    """The last output; a producer that just returns means `End()`.

    `total_tokens` were generated from `prompt_tokens` of input; 0 if they are not counted.
    """

    reason: FinishReason = FinishReason.STOP
    total_tokens: int = 0
    prompt_tokens: int = 0
    message: str | None = None
    retryable: bool = False


Output = Text | Reasoning | CallPiece | Revision | Data | Vector | Label | Remark | End


# ---- the producer ----


class Resumption(StrEnum):
    """How the stream of a dead worker continues."""

    REPEATS = "repeats"
    """The same request gives the same outputs: it is run again, and what was logged is dropped."""
    CONTINUES = "continues"
    """It continues from `Request.delivered`, inexactly; the stream says so with a Notice."""
    ENDS = "ends"
    """It cannot continue: the stream ends as `origin_lost`, and may be requested again."""


@dataclass(frozen=True, slots=True)
class About:
    """A producer's description.

    `name` is used in requests, unless the settings give another. A stream continues only on a
    producer of the same `fingerprint`. `device` is shown to people. `offers`: the optional fields
    of an Open that it supports: `logprobs`, `format`, `tools`.
    """

    name: str
    fingerprint: str
    resumption: Resumption
    device: str = "cpu"
    offers: tuple[str, ...] = ()


class Producer(Protocol):
    """A producer; it serves many requests at the same time, up to the worker's limit."""

    @property
    def about(self) -> About: ...

    def produce(self, request: Request) -> AsyncGenerator[Output, None]:
        """Return the outputs of one request, not faster than they are taken.

        A cancel raises CancelledError or GeneratorExit in it. An error of `tailrace.ledger.errors`
        ends the stream as failed with its message; any other error is reported to the reader
        without details.
        """

    async def close(self) -> None:
        """Close the producer; no more requests follow."""


async def load_producer(place: str) -> Producer:
    """Return what the factory at `module:factory` makes. Raises ConfigError if it is unusable."""
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
