"""The linears of BitNet layers for a step of one row, in two launches per layer instead of four.

Between the attention of two layers there are four linears: output projection, gate_up, `down`, and
the next layer's qkv. `kernels.linear.ternary_pair_triton` computes two of them in one launch, with
the same bits as the two launches that it replaces.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tailrace.kernels.gpu_limits import limits_of
from tailrace.kernels.layers import Layer, TernaryLayer
from tailrace.kernels.linear.epilogue import Epilogue
from tailrace.kernels.linear.ternary_pair_triton import PAIR_ROWS, pair_plan, ternary_pair

FUSED_LINEARS = False
"""Default of `Decoder(fused=...)`.

It stays False until a measurement on a GPU shows that a barrier of all programs takes less time
than the launch that it replaces. `kernels/BENCH.md` has the predicted times.
"""


class FusedTernaryLayers:
    """The layers of a BitNet decoder for up to MAX_ROWS rows, with pairs of linears fused."""

    MAX_ROWS = PAIR_ROWS

    def __init__(self, layers: Sequence[TernaryLayer], device: torch.device) -> None:
        self._layers = layers
        # All launches run on one stream, one after another, so they can share one barrier counter.
        self._counter = torch.zeros(1, dtype=torch.int32, device=device)

    @classmethod
    def of(cls, layers: Sequence[Layer], device: torch.device) -> FusedTernaryLayers | None:
        """Return the fused layers; None if a layer is not ternary or a pair does not fit a GPU."""
        ternary = [layer for layer in layers if isinstance(layer, TernaryLayer)]
        if not ternary or len(ternary) < len(layers):
            return None
        limits = limits_of(device)
        for layer, following in zip(ternary, [*ternary[1:], ternary[0]], strict=True):
            plans = (
                pair_plan(layer.output, layer.gate_up, True, limits),
                pair_plan(layer.down, following.qkv, False, limits),
            )
            if layer.gemv_rows < cls.MAX_ROWS or not all(plan.fits for plan in plans):
                return None
        return cls(ternary, device)

    def behind_attention(
        self, place: int, mixed: Tensor, x: Tensor, qkv: Tensor, *, dependent: bool = False
    ) -> None:
        """Run the linears after the attention of layer `place`, up to qkv of the next layer.

        mixed: fp32 [rows, heads D], the result of the layer's attention. x: the residual stream,
        fp32 [rows, hidden], to which the layer adds. qkv: fp32 [rows, (heads + 2 kv_heads) D], of
        the next layer.
        """
        layer = self._layers[place]
        inner = layer.scratch.inner[: len(x)]
        ternary_pair(
            mixed, layer.attention_norm, layer.output, x, layer.ffn_input_norm, layer.gate_up,
            inner, self._counter, eps=layer.eps, epilogue=Epilogue.RELU2_GATE,
            dependent=dependent,
        )  # fmt: skip
        if place + 1 == len(self._layers):
            layer.project_down(inner, x, dependent=dependent)
            return
        following = self._layers[place + 1]
        ternary_pair(
            inner, layer.ffn_norm, layer.down, x, following.input_norm, following.qkv, qkv,
            self._counter, eps=layer.eps, dependent=dependent,
        )  # fmt: skip
