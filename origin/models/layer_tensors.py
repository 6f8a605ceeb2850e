"""One decoder layer out of a checkpoint's tensors, by their names, whatever computes it.

Linears of the same input are joined: query, key and value, and gate and up.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor

from ledger.errors import ModelError

Linear = TypeVar("Linear")
Part = tuple[Tensor, Tensor | None]
"""The weight of one linear as it is stored, and its scale if it is ternary."""
CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class LayerTensors(Generic[Linear]):
    """Norms are fp32; those that the model's family has not are None."""

    input_norm: Tensor
    qkv: Linear
    q_norm: Tensor | None
    k_norm: Tensor | None
    attention_norm: Tensor | None
    output: Linear
    ffn_input_norm: Tensor
    gate_up: Linear
    ffn_norm: Tensor | None
    down: Linear


def layer_tensors(
    tensors: Mapping[str, Tensor],
    index: int,
    join: Callable[[Sequence[Part]], Linear],
    device: torch.device = CPU,
) -> LayerTensors[Linear]:
    """Layer `index`, moved to `device`.

    join: makes one linear of the parts that share an input, in the order of their outputs. A
    ValueError of it becomes a ModelError that names them.
    """
    prefix = f"model.layers.{index}"

    def norm(name: str) -> Tensor | None:
        weight = tensors.get(f"{prefix}.{name}.weight")
        return None if weight is None else weight.float().to(device)

    def required(name: str) -> Tensor:
        weight = norm(name)
        assert weight is not None, f"{prefix}.{name}: every checkpoint is read with it"
        return weight

    def linear(*names: str) -> Linear:
        stems = [f"{prefix}.{name}.weight" for name in names]
        try:
            return join([_part(tensors, stem, device) for stem in stems])
        except ValueError as exc:
            raise ModelError(str(exc), field=" or ".join(stems)) from exc

    return LayerTensors(
        input_norm=required("input_layernorm"),
        qkv=linear("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        q_norm=norm("self_attn.q_norm"),
        k_norm=norm("self_attn.k_norm"),
        attention_norm=norm("self_attn.attn_sub_norm"),
        output=linear("self_attn.o_proj"),
        ffn_input_norm=required("post_attention_layernorm"),
        gate_up=linear("mlp.gate_proj", "mlp.up_proj"),
        ffn_norm=norm("mlp.ffn_sub_norm"),
        down=linear("mlp.down_proj"),
    )


def _part(tensors: Mapping[str, Tensor], stem: str, device: torch.device) -> Part:
    scale = tensors.get(f"{stem}_scale")
    return tensors[stem].to(device), None if scale is None else scale.to(device)
