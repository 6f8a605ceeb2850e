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
the value has the form of a Python entry point. A producer runs on the event loop of its worker
process: long computations belong in a thread (`asyncio.to_thread`), or they delay cancels.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol, cast

from tailrace.ledger.errors import ConfigError
from tailrace.ledger.frame import FinishReason, TokenScores
from tailrace.origin.generations.recipe import Recipe
from tailrace.origin.plugin import load_plugin
from tailrace.origin.tool_calls import CallPiece

# ---- the input of a producer ----


@dataclass(slots=True)
class RunFate:
    """Tells a call of `Producer.produce` what becomes of its stream.

    `is_over` is True for a cancelled call if the stream has ended. Otherwise a later call may
    continue the stream. `is_repeating` is True while the stream has more frames than this call has
    given outputs for: an earlier call has given the next outputs, too.
    """

    is_over: bool = False
    is_repeating: bool = False


@dataclass(slots=True)
class TimedStage:
    """The time of one stage of a pipeline.

    `busy_s` is the time in seconds that its `items` input items took, without the time in which it
    waited for input, or for room for its output. The item that it processes is not in it.
    """

    name: str
    items: int = 0
    busy_s: float = 0.0
    _since_s: float | None = None

    def start(self, now_s: float) -> None:
        """Note that the stage works from now on."""
        self._since_s = now_s

    def stop(self, now_s: float) -> None:
        """Note that the stage waits from now on; repeated calls change nothing."""
        self.busy_s, self._since_s = self.so_far_s(now_s), None

    def so_far_s(self, now_s: float) -> float:
        """Return the busy time up to now, with that of the item that the stage processes."""
        return self.busy_s + (0.0 if self._since_s is None else now_s - self._since_s)


@dataclass(frozen=True, slots=True)
class Request:
    """A request to produce a stream, or to continue one.

    `delivered` is the stream's text so far, and `next_index` the number of frames so far. They are
    "" and 0 for a new stream. A producer with Resumption.REPEATS must ignore them, because it
    produces every stream from its beginning.
    """

    recipe: Recipe
    delivered: str = ""
    next_index: int = 0
    calls: int = 0
    """Number of tool calls that the stream has so far."""
    stream: bytes = b""
    """Id of the stream."""
    fate: RunFate = field(default_factory=RunFate)
    """Is changed by the worker while `produce` runs."""
    stages: list[TimedStage] = field(default_factory=list)
    """The times of a pipeline's stages. The producer of the pipeline fills this list."""


# ---- the outputs of a producer ----


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
    """Text that replaces all revisions since the last Text or the last final revision.

    `final` is True if no later revision replaces this text. `stability` is an estimate, from 0 to
    1, of how likely an interim text will not change any more; it is not used for a final one.
    """

    text: str
    final: bool = False
    stability: float = 0.0


@dataclass(frozen=True, slots=True)
class Data:
    """A message of any number of bytes, such as a chunk of audio."""

    data: bytes


@dataclass(frozen=True, slots=True)
class Vector:
    """An embedding: finite numbers, stored as fp32.

    A vector that is too large for a frame is sent as a Data message of little-endian fp32 numbers.
    """

    values: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Label:
    """The name of a class, and the classifier's confidence in it, from 0 to 1."""

    name: str
    confidence: float


@dataclass(frozen=True, slots=True)
class Remark:
    """A message about the stream for its readers; `code` is a word such as `inexact`.

    The code `retried` is reserved for the origin.
    """

    code: str
    message: str


@dataclass(frozen=True, slots=True)
class End:
    """The last output of a stream; if a producer just returns, the stream ends with `End()`.

    `total_tokens` is the number of generated tokens, `prompt_tokens` that of the input; both are 0
    if tokens are not counted. `reasoning_tokens` of the generated tokens were reasoning, and
    `cached_tokens` of the input came from a cache. `message` says why the stream failed or was
    filtered; with the reason STOP it is the stop sequence of the request that ended the text.
    """

    reason: FinishReason = FinishReason.STOP
    total_tokens: int = 0
    prompt_tokens: int = 0
    message: str | None = None
    retryable: bool = False
    cached_tokens: int = 0
    reasoning_tokens: int = 0


Output = Text | Reasoning | CallPiece | Revision | Data | Vector | Label | Remark | End


# ---- the producer ----


class Resumption(StrEnum):
    """How a stream continues on another worker after its worker has died."""

    REPEATS = "repeats"
    """The same request always gives the same outputs. The request is run again, and outputs that
    are already logged are skipped."""
    CONTINUES = "continues"
    """The producer continues after the text `Request.delivered`. The result may differ from an
    uninterrupted one, so a Notice in the stream warns its readers."""
    ENDS = "ends"
    """The producer cannot continue a stream. The stream ends as `origin_lost`, and clients may send
    their requests again."""


@dataclass(frozen=True, slots=True)
class About:
    """A producer's description of itself.

    `name` is the name of the model in requests, unless the settings give another one. A stream
    continues only on a producer with the same `fingerprint`. `device` is only shown to people.
    `offers` has the optional fields of an Open that the producer supports, out of `logprobs`,
    `format` and `tools`. `retries` means that the producer repeats failed requests itself, so the
    origin does not retry a stream that the producer has ended as retryable.
    """

    name: str
    fingerprint: str
    resumption: Resumption
    device: str = "cpu"
    offers: tuple[str, ...] = ()
    retries: bool = False


class Producer(Protocol):
    """The interface of a producer.

    A producer serves many requests at the same time, up to the setting `text_streams`.
    """

    @property
    def about(self) -> About: ...

    def produce(self, request: Request) -> AsyncGenerator[Output, None]:
        """Yield the outputs of one request.

        The generator is resumed only when there is room for the next output. If the stream is
        cancelled, CancelledError or GeneratorExit is raised in the generator. An error of
        `tailrace.ledger.errors` ends the stream as failed with the error's message. Any other error
        ends the stream as failed, too, but its details appear only in the origin's log. If the
        error, or the End, is retryable, the origin first runs the request once more, provided that
        the stream can continue (see `Resumption`).
        """

    async def close(self) -> None:
        """Release the producer's resources; no more requests follow."""


async def load_producer(place: str) -> Producer:
    """Call the factory `module:factory`, and return the producer that it makes.

    Raises ConfigError if the result is not a producer.
    """
    shape = "write module:factory; install the module, or start the origin in its folder"
    factory = load_plugin(place, "origin.producer", shape)
    if not callable(factory):
        raise _is_no_producer(place, "is not a function or class")
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
