"""Read a packed BitNet checkpoint (config.json and model.safetensors), and refuse a bad one.

The format is Hugging Face's `bitnet` in its `autobitlinear` offline mode: Llama's tensor names,
ternary layers as uint8 [out / 4, in] with a one-element `weight_scale`, all else floating.
Every refusal is a ModelError whose field names the file and the key or tensor.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from kernels.ternary import WEIGHTS_PER_BYTE
from ledger.errors import ModelError

CONFIG_FILE = "config.json"
GENERATION_FILE = "generation_config.json"
WEIGHTS_FILE = "model.safetensors"
TOKENIZER_FILE = "tokenizer.json"

DEFAULT_ROPE_THETA = 500_000.0
FLOATING = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The shape of a BitNet decoder; counts are in elements, `context` in tokens."""

    vocab: int
    hidden: int
    ffn: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    context: int
    norm_eps: float
    rope_theta: float
    tied_head: bool
    eos_ids: frozenset[int]


def read_config(directory: Path) -> ModelConfig:
    """The model's shape from config.json; eos_token_id of generation_config.json goes first."""
    path = directory / CONFIG_FILE
    raw = _read_json(path)
    _check_kind(path, raw)
    heads = _count(path, raw, "num_attention_heads")
    hidden = _count(path, raw, "hidden_size")
    head_dim = raw.get("head_dim") or hidden // heads
    kv_heads = raw.get("num_key_value_heads") or heads
    if heads * head_dim != hidden or head_dim % 2:
        raise _bad(path, "num_attention_heads", f"{heads} heads do not divide hidden_size {hidden}")
    if not isinstance(kv_heads, int) or heads % kv_heads:
        raise _bad(path, "num_key_value_heads", f"{kv_heads!r} does not divide {heads} heads")
    vocab = _count(path, raw, "vocab_size")
    return ModelConfig(
        vocab=vocab,
        hidden=hidden,
        ffn=_count(path, raw, "intermediate_size"),
        layers=_count(path, raw, "num_hidden_layers"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        context=_count(path, raw, "max_position_embeddings"),
        norm_eps=_positive(path, raw, "rms_norm_eps"),
        rope_theta=_rope_theta(path, raw),
        tied_head=bool(raw.get("tie_word_embeddings", False)),
        eos_ids=_eos_ids(directory, raw, vocab),
    )


def read_tensors(directory: Path, config: ModelConfig) -> dict[str, Tensor]:
    """All tensors of model.safetensors by name: exactly those that the config calls for."""
    path = directory / WEIGHTS_FILE
    try:
        tensors = load_file(path)
    except (OSError, SafetensorError) as exc:
        raise ModelError(f"cannot be read: {exc}", field=str(path)) from exc
    expected = expected_tensors(config)
    for name in sorted(tensors.keys() ^ expected.keys()):
        problem = "is missing" if name in expected else "belongs to no part of the model"
        raise _bad(path, name, problem)
    for name, (dtypes, shape) in expected.items():
        tensor = tensors[name]
        if tensor.dtype not in dtypes:
            raise _bad(path, name, f"dtype {tensor.dtype}, expected {dtypes[0]}")
        if tensor.shape != shape:
            raise _bad(path, name, f"shape {tuple(tensor.shape)}, expected {shape}")
    return tensors


Expected = tuple[tuple[torch.dtype, ...], tuple[int, ...]]


def expected_tensors(config: ModelConfig) -> dict[str, Expected]:
    """Name -> (dtypes allowed, shape) of every tensor of the checkpoint."""
    hidden, ffn = config.hidden, config.ffn
    kv = config.kv_heads * config.head_dim
    linears = {
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (ffn, hidden),
        "mlp.up_proj": (ffn, hidden),
        "mlp.down_proj": (hidden, ffn),
    }
    norms = {
        "input_layernorm": hidden,
        "post_attention_layernorm": hidden,
        "self_attn.attn_sub_norm": hidden,
        "mlp.ffn_sub_norm": ffn,
    }
    expected: dict[str, Expected] = {
        "model.embed_tokens.weight": (FLOATING, (config.vocab, hidden)),
        "model.norm.weight": (FLOATING, (hidden,)),
    }
    if not config.tied_head:
        expected["lm_head.weight"] = (FLOATING, (config.vocab, hidden))
    for layer in range(config.layers):
        prefix = f"model.layers.{layer}"
        for name, (rows, columns) in linears.items():
            packed = (rows // WEIGHTS_PER_BYTE, columns)
            expected[f"{prefix}.{name}.weight"] = ((torch.uint8,), packed)
            expected[f"{prefix}.{name}.weight_scale"] = (FLOATING, (1,))
        for name, size in norms.items():
            expected[f"{prefix}.{name}.weight"] = (FLOATING, (size,))
    return expected


def _check_kind(path: Path, raw: dict[str, Any]) -> None:
    """Refuse what would load but compute something else."""
    fixed = {"model_type": "bitnet", "hidden_act": "relu2"}
    for key, expected in fixed.items():
        if raw.get(key) != expected:
            raise _bad(path, key, f"{raw.get(key)!r}, expected {expected!r}")
    if raw.get("attention_bias"):
        raise _bad(path, "attention_bias", "layers with a bias are not supported")
    if raw.get("rope_scaling"):
        raise _bad(path, "rope_scaling", "scaled position embeddings are not supported")
    quantization = raw.get("quantization_config")
    if not isinstance(quantization, dict):
        raise _bad(path, "quantization_config", "is missing: only packed checkpoints are served")
    kind = {"quant_method": "bitnet", "linear_class": "autobitlinear"}
    kind["quantization_mode"] = "offline"
    for key, expected in kind.items():
        if quantization.get(key) != expected:
            problem = f"{quantization.get(key)!r}, expected {expected!r}"
            raise _bad(path, f"quantization_config.{key}", problem)


def _rope_theta(path: Path, raw: dict[str, Any]) -> float:
    """`rope_theta` at the top (older files) or inside `rope_parameters`."""
    parameters = raw.get("rope_parameters") or {}
    kind = parameters.get("rope_type", "default")
    if kind != "default":
        raise _bad(path, "rope_parameters.rope_type", f"{kind!r}, expected 'default'")
    both = {"rope_theta": DEFAULT_ROPE_THETA, **raw, **parameters}
    return _positive(path, both, "rope_theta")


def _eos_ids(directory: Path, raw: dict[str, Any], vocab: int) -> frozenset[int]:
    path = directory / GENERATION_FILE
    value = _read_json(path).get("eos_token_id") if path.exists() else None
    if value is None:
        path, value = directory / CONFIG_FILE, raw.get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    for item in ids:
        if not isinstance(item, int) or not 0 <= item < vocab:
            raise _bad(path, "eos_token_id", f"{item!r} is no id of a vocabulary of {vocab}")
    return frozenset(ids)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        raw = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as exc:
        raise ModelError(f"cannot be read: {exc}", field=str(path)) from exc
    if not isinstance(raw, dict):
        raise ModelError("is not a JSON object", field=str(path))
    return raw


def _count(path: Path, raw: dict[str, Any], key: str) -> int:
    value = raw.get(key)
    if type(value) is not int or value < 1:
        raise _bad(path, key, f"{value!r}, expected a whole number above 0")
    return value


def _positive(path: Path, raw: dict[str, Any], key: str) -> float:
    value = raw.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise _bad(path, key, f"{value!r}, expected a number above 0")
    return float(value)


def _bad(path: Path, where: str, problem: str) -> ModelError:
    return ModelError(f"{where}: {problem}", field=str(path))
