"""Whole steps of small models beside the CPU path, for each type of weight and cache.

The prompt is longer than a chunk, and rows follow it, so prefill, replay and the head take part.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from tailrace.kernels.shapes import DecoderShape, Family
from tailrace.origin.checkpoint.model_config import ModelConfig
from tailrace.origin.formats import Formats
from tailrace.origin.models.cpu_model import CpuModel
from tailrace.origin.models.gpu_model import GpuModel
from tailrace.origin.models.model import Model, Piece, prefill
from tests.bench.gpu.oracle import Check
from tests.bench.gpu.place import TINY, Place, two_layers

SHAPE = (128, 256, 2, 4, 2, 32, 384, 512)
"""Hidden, ffn, layers, heads, KV heads, head size, vocabulary and context: whole groups of int4."""
FORMATS = {
    Family.BITNET: (
        Formats(), Formats(kv_cache="int8"), Formats(kv_cache="fp8"), Formats(head="int8")
    ),
    Family.LLAMA: (
        Formats(), Formats(weights="int8"), Formats(weights="int4"), Formats(kv_cache="int8"),
        Formats(kv_cache="fp8"), Formats("int8", "int8", "int8"), Formats("int4", "fp8", "int8"),
    ),
    Family.QWEN3: (Formats(), Formats(kv_cache="int8")),
}  # fmt: skip
PAGES = [4, 1, 6]
PLAIN, QUANTISED = 1e-3, 5e-2
"""Root mean square of the error relative to that of the oracle; products of bf16 are rounded."""


def step_checks(place: Place) -> Iterator[Check]:
    """Yield a check of a whole step for each family and format."""
    for family, formats in FORMATS.items():
        for each in formats[: 1 if place.few else None]:
            name = f"{family.value}: a whole step with {each} ~ CPU"
            most = PLAIN if each == Formats() else QUANTISED
            yield Check(name, partial(_difference, place, family, each), most)


def config_of(shape: DecoderShape, *, tied: bool) -> ModelConfig:
    fields = {name: getattr(shape, name) for name in DecoderShape.__slots__}
    return ModelConfig(
        **fields, rope_scaling=None, tied_head=tied, eos_ids=frozenset(), packed=True
    )


def tensors_of(config: ModelConfig, device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return a random checkpoint's tensors, by their names in it."""
    random = torch.Generator(device).manual_seed(16)

    def noise(*size: int, around: float = 0.0, spread: float = 1.0) -> Tensor:
        return torch.empty(size, dtype=dtype, device=device).normal_(
            around, spread, generator=random
        )

    def ternary(rows: int, columns: int) -> Tensor:
        codes = torch.randint(
            0, 3, (4, rows // 4, columns), dtype=torch.uint8, device=device, generator=random
        )
        packed = codes[0]
        for part in range(1, 4):
            packed = packed | codes[part] << (2 * part)
        return packed

    found = {
        "model.embed_tokens.weight": noise(config.vocab, config.hidden, spread=0.3),
        "model.norm.weight": noise(config.hidden, around=1.0, spread=0.1),
    }
    linears = {
        "self_attn.q_proj": (config.queries, config.hidden),
        "self_attn.k_proj": (config.keys, config.hidden),
        "self_attn.v_proj": (config.keys, config.hidden),
        "self_attn.o_proj": (config.hidden, config.queries),
        "mlp.gate_proj": (config.ffn, config.hidden),
        "mlp.up_proj": (config.ffn, config.hidden),
        "mlp.down_proj": (config.hidden, config.ffn),
    }
    norms = {"input_layernorm": config.hidden, "post_attention_layernorm": config.hidden}
    if config.family is Family.BITNET:
        norms |= {"self_attn.attn_sub_norm": config.queries, "mlp.ffn_sub_norm": config.ffn}
    if config.family is Family.QWEN3:
        norms |= {"self_attn.q_norm": config.head_dim, "self_attn.k_norm": config.head_dim}
    for layer in range(config.layers):
        prefix = f"model.layers.{layer}"
        for name, size in linears.items():
            if config.family is Family.BITNET:
                found[f"{prefix}.{name}.weight"] = ternary(*size)
                found[f"{prefix}.{name}.weight_scale"] = noise(1, around=0.1, spread=0.01)
            else:
                found[f"{prefix}.{name}.weight"] = noise(*size, spread=1.5 * size[1] ** -0.5)
        for name, width in norms.items():
            found[f"{prefix}.{name}.weight"] = noise(width, around=1.0, spread=0.1)
    return found


def _difference(place: Place, family: Family, formats: Formats) -> float:
    small = DecoderShape(f"small-{family.value}", family, *SHAPE)
    shape = two_layers(TINY[family]) if place.fake else small
    config = config_of(shape, tied=True)
    tensors = tensors_of(config, torch.device("cpu"), torch.float32)
    on_cpu = CpuModel(config, dict(tensors), "", formats=formats)
    on_gpu = GpuModel(
        config, dict(tensors), "", place.device, lambda *_: None, formats, kv_bytes=1 << 20,
        step_rows=1 if place.few else 8,
    )  # fmt: skip
    length = 6 if place.few else 70
    ids = [(7 * at) % config.vocab for at in range(length)]
    expected, found = (_through(model, ids) for model in (on_cpu, on_gpu))
    return float((found - expected).square().mean().sqrt() / expected.square().mean().sqrt())


def _through(model: Model, ids: list[int]) -> Tensor:
    """Return logits of the last rows of a prompt and of two rows after it, fp64, on the CPU."""
    hidden = prefill(model, ids[:-2], PAGES)
    rows = model.forward([Piece(ids[-2:], len(ids) - 2, PAGES, prefill=False)])
    return model.logits(torch.cat([hidden[-2:], rows])).double().cpu()
