"""The tensors of each layer, by family."""

import re
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from tailrace.kernels.shapes import Family
from tailrace.ledger.errors import ModelError
from tailrace.origin.models.tensors import Part, layer_tensors
from tests.origin.tiny_checkpoint import Shape, random_tensors

SHAPES = {
    Family.BITNET: Shape(),
    Family.LLAMA: Shape(family=Family.LLAMA),
    Family.QWEN3: Shape(family=Family.QWEN3, head_dim=32),
}
NORMS = {
    Family.BITNET: {"attention_norm", "ffn_norm"},
    Family.LLAMA: set(),
    Family.QWEN3: {"q_norm", "k_norm"},
}


@pytest.mark.parametrize("family", Family)
def test_a_layer_has_the_linears_of_one_input_together_and_its_family_s_norms(
    family: Family,
) -> None:
    tensors = dict(random_tensors(SHAPES[family], 1))
    layer = layer_tensors(tensors, 1, list)
    names = {
        "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "output": ("self_attn.o_proj",),
        "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
        "down": ("mlp.down_proj",),
    }
    for field, stems in names.items():
        for (weight, scale), stem in zip(getattr(layer, field), stems, strict=True):
            assert weight.equal(tensors[f"model.layers.1.{stem}.weight"])
            assert (scale is not None) == (family is Family.BITNET)
    special = ("attention_norm", "ffn_norm", "q_norm", "k_norm")
    assert {name for name in special if getattr(layer, name) is not None} == NORMS[family]
    assert layer.input_norm.dtype == torch.float32
    assert layer.input_norm.equal(tensors["model.layers.1.input_layernorm.weight"].float())


def test_parts_that_cannot_be_joined_are_named() -> None:
    def join(parts: Sequence[Part]) -> Tensor:
        raise ValueError("packed: holds the code 3")

    named = "model.layers.0.self_attn.q_proj.weight or model.layers.0.self_attn.k_proj.weight or"
    with pytest.raises(ModelError, match="holds the code 3") as caught:
        layer_tensors(dict(random_tensors(Shape(), 1)), 0, join)
    assert re.match(re.escape(named), str(caught.value.field))
