"""Linear layers on the CPU whose rows do not depend on the batch that they are in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from timeit import Timer

import torch
from torch import Tensor
from torch.nn import functional as F

from kernels.linear.ternary import INT8_MAX, MIN_ABSMAX, unpack_ternary
from origin.models.layer_tensors import Part

TILE_ROWS = 8
"""Rows of the fp32 product whose bits count. So few: MKL sums them in several parts, two to three
times as near to the true sum as with more, and they take hardly longer than one row where
reading the weight is what takes the time."""
PRODUCT_ROWS = (1, 2, 4, TILE_ROWS, 16, 32, 64)
"""Rows of the products that are used if they give the bits of the tile."""
CACHE_LINE_BYTES = 64
"""The BLAS may sum in another order where an array begins elsewhere."""


MOST_EXACT_INPUTS = ((1 << 24) - 1) // INT8_MAX
"""Of a ternary layer: the sums of so many products are below 2**24, whole numbers in fp32."""
TRIED_ROWS = (1, 16)
"""Of the products whose times decide: one stream, and many."""
MOST_TRIED_OUTPUTS = 256
"""A trial takes a millisecond then, and tens of them where it is slow."""
TRIALS = 8
"""The quickest counts: the first prepares something, others may have been interrupted."""
FP32_SPEEDUP = 2.0
"""How much quicker fp32 has to be: it takes four times the memory. Where int8 is multiplied one by
one it is ten times and more."""


class TernaryLinear:
    """One or more ternary layers of the same input, fused into one product of whole numbers.

    Equals `ternary_linear` of each part bit for bit, hence in any batch. Where a processor
    multiplies int8 by itself (VNNI), weights stay int8, a quarter of fp32: a decoded token reads
    all of them, and reading is what takes the time. Elsewhere torch does so one by one, and fp32
    is quicker. Its sums are the same, as fp32 holds all whole numbers on the way.
    """

    def __init__(self, parts: Sequence[Part], in_fp32: bool | None = None) -> None:
        """parts: (packed uint8 [out / 4, in], scale [1]) of each fused layer, in output order.

        in_fp32: what to multiply in; by default what suits this processor.
        """
        unpacked = [unpack_ternary(packed) for packed, _ in parts]
        rows = torch.tensor([len(part) for part in unpacked])
        weight = torch.cat(unpacked)
        outputs, inputs = weight.shape
        is_exact = inputs <= MOST_EXACT_INPUTS
        if in_fp32 is None:
            in_fp32 = is_exact and is_fp32_quicker(min(outputs, MOST_TRIED_OUTPUTS), inputs)
        if in_fp32 and not is_exact:
            raise ValueError(f"fp32 does not hold every sum of {inputs} products")
        self._weight = weight.float() if in_fp32 else weight.t()
        # A sum that begins with +0 is never -0, as none of whole numbers is.
        self._nothing = torch.zeros(outputs) if in_fp32 else None
        scales = [scale.float() for _, scale in parts if scale is not None]
        self._scale = torch.cat(scales).repeat_interleave(rows)
        self._int8_max = torch.tensor(float(INT8_MAX))

    def __call__(self, x: Tensor) -> Tensor:
        """fp32 [T, in] -> fp32 [T, out], with each row quantised to int8 by its absolute maximum.

        The oracle clamps to int8 after rounding; a row scaled by 127 / max never leaves it.
        """
        absmax = x.abs().amax(-1, keepdim=True)
        # The oracle's 127 / absmax is this product in torch, and rounds as it does.
        factor = absmax.clamp_min_(MIN_ABSMAX).reciprocal_().mul_(self._int8_max)
        return self._sums((x * factor).round_()).div(factor).mul_(self._scale)

    def _sums(self, quantized: Tensor) -> Tensor:
        """fp32 [T, in] of whole numbers -> int32 or fp32 [T, out]."""
        if self._nothing is not None:
            return F.linear(quantized, self._weight, self._nothing)
        # The only int8 product with int32 sums that torch has on CPUs; torchao rests on it too.
        return torch._int_mm(quantized.to(torch.int8), self._weight)


@cache
def is_fp32_quicker(outputs: int, inputs: int) -> bool:
    """Whether the product of whole numbers should be one of fp32 here, found by trying.

    What instructions a processor has does not say which of them torch and its libraries use.
    """
    int8 = torch.zeros(outputs, inputs, dtype=torch.int8)
    fp32 = int8.float()
    tried = [torch.zeros(rows, inputs, dtype=torch.int8) for rows in TRIED_ROWS]
    in_int8 = sum(_seconds(partial(torch._int_mm, x, int8.t())) for x in tried)
    in_fp32 = sum(_seconds(partial(F.linear, x.float(), fp32)) for x in tried)
    return in_fp32 * FP32_SPEEDUP < in_int8


def _seconds(product: Callable[[], Tensor]) -> float:
    return min(Timer(product).repeat(TRIALS, number=1))


class Products:
    """Which fp32 products give a row the bits that it has alone in a tile, found by trying.

    A BLAS sums in an order that depends on the shape of the product, and promises nothing about
    a row's place in it or what lies beside it. So a weight's shape is tried out once: first
    whether every place in the tile gives the same bits, then which other numbers of rows do.
    """

    def __init__(self) -> None:
        self._found: dict[torch.Size, tuple[int, ...]] = {}

    def rows(self, weight: Tensor) -> tuple[int, ...]:
        """Ascending, of PRODUCT_ROWS; (1,) if places in the tile differ."""
        if weight.shape not in self._found:
            self._found[weight.shape] = _rows_alike(weight)
        return self._found[weight.shape]


class DenseLinear:
    """One or more fp32 layers of the same input, fused into one product.

    Rows are filled up with zeros to a number that `products` allows; if it allows but one row, each
    goes alone. Either way a row's bits are the same in any batch.
    """

    def __init__(self, parts: Sequence[Part], products: Products) -> None:
        """parts: floating [out, in] of each fused layer, in output order; none has a scale."""
        # A copy even of a single fp32 part: where it begins is then ours, not the file's.
        self.weight = torch.cat([weight.float() for weight, _ in parts])
        assert self.weight.data_ptr() % CACHE_LINE_BYTES == 0, "torch allocates cache lines"
        self.rows = products.rows(self.weight)

    def __call__(self, x: Tensor) -> Tensor:
        """fp32 [T, in] -> fp32 [T, out]."""
        most = self.rows[-1]
        if len(x) <= most:
            return self._product(x)
        return torch.cat([self._product(part) for part in torch.split(x, most)])

    def _product(self, x: Tensor) -> Tensor:
        rows = next(rows for rows in self.rows if rows >= len(x))
        # A copy either way, because a part of a tensor may begin off a cache line.
        whole = x.clone() if rows == len(x) else F.pad(x, (0, 0, 0, rows - len(x)))
        return F.linear(whole, self.weight)[: len(x)]


def _rows_alike(weight: Tensor) -> tuple[int, ...]:
    random = torch.Generator().manual_seed(1)
    x = torch.randn(PRODUCT_ROWS[-1], weight.shape[1], generator=random)
    alone = torch.zeros(TILE_ROWS, weight.shape[1])
    alone[0] = x[0]
    expected = F.linear(alone, weight)[0]
    for place in range(TILE_ROWS):
        tile = x[:TILE_ROWS].roll(place, 0)
        tile[(place + 1) % TILE_ROWS] = torch.nan
        if not torch.equal(F.linear(tile, weight)[place], expected):
            return (1,)
    tiles = torch.cat([F.linear(tile.clone(), weight) for tile in torch.split(x, TILE_ROWS)])
    return tuple(
        rows
        for rows in PRODUCT_ROWS
        if torch.equal(F.linear(x[:rows].clone(), weight), tiles[:rows])
    )
