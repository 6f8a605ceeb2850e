"""The memory that a model needs on a CPU and on a GPU, computed from its shape; no torch.

The sum covers weights, rotary tables and the KV cache as `origin.models` allocates them, but
neither activations nor torch itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tailrace.kernels.shapes import PAGE_TOKENS, WEIGHTS_PER_BYTE, Family, has_fp32_head
from tailrace.origin.checkpoint.finding import Findings
from tailrace.origin.checkpoint.layout import EMBEDDING, HEAD, StoredTensor, linears, norms
from tailrace.origin.checkpoint.model_config import CONFIG_FILE, ModelConfig
from tailrace.origin.formats import AS_STORED, Formats

WEIGHT_GROUP = 128
"""Number of consecutive int4 weights of a row that share a scale."""
HEAD_GROUP = 4
"""Number of inputs that one CPU instruction multiplies in an int8 LM head; the number of inputs
must be a multiple of it."""

FP32_BYTES = 4
BF16_BYTES = 2
SCALED_KV = ("int8", "fp8")
"""Formats of keys and values with one byte per element and an fp32 scale per token and head."""
INT4_GROUP_BYTES = {"cpu": 2 * BF16_BYTES, "gpu": FP32_BYTES + 1}
"""Bytes of scale and zero point for each group of int4 weights."""
GPU_KV_SHARE = 0.8
"""Default size of the KV cache, as a share of the GPU memory that the weights leave free."""


def examine_formats(
    formats: Formats, directory: Path, config: ModelConfig, findings: Findings
) -> None:
    """Add a fault for each number format that this model does not support on any device."""
    file = directory / CONFIG_FILE
    if formats.weights != "auto" and config.family is Family.BITNET:
        problem = f"ternary weights of bitnet cannot be held as {formats.weights}"
        findings.fault(file, "model_type", problem, "the setting weights = auto")
    elif formats.weights != "auto":
        for name, (_, inputs) in linears(config).items():
            if inputs % WEIGHT_GROUP:
                right = f"a multiple of {WEIGHT_GROUP}, or the setting weights = auto"
                problem = f"{inputs} inputs cannot have {formats.weights} weights"
                findings.fault(file, name, problem, right)
    if formats.head == "int8" and config.hidden % HEAD_GROUP:
        right = f"a multiple of {HEAD_GROUP}, or the setting head = auto"
        findings.fault(
            file, "hidden_size", f"{config.hidden} inputs cannot have an int8 head", right
        )


def refuse_formats(formats: Formats, directory: Path, config: ModelConfig) -> None:
    """Raise ModelError for a number format that this model does not support."""
    findings = Findings()
    examine_formats(formats, directory, config, findings)
    findings.refuse()


@dataclass(frozen=True, slots=True)
class Footprint:
    """The memory that a model needs on one kind of device."""

    weights_bytes: int
    kv_token_bytes: int
    """Bytes of the keys and values of one token in all layers."""
    kv_share: float
    """Maximum size of the KV cache, as a share of the memory that the weights leave free."""

    @property
    def kv_page_bytes(self) -> int:
        return self.kv_token_bytes * PAGE_TOKENS

    def sequences(self, memory_bytes: int, context: int) -> int:
        """Return how many sequences of `context` tokens fit into `memory_bytes` at once."""
        left = max(memory_bytes - self.weights_bytes, 0) * self.kv_share
        return int(left // (-(-context // PAGE_TOKENS) * self.kv_page_bytes))


def parameters(config: ModelConfig) -> int:
    """Return the number of weights; a tied embedding counts once, scales do not count."""
    layer = _linear_weights(config) + sum(norms(config).values())
    tables = config.vocab * config.hidden * (1 if config.tied_head else 2)
    return tables + config.layers * layer + config.hidden


def cpu_footprint(
    config: ModelConfig, stored: Mapping[str, StoredTensor], formats: Formats = AS_STORED
) -> Footprint:
    """Return the memory that a model needs on a CPU with an instruction for int8 products.

    Unless `formats` sets other types, weights are fp32; ternary weights are int8, and an untied
    embedding keeps its stored type. A CPU without the instruction needs more, because ternary
    weights and an int8 head are fp32, too.
    """
    if config.family is Family.BITNET:
        linear = _int8_bytes(config)
    elif formats.weights == "auto":
        linear = _linear_weights(config) * FP32_BYTES
    else:
        linear = _quantised_bytes(config, formats, "cpu")
    weights = config.layers * linear
    if formats.head == "int8":
        weights += _int8_head_bytes(config) + _stored_bytes(stored, EMBEDDING)
    else:
        weights += config.vocab * config.hidden * FP32_BYTES
        if not config.tied_head:
            weights += _stored_bytes(stored, EMBEDDING)
    return Footprint(
        weights_bytes=weights + _small_bytes(config),
        kv_token_bytes=_kv_token_bytes(config, formats, FP32_BYTES),
        kv_share=1.0,
    )


def gpu_footprint(
    config: ModelConfig, stored: Mapping[str, StoredTensor], formats: Formats = AS_STORED
) -> Footprint:
    """Return the memory that a model needs on a GPU.

    Ternary weights are packed, and others keep their stored type.
    """
    small = has_fp32_head(config.vocab, config.hidden)
    weights = _stored_bytes(stored, EMBEDDING)
    if formats.head == "int8":
        weights += _int8_head_bytes(config)
    elif small:
        weights += config.vocab * config.hidden * FP32_BYTES
    elif not config.tied_head:
        weights += _stored_bytes(stored, HEAD)
    if config.family is Family.BITNET:
        weights += config.layers * _linear_weights(config) // WEIGHTS_PER_BYTE
    elif formats.weights != "auto":
        weights += config.layers * _quantised_bytes(config, formats, "gpu")
    else:
        names = (
            f"model.layers.{at}.{name}.weight"
            for at in range(config.layers)
            for name in linears(config)
        )
        weights += sum(_stored_bytes(stored, name) for name in names)
    return Footprint(
        weights_bytes=weights + _small_bytes(config),
        kv_token_bytes=_kv_token_bytes(config, formats, FP32_BYTES if small else BF16_BYTES),
        kv_share=GPU_KV_SHARE,
    )


def _linear_weights(config: ModelConfig) -> int:
    """Return the number of weights in the linear maps of one layer."""
    return sum(rows * columns for rows, columns in linears(config).values())


def _small_bytes(config: ModelConfig) -> int:
    """Return the bytes of norms and rotary tables, all in fp32."""
    tables = 2 * config.context * config.head_dim
    norms_of_all = config.layers * sum(norms(config).values()) + config.hidden
    return (norms_of_all + tables) * FP32_BYTES


def _int8_bytes(config: ModelConfig) -> int:
    """Return the bytes of one layer's linear maps in int8, with a scale for every row."""
    rows = sum(rows for rows, _ in linears(config).values())
    return _linear_weights(config) + rows * FP32_BYTES


def _quantised_bytes(config: ModelConfig, formats: Formats, device: str) -> int:
    """Return the bytes of one layer's linear maps in the configured format."""
    if formats.weights == "int8":
        return _int8_bytes(config)
    weights = _linear_weights(config)
    return weights // 2 + weights // WEIGHT_GROUP * INT4_GROUP_BYTES[device]


def _int8_head_bytes(config: ModelConfig) -> int:
    return config.vocab * (config.hidden + FP32_BYTES)


def _kv_token_bytes(config: ModelConfig, formats: Formats, plain_bytes: int) -> int:
    """Return the bytes of one token's keys and values.

    `plain_bytes` is the size of an element in a cache without scales.
    """
    head = config.head_dim * plain_bytes
    if formats.kv_cache in SCALED_KV:
        head = config.head_dim + FP32_BYTES
    return 2 * config.layers * config.kv_heads * head


def _stored_bytes(stored: Mapping[str, StoredTensor], name: str) -> int:
    tensor = stored[name]
    return tensor.end - tensor.start
