"""Argument checks of kernels: errors name the argument, its value and what was expected."""

from __future__ import annotations

import torch
from torch import Tensor


def check_tensor(
    name: str, tensor: Tensor, dtypes: torch.dtype | tuple[torch.dtype, ...], *shape: int | None
) -> None:
    """Raise unless a tensor has one of these dtypes, this shape, and is contiguous.

    shape: the expected sizes, None for any. Raises TypeError for a wrong dtype, and ValueError for
    a wrong shape or a tensor that is not contiguous. The kernels do not read strides, so they need
    contiguous tensors.
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
    """Raise ValueError unless `value` is positive and a multiple of `factor`."""
    if value <= 0 or value % factor:
        raise ValueError(f"{name}: {value}, expected a multiple of {factor} above 0")


def check_same_device(**tensors: Tensor | None) -> None:
    """Raise ValueError unless all tensors are on one device."""
    devices = {name: t.device for name, t in tensors.items() if t is not None}
    if len(set(devices.values())) > 1:
        places = ", ".join(f"{name} on {device}" for name, device in devices.items())
        raise ValueError(f"{places}: expected one device for all")
