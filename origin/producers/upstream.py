"""Any OpenAI-compatible server as a producer; clients can resume its streams like all others.

If a server is lost before its first token, the request is sent again. If it is lost later, the
setting `upstream_lost` decides. `continue` requests the text after the delivered text, and a Notice
says that the stream is inexact, because no such server can reproduce the tokens of an uninterrupted
run. `end` ends the stream as `origin_lost`. A lost worker is handled in the same way: the next
worker gets the delivered text from the ledger.

Tokens are counted as pieces of text and reasoning until the server reports its own count, so a
continuation may come out a little longer or shorter than requested. A server that exceeds
`max_tokens` is disconnected, and the stream ends there.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from random import Random

import httpx
import structlog

from tailrace.ledger.errors import ConfigError, TailraceError, Unavailable
from tailrace.ledger.flow.backoff import Backoff
from tailrace.ledger.frame import FinishReason
from tailrace.origin.config import OriginConfig
from tailrace.origin.producer import About, End, Output, Reasoning, Request, Resumption
from tailrace.origin.producers.production import INEXACT
from tailrace.origin.producers.upstream_away import AwayLog, reason_of
from tailrace.origin.producers.upstream_call import Piece, UpstreamCall, body_of, lost
from tailrace.origin.producers.upstream_reply import refusal
from tailrace.origin.tool_calls import CallPiece

RETRY_MIN_S = 0.2
RETRY_MAX_S = 5.0
"""Maximum wait in seconds before a request is repeated. The upper bound of the random wait doubles
with each failure until it reaches this maximum."""
SETTLED_PIECES = 16
"""Pieces of text after which a try counts as successful, and earlier failures are forgotten."""
BROKEN = frozenset(("upstream_failed", "upstream_rubbish"))
BROKEN_TRIES = 5
"""Number of consecutive broken answers after which a server is not retried. A server that is only
starting would refuse connections or answer 503 instead."""

MAX_LIST_BYTES = 1 << 20
ANSWER_S = 10.0
"""Timeout in seconds for the list of models."""
MAX_NAMED = 10
"""Maximum number of models that an error message lists."""
Progress = Callable[[str, int, int], None]
"""Callback (stage, done, total); an unknown number is 0."""

log = structlog.get_logger("upstream")


@dataclass(frozen=True, slots=True)
class Retry:
    """Back-off between tries; tests replace the random numbers, the sleep and the clock."""

    random: Random = field(default_factory=Random)
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    clock: Callable[[], float] = time.monotonic

    async def wait(self, failures: int, error: TailraceError) -> None:
        """Wait after `failures` failures, at least for the Retry-After of the last one, `error`."""
        backoff = Backoff(RETRY_MIN_S, RETRY_MAX_S, self.random, failures - 1)
        least_s = (error.retry_after_ms or 0) / 1000
        await self.sleep(max(least_s, backoff.next_delay_s()))


@dataclass(slots=True)
class _Said:
    """The output of one stream so far: its text in parts, and counts of pieces.

    Attributes:
        texts: Number of pieces of text; `thoughts` and `calls` count those of reasoning and calls.
        untold: True if there were pieces since the last Notice.
        failures: Number of failed tries since the last try that made SETTLED_PIECES.
        broken: Number of the last failures in a row that were invalid answers.
        lost_s: Time of the first of the `failures`, in seconds by the clock of `Retry`.
        tried: Number of pieces of text in the current try.
    """

    parts: list[str]
    texts: int
    thoughts: int = 0
    calls: int = 0
    untold: bool = False
    failures: int = 0
    broken: int = 0
    lost_s: float = 0.0
    tried: int = 0

    @property
    def made(self) -> int:
        """Number of generated tokens, counting each piece as one."""
        return self.texts + self.thoughts + self.calls

    def add(self, piece: Piece) -> None:
        self.untold = True
        if isinstance(piece, CallPiece):
            self.calls += 1
            return
        if isinstance(piece, Reasoning):
            self.thoughts += 1
            return
        self.parts.append(piece.text)
        self.texts += 1
        self.tried += 1
        if self.tried == SETTLED_PIECES:
            self.failures = self.broken = 0

    def begin_try(self) -> None:
        self.tried = 0
        if not self.parts:
            self.thoughts = 0  # without text to continue, the server starts from the beginning


class Upstream:
    """The producer for an upstream server; `client` has the server's URL as its base."""

    def __init__(
        self, config: OriginConfig, model: str, client: httpx.AsyncClient, retry: Retry
    ) -> None:
        self._config = config
        self._model = model
        self._client = client
        self._retry = retry
        goes_on = config.upstream_lost == "continue"
        # The fingerprint does not include the server's address, so that a stream can be continued
        # by any server that has this model.
        self.about = About(
            name=model,
            fingerprint=f"upstream {model}",
            resumption=Resumption.CONTINUES if goes_on else Resumption.ENDS,
            device="upstream",
            offers=("logprobs", "format", "tools"),
            retries=True,
        )

    async def produce(self, request: Request) -> AsyncGenerator[Output, None]:
        recipe, delivered = request.recipe, request.delivered
        path = "chat/completions" if recipe.messages else "completions"
        parts = [delivered] if delivered else []
        said = _Said(parts, request.next_index if parts else 0)
        while said.made < recipe.max_tokens:
            said.begin_try()
            body = body_of(recipe, self._model, "".join(said.parts), said.made)
            call = UpstreamCall(self._client, path, body, self._config, recipe.trace)
            before = replace(said)
            try:
                async with aclosing(call.pieces()) as pieces:
                    async for piece in pieces:
                        if _is_over(call, said, before, recipe.max_tokens):
                            call.finish = FinishReason.LENGTH
                            break
                        said.add(piece)
                        yield piece
                yield _end(call, said, before, recipe.stop)
                return
            except TailraceError as error:
                if (end := self._give_up(error, said)) is not None:
                    yield end
                    return
                failure = error
            if said.untold:
                said.untold = False
                yield INEXACT
            await self._retry.wait(said.failures, failure)
        yield End(FinishReason.LENGTH, total_tokens=said.made)

    async def close(self) -> None:
        await self._client.aclose()

    def _give_up(self, error: TailraceError, said: _Said) -> End | None:
        """Return the stream's end, or None to try the request again.

        Raises `error` if the server refuses a request before any output. A refused continuation
        counts as a loss of the server, since the request was accepted at first.
        """
        cause = repr(error.__cause__) if error.__cause__ is not None else None
        log.warning("upstream.failed", error=str(error), cause=cause, pieces=said.made)
        if not isinstance(error, Unavailable) and not (said.parts or said.calls):
            raise error
        now = self._retry.clock()
        said.lost_s = said.lost_s if said.failures else now
        said.failures += 1
        said.broken = said.broken + 1 if error.code in BROKEN else 0
        goes_on = self._config.upstream_lost == "continue" and not said.calls
        may_go_on = goes_on or not (said.parts or said.calls)
        has_time = now - said.lost_s < self._config.upstream_retry_s
        is_broken = said.broken == BROKEN_TRIES
        if isinstance(error, Unavailable) and may_go_on and has_time and not is_broken:
            return None
        return End(FinishReason.ORIGIN_LOST, said.made, message=error.message, retryable=True)


def _is_over(call: UpstreamCall, said: _Said, before: _Said, max_tokens: int) -> bool:
    """Return True if one more piece would exceed `max_tokens`.

    Tokens are counted as pieces, or by the server if its count is higher.
    """
    counted = call.usage.completion_tokens if call.usage is not None else 0
    return max(said.made + 1, before.made + counted) > max_tokens


def _end(call: UpstreamCall, said: _Said, before: _Said, stops: Sequence[str]) -> End:
    """Return the end that the server reports.

    `before` has the counts at the beginning of this call. The server counts the text that the
    stream had then as part of the prompt. `stops` are the stop sequences of the request.
    """
    assert call.finish is not None  # without a finish reason pieces() raises an error
    usage, finish = call.usage, call.finish
    # For required tool calls some servers report STOP as the finish reason.
    if said.calls and finish is FinishReason.STOP:
        finish = FinishReason.TOOL_CALLS
    stop = call.stop if finish is FinishReason.STOP and call.stop in stops else None
    if usage is None:
        return End(finish, total_tokens=said.made, message=stop)
    return End(
        finish,
        message=stop,
        total_tokens=before.made + usage.completion_tokens,
        prompt_tokens=max(0, usage.prompt_tokens - before.texts),
        cached_tokens=usage.cached_tokens,
        reasoning_tokens=usage.reasoning_tokens,
    )


async def open_upstream(
    config: OriginConfig, progress: Progress, retry: Retry | None = None
) -> Upstream:
    """Return the producer once the server answers.

    `progress` is called after each failed try with the reason. Raises ConfigError if the server
    answers, but another try cannot help.
    """
    retry = retry or Retry()
    client = client_of(config)
    away, url = AwayLog(retry.clock), config.upstream
    try:
        failures = 0
        while True:
            try:
                models = await list_models(client)
                made = Upstream(config, choose_model(models, config.upstream_model), client, retry)
                if failures:
                    log.info("upstream.back", url=url, tries=failures)
                return made
            except Unavailable as error:
                failures += 1
                if away.is_due(reason := reason_of(error)):
                    log.warning("upstream.away", url=url, reason=reason, tries=failures)
                progress(f"after {failures} tries {error.message}", 0, 0)
                failure = error
            await retry.wait(failures, failure)
    except BaseException:
        await client.aclose()
        raise


def client_of(config: OriginConfig) -> httpx.AsyncClient:
    """Return an HTTP client with a connection per stream.

    It enforces a timeout only for connecting; callers enforce the others.
    """
    streams = config.text_streams
    # Compressed event streams would buffer several tokens.
    headers = {"Accept-Encoding": "identity"}
    if config.upstream_key_env is not None:
        headers["Authorization"] = f"Bearer {_key(config.upstream_key_env)}"
    return httpx.AsyncClient(
        base_url=config.upstream or "",
        headers=headers,
        timeout=httpx.Timeout(None, connect=config.upstream_connect_s),
        limits=httpx.Limits(max_connections=streams, max_keepalive_connections=streams),
    )


def _key(variable: str) -> str:
    key = os.environ.get(variable)
    if not key:
        raise ConfigError(
            f"the environment variable {variable} is not set",
            field="origin.upstream_key_env",
            hint="export the server's API key in this variable",
        )
    return key


async def list_models(client: httpx.AsyncClient) -> list[str] | None:
    """Return the names of the server's models; None if it answers but keeps no list."""
    try:
        async with asyncio.timeout(ANSWER_S), client.stream("GET", "models") as response:
            body = b""
            async for data in response.aiter_raw():
                body += data
                if len(body) > MAX_LIST_BYTES:
                    return None
    except TimeoutError as error:
        raise Unavailable("the upstream server does not answer") from error
    except httpx.TransportError as error:
        raise lost(error) from error
    if response.status_code == 200:
        return _names(body)
    if response.status_code in (404, 405, 501):
        return None
    said = refusal(response.status_code, body, response.headers.get("retry-after", ""))
    if isinstance(said, Unavailable):
        raise said
    raise ConfigError(
        said.message,
        field="origin.upstream",
        hint="give the URL that ends in /v1; --upstream-key-env names the variable of its key",
    )


def _names(body: bytes) -> list[str] | None:
    try:
        listed = json.loads(body)["data"]
        return [str(model["id"]) for model in listed]
    except (ValueError, RecursionError, KeyError, TypeError):
        return None


def choose_model(models: list[str] | None, wanted: str | None) -> str:
    """Return the wanted model, or the only one. Raises ConfigError if there are several."""
    if wanted is not None:
        if models is not None and wanted not in models:
            # Some servers accept names that they do not list: aliases, adapters.
            log.warning("upstream.model_not_listed", model=wanted, listed=models[:MAX_NAMED])
        return wanted
    if models is None or len(models) != 1:
        some = ", ".join((models or [])[:MAX_NAMED])
        raise ConfigError(
            f"the upstream server lists {len(models)} models: {some}"
            if models
            else "the upstream server lists no models",
            field="origin.upstream_model",
            hint="name the model to serve: --upstream-model NAME",
        )
    return models[0]
