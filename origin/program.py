"""Which program a worker slot runs, and its command line: written here, and read here.

The supervisor's side needs no torch; what opens a producer imports it only then.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from pathlib import Path

from ledger.errors import ConfigError
from origin.config import OriginConfig
from origin.embedder import is_classifier, is_embedding, open_embedder
from origin.producer import Producer, load_producer
from origin.upstream import UpstreamSettings
from origin.upstream_call import Patience
from origin.upstream_probe import open_upstream

Progress = Callable[[str, int, int], None]
"""Told the stage, and how many units of how many are done; 0 where nobody knows."""

TOKENS = "origin.worker"
TEXT = "origin.text_worker"


def makes_tokens(config: OriginConfig) -> bool:
    """Whether the workers are of kind `tokens`: our own decoder, with a tokenizer to admit by."""
    if config.producer is not None or config.upstream is not None:
        return False
    return not (is_embedding(config.model) or is_classifier(config.model))


def program(config: OriginConfig) -> list[str]:
    """The module that a slot runs, and its arguments but for the socket."""
    if makes_tokens(config):
        return [TOKENS, *_written(_engine(config)), *_guessing(config)]
    flags = {
        **_choice(config),
        "--name": config.model_name,
        "--streams": config.text_streams,
        "--log-level": config.log_level,
    }
    return [TEXT, *_written(flags)]


def _engine(config: OriginConfig) -> dict[str, object]:
    return {
        "--model": config.model.resolve(),
        "--name": config.served_name,
        "--device": config.device,
        "--kv-mib": config.kv_mib,
        "--running": config.running_streams,
        "--step-ms": config.step_ms,
        "--filter": config.filter,
        "--draft-model": config.draft_model and config.draft_model.resolve(),
    }


def _guessing(config: OriginConfig) -> list[str]:
    wanted = config.speculate == "prompt-lookup" and config.draft_model is None
    return ["--prompt-lookup"] if wanted else []


def _choice(config: OriginConfig) -> dict[str, object]:
    if config.upstream is not None:
        return {
            "--upstream": config.upstream,
            "--upstream-model": config.upstream_model,
            "--upstream-key-env": config.upstream_key_env,
            "--upstream-lost": config.upstream_lost,
            "--upstream-connect-s": config.upstream_connect_s,
            "--upstream-first-token-s": config.upstream_first_token_s,
            "--upstream-between-tokens-s": config.upstream_between_tokens_s,
            "--upstream-retry-s": config.upstream_retry_s,
        }
    if config.producer is not None:
        return {"--producer": config.producer}
    return {"--embed": config.model.resolve(), "--device": config.device}


def _written(flags: dict[str, object]) -> list[str]:
    # With an equals sign, so that a value that begins with a dash is none the worse for it.
    return [f"{flag}={value}" for flag, value in flags.items() if value is not None]


def text_parser() -> argparse.ArgumentParser:
    """The command line of `origin.text_worker`."""
    parser = argparse.ArgumentParser(prog=f"python -m {TEXT}", allow_abbrev=False)
    parser.add_argument("--socket", type=Path, required=True, help="the supervisor's Unix socket")
    parser.add_argument("--name", help="the model's name in requests, instead of the producer's")
    parser.add_argument("--streams", type=int, default=64, help="produced at the same time")
    parser.add_argument("--log-level", default="info", help="least level that is logged")
    parser.add_argument("--device", default="auto", help="where an embedding model runs")
    choice = parser.add_mutually_exclusive_group(required=True)
    choice.add_argument("--producer", metavar="MODULE:FACTORY", help="any Python producer")
    choice.add_argument("--embed", type=Path, metavar="DIR", help="embedding or classifying model")
    choice.add_argument("--upstream", metavar="URL", help="an OpenAI-compatible server's /v1")
    patience = Patience()
    parser.add_argument("--upstream-model", help="its name there")
    parser.add_argument("--upstream-key-env", help="variable that holds the server's key")
    parser.add_argument("--upstream-lost", choices=("continue", "end"), default="continue")
    parser.add_argument("--upstream-connect-s", type=float, default=patience.connect_s)
    parser.add_argument("--upstream-first-token-s", type=float, default=patience.first_token_s)
    parser.add_argument(
        "--upstream-between-tokens-s", type=float, default=patience.between_tokens_s
    )
    parser.add_argument("--upstream-retry-s", type=float, default=patience.retry_s)
    return parser


async def open_producer(options: argparse.Namespace, progress: Progress) -> Producer:
    """What the command line names, ready to be asked; raises a TailraceError if it cannot be."""
    if options.upstream is not None:
        return await open_upstream(_upstream_settings(options), progress, options.streams)
    if options.producer is not None:
        progress(f"making {options.producer}", 0, 1)
        return await load_producer(options.producer)
    progress("loading the model", 0, 1)
    return await open_embedder(options.embed, options.device)


def _upstream_settings(options: argparse.Namespace) -> UpstreamSettings:
    return UpstreamSettings(
        url=options.upstream,
        model=options.upstream_model,
        key=_key(options.upstream_key_env),
        lost=options.upstream_lost,
        patience=Patience(
            connect_s=options.upstream_connect_s,
            first_token_s=options.upstream_first_token_s,
            between_tokens_s=options.upstream_between_tokens_s,
            retry_s=options.upstream_retry_s,
        ),
    )


def _key(variable: str | None) -> str | None:
    if variable is None:
        return None
    key = os.environ.get(variable)
    if not key:
        raise ConfigError(
            f"the variable {variable} is not set",
            field="origin.upstream_key_env",
            hint="export the server's key in it",
        )
    return key
