"""Tensors that every launch refuses: those of another type, shape or layout than it reads."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

import pytest
import torch
from torch import Tensor

Refusal = tuple[type[Exception], str, Mapping[str, object]]
"""The error, how its text begins, and the arguments that are other than they should be."""


def assert_refused(
    launch: Callable[..., object], arguments: Mapping[str, object], *more: Refusal
) -> None:
    """Each tensor among the arguments by its name when it is wrong in any way, and `more`."""
    wrong = [refusal for name in arguments for refusal in _wrong(name, arguments[name])]
    for error, said, changed in (*wrong, *more):
        with pytest.raises(error, match=f"^{re.escape(said)}"):
            launch(**{**arguments, **changed})


def _wrong(name: str, value: object) -> list[Refusal]:
    if not isinstance(value, Tensor):
        return []
    found: list[Refusal] = [
        (TypeError, f"{name}: dtype", {name: value.to(torch.float64)}),
        (ValueError, f"{name}: shape", {name: value[None]}),
    ]
    if value.numel() > 1:
        gaps = torch.stack((value, value), -1)[..., 0]
        found.append((ValueError, f"{name}: strides", {name: gaps}))
    return found
