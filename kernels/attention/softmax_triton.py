"""The online softmax of prefill over tiles of a paged cache, and functions shared with decode."""

# mypy: disallow-untyped-calls=False, disallow-untyped-decorators=False
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl

from tailrace.kernels.launch import INTERPRETED, next_power_of_2
from tailrace.kernels.rows.rounding_triton import rounded

DOT_TYPES = {torch.float32: tl.float32}
"""Maps the cache's type to the type of the operands of products. All types that are not listed use
bf16, which holds each of their numbers exactly."""


@triton.jit
def attend_tile(
    q, scale, cell, known, live, highest, total, mixed,
    keys_ptr, values_ptr, key_scales_ptr, value_scales_ptr,
    D: tl.constexpr, TILE: tl.constexpr, DOT: tl.constexpr, MASKED: tl.constexpr,
    INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Do one step of the online softmax over a tile: the cache's rows `cell` .. `cell` + TILE - 1.

    q: DOT [ROWS, BLOCK_D]. known: [TILE], True for positions to read. live: True for scores that
    count; its shape broadcasts to [ROWS, TILE]. If not MASKED, both are ignored: all positions are
    read and count. highest: fp32 [ROWS], the largest score so far; scores are base-2 logarithms.
    total: fp32 [ROWS, TILE], the sums of weights so far, kept per column so that they are summed
    across threads only once. mixed: fp32 [ROWS, BLOCK_D]. Returns the new highest, total and mixed.
    Source: Milakov and Gimelshein, Online normalizer calculation for softmax, 2018.
    """
    token = tl.arange(0, TILE)
    columns = tl.arange(0, q.shape[1])
    PADDED: tl.constexpr = q.shape[1] != D
    place = (token * D)[:, None] + columns[None, :]
    inside = (columns < D)[None, :] & known[:, None]
    keys = _cells(keys_ptr + cell * D + place, inside, MASKED or PADDED)
    keys = tl.trans(operand(keys, DOT, INTERPRETED))
    scores = tl.dot(q, keys, input_precision="ieee") * scale
    if key_scales_ptr is not None:
        scores *= _cells(key_scales_ptr + cell + token, known, MASKED)[None, :]
    if MASKED:
        scores = tl.where(live, scores, float("-inf"))
    higher = tl.maximum(highest, tl.max(scores, 1))
    weights = tl.math.exp2(scores - higher[:, None])
    shrink = tl.math.exp2(highest - higher)
    total = total * shrink[:, None] + weights
    if value_scales_ptr is not None:
        weights *= _cells(value_scales_ptr + cell + token, known, MASKED)[None, :]
    values = _cells(values_ptr + cell * D + place, inside, MASKED or PADDED)
    values = operand(values, DOT, INTERPRETED)
    weights = rounded(weights, DOT, INTERPRETED)
    mixed = tl.dot(weights, values, mixed * shrink[:, None], input_precision="ieee")
    return higher, total, mixed


@triton.jit
def _cells(pointers, mask, MASKED: tl.constexpr):
    if MASKED:
        return tl.load(pointers, mask=mask, other=0.0)
    else:
        return tl.load(pointers)


@triton.jit
def operand(cells, DOT: tl.constexpr, INTERPRETED: tl.constexpr):
    """Convert numbers of a cache to DOT, the type of a product's operands; this rounds nothing."""
    if INTERPRETED:
        return cells.to(tl.float32)
    else:
        return cells.to(DOT)


@triton.jit
def pinned(x, INTERPRETED: tl.constexpr):
    """Return x, and keep the compiler from computing it again in another layout for a product."""
    if INTERPRETED:
        return x
    else:
        return tl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=False,
            pack=32 // x.dtype.primitive_bitwidth,
        )  # fmt: skip


def softmax_plan(heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> dict[str, Any]:
    """Return the constants of attention, which depend only on the heads and the cache's type."""
    return {
        "HEADS": heads,
        "KV_HEADS": kv_heads,
        "D": head_dim,
        "BLOCK_D": next_power_of_2(head_dim),
        "GROUP": heads // kv_heads,
        "SCALE": head_dim**-0.5 * math.log2(math.e),
        "DOT": DOT_TYPES.get(dtype, tl.bfloat16),
        "INTERPRETED": INTERPRETED,
    }
