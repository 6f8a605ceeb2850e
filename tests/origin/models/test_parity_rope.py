"""The rotary tables of a config.json, here and in transformers: the same bits."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from tailrace.kernels.attention.rope import rope_table
from tailrace.kernels.shapes import Family
from tailrace.origin.checkpoint.model_config import read_config
from tests.origin.tiny_checkpoint import Shape, write_checkpoint

LLAMA3 = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
SCALINGS: list[dict[str, Any]] = [
    {},
    {"rope_theta": 1e6},
    {"rope_scaling": None},
    {"rope_scaling": {"type": "linear", "factor": 4.0}},
    {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
    {"rope_scaling": LLAMA3 | {"factor": 8.0, "original_max_position_embeddings": 64}},
    {"rope_scaling": LLAMA3 | {"factor": 32.0, "original_max_position_embeddings": 8192}},
    {"rope_scaling": LLAMA3 | {"factor": 2.0}, "original_max_position_embeddings": 100},
    {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}},
    {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}, "rope_theta": 1e6},
    {"rope_scaling": {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 32,
                      "beta_fast": 4, "beta_slow": 2, "truncate": False}},
    {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64,
                      "mscale": 0.7, "mscale_all_dim": 1.2}},
    {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.5,
                      "original_max_position_embeddings": 64}},
    {"rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 777.0}},
    {"rope_parameters": LLAMA3 | {"factor": 4.0, "rope_theta": 5e5,
                                  "original_max_position_embeddings": 128}},
    {"rope_parameters": {"rope_theta": 2e4}, "rope_scaling": {"type": "linear", "factor": 2.0}},
]  # fmt: skip
SHAPES = {
    Family.BITNET: Shape(layers=1),
    Family.LLAMA: Shape(layers=1, family=Family.LLAMA, hidden=96, heads=2, kv_heads=1),
    Family.QWEN3: Shape(layers=1, family=Family.QWEN3, head_dim=32),
}


def reference_table(directory: Path, family: Family, context: int) -> tuple[Any, Any]:
    """Cos and sin [context, D] that transformers turns by."""
    from transformers import AutoConfig
    from transformers.models.bitnet.modeling_bitnet import BitNetRotaryEmbedding
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

    tables: dict[Family, Any] = {
        Family.BITNET: BitNetRotaryEmbedding,
        Family.LLAMA: LlamaRotaryEmbedding,
        Family.QWEN3: Qwen3RotaryEmbedding,
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        table = tables[family](AutoConfig.from_pretrained(directory))
        cos, sin = table(torch.zeros(1), torch.arange(context)[None])
    return cos[0], sin[0]


@pytest.mark.parametrize("family", list(Family))
@pytest.mark.parametrize("keys", SCALINGS, ids=lambda keys: json.dumps(keys)[:60])
def test_the_table_has_the_bits_of_transformers(
    tmp_path: Path, family: Family, keys: dict[str, Any]
) -> None:
    write_checkpoint(tmp_path, SHAPES[family])
    path = tmp_path / "config.json"
    raw = json.loads(path.read_text())
    del raw["rope_theta"]
    path.write_text(json.dumps(raw | keys))
    config = read_config(tmp_path)
    ours = rope_table(config.context, config.head_dim, config.rope_theta, config.rope_scaling)
    cos, sin = reference_table(tmp_path, family, config.context)
    half = config.head_dim // 2
    assert torch.equal(ours[0], cos)
    assert torch.equal(ours[1][:, half:], sin[:, half:])
    assert torch.equal(ours[1][:, :half], -sin[:, :half])
