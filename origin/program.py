"""Which program a worker slot runs, and its command line: written here.

It is read in `origin.engine.worker` and `origin.producers.text_program`, of which this imports
nothing: before a worker can be started, this is imported, and everything else may wait.
"""

from __future__ import annotations

from origin.config import OriginConfig
from origin.producers.embedder import is_classifier, is_embedding

TOKENS = "origin.engine.worker"
TEXT = "origin.producers.text_worker"


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
        "--filter": config.filter,
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
