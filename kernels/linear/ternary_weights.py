"""Packed ternary weights that one launch multiplies: one linear, or several with the same input."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tailrace.kernels.checks import check_multiple, check_same_device, check_tensor
from tailrace.kernels.shapes import WEIGHTS_PER_BYTE

MAX_PARTS = 3
"""Maximum number of parts of a weight, such as query, key and value."""
MAX_IN = 2**16
"""Maximum inputs. The sums of packed fields are at most 3 * 64 * 127 times this, which is below
2**31, so int32 does not overflow. The sum of a weight row is at most 127 times this, which is below
2**24, so fp32 holds it exactly."""


@dataclass(frozen=True, slots=True)
class TernaryWeights:
    """Consecutive parts of a weight, each packed separately (see `kernels.linear.ternary`).

    packed: uint8 [sum of outs / 4, in]. outs: output rows of each part, each a multiple of 4; `in`
    is a multiple of 4, so that a row is whole words. scale: fp32 [parts]. All tensors are on one
    device. Raises TypeError or ValueError, also if a field has the code 3, which stands for no
    weight.
    """

    packed: Tensor
    outs: tuple[int, ...]
    scale: Tensor

    def __post_init__(self) -> None:
        if not 1 <= len(self.outs) <= MAX_PARTS:
            raise ValueError(f"outs: {len(self.outs)} parts, expected 1 to {MAX_PARTS}")
        for out in self.outs:
            check_multiple("outs", out, WEIGHTS_PER_BYTE)
        check_tensor("packed", self.packed, torch.uint8, self.packed_rows, None)
        check_multiple("packed: in", self.packed.shape[1], 4)
        if self.packed.shape[1] > MAX_IN:
            raise ValueError(f"packed: in = {self.packed.shape[1]}, expected at most {MAX_IN}")
        check_tensor("scale", self.scale, torch.float32, len(self.outs))
        check_same_device(packed=self.packed, scale=self.scale)
        if bool((self.packed & (self.packed >> 1) & 0x55).any()):
            raise ValueError("packed: holds the code 3, which stands for no ternary value")

    @classmethod
    def from_parts(cls, parts: Sequence[tuple[Tensor, Tensor]]) -> TernaryWeights:
        """Join parts: pairs of packed uint8 [out / 4, in] and a float scale of one element."""
        if not parts:
            raise ValueError("parts: none, expected at least one")
        width = None
        for packed, scale in parts:
            check_tensor("packed", packed, torch.uint8, None, width)
            width = packed.shape[1]
            if scale.numel() != 1 or not scale.is_floating_point():
                raise ValueError(
                    f"scale: {scale.dtype} {tuple(scale.shape)}, expected one floating element"
                )
        return cls(
            packed=torch.cat([packed for packed, _ in parts]),
            outs=tuple(len(packed) * WEIGHTS_PER_BYTE for packed, _ in parts),
            scale=torch.cat([scale.reshape(1).float() for _, scale in parts]),
        )

    @property
    def packed_rows(self) -> int:
        """Number of rows of `packed`, which is a quarter of the output rows."""
        return self.out_features // WEIGHTS_PER_BYTE

    @property
    def out_features(self) -> int:
        """Number of output rows of all parts together."""
        return sum(self.outs)

    @property
    def in_features(self) -> int:
        """Elements of an input row."""
        return self.packed.shape[1]

    @property
    def words(self) -> Tensor:
        """View of `packed` as int32 [packed rows, in / 4]."""
        return self.packed.view(torch.int32)

    def part_rows(self) -> tuple[int, int, int]:
        """Packed rows of the first, second and third part; 0 for absent parts."""
        first, second, third = (*self.outs, 0, 0)[:3]
        return tuple(out // WEIGHTS_PER_BYTE for out in (first, second, third))  # type: ignore[return-value]
