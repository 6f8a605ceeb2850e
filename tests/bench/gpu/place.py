"""Where the bench runs: on a GPU, or on tiny shapes in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tailrace.kernels.shapes import (
    BITNET_2B4T,
    LLAMA_8B,
    PAGE_TOKENS,
    QWEN3_8B,
    DecoderShape,
    Family,
)
from tests.bench.gpu.timing import Launch, copies

TINY = {
    family: DecoderShape(f"tiny-{family.value}", family, 64, 96, 1, 4, 2, 32, 96, 512)
    for family in Family
}
STEP_LENGTH = 512
"""Positions of each sequence in a step."""
FAKE_LENGTH = PAGE_TOKENS + 6
"""The same in Triton's interpreter: two pages, of which the second is not full."""


@dataclass(frozen=True, slots=True)
class Place:
    """The devices to run on. fake: tiny shapes, no GPU. planning: launches are only recorded."""

    device: torch.device
    fake: bool
    planning: bool = False

    @property
    def few(self) -> bool:
        """True if one set of weights, two layers and a step of each kind suffice."""
        return self.fake or self.planning

    @property
    def bitnet(self) -> DecoderShape:
        return TINY[Family.BITNET] if self.fake else self.layers_of(BITNET_2B4T)

    @property
    def llama(self) -> DecoderShape:
        return TINY[Family.LLAMA] if self.fake else self.layers_of(LLAMA_8B)

    @property
    def qwen(self) -> DecoderShape:
        return TINY[Family.QWEN3] if self.fake else self.layers_of(QWEN3_8B)

    @property
    def length(self) -> int:
        """Positions of each sequence in a step."""
        return FAKE_LENGTH if self.fake else STEP_LENGTH

    def layers_of(self, shape: DecoderShape) -> DecoderShape:
        """Return a shape with as many layers as are needed here."""
        return two_layers(shape) if self.planning else shape

    def empty(self, *size: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(size, dtype=dtype, device=self.device)

    def normal(self, *size: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return self.empty(*size, dtype=dtype).normal_()

    def sets(self, bytes_each: int, make: Callable[[], Launch]) -> list[Launch]:
        """Return launches over weights of their own, so many that no cache holds them."""
        return [make() for _ in range(copies(bytes_each, self.few))]


def two_layers(shape: DecoderShape) -> DecoderShape:
    """Return the shape with two layers, which are enough for parity."""
    fields = {name: getattr(shape, name) for name in DecoderShape.__slots__}
    return DecoderShape(**{**fields, "layers": 2})
