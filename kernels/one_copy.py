"""Several small tensors moved to a device in one copy: each costs as much as a launch."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn.functional import pad

ALIGNED_BYTES = 16
"""Where a tensor begins that the allocator gives, and what kernels are compiled for."""


def move_into(there: Tensor, here: Tensor) -> Tensor:
    """Copy to a device behind what it was asked for before, without waiting for that."""
    if there.device.type == "cuda":
        here = here.pin_memory()
    return there.copy_(here, non_blocking=True)


def one_copy(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """The same numbers on `device`, in one block of memory; each begins at ALIGNED_BYTES.

    tensors: contiguous, on the CPU, of any type whose elements divide ALIGNED_BYTES.
    """
    parts = [tensor.flatten().view(torch.uint8) for tensor in tensors]
    whole = torch.cat([pad(part, (0, -len(part) % ALIGNED_BYTES)) for part in parts])
    block = move_into(torch.empty_like(whole, device=device), whole)
    starts = accumulate((len(p) + -len(p) % ALIGNED_BYTES for p in parts), initial=0)
    return [
        block[at : at + len(part)].view(tensor.dtype).view(tensor.shape)
        for at, part, tensor in zip(starts, parts, tensors, strict=False)
    ]
