"""Copies several small tensors to a device at once: each transfer takes as long as a launch."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn.functional import pad

ALIGNED_BYTES = 16
"""Alignment in bytes that kernels are compiled for; torch's allocator aligns tensors in the same
way."""


def move_into(there: Tensor, here: Tensor) -> Tensor:
    """Copy a tensor to a device in stream order, without waiting for earlier work on the device."""
    if there.device.type == "cuda":
        here = here.pin_memory()
    return there.copy_(here, non_blocking=True)


def one_copy(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Copy tensors to `device` into one block of memory, each aligned to ALIGNED_BYTES.

    tensors: contiguous, on the CPU, of any type whose element size divides ALIGNED_BYTES. Returns
    the copies, in the same order.
    """
    parts = [tensor.flatten().view(torch.uint8) for tensor in tensors]
    whole = torch.cat([pad(part, (0, -len(part) % ALIGNED_BYTES)) for part in parts])
    block = move_into(torch.empty_like(whole, device=device), whole)
    starts = accumulate((len(p) + -len(p) % ALIGNED_BYTES for p in parts), initial=0)
    return [
        block[at : at + len(part)].view(tensor.dtype).view(tensor.shape)
        for at, part, tensor in zip(starts, parts, tensors, strict=False)
    ]
