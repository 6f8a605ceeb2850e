"""Decode attention over pages: flash-decoding whose bits depend on a row's length alone.

For each KV head, a row's pages are divided among at most MAX_SPLITS programs (`splits_triton`); up
to 2,048 positions that is one page per program. The query heads of a group share what their program
reads. A program of a dependent launch requests its first page before it waits for the preceding
launches, so that the page is in shared memory when the queries are computed. This early read is
safe, because positions before the step's own were written by earlier chains of launches. The
softmax begins with the row's own token, whose key and value are in registers, so a program reads
nothing that the same launch writes.

The speed for long rows is limited by the bytes in flight: 4.3 TB/s over 132 multiprocessors is 33
bytes per ns each, so with a memory latency of 1 us under load a multiprocessor must have 33 KB
requested at all times. In bf16 with D = 128 a page's keys and values are 32 KB. A program loads
them into registers and then stores them to shared memory. Four programs fit on a multiprocessor, so
that three keep memory busy while one computes.
"""

# mypy: disallow-untyped-calls=False, disallow-untyped-decorators=False
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import cuda

from tailrace.kernels.attention.paged_attention import check_queries
from tailrace.kernels.attention.paged_kv import PagedKv, check_tables
from tailrace.kernels.attention.rope import Rope
from tailrace.kernels.attention.rope_triton import (
    absent_pointers,
    cells_of,
    check_write,
    dependent_too,
    own_heads,
    page_at,
    row_fault,
    served_caches,
    signature_of,
    store_cells,
    turn_of,
)
from tailrace.kernels.attention.softmax_triton import operand, pinned, softmax_plan
from tailrace.kernels.attention.splits_triton import DecodeWorkspace, finish, split_span, splits_of
from tailrace.kernels.checks import check_same_device, check_tensor
from tailrace.kernels.launch import dependent_launch, next_power_of_2
from tailrace.kernels.rows.rounding_triton import rounded
from tailrace.kernels.shapes import ATTENTION_SHAPES, PAGE_TOKENS, DecoderShape
from tailrace.kernels.variant import Variant

_PAGE = tl.constexpr(PAGE_TOKENS)
# Initial maximum of the softmax. It is lower than any score but finite, since for a row with no
# readable position the softmax would compute inf - inf, which is NaN.
_LOWEST = tl.constexpr(-3.0e38)


@triton.jit
def _own_token(
    x_ptr, head, cell, mine, turn, q_norm_ptr, k_norm_ptr, eps, keys_ptr, values_ptr,
    key_scales_ptr, value_scales_ptr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr,
    BLOCK_D: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
    SCALE: tl.constexpr, DOT: tl.constexpr, WRITE: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Start a row: load its queries, DOT [BLOCK_D, ROWS], and begin the softmax with its own token.

    With WRITE this function rotates the token and stores it to row `cell` of the cache; otherwise
    it reads the token from there. mine: True if the token belongs to this program's split. The key
    is placed behind the queries, as their number GROUP. The product of that matrix with itself then
    contains the scores of the token, and the order of summation is the same with and without WRITE.
    Returns the queries, and for this one position what `_attend_tile` returns.
    """
    SCALED: tl.constexpr = key_scales_ptr is not None
    KIND: tl.constexpr = keys_ptr.dtype.element_ty
    member = tl.arange(0, ROWS)
    is_key = member == GROUP
    one = tl.arange(0, 1)
    if WRITE:
        q, value = own_heads(
            x_ptr, head, turn, q_norm_ptr, k_norm_ptr, eps, HEADS, KV_HEADS, D, BLOCK_D, GROUP, ROWS
        )
        key, key_scale = cells_of(q, KIND, SCALED, INTERPRETED)
        store_cells(key, key_scale, is_key & mine, keys_ptr, key_scales_ptr, cell, D)
        value, value_scale = cells_of(value, KIND, SCALED, INTERPRETED)
        store_cells(value, value_scale, (one == 0) & mine, values_ptr, value_scales_ptr, cell, D)
    else:
        columns = tl.arange(0, BLOCK_D)[None, :]
        inside = columns < D
        heads = x_ptr + (head * GROUP + member)[:, None] * D + columns
        q = tl.load(heads, mask=(member < GROUP)[:, None] & inside, other=0.0)
        place = cell * D + columns
        key = tl.load(keys_ptr + place, mask=inside & mine, other=0.0)
        value = tl.load(values_ptr + place, mask=inside & mine, other=0.0)
        if SCALED:
            key_scale = tl.load(key_scales_ptr + cell + one)
            value_scale = tl.load(value_scales_ptr + cell + one)
    q = rounded(q, DOT, INTERPRETED)
    if SCALED or not WRITE:
        q = tl.where(is_key[:, None], operand(key, DOT, INTERPRETED), q)
    q = pinned(tl.trans(q), INTERPRETED)
    products = tl.dot(tl.trans(q), q, input_precision="ieee") * SCALE
    value = value.to(tl.float32)
    if SCALED:
        products *= key_scale[:, None]
        value *= value_scale[:, None]
    score = tl.sum(tl.where(is_key[:, None], products, 0.0), 0)
    first = (tl.arange(0, TILE) == 0) & mine
    return (
        q,
        tl.where(mine, score, _LOWEST),
        tl.broadcast_to(tl.where(first, 1.0, 0.0)[:, None], (TILE, ROWS)),
        tl.broadcast_to(tl.trans(tl.where(mine, value, 0.0)), (BLOCK_D, ROWS)),
    )


@triton.jit
def _tile(
    page, start, end, head, keys_ptr, values_ptr, key_scales_ptr, value_scales_ptr,
    KV_HEADS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, TILE: tl.constexpr,
    DOT: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Load keys, DOT [TILE, BLOCK_D], transposed values, and scales of TILE positions from `start`.

    Positions from `end` on must not count: `_attend_tile` masks their scores, and their values are
    loaded as 0 because a weight of 0 would not hide a NaN.
    """
    token = tl.arange(0, TILE)
    inside = (tl.arange(0, BLOCK_D) < D)[None, :]
    known = start + token < end
    cell = (page.to(tl.int64) * KV_HEADS + head) * _PAGE + start % _PAGE
    # With 64-bit offsets, the distances between the rows that a thread loads become constants in
    # the load instructions.
    place = (token.to(tl.int64) * D)[:, None] + tl.arange(0, BLOCK_D)[None, :]
    if D == BLOCK_D:
        keys = tl.load(keys_ptr + cell * D + place)
    else:
        keys = tl.load(keys_ptr + cell * D + place, mask=inside, other=0.0)
    values = tl.load(values_ptr + cell * D + place, mask=inside & known[:, None], other=0.0)
    keys = operand(keys, DOT, INTERPRETED)
    values = pinned(tl.trans(operand(values, DOT, INTERPRETED)), INTERPRETED)
    if key_scales_ptr is not None:
        key_scales = tl.load(key_scales_ptr + cell + token, mask=known, other=0.0)
        value_scales = tl.load(value_scales_ptr + cell + token, mask=known, other=0.0)
        return keys, values, key_scales, value_scales
    else:
        return keys, values, None, None


@triton.jit
def _attend_tile(
    q, keys, values, key_scales, value_scales, known, highest, total, mixed, SCALE: tl.constexpr,
    DOT: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Do one step of the online softmax over a tile of positions.

    In the products the positions are the rows and the queries the columns, since tensor cores
    accept as few as eight columns. known: [TILE], True for positions that count. highest: fp32
    [ROWS], the largest score so far; scores are base-2 logarithms. total: fp32 [TILE, ROWS], the
    sums of weights so far, kept per row of the tile so that they are summed across threads only
    once. mixed: fp32 [BLOCK_D, ROWS]. Returns the new highest, total and mixed.
    Source: Milakov and Gimelshein, Online normalizer calculation for softmax, 2018.
    """
    if DOT == tl.float32:
        q, keys = pinned(q, INTERPRETED), pinned(keys, INTERPRETED)
    scores = tl.dot(keys, q, input_precision="ieee") * SCALE
    if key_scales is not None:
        scores *= key_scales[:, None]
    scores = tl.where(known[:, None], scores, float("-inf"))
    higher = tl.maximum(highest, tl.max(scores, 0))
    weights = tl.math.exp2(scores - higher[None, :])
    shrink = tl.math.exp2(highest - higher)[None, :]
    total = total * shrink + weights
    if value_scales is not None:
        weights *= value_scales[:, None]
    weights = rounded(weights, DOT, INTERPRETED)
    mixed = tl.dot(values, weights, mixed * shrink, input_precision="ieee")
    return higher, total, mixed


@triton.jit(do_not_specialize=["sequences", "max_pages", "pages", "context", "max_length"])
def _decode(
    x_ptr, lengths_ptr, sequences_ptr, cos_ptr, sin_ptr, q_norm_ptr, k_norm_ptr, eps,
    keys_ptr, values_ptr, key_scales_ptr, value_scales_ptr, tables_ptr, out_ptr, faults_ptr,
    mixed_ptr, sums_ptr, counters_ptr, sequences, max_pages, pages, context, max_length,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    GROUP: tl.constexpr, BLOCK_GROUP: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
    SCALE: tl.constexpr, DOT: tl.constexpr, WRITE: tl.constexpr,
    PDL: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    if PDL:
        cuda.gdc_launch_dependents()
    split, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    length = tl.load(lengths_ptr + row)
    sequence = tl.load(sequences_ptr + row)
    longest = tl.minimum(max_length, max_pages * _PAGE)
    if WRITE:
        longest = tl.minimum(longest, context)
        x_ptr += row * ((HEADS + 2 * KV_HEADS) * D)
    else:
        x_ptr += row * (HEADS * D)
    out_ptr += (row * HEADS + head * GROUP) * D
    fault = row_fault(sequence, sequences, length, 0, longest)
    span = split_span(length)
    begin = split * span
    if (fault == 0) & (begin < length):
        end = tl.minimum(begin + span, length)
        last = length - 1
        mine = end == length
        page, foreign = page_at(tables_ptr, sequence, max_pages, last // _PAGE, pages, mine)
        own_cell = (page.to(tl.int64) * KV_HEADS + head) * _PAGE + last % _PAGE
        mine &= foreign == 0
        turn = (0.0, 0.0)
        if WRITE:
            turn = turn_of(last, cos_ptr, sin_ptr, D, BLOCK_D, ROWS)
        elif PDL:
            # Without WRITE, the launch ahead writes this row's own key and value, so wait before
            # any are read.
            cuda.gdc_wait()
        q = tl.zeros((BLOCK_D, ROWS), tl.float32 if INTERPRETED else DOT)
        highest = tl.full((ROWS,), _LOWEST, tl.float32)
        total = tl.zeros((TILE, ROWS), tl.float32)
        mixed = tl.zeros((BLOCK_D, ROWS), tl.float32)
        for number in tl.range(begin, end, TILE, num_stages=1):
            # The loop variable is a Python integer in the interpreter, so it is cast.
            start = tl.cast(number, tl.int32)
            page, strange = page_at(tables_ptr, sequence, max_pages, start // _PAGE, pages, True)
            foreign |= strange
            keys, values, key_scales, value_scales = _tile(
                page, start, last, head, keys_ptr, values_ptr, key_scales_ptr,
                value_scales_ptr, KV_HEADS, D, BLOCK_D, TILE, DOT, INTERPRETED,
            )  # fmt: skip
            if start == begin:
                if PDL and WRITE:
                    cuda.gdc_wait()
                q, highest, total, mixed = _own_token(
                    x_ptr, head, own_cell, mine, turn, q_norm_ptr, k_norm_ptr, eps,
                    keys_ptr, values_ptr, key_scales_ptr, value_scales_ptr, HEADS, KV_HEADS, D,
                    BLOCK_D, GROUP, ROWS, TILE, SCALE, DOT, WRITE, INTERPRETED,
                )  # fmt: skip
            highest, total, mixed = _attend_tile(
                q, keys, values, key_scales, value_scales, start + tl.arange(0, TILE) < last,
                highest, total, mixed, SCALE, DOT, INTERPRETED,
            )  # fmt: skip
        if foreign != 0:
            tl.atomic_or(faults_ptr + row, foreign)
        summed = tl.where(foreign != 0, float("nan"), tl.sum(total, 0))
        finish(
            highest, summed, mixed, split, end - begin, length, row * KV_HEADS + head,
            out_ptr, mixed_ptr, sums_ptr, counters_ptr, D, GROUP, BLOCK_GROUP,
        )  # fmt: skip
    else:
        if PDL:
            cuda.gdc_wait()
        if (split == 0) & ((fault != 0) | (length == 0)):
            cell = tl.arange(0, ROWS * BLOCK_D)
            nothing = tl.where(fault != 0, float("nan"), 0.0)
            tl.store(out_ptr + cell, nothing + cell * 0.0, mask=cell < GROUP * D)
            tl.atomic_or(faults_ptr + row, fault)


def decode_attention(
    x: Tensor,
    lengths: Tensor,
    sequences: Tensor,
    cache: PagedKv,
    tables: Tensor,
    out: Tensor,
    faults: Tensor,
    workspace: DecodeWorkspace,
    *,
    max_length: int,
    write: Rope | None = None,
    dependent: bool = False,
) -> None:
    """Attend from every row to positions 0 .. length-1 of its sequence.

    With `write`, this launch also rotates each row's token, at position length-1, and stores its
    key and value, as decode steps need. x is then fp32 qkv [rows, (heads + 2 kv_heads) * D], and
    the rows belong to distinct sequences. Without `write`, x is fp32 [rows, heads * D], the queries
    that `rope_write` rotated, and several rows may belong to one sequence: n rows of lengths p+1 ..
    p+n get the same bits as in n decode steps.

    lengths, sequences: int32 [rows]; sequence s has row s of `tables`, int32 [sequences,
    max_pages]. out: fp32 [rows, heads * D]; a row of length 0 gets zeros and no fault, so that a
    batch can be padded. faults: int32 [rows], cleared by the caller; a row whose sequence, length
    or page is invalid gets a FAULT_* bit and NaN, and other rows are unaffected. max_length:
    maximum length of a row; a longer row gets a fault. dependent: programmatic dependent launch;
    lengths, sequences and tables are read while earlier launches run, so no launch of the chain may
    write them, nor, with `write`, positions before a row's own. Raises TypeError or ValueError.

    Moves `cache.token_bytes()` per position, x, out, and the partial results twice: D + 2 fp32
    numbers for every split and head. Source: Dao et al., Flash-Decoding for
    long-context inference, 2023; grouped queries after Ainslie et al., GQA, 2023.
    """
    rows = len(x)
    heads = check_queries("x", x, cache) if write is None else check_write(x, write, cache)
    check_tables(tables, sequences, rows)
    check_tensor("lengths", lengths, torch.int32, rows)
    check_tensor("out", out, torch.float32, rows, heads * cache.head_dim)
    check_tensor("faults", faults, torch.int32, rows)
    workspace.check(rows, heads, cache, max_length)
    check_same_device(
        x=x, lengths=lengths, sequences=sequences, keys=cache.keys, tables=tables, out=out,
        faults=faults, cos=write.cos if write else None,
    )  # fmt: skip
    if rows == 0:
        return
    rope: tuple[Any, ...] = (None, None, None, None, 1.0)
    if write is not None:
        rope = (write.cos, write.sin, write.q_norm, write.k_norm, write.eps)
    constants, options = decode_plan(heads, cache.kv_heads, cache.head_dim, cache.keys.dtype)
    dependent, launch = dependent_launch(dependent)
    _decode[(splits_of(max_length), cache.kv_heads, rows)](
        x, lengths, sequences, *rope, cache.keys, cache.values, cache.key_scales,
        cache.value_scales, tables, out, faults, workspace.mixed, workspace.sums,
        workspace.counters, *tables.shape, cache.pages, len(write.cos) if write else 0,
        max_length, **constants, WRITE=write is not None, PDL=dependent, **options, **launch,
    )  # fmt: skip


_MIN_DOT_ROWS = 8
"""Minimum number of columns of a product on tensor cores, padding included."""


def decode_plan(
    heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype
) -> tuple[dict[str, Any], dict[str, int]]:
    """Return (constants, launch options), which depend only on the heads and the cache's type."""
    constants = softmax_plan(heads, kv_heads, head_dim, dtype)
    # In fp32 the products are not done by tensor cores, so the operands stay in registers and tiles
    # are small.
    plain = dtype == torch.float32
    warps = 4 if constants["BLOCK_D"] <= 128 else 8
    constants |= {
        "BLOCK_GROUP": next_power_of_2(constants["GROUP"]),
        "ROWS": max(_MIN_DOT_ROWS, next_power_of_2(constants["GROUP"] + 1)),
        "TILE": 16 if plain else PAGE_TOKENS if warps == 4 else PAGE_TOKENS // 2,
    }
    return constants, {"num_warps": warps}


SHAPES = ATTENTION_SHAPES


def variants(shape: DecoderShape) -> Iterator[Variant]:
    """Yield the variants with and without `write`; bytes moved are those of one page."""
    for dtype in served_caches(shape):
        constants, options = decode_plan(shape.heads, shape.kv_heads, shape.head_dim, dtype)
        for write, dependent in product((True, False), dependent_too(shape)):
            absent = absent_pointers(shape, dtype)
            if not write:
                absent |= {"cos", "sin", "q_norm", "k_norm"}
            signature, none = signature_of(_decode, dtype, absent)
            kind = str(dtype).removeprefix("torch.") + (" write" if write else "")
            first = write and not dependent and dtype == torch.bfloat16
            yield Variant(
                name=f"{shape.name}.attend {kind}" + " dependent" * dependent,
                kernel=_decode,
                signature=signature,
                constants=none | constants | {"WRITE": write, "PDL": dependent},
                divisible=frozenset(name for name in signature if name.endswith("_ptr")),
                expects=() if dtype == torch.float32 else ("HMMA",),
                bytes_moved=PAGE_TOKENS * 2 * shape.keys * dtype.itemsize,
                step="attend" if first else None,
                num_warps=options["num_warps"],
                launch_pdl=dependent,
            )
