"""Several small tensors moved to a device in one copy: each copy has the device waited for."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn.functional import pad

ALIGNED_BYTES = 16
"""Where a tensor begins that the allocator gives, and what kernels are compiled for."""


def one_copy(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """The same numbers on `device`, in one block of memory; each begins at ALIGNED_BYTES.

    tensors: contiguous, on the CPU, of any type whose elements divide ALIGNED_BYTES.
    """
    parts = [tensor.flatten().view(torch.uint8) for tensor in tensors]
    block = torch.cat([pad(part, (0, -len(part) % ALIGNED_BYTES)) for part in parts]).to(device)
    starts = accumulate((len(p) + -len(p) % ALIGNED_BYTES for p in parts), initial=0)
    return [
        block[at : at + len(part)].view(tensor.dtype).view(tensor.shape)
        for at, part, tensor in zip(starts, parts, tensors, strict=False)
    ]
