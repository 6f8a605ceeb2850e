"""RMSNorm and int8 quantisation of a row, as device functions that all kernels share.

A sum of floats depends on the order of additions, and so on the tile, the warps and the batch. Here
a row is scaled by a power of two so that its largest value is in [2**19, 2**20), rounded to
integers, and their squares are summed as int64, which is exact in any order. So a row has the same
norm in every kernel, in every batch and in the torch reference, bit for bit. Kernels that use these
functions are compiled with `enable_fp_fusion=False`, since a product fused with an addition is not
rounded and would differ from the reference.

The end of the file has norms as launches of their own. They are for larger batches, for which
repeating the norm in every program of a linear would cost more. A program holds a row in its
registers; each float is read once and written once.
"""

# mypy: disallow-untyped-calls=False, disallow-untyped-decorators=False
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import cuda

from tailrace.kernels.checks import check_same_device, check_tensor
from tailrace.kernels.launch import INTERPRETED, dependent_launch, next_power_of_2
from tailrace.kernels.linear.int8_words_triton import WORD, WORDS, elements, int8_row, load_row
from tailrace.kernels.linear.ternary import INT8_MAX, MIN_ABSMAX
from tailrace.kernels.rows.rounding_triton import fixed_factor, rounded, squares
from tailrace.kernels.shapes import DecoderShape, Family
from tailrace.kernels.variant import Variant

MAX_COLUMNS = 16_384
"""Maximum number of elements of a row: one program holds a row in registers."""
LINE = WORDS * WORD
"""Number of elements in a line, the part of a row that a warp holds: 4 per lane."""
MAX_WARPS = 8
"""Maximum number of warps of a program: two for each of a multiprocessor's four schedulers.

It must not exceed 16, so that the parts of a sum fit into 32 bits (`pieces_of_squares`).
"""

_WORD, _WORDS = tl.constexpr(WORD), tl.constexpr(WORDS)
_INT8_MAX = tl.constexpr(float(INT8_MAX))
_MIN_ABSMAX = tl.constexpr(MIN_ABSMAX)
# Adding and then subtracting 1.5 * 2**23 rounds |v| < 2**22 to an integer, half to even.
_ROUND = tl.constexpr(12_582_912.0)


@triton.jit
def inverse_rms(x, size, eps):
    """Return 1 / sqrt(mean(x ** 2) + eps) of each row: fp32 [rows, BLOCK] -> fp32 [rows].

    x holds 0 beyond `size` columns. The result is NaN for a row with NaN or infinite values.
    """
    largest = tl.max(tl.where(x == x, tl.abs(x), float("inf")), 1)
    finite = largest < float("inf")
    factor = fixed_factor(largest.to(tl.int32, bitcast=True))
    total = tl.sum(squares(tl.where(finite[:, None], x, 0.0), factor[:, None]), 1).to(tl.float32)
    mean = tl.div_rn(total, size * 1.0) + eps * factor * factor
    inverse = tl.div_rn(factor, tl.sqrt_rn(tl.where(finite, mean, 1.0)))
    return tl.where(finite, inverse, float("nan"))


@triton.jit
def normalise(x, weight, inverse):
    """Return (weight * x) * inverse; the order decides bits and must be that of the reference."""
    return weight * x * inverse


@triton.jit
def int8_factor(normed):
    """Return the factor 127 / max(|row|, 1e-5) for int8 rounding; NaN for a row with NaN.

    The quotient is computed as 127 times the reciprocal, as torch does. normed: fp32 [rows, BLOCK],
    0 beyond its size. Returns fp32 [rows].
    """
    largest = tl.max(tl.where(normed == normed, tl.abs(normed), float("inf")), 1)
    factor = tl.div_rn(1.0, tl.maximum(largest, _MIN_ABSMAX)) * _INT8_MAX
    return tl.where(largest < float("inf"), factor, float("nan"))


@triton.jit
def quantise(x, factor):
    """Round x * factor to integers in -127 .. 127, half to even, as int32; 0 for NaN.

    x, factor: fp32, of shapes that broadcast; |x * factor| <= 127 up to rounding.
    """
    rounded = (x * factor + _ROUND) - _ROUND
    bounded = tl.minimum(tl.maximum(rounded, -_INT8_MAX), _INT8_MAX)
    return tl.where(bounded == bounded, bounded, 0.0).to(tl.int32)


@triton.jit
def norm_kernel(
    x_ptr, weight_ptr, out_ptr, eps, SIZE: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Compute an RMSNorm, with one row per program."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)[None, :]
    mask = column < SIZE
    weight = tl.load(weight_ptr + column, mask=mask, other=0.0)
    if PDL:
        cuda.gdc_launch_dependents()
        cuda.gdc_wait()
    x = tl.load(x_ptr + row * SIZE + column, mask=mask, other=0.0)
    normed = normalise(x, weight, inverse_rms(x, SIZE, eps)[:, None])
    KIND: tl.constexpr = out_ptr.dtype.element_ty
    normed = rounded(normed, KIND, INTERPRETED).to(KIND)
    tl.store(out_ptr + row * SIZE + column, normed, mask=mask)


@triton.jit
def norm_int8_kernel(
    x_ptr, weight_ptr, q_ptr, factor_ptr, eps,
    SIZE: tl.constexpr, LINES: tl.constexpr, STEPS: tl.constexpr,
    PDL: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Compute an RMSNorm and quantise the result to int8, with one row per program."""
    row = tl.program_id(0).to(tl.int64)
    gains = load_row(weight_ptr, SIZE, LINES, STEPS)
    if PDL:
        cuda.gdc_launch_dependents()
        cuda.gdc_wait()
    tiles = load_row(x_ptr + row * SIZE, SIZE, LINES, STEPS)
    words, factor = int8_row(tiles, gains, eps, SIZE, LINES, STEPS, True, INTERPRETED)
    finite = (factor == factor)[:, None]
    q_ptr += row * SIZE
    for step in tl.static_range(STEPS):
        number = tl.where(finite, words[step], 0)[:, :, None]
        byte = (number >> 8 * tl.arange(0, _WORD)[None, None, :]).to(tl.int8)
        element = elements(step, LINES)
        tl.store(q_ptr + element, tl.reshape(byte, element.shape), mask=element < SIZE)
    lane = tl.arange(0, LINES)[:, None] * _WORDS + tl.arange(0, _WORDS)[None, :]
    factor = tl.broadcast_to(factor[:, None], (LINES, _WORDS))
    tl.store(factor_ptr + row + lane, factor, mask=lane == 0)


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, out: Tensor, *, dependent: bool = False
) -> None:
    """Compute out = norm(x), with the bits of `kernels.rows.norm.order_free_rms_norm`.

    x: fp32 [rows, H], H up to 16,384. weight: fp32 [H]. eps: above 0. out: [rows, H] of fp32, bf16
    or fp16; if it is fp32, it may be x itself. bf16 and fp16 are rounded half to even, as linears
    with bf16 or fp16 weights round their inputs. A row with NaN or infinite values becomes NaN.
    dependent: programmatic dependent launch. Raises TypeError or ValueError.

    Memory traffic: 8 H bytes per row if out is fp32, 6 H if it is bf16 or fp16; and 4 H for weight.

    Source: Zhang and Sennrich, Root Mean Square Layer Normalization, 2019.
    """
    check_tensor("x", x, torch.float32, None, None)
    rows, size = x.shape
    _check_norm(weight, eps, size)
    check_tensor("out", out, (torch.float32, torch.bfloat16, torch.float16), rows, size)
    check_same_device(x=x, weight=weight, out=out)
    if rows > 0:
        dependent, options = dependent_launch(dependent)
        norm_kernel[(rows,)](
            x, weight, out, eps, **plan(size), PDL=dependent, INTERPRETED=INTERPRETED, **options
        )


def rms_norm_int8(
    x: Tensor, weight: Tensor, eps: float, q: Tensor, factor: Tensor, *, dependent: bool = False
) -> None:
    """Compute q, factor = quantised norm(x), with the bits of `ternary.quantize_activations`.

    q: int8 [rows, H], integers in -127 .. 127. factor: fp32 [rows], by which a row was multiplied
    before rounding; NaN, with zeros in q, for a row with NaN or infinite values. Everything else is
    as in `rms_norm`. Moves 5 H + 4 bytes per row and 4 H once.
    """
    check_tensor("x", x, torch.float32, None, None)
    rows, size = x.shape
    _check_norm(weight, eps, size)
    check_tensor("q", q, torch.int8, rows, size)
    check_tensor("factor", factor, torch.float32, rows)
    check_same_device(x=x, weight=weight, out=q, factor=factor)
    if rows > 0:
        dependent, options = dependent_launch(dependent)
        norm_int8_kernel[(rows,)](
            x, weight, q, factor, eps, **int8_plan(size), PDL=dependent, INTERPRETED=INTERPRETED,
            **options,
        )  # fmt: skip


def _check_norm(weight: Tensor, eps: float, size: int) -> None:
    """Raise TypeError or ValueError if the size of rows, the weight or eps is invalid."""
    if not 0 < size <= MAX_COLUMNS:
        raise ValueError(f"x: rows of {size}, expected 1 to {MAX_COLUMNS} elements")
    check_tensor("weight", weight, torch.float32, size)
    if not eps > 0.0:
        raise ValueError(f"eps: {eps}, expected a number above 0")


def plan(size: int) -> dict[str, Any]:
    """Return the constants and warps of a float norm's launch; a thread has up to 32 elements."""
    block = next_power_of_2(size)
    return {"SIZE": size, "BLOCK": block, "num_warps": min(max(block // 512, 1), 16)}


def int8_plan(size: int) -> dict[str, Any]:
    """Return the constants and warps of an int8 norm's launch; a warp has one line per step."""
    lines = triton.cdiv(size, LINE)
    warps = min(next_power_of_2(lines), MAX_WARPS)
    steps = triton.cdiv(lines, warps)
    return {"SIZE": size, "LINES": warps, "STEPS": steps, "num_warps": warps}


def variants(shape: DecoderShape) -> Iterator[Variant]:
    """Yield the norms before linears and before the LM head, as launches of their own."""
    yield _variant(shape, "hidden", shape.hidden)
    yield _variant(shape, "hidden", shape.hidden, out="bf16")
    yield _variant(shape, "hidden", shape.hidden, out="bf16", dependent=True)
    for dependent in (False, True):
        yield _int8_variant(shape, "hidden", shape.hidden, dependent=dependent)
        if shape.family is Family.BITNET:
            yield _int8_variant(shape, "queries", shape.queries, dependent=dependent)
            yield _int8_variant(shape, "ffn", shape.ffn, dependent=dependent)


def _variant(
    shape: DecoderShape, what: str, size: int, *, out: str = "fp32", dependent: bool = False
) -> Variant:
    rows, element = 16, {"fp32": 4, "bf16": 2}[out]
    pointers = {"x_ptr": "*fp32", "weight_ptr": "*fp32", "out_ptr": f"*{out}"}
    launch = plan(size) | {"PDL": dependent, "INTERPRETED": False}
    warps = launch.pop("num_warps")
    kind = " bf16" if out == "bf16" else ""
    return Variant(
        name=f"{shape.name}.norm {what}{kind} rows={rows}" + " dependent" * dependent,
        kernel=norm_kernel,
        signature={**pointers, "eps": "fp32"},
        constants=launch,
        divisible=frozenset(pointers),
        num_warps=warps,
        launch_pdl=dependent,
        bytes_moved=rows * (4 + element) * size + 4 * size,
    )


def _int8_variant(shape: DecoderShape, what: str, size: int, *, dependent: bool) -> Variant:
    rows = 8
    pointers = dict.fromkeys(("x_ptr", "weight_ptr", "factor_ptr"), "*fp32") | {"q_ptr": "*i8"}
    launch = int8_plan(size) | {"PDL": dependent, "INTERPRETED": False}
    warps = launch.pop("num_warps")
    return Variant(
        name=f"{shape.name}.norm {what} int8 rows={rows}" + " dependent" * dependent,
        kernel=norm_int8_kernel,
        signature={**pointers, "eps": "fp32"},
        constants=launch,
        divisible=frozenset(pointers),
        num_warps=warps,
        launch_pdl=dependent,
        bytes_moved=rows * (5 * size + 4) + 4 * size,
    )
