"""Measures the memory that our objects hold, to compare with what `model check` computes."""

from enum import Enum
from typing import Any

import torch

from tailrace.origin.checkpoint.model_config import ModelConfig


def held_bytes(holder: object) -> int:
    """Return the size of all tensors that an object holds, or several objects in a list."""
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors_of(holder))


def tensors_of(holder: object, seen: set[int] | None = None) -> list[torch.Tensor]:
    """Return every tensor that an object holds, each memory once."""
    seen = set() if seen is None else seen
    if isinstance(holder, torch.Tensor):
        at = holder.untyped_storage().data_ptr()
        fresh = at not in seen
        seen.add(at)
        return [holder] if fresh else []
    if isinstance(holder, list | tuple):
        parts: list[Any] = list(holder)
    elif not type(holder).__module__.startswith(
        ("tailrace.kernels.", "tailrace.origin.")
    ) or isinstance(holder, ModelConfig | Enum):
        return []
    elif hasattr(holder, "__dict__"):
        parts = list(vars(holder).values())
    else:
        names = [name for kind in type(holder).__mro__ for name in getattr(kind, "__slots__", ())]
        parts = [getattr(holder, name) for name in names if hasattr(holder, name)]
    return [tensor for part in parts for tensor in tensors_of(part, seen)]
