"""The keys and values of one run's tokens, allocated once for the whole context."""

from __future__ import annotations

import torch
from torch import Tensor


class KvCache:
    """fp32 keys [layers, kv_heads, head_dim, context] and values [layers, kv_heads, context,
    head_dim]; keys lie transposed so that a decoded token's scores read rows.

    `length` is the number of tokens whose keys and values every layer holds.
    """

    def __init__(self, layers: int, kv_heads: int, head_dim: int, context: int) -> None:
        self.context = context
        self.length = 0
        self._keys = torch.empty(layers, kv_heads, head_dim, context).unbind()
        self._values = torch.empty(layers, kv_heads, context, head_dim).unbind()

    def extend(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Write T tokens of one layer after `length`; returns that layer's keys and values so far.

        keys, values: fp32 [T, kv_heads, head_dim]. The caller moves `length` once all layers
        are written, and has checked that T tokens fit.
        """
        end = self.length + keys.shape[0]
        layer_keys, layer_values = self._keys[layer], self._values[layer]
        layer_keys[:, :, self.length : end] = keys.permute(1, 2, 0)
        layer_values[:, self.length : end] = values.transpose(0, 1)
        return layer_keys[:, :, :end], layer_values[:, :end]
