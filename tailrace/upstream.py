"""The OpenAI-compatible server behind `tailrace up --upstream`.

It is asked for its models before anything starts, so that a wrong URL, key or model name is one
line on the terminal and leaves nothing behind.
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
"""Maximum number of models that are served without being named; each takes a process."""
MAX_SHOWN = 10
"""Maximum number of model names in an error message."""


@dataclass(frozen=True, slots=True)
class UpstreamServer:
    """A server that answered, and the models of it that are served."""

    url: str
    key_variable: str | None
    """Environment variable that holds the server's API key."""
    models: tuple[str, ...]

    def origin_flags(self, folder: Path) -> dict[str, object]:
        """Return the flags of `tailrace origin`; several models take a file in `folder`."""
        if len(self.models) > 1:
            file = folder / "upstream.toml"
            file.write_text("\n".join(map(self._table, self.models)), "utf-8")
            return {"--config": file}
        flags: dict[str, object] = {"--upstream": self.url, "--upstream-model": self.models[0]}
        if self.key_variable is not None:
            flags["--upstream-key-env"] = self.key_variable
        return flags

    def _table(self, model: str) -> str:
        # A JSON string is a TOML basic string. Such a model takes no memory here, so it stays.
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
    """Ask the server at `url` for its models and choose those that are served.

    `wanted` are names that the user gave; without one, every model that the server lists is served.

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
                hint=f"--upstream {url}/v1",
            )
    return UpstreamServer(url, key_variable, choose(url, listed, wanted))


def choose(url: str, listed: list[str] | None, wanted: Sequence[str]) -> tuple[str, ...]:
    """Return the models to serve: those wanted, or else every model that is listed.

    Raises ConfigError if a wanted one is not listed, or none is wanted and too many are listed.
    """
    if not listed:
        if wanted:
            return tuple(
                dict.fromkeys(wanted)
            )  # a server without a list: requests will show if they exist
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
            f"{url} lists {len(chosen)} models, more than the {MAX_MODELS} that are served unnamed",
            field="--model",
            hint=f"name those to serve: --model {chosen[0]} --model {chosen[1]}",
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
            "the URL holds a password",
            field="--upstream",
            hint="put the key into an environment variable and name it: --api-key-env NAME",
        )
    return url.rstrip("/")


def _refused(url: str, key_variable: str | None, error: ConfigError) -> ConfigError:
    hint = (
        f"{key_variable} holds a key that the server does not take"
        if key_variable is not None
        else "if the server needs an API key, name the variable that holds it: --api-key-env NAME"
    )
    return ConfigError(f"{url}: {error.message}", field="--upstream", hint=hint)


async def _answers(url: str) -> bool:
    """Return True if a list of models is served below `url`."""
    async with client_of(OriginConfig(upstream=url)) as client:
        try:
            return bool(await list_models(client))
        except (ConfigError, Unavailable):
            return False
