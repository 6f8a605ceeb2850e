"""Chooses the program that a worker slot runs, and prepares its settings as JSON.

This is imported before the first worker starts, so it does not import the programs themselves
(`token_worker` and `text_worker`).
"""

from __future__ import annotations

import json

from tailrace.origin.config import OriginConfig, PipelineConfig
from tailrace.origin.gpu.listing import visible_gpus
from tailrace.origin.producers.embedder import is_classifier, is_embedding

TOKENS = "tailrace.origin.workers.token_worker"
TEXT = "tailrace.origin.workers.text_worker"

DECODER_SETTINGS = (
    *("step_ms", "running_streams", "fork_workers", "kv_mib", "weights", "kv_cache", "head"),
    *("dependent_launches", "speculate", "draft_model", "open_objects"),
)
FOLDER_SETTINGS = ("model",)
DEVICE_SETTINGS = ("device", "gpus")
UPSTREAM_SETTINGS = (
    *("upstream_model", "upstream_key_env", "upstream_lost", "upstream_connect_s"),
    *("upstream_first_token_s", "upstream_between_tokens_s", "upstream_retry_s"),
)
TEXT_SETTINGS = ("text_streams",)
"""Settings of `[origin]` that only workers of kind `text` use."""


def makes_tokens(config: OriginConfig) -> bool:
    """Return True if the workers are of kind `tokens`: our own decoder and its tokenizer."""
    if isinstance(config, PipelineConfig):
        return False
    if config.producer is not None or config.upstream is not None:
        return False
    return not (is_embedding(config.model) or is_classifier(config.model))


def program(config: OriginConfig) -> tuple[str, str]:
    """Return the module that a slot runs, and its settings as JSON."""
    is_ours = makes_tokens(config)
    # Symbolic links are resolved only here, so that a restarted worker loads the same files.
    settled = {
        "model": config.model.resolve(),
        "draft_model": config.draft_model and config.draft_model.resolve(),
        "model_name": config.served_name if is_ours else config.model_name,
    }
    return TOKENS if is_ours else TEXT, config.model_copy(update=settled).model_dump_json()


def settings_of(text: str) -> OriginConfig:
    """Return the settings that `program` has written for a worker."""
    kind = PipelineConfig if "pipeline" in json.loads(text) else OriginConfig
    return kind.model_validate_json(text)


def gpus_of(config: OriginConfig) -> tuple[str, ...]:
    """Return the GPUs to which the workers of a model may be assigned, one GPU for each worker.

    The result is empty if workers are not assigned GPUs: on a CPU, for a producer or an upstream
    server, which choose GPUs themselves, and for a pipeline without a stage of kind `gpu`.
    """
    if isinstance(config, PipelineConfig) and not config.has_device:
        return ()
    if config.device == "cpu" or config.producer is not None or config.upstream is not None:
        return ()
    return config.gpus or visible_gpus()


def unused(*served: OriginConfig) -> list[str]:
    """Return the names of settings that the operator gave, but that no served model uses."""
    return sorted(set.intersection(*map(_unused, served)))


def _unused(config: OriginConfig) -> set[str]:
    is_ours, is_upstream = makes_tokens(config), config.upstream is not None
    has_folder = not (is_upstream or config.producer or isinstance(config, PipelineConfig))
    has_device = config.has_device if isinstance(config, PipelineConfig) else has_folder
    uses = (
        (DECODER_SETTINGS, is_ours),
        (FOLDER_SETTINGS, has_folder),
        (DEVICE_SETTINGS, has_device),
        (UPSTREAM_SETTINGS, is_upstream),
        (TEXT_SETTINGS, not is_ours),
    )
    without_use = {name for names, is_used in uses if not is_used for name in names}
    return without_use & config.model_fields_set
