"""Tensors between margins of poison: reads beyond them change results, writes the margins."""

from __future__ import annotations

import torch
from torch import Tensor

MARGIN = 256
"""Elements on either side: a multiple of 16 bytes, as the tensors of a model are aligned."""
POISON = {torch.uint8: 0x7F, torch.int8: 0x7F, torch.int32: 0x7F7F7F7F}
"""Margin values of integer tensors; those of floating-point tensors are NaN."""


class Guarded:
    """A copy of `values` in the middle of a larger buffer."""

    def __init__(self, values: Tensor) -> None:
        poison = POISON.get(values.dtype, float("nan"))
        size = values.numel() + 2 * MARGIN
        self._buffer = torch.full((size,), poison, dtype=values.dtype, device=values.device)
        self.tensor = self._buffer[MARGIN:-MARGIN].view(values.shape)
        self.tensor.copy_(values)
        self._margins = self._margin_bytes()

    def intact(self) -> bool:
        """Nothing was written beyond the tensor."""
        return torch.equal(self._margins, self._margin_bytes())

    def _margin_bytes(self) -> Tensor:
        margins = torch.cat([self._buffer[:MARGIN], self._buffer[-MARGIN:]])
        return margins.view(torch.uint8).clone()
