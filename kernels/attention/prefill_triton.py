"""Prefill attention: chunks of several sequences, each over its sequence's pages so far.

One program computes BLOCK_M positions of one query head, starting at a multiple of BLOCK_M, and
reads all pages up to these positions. The programs of the heads of a group read the same pages, so
most reads are served by the L2 cache. A row's sums run over tiles at absolute positions, so neither
the batch nor the ends of chunks change its bits. From 512 positions on, the tensor cores limit the
speed, not memory: each score in the causal half costs 4 * D operations. Tiles in the other half are
not computed.
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

from tailrace.kernels.attention.paged_attention import check_queries
from tailrace.kernels.attention.paged_kv import SCALED_DTYPES, PagedKv, check_tables
from tailrace.kernels.attention.rope_triton import (
    absent_pointers,
    page_at,
    row_fault,
    served_caches,
    signature_of,
)
from tailrace.kernels.attention.softmax_triton import attend_tile, softmax_plan
from tailrace.kernels.checks import check_same_device, check_tensor
from tailrace.kernels.launch import OPTIONS
from tailrace.kernels.rows.rounding_triton import rounded
from tailrace.kernels.shapes import ATTENTION_SHAPES, PAGE_TOKENS, DecoderShape
from tailrace.kernels.variant import Variant

_PAGE = tl.constexpr(PAGE_TOKENS)
_FAR = tl.constexpr(2**30)


@triton.jit
def _attend_range(
    q, position, begin, end, head, tables_ptr, sequence, max_pages, pages, highest, total, mixed,
    fault, keys_ptr, values_ptr, key_scales_ptr, value_scales_ptr, KV_HEADS: tl.constexpr,
    D: tl.constexpr, TILE: tl.constexpr, STAGES: tl.constexpr, SCALE: tl.constexpr,
    DOT: tl.constexpr, MASKED: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Run the online softmax over positions begin .. end-1; MASKED if not all rows see them all."""
    for first in tl.range(begin, end, TILE, num_stages=STAGES):
        # The loop variable is a Python integer in the interpreter, so it is cast.
        start = tl.cast(first, tl.int32)
        page, foreign = page_at(tables_ptr, sequence, max_pages, start // _PAGE, pages, True)
        fault |= foreign
        cell = (page.to(tl.int64) * KV_HEADS + head) * _PAGE + start % _PAGE
        there = start + tl.arange(0, TILE)
        live = there[None, :] <= position[:, None]
        highest, total, mixed = attend_tile(
            q, SCALE, cell, there < end, live, highest, total, mixed,
            keys_ptr, values_ptr, key_scales_ptr, value_scales_ptr,
            D, TILE, DOT, MASKED, INTERPRETED,
        )  # fmt: skip
    return highest, total, mixed, fault


@triton.jit(do_not_specialize=["sequences", "max_pages", "pages", "rows"])
def _prefill(
    q_ptr, first_rows_ptr, starts_ptr, sequences_ptr, keys_ptr, values_ptr, key_scales_ptr,
    value_scales_ptr, tables_ptr, out_ptr, faults_ptr, sequences, max_pages, pages, rows,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    GROUP: tl.constexpr, BLOCK_M: tl.constexpr, TILE: tl.constexpr, STAGES: tl.constexpr,
    SCALE: tl.constexpr, DOT: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    head, chunk = tl.program_id(1), tl.program_id(2)
    first_row = tl.load(first_rows_ptr + chunk)
    after = tl.load(first_rows_ptr + chunk + 1)
    start = tl.load(starts_ptr + chunk)
    sequence = tl.load(sequences_ptr + chunk)
    tokens = after - first_row
    # If a chunk's start is invalid, clamp it: the rows still have to be found, to mark their
    # faults.
    begin = tl.minimum(tl.maximum(start, 0), _FAR)
    # Programs of later positions read more pages and take longer, so they start first.
    block = begin // BLOCK_M + tl.num_programs(0) - 1 - tl.program_id(0)
    position = block * BLOCK_M + tl.arange(0, BLOCK_M)
    row = first_row + position - begin
    own = (row >= tl.maximum(first_row, 0)) & (row < tl.minimum(after, rows))
    end = begin + tokens
    if (block * BLOCK_M < end) & (tokens > 0):
        most = (tl.num_programs(0) - 1) * BLOCK_M
        highest_start = tl.where(tokens <= most, max_pages * _PAGE - tokens, -1)
        fault = row_fault(sequence, sequences, start, 0, highest_start)
        columns = tl.arange(0, BLOCK_D)
        cells = row.to(tl.int64)[:, None] * (HEADS * D) + head * D + columns[None, :]
        inside = own[:, None] & (columns < D)[None, :]
        q = rounded(tl.load(q_ptr + cells, mask=inside, other=0.0), DOT, INTERPRETED)
        highest = tl.full((BLOCK_M,), float("-inf"), tl.float32)
        total = tl.zeros((BLOCK_M, TILE), tl.float32)
        mixed = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
        # With a fault both ranges are empty, so that no page is read.
        last = tl.where(fault == 0, tl.minimum((block + 1) * BLOCK_M, end), 0)
        full = tl.where(fault == 0, block * BLOCK_M, 0)
        highest, total, mixed, fault = _attend_range(
            q, position, 0, full, head // GROUP, tables_ptr, sequence, max_pages, pages,
            highest, total, mixed, fault, keys_ptr, values_ptr, key_scales_ptr, value_scales_ptr,
            KV_HEADS, D, TILE, STAGES, SCALE, DOT, False, INTERPRETED,
        )  # fmt: skip
        highest, total, mixed, fault = _attend_range(
            q, position, full, last, head // GROUP, tables_ptr, sequence, max_pages, pages,
            highest, total, mixed, fault, keys_ptr, values_ptr, key_scales_ptr, value_scales_ptr,
            KV_HEADS, D, TILE, STAGES, SCALE, DOT, True, INTERPRETED,
        )  # fmt: skip
        summed = tl.where(fault == 0, tl.sum(total, 1), float("nan"))
        tl.store(out_ptr + cells, tl.div_rn(mixed, summed[:, None]), mask=inside)
        if fault != 0:
            tl.atomic_or(faults_ptr + row, fault + tl.zeros_like(row), mask=own)


def prefill_attention(
    q: Tensor,
    first_rows: Tensor,
    starts: Tensor,
    sequences: Tensor,
    cache: PagedKv,
    tables: Tensor,
    out: Tensor,
    faults: Tensor,
    *,
    max_tokens: int,
) -> None:
    """Attend from every row of several chunks to all positions of its sequence up to its own.

    q: fp32 [rows, heads * D], rotated by `rope_write`, which has also stored these rows' keys and
    values. Chunk c is rows first_rows[c] .. first_rows[c+1]-1, the tokens of sequence sequences[c]
    from position starts[c] on. first_rows: int32 [chunks + 1], ascending from 0 to rows. starts,
    sequences: int32 [chunks]. tables: int32 [sequences, max_pages]. out: fp32 [rows, heads * D].
    faults: int32 [rows], cleared by the caller; rows whose chunk or pages are invalid get a FAULT_*
    bit and NaN, as do rows in the same block of BLOCK_M positions. max_tokens: the maximum number
    of rows of a chunk; of a longer chunk, rows that get a program are marked as faults, and the
    others are not computed. Raises TypeError or ValueError.

    Moves q and out, and `cache.token_bytes()` per position of each chunk's sequence; computes 4 *
    heads * D operations for each row and position. Source: Dao, FlashAttention-2, 2023.
    """
    rows, chunks = len(q), len(starts)
    heads = check_queries("q", q, cache)
    check_tables(tables, sequences, chunks)
    check_tensor("starts", starts, torch.int32, chunks)
    check_tensor("first_rows", first_rows, torch.int32, chunks + 1)
    check_tensor("out", out, torch.float32, *q.shape)
    check_tensor("faults", faults, torch.int32, rows)
    if max_tokens < 0:
        raise ValueError(f"max_tokens: {max_tokens}, expected 0 or more")
    check_same_device(
        q=q, first_rows=first_rows, starts=starts, sequences=sequences, keys=cache.keys,
        tables=tables, out=out, faults=faults,
    )  # fmt: skip
    if rows == 0 or chunks == 0 or max_tokens == 0:
        return
    constants, options = prefill_plan(heads, cache.kv_heads, cache.head_dim, cache.keys.dtype)
    # One block more, because a chunk that begins inside a block can end in an additional one.
    blocks = -(-max_tokens // constants["BLOCK_M"]) + 1
    _prefill[(blocks, heads, chunks)](
        q, first_rows, starts, sequences, cache.keys, cache.values, cache.key_scales,
        cache.value_scales, tables, out, faults, *tables.shape, cache.pages, rows,
        **constants, **options, **OPTIONS,
    )  # fmt: skip


def prefill_plan(
    heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype
) -> tuple[dict[str, Any], dict[str, int]]:
    """Return (constants, launch options), which depend only on the heads and the cache's type.

    In bf16 a block is a page. The engine divides prompts into chunks of that size, so no row of a
    block is wasted. Its 64 rows are the height of one product of four warps on the tensor cores. In
    fp32, which tensor cores do not multiply exactly, blocks are small. For heads above D = 128 (64
    in fp32) tiles have half as many positions, since a thread has only 255 registers; bf16 uses
    twice the warps, and int8 and fp8 half the rows. TILE divides BLOCK_M, so that tiles before a
    block's first position need no mask.
    """
    constants = softmax_plan(heads, kv_heads, head_dim, dtype)
    wide = head_dim > 128
    if dtype == torch.float32:
        rows = 16 if head_dim > 64 else 32
        return constants | {"BLOCK_M": rows, "TILE": rows, "STAGES": 1}, {"num_warps": 4}
    if wide and dtype in SCALED_DTYPES:
        return constants | {"BLOCK_M": 32, "TILE": 32, "STAGES": 2}, {"num_warps": 4}
    tile, warps = (PAGE_TOKENS // 2, 8) if wide else (PAGE_TOKENS, 4)
    return constants | {"BLOCK_M": PAGE_TOKENS, "TILE": tile, "STAGES": 2}, {"num_warps": warps}


SHAPES = ATTENTION_SHAPES


def variants(shape: DecoderShape) -> Iterator[Variant]:
    """Yield prefill attention for every cache type that is served."""
    for dtype in served_caches(shape):
        constants, options = prefill_plan(shape.heads, shape.kv_heads, shape.head_dim, dtype)
        signature, none = signature_of(_prefill, dtype, absent_pointers(shape, dtype))
        yield Variant(
            name=f"{shape.name}.prefill {str(dtype).removeprefix('torch.')}",
            kernel=_prefill,
            signature=signature,
            constants=none | constants,
            divisible=frozenset(name for name in signature if name.endswith("_ptr")),
            expects=()
            if dtype == torch.float32
            else ("HGMMA" if constants["BLOCK_M"] == PAGE_TOKENS else "HMMA", "LDGSTS"),
            bytes_moved=PAGE_TOKENS * (8 * shape.queries + 2 * shape.keys * dtype.itemsize),
            num_warps=options["num_warps"],
        )
