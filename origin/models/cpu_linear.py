"""Linear layers on the CPU in which a row's bits do not depend on its batch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import cache, partial
from timeit import Timer

import torch
from torch import Tensor
from torch.nn import functional as F

from tailrace.kernels.linear.ternary import INT8_MAX, MIN_ABSMAX, unpack_ternary
from tailrace.kernels.linear.weight_only import (
    GROUP,
    quantise_int4,
    quantise_int8,
    unpack_words,
)
from tailrace.origin.models.tensors import Part

TILE_ROWS = 8
"""Number of rows of the fp32 product that defines the bits of a row (the reference tile).

With eight rows MKL sums in several parts, which is two to three times as exact as with many rows.
Eight rows take hardly longer than one if reading the weight takes most of the time.
"""
PRODUCT_ROWS = (1, 2, 4, TILE_ROWS, 16, 32, 64)
"""Numbers of rows of a product to try; those that give the bits of the reference tile are used."""
CACHE_LINE_BYTES = 64
"""Alignment of arrays in bytes; at other addresses the BLAS may sum in another order."""

MOST_EXACT_SUM = (1 << 24) - 1
"""Maximum sum: fp32 represents all integers up to it exactly."""
TRIED_ROWS = (1, 16)
"""Numbers of rows for which fp32 and int8 products are timed: one stream, and many streams."""
MOST_TRIED_OUTPUTS = 256
"""Maximum outputs of a product that is timed, so that a trial takes only milliseconds."""
TRIALS = 8
"""Number of trials per product. The fastest one counts, because the first one has cold caches and
others may be interrupted."""
FP32_SPEEDUP = 2.0
"""Minimum speed-up for which weights are fp32 instead of int8, since fp32 takes four times the
memory.

If torch multiplies int8 without special instructions, fp32 is at least ten times as fast.
"""
INT4_ROWS = 16
"""Number of a weight's rows that torch's int4 product processes together."""
MIDDLE_CODE = 8
"""The int4 code that stands for 0 in torch's product."""


class Int8Linear:
    """int8 weights times activations quantised to int8, with integer sums.

    The result equals `int8_linear` bit for bit, in any batch. On a processor with int8 products
    (VNNI) weights stay int8, a quarter of fp32's size: a decoded token reads all of them, and
    reading is the bottleneck. On other processors torch multiplies int8 numbers one at a time, so
    weights are fp32, which is faster. The sums are the same, because inputs are divided into parts
    whose sums fp32 holds exactly.
    """

    def __init__(
        self, weight: Tensor, scale: Tensor, in_fp32: bool | None = None, largest: int = INT8_MAX
    ) -> None:
        """Take int8 weights [out, in] of magnitude up to `largest`, and fp32 scales [out].

        in_fp32: multiply in fp32 or int8; by default whichever is faster on this processor.
        """
        outputs, inputs = weight.shape
        if in_fp32 is None:
            in_fp32 = is_fp32_quicker(min(outputs, MOST_TRIED_OUTPUTS), inputs)
        self._in_fp32 = in_fp32
        self._inputs = MOST_EXACT_SUM // (INT8_MAX * largest) if in_fp32 else inputs
        parts = torch.split(weight, self._inputs, 1)
        self._parts = [part.float() for part in parts] if in_fp32 else [weight.t()]
        # fp32 sums start with +0, so that the result is never -0, which an integer sum cannot be.
        self._nothing = torch.zeros(outputs if in_fp32 else 0)
        self._scale = scale
        self._int8_max = torch.tensor(float(INT8_MAX))

    def __call__(self, x: Tensor) -> Tensor:
        """Compute fp32 [T, in] -> fp32 [T, out], quantising each row to int8 by its maximum.

        The reference clamps to int8 after rounding. That is not needed, as a row scaled by 127 /
        max never exceeds int8.
        """
        absmax = x.abs().amax(-1, keepdim=True)
        # The reference's 127 / absmax is computed by torch as 127 * (1 / absmax), as it is here.
        factor = absmax.clamp_min_(MIN_ABSMAX).reciprocal_().mul_(self._int8_max)
        return self._sums((x * factor).round_()).div(factor).mul_(self._scale)

    def _sums(self, quantized: Tensor) -> Tensor:
        """Return the product of activations and weights; both hold integers.

        quantized: integers as fp32 [T, in]. Returns int32 or fp32 [T, out].
        """
        if not self._in_fp32:
            # A private function, but torch's only int8 product with int32 sums on CPUs.
            return torch._int_mm(quantized.to(torch.int8), self._parts[0])
        inputs = torch.split(quantized, self._inputs, 1)
        pairs = zip(inputs, self._parts, strict=True)
        sums = [F.linear(x, part, self._nothing) for x, part in pairs]
        if len(sums) == 1:
            return sums[0]
        total = sums[0].to(torch.int32)
        for more in sums[1:]:
            total += more.to(torch.int32)
        return total


class TernaryLinear(Int8Linear):
    """One or more ternary layers with the same input, fused into one integer product.

    The result equals `ternary_linear` of each part bit for bit.
    """

    def __init__(self, parts: Sequence[Part], in_fp32: bool | None = None) -> None:
        """Take (packed uint8 [out / 4, in], scale [1]) of each fused layer, in output order."""
        unpacked = [unpack_ternary(packed) for packed, _ in parts]
        rows = torch.tensor([len(part) for part in unpacked])
        scales = [scale.float() for _, scale in parts if scale is not None]
        scale = torch.cat(scales).repeat_interleave(rows)
        super().__init__(torch.cat(unpacked), scale, in_fp32, largest=1)


@cache
def is_fp32_quicker(outputs: int, inputs: int) -> bool:
    """Return True if integer products should be computed in fp32 on this machine, by timing both.

    A processor's instruction sets do not tell which of them torch and its libraries use.
    """
    int8 = torch.zeros(outputs, inputs, dtype=torch.int8)
    fp32 = int8.float()
    tried = [torch.zeros(rows, inputs, dtype=torch.int8) for rows in TRIED_ROWS]
    in_int8 = sum(_seconds(partial(torch._int_mm, x, int8.t())) for x in tried)
    in_fp32 = sum(_seconds(partial(F.linear, x.float(), fp32)) for x in tried)
    return in_fp32 * FP32_SPEEDUP < in_int8


def _seconds(product: Callable[[], Tensor]) -> float:
    return min(Timer(product).repeat(TRIALS, number=1))


Multiply = Callable[[Tensor], Tensor]
"""Type of a linear layer's function: fp32 [T, in] -> fp32 [T, out]. It never changes its input."""


class Products:
    """Finds the numbers of rows at which a product gives each row the bits of the reference tile.

    A BLAS sums in an order that depends on the shape of the product, and does not promise that a
    row's bits are independent of its position and of the other rows. So each shape of a weight is
    tested once: first whether every position in the tile gives the same bits, then which other
    numbers of rows give these bits, too.
    """

    def __init__(self) -> None:
        self._found: dict[tuple[str, torch.Size], tuple[int, ...]] = {}

    def rows(self, kind: str, size: torch.Size, multiply: Multiply) -> tuple[int, ...]:
        """Return the usable numbers of rows for weights [out, in] of one kind, in ascending order.

        They are some of PRODUCT_ROWS; (1,) if positions in the tile differ.
        """
        if (kind, size) not in self._found:
            self._found[kind, size] = _rows_alike(size[1], multiply)
        return self._found[kind, size]


class FloatLinear(ABC):
    """A linear layer with float sums, whose order depends on the shape of the product.

    Rows are padded with zeros to a number that `Products` allows; if it allows only one row, each
    row is multiplied alone. Either way a row's bits are the same in any batch.
    """

    def __init__(self, rows: tuple[int, ...]) -> None:
        self.rows = rows

    def __call__(self, x: Tensor) -> Tensor:
        """Compute fp32 [T, in] -> fp32 [T, out]."""
        most = self.rows[-1]
        if len(x) <= most:
            return self._product(x)
        return torch.cat([self._product(part) for part in torch.split(x, most)])

    def _product(self, x: Tensor) -> Tensor:
        rows = next(rows for rows in self.rows if rows >= len(x))
        # Always a copy, because a slice of a tensor may be unaligned.
        whole = x.clone() if rows == len(x) else F.pad(x, (0, 0, 0, rows - len(x)))
        return self._multiply(whole)[: len(x)]

    @abstractmethod
    def _multiply(self, x: Tensor) -> Tensor:
        """Multiply fp32 [n, in] -> fp32 [n, out], where n is one of `self.rows`."""


class DenseLinear(FloatLinear):
    """One or more fp32 layers with the same input, fused into one product."""

    def __init__(self, parts: Sequence[Part], products: Products) -> None:
        """Take float weights [out, in] of each fused layer, in output order; none has a scale."""
        # Copy even a single fp32 part, because the file may not align it as needed. Copy only once,
        # because writing new memory, which the kernel clears first, dominates the time of a load.
        weights = [weight for weight, _ in parts]
        rows = [len(weight) for weight in weights]
        self.weight = torch.empty(sum(rows), weights[0].shape[1])
        for part, weight in zip(torch.split(self.weight, rows), weights, strict=True):
            part.copy_(weight)
        assert self.weight.data_ptr() % CACHE_LINE_BYTES == 0, "torch allocates cache lines"
        super().__init__(products.rows("fp32", self.weight.shape, self._multiply))

    def _multiply(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


class Int8WeightLinear(FloatLinear):
    """One or more layers with the same input and int8 weights, fused into one product.

    It computes `weight_only_linear` of bf16 activations, but rounds the sums to bf16, the only
    result that torch's product for such weights offers. It reads a quarter of the bytes of fp32,
    and reading dominates the time for few rows.
    """

    def __init__(self, parts: Sequence[Part], products: Products) -> None:
        """Take float weights [out, in] of each fused layer, in output order.

        Raises ValueError if `in` is not a multiple of the quantisation group.
        """
        weights = quantise_int8(_joined(parts))
        codes = unpack_words(weights.words, 8)
        self._codes = ((codes ^ 0x80) - 0x80).to(torch.int8)
        self._scale = weights.scale
        self._ones = torch.ones(len(codes), dtype=torch.bfloat16)
        super().__init__(products.rows("int8", codes.shape, self._multiply))

    def _multiply(self, x: Tensor) -> Tensor:
        # The product would round scales to bf16, so they are multiplied to the sums afterwards.
        sums = torch._weight_int8pack_mm(x.bfloat16(), self._codes, self._ones)
        return sums.float().mul_(self._scale)


class Int4WeightLinear(FloatLinear):
    """One or more layers with the same input and int4 weights, fused into one product.

    It works like `Int8WeightLinear`, but reads an eighth of the bytes of fp32. Scales and zero
    points are bf16.
    """

    def __init__(self, parts: Sequence[Part], products: Products) -> None:
        """Take the same parts as `Int8WeightLinear`."""
        weights = quantise_int4(_joined(parts))
        assert weights.zero is not None, "int4 has zeros"
        self._outputs = weights.shape[0]
        filled = 0, -self._outputs % INT4_ROWS
        codes = unpack_words(weights.words, 4)
        packed = F.pad(codes, (0, 0, *filled))
        self._codes = torch._convert_weight_to_int4pack_for_cpu(packed, 1)
        middle = (MIDDLE_CODE - weights.zero.float()) * weights.scale
        scales = torch.stack([weights.scale, middle], -1)
        self._scales = F.pad(scales, (0, 0, *filled)).bfloat16()
        super().__init__(products.rows("int4", codes.shape, self._multiply))

    def _multiply(self, x: Tensor) -> Tensor:
        sums = torch._weight_int4pack_mm_for_cpu(x.bfloat16(), self._codes, GROUP, self._scales)
        return sums[:, : self._outputs].float()


def _joined(parts: Sequence[Part]) -> Tensor:
    return torch.cat([weight for weight, _ in parts])


def _rows_alike(inputs: int, multiply: Multiply) -> tuple[int, ...]:
    random = torch.Generator().manual_seed(1)
    x = torch.randn(PRODUCT_ROWS[-1], inputs, generator=random)
    alone = torch.zeros(TILE_ROWS, inputs)
    alone[0] = x[0]
    expected = multiply(alone)[0]
    for place in range(TILE_ROWS):
        tile = x[:TILE_ROWS].roll(place, 0)
        tile[(place + 1) % TILE_ROWS] = torch.nan
        if not torch.equal(multiply(tile)[place], expected):
            return (1,)
    tiles = torch.cat([multiply(tile.clone()) for tile in torch.split(x, TILE_ROWS)])
    return tuple(
        rows for rows in PRODUCT_ROWS if torch.equal(multiply(x[:rows].clone()), tiles[:rows])
    )
