"""Argument checks of kernels: an error names the argument, what it is and what would be right."""

from __future__ import annotations

import torch
from torch import Tensor


def check_tensor(
    name: str, tensor: Tensor, dtypes: torch.dtype | tuple[torch.dtype, ...], *shape: int | None
) -> None:
    """Refuse a tensor of another dtype or shape, or whose last dimension is not dense.

    shape: the sizes expected, None for any. Raises TypeError for the dtype and ValueError for
    the rest. A kernel addresses by the strides that it is given, but reads rows as they lie.
    """
    allowed = (dtypes,) if isinstance(dtypes, torch.dtype) else dtypes
    if tensor.dtype not in allowed:
        wanted = " or ".join(str(dtype) for dtype in allowed)
        raise TypeError(f"{name}: dtype {tensor.dtype}, expected {wanted}")
    fits = tensor.dim() == len(shape) and all(
        wanted is None or found == wanted for found, wanted in zip(tensor.shape, shape, strict=True)
    )
    if not fits:
        sizes = ", ".join("any" if size is None else str(size) for size in shape)
        raise ValueError(f"{name}: shape {tuple(tensor.shape)}, expected [{sizes}]")
    if not tensor.is_contiguous():
        raise ValueError(f"{name}: strides {tensor.stride()}, expected a contiguous tensor")


def check_multiple(name: str, value: int, factor: int) -> None:
    """Refuse a size that `factor` does not divide, or that is not above 0."""
    if value <= 0 or value % factor:
        raise ValueError(f"{name}: {value}, expected a multiple of {factor} above 0")


def check_same_device(**tensors: Tensor | None) -> None:
    """Refuse tensors that do not all lie on one device."""
    devices = {name: t.device for name, t in tensors.items() if t is not None}
    if len(set(devices.values())) > 1:
        places = ", ".join(f"{name} on {device}" for name, device in devices.items())
        raise ValueError(f"{places}: expected one device for all")
