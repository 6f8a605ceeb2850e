"""Any OpenAI-compatible server as a producer: its tokens are logged and resumable like ours.

A server that is lost before its first token is asked again, as if nothing had been. Later,
`lost = continue` asks for the rest of what was delivered, and a Notice says that this is
inexact: no such server can be asked for the tokens that the uninterrupted run would have drawn.
`lost = end` ends the stream as `origin_lost`. A worker that dies is no different: its successor
is given what the ledger has.

Tokens are counted by the pieces of text that they come in, until the server's own count of the
whole is known; a continuation may therefore come out a little longer or shorter than asked for.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from random import Random
from typing import Literal

import httpx
import structlog

from ledger.backoff import Backoff
from ledger.errors import TailraceError, Unavailable
from ledger.frame import FinishReason
from origin.producer import About, End, Output, Request, Resumption, Text
from origin.producers.production import INEXACT
from origin.producers.upstream_call import Patience, UpstreamCall
from origin.producers.upstream_request import body_of, path_of

RETRY_MIN_S = 0.2
RETRY_MAX_S = 5.0
"""Wait before a request is tried again; its ceiling doubles with each failure."""

log = structlog.get_logger("upstream")


@dataclass(frozen=True, slots=True)
class UpstreamSettings:
    """`url` ends in /v1 as a rule; `key` is sent as a bearer token."""

    url: str
    model: str | None = None
    key: str | None = None
    lost: Literal["continue", "end"] = "continue"
    patience: Patience = field(default_factory=Patience)


@dataclass(frozen=True, slots=True)
class Retry:
    """When to try again; all three parts are injected in tests."""

    random: Random = field(default_factory=Random)
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    clock: Callable[[], float] = time.monotonic

    async def wait(self, failures: int, error: TailraceError) -> None:
        """Wait after so many failures; at least as long as the last one asked for."""
        backoff = Backoff(RETRY_MIN_S, RETRY_MAX_S, self.random, failures - 1)
        least_s = (error.retry_after_ms or 0) / 1000
        await self.sleep(max(least_s, backoff.next_delay_s()))


@dataclass(slots=True)
class _Said:
    """One stream's text so far, in parts, and how many `pieces` came of it.

    `told` is the parts that there were at the last Notice. `failures` were there since the last
    piece, the first of them at `lost_s` of the clock.
    """

    parts: list[str]
    pieces: int
    told: int
    failures: int = 0
    lost_s: float = 0.0


class Upstream:
    """The producer. `client` has the server's URL as its base."""

    def __init__(
        self, settings: UpstreamSettings, model: str, client: httpx.AsyncClient, retry: Retry
    ) -> None:
        self._settings = settings
        self._model = model
        self._client = client
        self._retry = retry
        goes_on = settings.lost == "continue"
        # Not the address: a stream goes on with whatever serves this model now, as well as it may.
        self.about = About(
            name=model,
            fingerprint=f"upstream {model}",
            resumption=Resumption.CONTINUES if goes_on else Resumption.ENDS,
            device="upstream",
        )

    async def produce(self, request: Request) -> AsyncGenerator[Output, None]:
        recipe, delivered = request.recipe, request.delivered
        parts = [delivered] if delivered else []
        said = _Said(parts, request.next_index if parts else 0, len(parts))
        while said.pieces < recipe.max_tokens:
            body = body_of(recipe, self._model, "".join(said.parts), said.pieces)
            before = said.pieces
            call = UpstreamCall(self._client, path_of(recipe), body, self._settings.patience)
            try:
                async with aclosing(call.texts()) as texts:
                    async for text in texts:
                        said.parts.append(text)
                        said.pieces += 1
                        said.failures = 0
                        yield Text(text)
                yield _end(call, said, before)
                return
            except TailraceError as error:
                if (end := self._give_up(error, said)) is not None:
                    yield end
                    return
                failure = error
            if said.told < len(said.parts):
                said.told = len(said.parts)
                yield INEXACT
            await self._retry.wait(said.failures, failure)
        yield End(FinishReason.LENGTH, total_tokens=said.pieces)

    async def close(self) -> None:
        await self._client.aclose()

    def _give_up(self, error: TailraceError, said: _Said) -> End | None:
        """The stream's end, unless the request is to be tried again; raises what says no.

        A refused continuation is a loss: nothing was wrong with the request when it began.
        """
        cause = repr(error.__cause__) if error.__cause__ is not None else None
        log.warning("upstream.failed", error=str(error), cause=cause, pieces=said.pieces)
        if not isinstance(error, Unavailable) and not said.parts:
            raise error
        now = self._retry.clock()
        said.lost_s = said.lost_s if said.failures else now
        said.failures += 1
        may_go_on = self._settings.lost == "continue" or not said.parts
        has_time = now - said.lost_s < self._settings.patience.retry_s
        if isinstance(error, Unavailable) and may_go_on and has_time:
            return None
        return End(FinishReason.ORIGIN_LOST, said.pieces, message=error.message, retryable=True)


def _end(call: UpstreamCall, said: _Said, before: int) -> End:
    """As the server tells it; `before` pieces came from elsewhere and were its prompt."""
    assert call.finish is not None  # or texts() would have raised
    usage = call.usage
    if usage is None:
        return End(call.finish, total_tokens=said.pieces)
    return End(
        call.finish,
        total_tokens=before + usage.completion_tokens,
        prompt_tokens=max(0, usage.prompt_tokens - before),
    )
