"""RoPE of queries and keys, and storing keys and values to their pages, in one launch.

Decode attention rotates and stores a row's own token with the device functions below, so that both
paths store the same bits and attend with them. All arithmetic is element-wise, with two exceptions
that do not depend on the order either: the exact sum in the norm of a head, and the largest value
of a quantised head.
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

from tailrace.kernels.attention.paged_attention import (
    FAULT_PAGE,
    FAULT_POSITION,
    FAULT_SEQUENCE,
    check_queries,
)
from tailrace.kernels.attention.paged_kv import FP8, FP8_MAX, SCALED_DTYPES, PagedKv, check_tables
from tailrace.kernels.attention.rope import Rope
from tailrace.kernels.checks import check_same_device, check_tensor
from tailrace.kernels.dependent_triton import wait_for_launches_ahead
from tailrace.kernels.launch import INTERPRETED, dependent_launch, next_power_of_2
from tailrace.kernels.linear.ternary import INT8_MAX
from tailrace.kernels.rows.norm_triton import int8_factor, inverse_rms, normalise, quantise
from tailrace.kernels.rows.rounding_triton import rounded
from tailrace.kernels.shapes import (
    ATTENTION_SHAPES,
    DEMO,
    FALCON3_7B,
    LLAMA_8B,
    PAGE_TOKENS,
    QWEN3_8B,
    REAL_SHAPES,
    DecoderShape,
    Family,
)
from tailrace.kernels.variant import Variant

_PAGE = tl.constexpr(PAGE_TOKENS)
_FAULT_SEQUENCE = tl.constexpr(FAULT_SEQUENCE)
_FAULT_POSITION = tl.constexpr(FAULT_POSITION)
_FAULT_PAGE = tl.constexpr(FAULT_PAGE)
_FP8_OF_INT8 = tl.constexpr(FP8_MAX / INT8_MAX)
# Adding and then subtracting 1.5 * 2**14 rounds to multiples of 2**-9, the distance of e4m3 numbers
# below 2**-6.
_E4M3_ROUND = tl.constexpr(24_576.0)
_E4M3_MIN_NORMAL = tl.constexpr(2.0**-6)


@triton.jit
def turn_of(position, cos_ptr, sin_ptr, D: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr):
    """Load a position's rotation factors from the tables cos and sin: two fp32 [ROWS, BLOCK_D].

    The same factors are loaded into every row, so that no thread has to get them from another one
    after the wait for earlier launches.
    """
    columns = tl.arange(0, BLOCK_D)[None, :] + tl.zeros((ROWS, 1), tl.int32)
    angle = position.to(tl.int64) * D + columns
    cos = tl.load(cos_ptr + angle, mask=columns < D, other=0.0)
    return cos, tl.load(sin_ptr + angle, mask=columns < D, other=0.0)


@triton.jit
def turned_heads(
    x_ptr, heads, live, keys, turn, q_norm_ptr, k_norm_ptr, eps, D: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Load heads of D elements at x_ptr, norm them if q_norm_ptr is not None, and rotate them.

    heads: int32 [ROWS], indices of heads. live: [ROWS], True for heads to load. keys: [ROWS], True
    for key heads. turn: the result of `turn_of`. Returns fp32 [ROWS, BLOCK_D], 0 where not live.
    """
    columns = tl.arange(0, BLOCK_D)[None, :]
    partners = tl.where(columns < D // 2, columns + D // 2, columns - D // 2)
    inside = columns < D
    mask = live[:, None] & inside
    x = tl.load(x_ptr + heads[:, None] * D + columns, mask=mask, other=0.0)
    other = tl.load(x_ptr + heads[:, None] * D + partners, mask=mask, other=0.0)
    if q_norm_ptr is not None:
        inverse = inverse_rms(x, D, eps)[:, None]
        x = normalise(x, _weight(q_norm_ptr, k_norm_ptr, keys, columns, inside), inverse)
        weight = _weight(q_norm_ptr, k_norm_ptr, keys, partners, inside)
        other = normalise(other, weight, inverse)
    cos, sin = turn
    return x * cos + other * sin


@triton.jit
def _weight(q_norm_ptr, k_norm_ptr, keys, columns, inside):
    q_weight = tl.load(q_norm_ptr + columns, mask=inside, other=0.0)
    k_weight = tl.load(k_norm_ptr + columns, mask=inside, other=0.0)
    return tl.where(keys[:, None], k_weight, q_weight)


@triton.jit
def cells_of(x, KIND: tl.constexpr, SCALED: tl.constexpr, INTERPRETED: tl.constexpr):
    """Convert fp32 heads [ROWS, BLOCK_D] to a cache's type KIND; return them and scales [ROWS]."""
    if SCALED:
        factor = int8_factor(x)
        if KIND == tl.int8:
            cells = quantise(x, factor[:, None])
        else:
            factor = factor * _FP8_OF_INT8
            cells = x * factor[:, None]
            cells = tl.where(cells == cells, cells, 0.0)
            if INTERPRETED:
                cells = _round_to_e4m3(cells)
        return cells.to(KIND), tl.div_rn(1.0, factor)
    else:
        return rounded(x, KIND, INTERPRETED).to(KIND), tl.full((x.shape[0],), 1.0, tl.float32)


@triton.jit
def store_cells(cells, scale, live, cells_ptr, scales_ptr, cell, D: tl.constexpr):
    """Store the only live row of a result of `cells_of` as row `cell`, int64, of a cache."""
    columns = tl.arange(0, cells.shape[1])[None, :]
    mask = live[:, None] & (columns < D)
    tl.store(cells_ptr + cell * D + columns + tl.zeros_like(mask).to(tl.int32), cells, mask=mask)
    if scales_ptr is not None:
        tl.store(scales_ptr + cell + tl.zeros_like(live).to(tl.int32), scale, mask=live)


@triton.jit
def _round_to_e4m3(x):
    """Round |x| <= 448 to e4m3, ties to even; the interpreter's conversion does not do that."""
    bits = x.to(tl.int32, bitcast=True)
    normal = (bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000
    small = (x + _E4M3_ROUND) - _E4M3_ROUND
    return tl.where(tl.abs(x) < _E4M3_MIN_NORMAL, small, normal.to(tl.float32, bitcast=True))


@triton.jit
def row_fault(sequence, sequences, number, lowest, highest):
    """Return a row's fault bits; its position or length is `number`, in lowest .. highest."""
    outside = (number < lowest) | (number > highest)
    unknown = (sequence < 0) | (sequence >= sequences)
    return tl.where(outside, _FAULT_POSITION, 0) | tl.where(unknown, _FAULT_SEQUENCE, 0)


@triton.jit
def page_at(tables_ptr, sequence, max_pages, index, pages, wanted):
    """Read entry `index` of a sequence's block table if `wanted`; return (page id, fault bits).

    If the entry is no page of the cache, the function returns page 0, which can be read safely, and
    a fault, for which the caller makes the row's result NaN.
    """
    entry = tables_ptr + sequence.to(tl.int64) * max_pages + index
    page = tl.load(entry, mask=wanted, other=0)
    foreign = (page < 0) | (page >= pages)
    return tl.where(foreign, 0, page), tl.where(foreign, _FAULT_PAGE, 0)


@triton.jit
def own_heads(
    x_ptr, head, turn, q_norm_ptr, k_norm_ptr, eps, HEADS: tl.constexpr, KV_HEADS: tl.constexpr,
    D: tl.constexpr, BLOCK_D: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Load and rotate the queries and the key of one KV head of the row at x_ptr; load its value.

    Returns fp32 [ROWS, BLOCK_D], whose first GROUP rows are the group's queries and whose row GROUP
    is the key, and the value, fp32 [1, BLOCK_D].
    """
    member = tl.arange(0, ROWS)
    is_key = member == GROUP
    heads = tl.where(is_key, HEADS + head, head * GROUP + member)
    turned = turned_heads(
        x_ptr, heads, member <= GROUP, is_key, turn, q_norm_ptr, k_norm_ptr, eps, D, BLOCK_D
    )
    columns = tl.arange(0, BLOCK_D)[None, :]
    value_ptr = x_ptr + (HEADS + KV_HEADS + head) * D
    return turned, tl.load(value_ptr + columns, mask=columns < D, other=0.0)


@triton.jit(do_not_specialize=["sequences", "max_pages", "pages", "context"])
def _rope_write(
    qkv_ptr, positions_ptr, sequences_ptr, cos_ptr, sin_ptr, q_norm_ptr, k_norm_ptr, eps, keys_ptr,
    values_ptr, key_scales_ptr, value_scales_ptr, tables_ptr, q_out_ptr, faults_ptr, sequences,
    max_pages, pages, context, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr,
    BLOCK_D: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, PDL: tl.constexpr,
    INTERPRETED: tl.constexpr,
):  # fmt: skip
    wait_for_launches_ahead(PDL)
    row, head = tl.program_id(0), tl.program_id(1)
    position = tl.load(positions_ptr + row)
    sequence = tl.load(sequences_ptr + row)
    last = tl.minimum(context, max_pages * _PAGE) - 1
    fault = row_fault(sequence, sequences, position, 0, last)
    index = position // _PAGE
    page, foreign = page_at(tables_ptr, sequence, max_pages, index, pages, fault == 0)
    fault = fault | foreign
    member = tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK_D)[None, :]
    target = row.to(tl.int64) * (HEADS * D) + (head * GROUP + member)[:, None] * D + columns
    is_query = (member < GROUP)[:, None] & (columns < D)
    if fault != 0:
        # Attention reads the queries of every row, also of those with faults, so they must not be
        # left uninitialised.
        tl.store(q_out_ptr + target, tl.zeros((ROWS, BLOCK_D), tl.float32), mask=is_query)
        tl.atomic_or(faults_ptr + row, fault)
    else:
        x_ptr = qkv_ptr + row.to(tl.int64) * ((HEADS + 2 * KV_HEADS) * D)
        turn = turn_of(position, cos_ptr, sin_ptr, D, BLOCK_D, ROWS)
        turned, value = own_heads(
            x_ptr, head, turn, q_norm_ptr, k_norm_ptr, eps, HEADS, KV_HEADS, D, BLOCK_D, GROUP, ROWS
        )
        SCALED: tl.constexpr = key_scales_ptr is not None
        KIND: tl.constexpr = keys_ptr.dtype.element_ty
        cell = (page.to(tl.int64) * KV_HEADS + head) * _PAGE + position % _PAGE
        key, scale = cells_of(turned, KIND, SCALED, INTERPRETED)
        store_cells(key, scale, member == GROUP, keys_ptr, key_scales_ptr, cell, D)
        value, scale = cells_of(value, KIND, SCALED, INTERPRETED)
        store_cells(value, scale, tl.arange(0, 1) == 0, values_ptr, value_scales_ptr, cell, D)
        tl.store(q_out_ptr + target, turned, mask=is_query)


def rope_write(
    qkv: Tensor,
    positions: Tensor,
    sequences: Tensor,
    rope: Rope,
    cache: PagedKv,
    tables: Tensor,
    q_out: Tensor,
    faults: Tensor,
    *,
    dependent: bool = False,
) -> None:
    """Rotate the queries of every row, and rotate, quantise and store its key and value.

    qkv: fp32 [rows, (heads + 2 kv_heads) * D]. positions: int32 [rows], each row's position in its
    sequence. sequences: int32 [rows], the number of each row's sequence. cache: gets the keys and
    values. tables: int32 [sequences, max_pages], the pages of each sequence in `cache`. q_out: fp32
    [rows, heads * D]. faults: int32 [rows], cleared by the caller; a row whose sequence, position
    or page is invalid gets a FAULT_* bit and queries of 0, and is not stored. No two rows may have
    the same sequence and position. dependent: programmatic dependent launch. Raises TypeError or
    ValueError.

    Memory traffic: `qkv` and `q_out` once, and per row `cache.token_bytes()`, the bytes of one
    position's keys and values. Source: Su et al., RoFormer, 2021; rotate-half as in Llama.
    """
    rows = len(qkv)
    heads = check_write(qkv, rope, cache)
    check_tables(tables, sequences, rows)
    check_tensor("positions", positions, torch.int32, rows)
    check_tensor("q_out", q_out, torch.float32, rows, heads * cache.head_dim)
    check_tensor("faults", faults, torch.int32, rows)
    check_same_device(
        qkv=qkv,
        positions=positions,
        sequences=sequences,
        cos=rope.cos,
        keys=cache.keys,
        tables=tables,
        q_out=q_out,
        faults=faults,
    )
    if rows == 0:
        return
    dependent, options = dependent_launch(dependent)
    _rope_write[(rows, cache.kv_heads)](
        qkv, positions, sequences, rope.cos, rope.sin, rope.q_norm, rope.k_norm, rope.eps,
        cache.keys, cache.values, cache.key_scales, cache.value_scales, tables, q_out, faults,
        *tables.shape, cache.pages, len(rope.cos), **plan(heads, cache.kv_heads, cache.head_dim),
        PDL=dependent, num_warps=_WARPS, **options,
    )  # fmt: skip


_WARPS = 4


def plan(heads: int, kv_heads: int, head_dim: int) -> dict[str, Any]:
    """Return the constants of a launch, which depend only on the number and size of the heads."""
    group = heads // kv_heads
    return {
        "HEADS": heads,
        "KV_HEADS": kv_heads,
        "D": head_dim,
        "BLOCK_D": next_power_of_2(head_dim),
        "GROUP": group,
        "ROWS": next_power_of_2(group + 1),
        "INTERPRETED": INTERPRETED,
    }


def check_write(qkv: Tensor, rope: Rope, cache: PagedKv) -> int:
    """Return the number of query heads; raise unless rows and rotary table fit the cache."""
    heads = check_queries("qkv", qkv, cache) - 2 * cache.kv_heads
    if heads <= 0:
        raise ValueError(f"qkv: shape {tuple(qkv.shape)} has no column for a query")
    check_tensor("cos", rope.cos, torch.float32, None, cache.head_dim)
    return heads


_KV_TYPES = {
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.int8: "*i8",
    FP8: "*fp8e4nv",
}
_INTEGERS = {
    *("counters", "faults", "first_rows", "lengths"),
    *("positions", "sequences", "starts", "tables"),
}
"""Names of the arguments that point to int32. All others, except the cache's, point to fp32."""


SHAPES = ATTENTION_SHAPES
"""Shapes for which the variants of this file are compiled."""


def dependent_too(shape: DecoderShape) -> tuple[bool, ...]:
    """Return the values of `dependent` to compile: False, and also True for real models' shapes."""
    return (False, True) if shape in REAL_SHAPES else (False,)


def served_caches(shape: DecoderShape) -> tuple[torch.dtype, ...]:
    """Return the cache types that a model is compiled for ahead of time.

    Every model has bf16, and models small enough to be served in fp32 have fp32. The other types
    that an origin can be set to are compiled for three models only: an ordinary one, one with norms
    of heads, and one with the largest heads.
    """
    others = {
        DEMO: (torch.float32,),
        LLAMA_8B: (torch.float32, *SCALED_DTYPES),
        QWEN3_8B: SCALED_DTYPES,
        FALCON3_7B: (torch.float32, *SCALED_DTYPES),
    }
    return (torch.bfloat16, *others.get(shape, ()))


def signature_of(
    kernel: Any, dtype: torch.dtype, absent: set[str]
) -> tuple[dict[str, str], dict[str, None]]:
    """Return Triton's type of each run-time argument, and a constant None for each absent pointer.

    The types follow from the arguments' names: pointers end with `_ptr`, `eps` is fp32, and all
    other numbers are int32.
    """
    signature: dict[str, str] = {}
    for name in kernel.arg_names:
        plain = name.removesuffix("_ptr")
        if name.isupper() or plain in absent:
            continue
        if plain in ("keys", "values"):
            signature[name] = _KV_TYPES[dtype]
        elif name != plain:
            signature[name] = "*i32" if plain in _INTEGERS else "*fp32"
        else:
            signature[name] = "fp32" if name == "eps" else "i32"
    return signature, {
        name: None for name in kernel.arg_names if name.removesuffix("_ptr") in absent
    }


def absent_pointers(shape: DecoderShape, dtype: torch.dtype) -> set[str]:
    """Return the names of pointers that a launch for this model and cache type does not have."""
    norms = set() if shape.family is Family.QWEN3 else {"q_norm", "k_norm"}
    return norms | (set() if dtype in SCALED_DTYPES else {"key_scales", "value_scales"})


def variants(shape: DecoderShape) -> Iterator[Variant]:
    """Yield the variants of `rope_write`, for attention that does not store keys itself."""
    for dtype in served_caches(shape):
        signature, none = signature_of(_rope_write, dtype, absent_pointers(shape, dtype))
        row_bytes = 4 * (2 * shape.queries + 2 * shape.keys)
        kind = str(dtype).removeprefix("torch.")
        for dependent in dependent_too(shape):
            yield Variant(
                name=f"{shape.name}.rope_write {kind}" + " dependent" * dependent,
                kernel=_rope_write,
                signature=signature,
                constants=none
                | plan(shape.heads, shape.kv_heads, shape.head_dim)
                | {"PDL": dependent},
                divisible=frozenset(name for name in signature if name.endswith("_ptr")),
                num_warps=_WARPS,
                launch_pdl=dependent,
                bytes_moved=row_bytes + 2 * shape.keys * dtype.itemsize,
            )
