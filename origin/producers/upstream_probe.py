"""Is the upstream server there, and what does it serve? Asked once, before the first stream."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable

import httpx
import structlog

from ledger.errors import ConfigError, TailraceError, Unavailable
from origin.config import OriginConfig
from origin.producers.upstream import Retry, Upstream
from origin.producers.upstream_call import lost
from origin.producers.upstream_reply import refusal

MAX_LIST_BYTES = 1 << 20
ANSWER_S = 10.0
"""How long the list of models may take."""
MAX_NAMED = 10
"""Models that an error names."""

log = structlog.get_logger("upstream")

Progress = Callable[[str, int, int], None]
"""Told the stage, and how many units of how many are done; 0 where nobody knows."""


async def open_upstream(
    config: OriginConfig, progress: Progress, retry: Retry | None = None
) -> Upstream:
    """The producer, once the server answers; tries until it does, and `progress` says why.

    Raises ConfigError where it does answer and no patience will help.
    """
    retry = retry or Retry()
    client = client_of(config)
    try:
        failures = 0
        while True:
            try:
                models = await _models(client)
                return Upstream(config, choose_model(models, config.upstream_model), client, retry)
            except Unavailable as error:
                failures += 1
                log.warning("upstream.away", url=config.upstream, error=str(error), tries=failures)
                progress(f"after {failures} tries {error.message}", 0, 0)
                failure = error
            await retry.wait(failures, failure)
    except BaseException:
        await client.aclose()
        raise


def client_of(config: OriginConfig) -> httpx.AsyncClient:
    """A connection for each stream; timeouts other than that of connecting are the call's."""
    streams = config.text_streams
    # Compressed event streams gather several tokens before they come out.
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
            f"the variable {variable} is not set",
            field="origin.upstream_key_env",
            hint="export the server's key in it",
        )
    return key


async def _models(client: httpx.AsyncClient) -> list[str] | None:
    """The names of the server's models; None where it answers, and keeps no list."""
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
    raise said if isinstance(said, Unavailable) else _config_error(said)


def _names(body: bytes) -> list[str] | None:
    try:
        listed = json.loads(body)["data"]
        return [str(model["id"]) for model in listed]
    except (ValueError, RecursionError, KeyError, TypeError):
        return None


def choose_model(models: list[str] | None, wanted: str | None) -> str:
    """The wanted model, or the only one; ConfigError where that leaves a choice."""
    if wanted is not None:
        if models is not None and wanted not in models:
            # Some servers take names that they do not list: aliases, adapters.
            log.warning("upstream.model_not_listed", model=wanted, listed=models[:MAX_NAMED])
        return wanted
    if models is None or len(models) != 1:
        some = ", ".join((models or [])[:MAX_NAMED])
        raise ConfigError(
            f"the upstream server lists {len(models)} models: {some}"
            if models
            else "the upstream server lists no models",
            field="origin.upstream_model",
            hint="name the one to serve: --upstream-model NAME",
        )
    return models[0]


def _config_error(error: TailraceError) -> ConfigError:
    return ConfigError(
        error.message,
        field="origin.upstream",
        hint="give the URL that ends in /v1; --upstream-key-env names the variable of its key",
    )
