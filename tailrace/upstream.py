"""The OpenAI-compatible server behind `tailrace up --upstream`.

The command requests the server's list of models before it starts any process. So a wrong URL, key
or model name causes a short error at once.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from tailrace.ledger.errors import ConfigError, Unavailable
from tailrace.ledger.validation import closest_name
from tailrace.origin.config import OriginConfig
from tailrace.origin.producers.upstream import client_of, list_models
from tailrace.origin.producers.upstream_away import reason_of

MAX_MODELS = 16
"""Maximum number of models that are served if the user names none. Each takes a worker process."""
MAX_SHOWN = 10
"""Maximum number of model names in an error message."""


@dataclass(frozen=True, slots=True)
class UpstreamServer:
    """An OpenAI-compatible server that has answered, and its models that will be served."""

    url: str
    key_variable: str | None
    """Environment variable that holds the server's API key."""
    models: tuple[str, ...]

    def origin_flags(self, folder: Path) -> dict[str, object]:
        """Return the flags for `tailrace origin` that serve these models.

        Several models need a settings file, which is written into `folder`.
        """
        if len(self.models) > 1:
            file = folder / "upstream.toml"
            file.write_text("\n".join(map(self._table, self.models)), "utf-8")
            return {"--config": file}
        flags: dict[str, object] = {"--upstream": self.url, "--upstream-model": self.models[0]}
        if self.key_variable is not None:
            flags["--upstream-key-env"] = self.key_variable
        return flags

    def _table(self, model: str) -> str:
        # Every JSON string is a valid TOML string. `pin`: a model of an upstream server needs no
        # GPU memory here, so there is no reason to unload it.
        lines = [
            f"[models.{json.dumps(model)}]",
            f"upstream = {json.dumps(self.url)}",
            f"upstream_model = {json.dumps(model)}",
            "pin = true",
        ]
        if self.key_variable is not None:
            lines.append(f"upstream_key_env = {json.dumps(self.key_variable)}")
        return "\n".join(lines) + "\n"


async def find_upstream(
    url: str, key_variable: str | None, wanted: Sequence[str]
) -> UpstreamServer:
    """Request the models of the server at `url`, and choose those that will be served.

    `wanted` are the models that the user named; if there are none, all listed models are served.

    Raises ConfigError if the URL, the key or a name is wrong, or the server does not answer.
    """
    url = _checked(url)
    if key_variable is not None and not os.environ.get(key_variable):
        raise ConfigError(
            f"the environment variable {key_variable} is not set",
            field="--api-key-env",
            hint=f"export {key_variable}=KEY, with the API key of {url}",
        )
    config = OriginConfig(upstream=url, upstream_key_env=key_variable)
    async with client_of(config) as client:
        try:
            listed = await list_models(client)
        except Unavailable as error:
            raise ConfigError(
                f"no OpenAI-compatible server answers at {url} ({reason_of(error)})",
                field="--upstream",
                hint="start the server, or correct the URL; it usually ends in /v1",
            ) from error
        except ConfigError as error:
            raise _refused(url, key_variable, error) from error
        if listed is None and not url.endswith("/v1") and await _answers(f"{url}/v1"):
            raise ConfigError(
                f"{url} lists no models, but {url}/v1 does",
                field="--upstream",
                hint=f"use --upstream {url}/v1",
            )
    return UpstreamServer(url, key_variable, choose(url, listed, wanted))


def choose(url: str, listed: list[str] | None, wanted: Sequence[str]) -> tuple[str, ...]:
    """Return the models to serve: the `wanted` ones, or all listed ones if none are wanted.

    Raises ConfigError if a wanted model is not listed, or if none is wanted and there are more than
    MAX_MODELS.
    """
    if not listed:
        if wanted:
            # The server has no list of models, so only requests will show if these models exist.
            return tuple(dict.fromkeys(wanted))
        raise ConfigError(
            f"{url} lists no models",
            field="--model",
            hint="name the model to serve: --model NAME",
        )
    for name in wanted:
        if name not in listed:
            near = closest_name(name, listed)
            shown = ", ".join(listed[:MAX_SHOWN]) + (", …" if len(listed) > MAX_SHOWN else "")
            guess = f"did you mean {near}? " if near else ""
            raise ConfigError(
                f"{url} has no model {name!r}", field="--model", hint=f"{guess}it lists {shown}"
            )
    chosen = tuple(dict.fromkeys(wanted or listed))
    if not wanted and len(chosen) > MAX_MODELS:
        raise ConfigError(
            f"{url} lists {len(chosen)} models; at most {MAX_MODELS} are served without --model",
            field="--model",
            hint=f"name the models to serve: --model {chosen[0]} --model {chosen[1]}",
        )
    return chosen


def _checked(url: str) -> str:
    try:
        parts = urlsplit(url)
        is_open = parts.scheme in ("http", "https") and bool(parts.hostname)
    except ValueError:
        is_open = False
    if not is_open:
        raise ConfigError(
            f"{url!r} is not an http:// or https:// URL",
            field="--upstream",
            hint="write --upstream http://127.0.0.1:8000/v1",
        )
    if "@" in parts.netloc:
        raise ConfigError(
            "the URL contains a password",
            field="--upstream",
            hint="put the key into an environment variable and name it: --api-key-env NAME",
        )
    return url.rstrip("/")


def _refused(url: str, key_variable: str | None, error: ConfigError) -> ConfigError:
    hint = (
        f"the server refuses the API key in {key_variable}"
        if key_variable is not None
        else "if the server needs an API key, name the variable that holds it: --api-key-env NAME"
    )
    return ConfigError(f"{url}: {error.message}", field="--upstream", hint=hint)


async def _answers(url: str) -> bool:
    """Return True if the server at `url` returns a list of models."""
    async with client_of(OriginConfig(upstream=url)) as client:
        try:
            return bool(await list_models(client))
        except (ConfigError, Unavailable):
            return False
