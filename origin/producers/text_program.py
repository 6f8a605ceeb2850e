"""The command line of `origin.producers.text_worker`, and the producer that it names.

`origin.program` writes it.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from pathlib import Path

from ledger.errors import ConfigError
from origin.producer import Producer, load_producer
from origin.producers.embedder import open_embedder
from origin.producers.upstream import UpstreamSettings
from origin.producers.upstream_call import Patience
from origin.producers.upstream_probe import open_upstream
from origin.program import TEXT

Progress = Callable[[str, int, int], None]
"""Told the stage, and how many units of how many are done; 0 where nobody knows."""


def text_parser() -> argparse.ArgumentParser:
    """The command line of `origin.producers.text_worker`."""
    parser = argparse.ArgumentParser(prog=f"python -m {TEXT}", allow_abbrev=False)
    parser.add_argument("--socket", type=Path, required=True, help="the supervisor's Unix socket")
    parser.add_argument("--name", help="the model's name in requests, instead of the producer's")
    parser.add_argument("--streams", type=int, default=64, help="produced at the same time")
    parser.add_argument("--log-level", default="info", help="least level that is logged")
    parser.add_argument("--device", default="auto", help="where an embedding model runs")
    parser.add_argument("--filter", help="MODULE:FACTORY of an origin.filter.Filter")
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
