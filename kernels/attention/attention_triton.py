"""Decode attention over pages: flash-decoding whose result depends on a row's length alone.

One program reads SPLIT_TOKENS positions of one KV head for one row, and the group's query heads,
padded to 16, share what it reads: a product of 16 rows is what the tensor cores take. Tiles lie
within pages, splits begin at multiples of their size, and merging has a fixed order
(splits_triton).

What bounds it is bytes in flight. 4.3 TB/s over 132 multiprocessors is 33 bytes per ns, so one
that waits 1 us for memory under load must have asked for 33 KB at all times. In bf16 with D = 128
a page's keys or values are 16 KB; with two stages ahead a program holds 64 KB of shared memory,
and three programs fit: up to 192 KB asked for, and while one of them starts, turns a query or
merges, either of the others covers its share. A split is four tiles, 128 KB of cache, and leaves
2 KB of partial results, 1.6 % written and, from the second-level cache, 1.6 % read again.
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

from kernels.attention.paged_attention import SPLIT_PAGES, SPLIT_TOKENS, check_queries
from kernels.attention.paged_kv import PagedKv, check_tables
from kernels.attention.rope import Rope
from kernels.attention.rope_triton import (
    absent_pointers,
    check_write,
    dependent_too,
    page_at,
    row_fault,
    served_caches,
    signature_of,
    turned_heads,
    write_token,
)
from kernels.attention.softmax_triton import attend_tile, softmax_plan
from kernels.attention.splits_triton import (
    CELLS,
    DecodeWorkspace,
    finish,
    splits_of,
    store_heads,
)
from kernels.checks import check_same_device, check_tensor
from kernels.dependent_triton import prefetch
from kernels.launch import dependent_launch, next_power_of_2
from kernels.rows.rounding_triton import rounded
from kernels.shapes import ATTENTION_SHAPES, PAGE_TOKENS, DecoderShape
from kernels.variant import Variant

_PAGE = tl.constexpr(PAGE_TOKENS)
_SPLIT = tl.constexpr(SPLIT_TOKENS)
_SPLIT_PAGES = tl.constexpr(SPLIT_PAGES)

AHEAD_PAGES = 2
"""Pages of keys, and of values, that a dependent program asks for before it waits.

64 KB in bf16 at D = 128, 25 MB over the programs that fit a GPU at once: half of its L2.
"""
_AHEAD_PAGES = tl.constexpr(AHEAD_PAGES)
_LINE_BITS = tl.constexpr(8 * 128)


@triton.jit
def _split_pages(tables_ptr, sequence, max_pages, entry, pages, left):
    """The four pages of a split that has `left` positions, and their fault bits."""
    page0, fault0 = page_at(tables_ptr, sequence, max_pages, entry, pages, left > 0)
    page1, fault1 = page_at(tables_ptr, sequence, max_pages, entry + 1, pages, left > _PAGE)
    page2, fault2 = page_at(tables_ptr, sequence, max_pages, entry + 2, pages, left > 2 * _PAGE)
    page3, fault3 = page_at(tables_ptr, sequence, max_pages, entry + 3, pages, left > 3 * _PAGE)
    return (page0, page1, page2, page3), fault0 | fault1 | fault2 | fault3


@triton.jit
def _ask_for(
    cells_ptr, split_pages, left, head, KV_HEADS: tl.constexpr, D: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Bring a head's first pages of a split into L2, as far as they hold positions."""
    CELLS: tl.constexpr = _LINE_BITS // cells_ptr.dtype.element_ty.primitive_bitwidth
    line = tl.minimum(tl.arange(0, _PAGE * BLOCK_D // CELLS), _PAGE * D // CELLS - 1)
    for number in tl.static_range(_AHEAD_PAGES):
        page = tl.where(left > number * _PAGE, split_pages[number], split_pages[0])
        first = (page.to(tl.int64) * KV_HEADS + head) * (_PAGE * D)
        prefetch(cells_ptr + first + line * CELLS)


@triton.jit
def _choose(number, split_pages):
    low = tl.where(number == 0, split_pages[0], split_pages[1])
    high = tl.where(number == 2, split_pages[2], split_pages[3])
    return tl.where(number < 2, low, high)


@triton.jit
def _queries(
    x_ptr, head, position, cos_ptr, sin_ptr, q_norm_ptr, eps, D: tl.constexpr,
    BLOCK_D: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, WRITE: tl.constexpr,
):  # fmt: skip
    """The group's queries, fp32 [ROWS, BLOCK_D]: turned here if WRITE, else as they lie."""
    member = tl.arange(0, ROWS)
    heads, live = head * GROUP + member, member < GROUP
    if WRITE:
        return turned_heads(
            x_ptr, heads, live, position, cos_ptr, sin_ptr, q_norm_ptr, eps, D, BLOCK_D
        )
    else:
        columns = tl.arange(0, BLOCK_D)
        inside = live[:, None] & (columns < D)[None, :]
        return tl.load(x_ptr + heads[:, None] * D + columns[None, :], mask=inside, other=0.0)


@triton.jit
def _write_own(
    x_ptr, head, left, position, split_pages, cos_ptr, sin_ptr, k_norm_ptr, eps,
    keys_ptr, values_ptr, key_scales_ptr, value_scales_ptr, HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Store the row's own token, if it lies in this split, so that the program can read it."""
    if left <= _SPLIT:
        page = _choose((left - 1) // _PAGE, split_pages)
        write_token(
            x_ptr, head, position, page, cos_ptr, sin_ptr, k_norm_ptr, eps, keys_ptr, values_ptr,
            key_scales_ptr, value_scales_ptr, HEADS, KV_HEADS, D, BLOCK_D, INTERPRETED,
        )  # fmt: skip
        # Other threads of this program read what one of them has stored.
        tl.debug_barrier()


@triton.jit(do_not_specialize=["sequences", "max_pages", "pages", "context", "capacity"])
def _decode(
    x_ptr, lengths_ptr, sequences_ptr, cos_ptr, sin_ptr, q_norm_ptr, k_norm_ptr, eps,
    keys_ptr, values_ptr, key_scales_ptr, value_scales_ptr, tables_ptr, out_ptr, faults_ptr,
    mixed_ptr, sums_ptr, counters_ptr, sequences, max_pages, pages, context, capacity,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    GROUP: tl.constexpr, ROWS: tl.constexpr, DOT_ROWS: tl.constexpr, TILE: tl.constexpr,
    STAGES: tl.constexpr, SCALE: tl.constexpr, DOT: tl.constexpr, WRITE: tl.constexpr,
    PDL: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    if PDL:
        cuda.gdc_launch_dependents()
    split, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    length = tl.load(lengths_ptr + row)
    sequence = tl.load(sequences_ptr + row)
    longest = tl.minimum(tl.num_programs(0) * _SPLIT, max_pages * _PAGE)
    if WRITE:
        x_ptr += row * ((HEADS + 2 * KV_HEADS) * D)
        longest = tl.minimum(longest, context)
    else:
        x_ptr += row * (HEADS * D)
    out_ptr += (row * HEADS + head * GROUP) * D
    fault = row_fault(sequence, sequences, length, 0, longest)
    left = length - split * _SPLIT
    split_pages, foreign = _split_pages(
        tables_ptr, sequence, max_pages, split * _SPLIT_PAGES, pages,
        tl.where(fault == 0, left, 0),
    )  # fmt: skip
    if PDL:
        # Lengths and block tables are those of the step; what is asked for is read after the wait.
        if (fault == 0) & (left > 0):
            _ask_for(keys_ptr, split_pages, left, head, KV_HEADS, D, BLOCK_D)
            _ask_for(values_ptr, split_pages, left, head, KV_HEADS, D, BLOCK_D)
        cuda.gdc_wait()
    if (fault != 0) | (length == 0):
        if split == 0:
            nothing = tl.where(fault != 0, float("nan"), 0.0)
            column = tl.arange(0, BLOCK_D)
            for member in tl.static_range(GROUP):
                store_heads(nothing, out_ptr, member, column, D, GROUP)
            tl.atomic_or(faults_ptr + row, fault)
    elif left > 0:
        q = _queries(
            x_ptr, head, length - 1, cos_ptr, sin_ptr, q_norm_ptr, eps,
            D, BLOCK_D, GROUP, DOT_ROWS, WRITE,
        )  # fmt: skip
        q = rounded(q, DOT, INTERPRETED)
        if foreign != 0:
            tl.atomic_or(faults_ptr + row, foreign)
        elif WRITE:
            _write_own(
                x_ptr, head, left, length - 1, split_pages, cos_ptr, sin_ptr,
                k_norm_ptr, eps, keys_ptr, values_ptr, key_scales_ptr, value_scales_ptr,
                HEADS, KV_HEADS, D, BLOCK_D, INTERPRETED,
            )  # fmt: skip
        highest = tl.full((DOT_ROWS,), float("-inf"), tl.float32)
        total = tl.zeros((DOT_ROWS, TILE), tl.float32)
        mixed = tl.zeros((DOT_ROWS, BLOCK_D), tl.float32)
        for offset in tl.range(0, tl.minimum(left, _SPLIT), TILE, num_stages=STAGES):
            page = _choose(offset // _PAGE, split_pages)
            cell = (page.to(tl.int64) * KV_HEADS + head) * _PAGE + offset % _PAGE.value
            known = offset + tl.arange(0, TILE) < left
            highest, total, mixed = attend_tile(
                q, SCALE, cell, known, known[None, :], highest, total, mixed,
                keys_ptr, values_ptr, key_scales_ptr, value_scales_ptr,
                D, TILE, DOT, True, INTERPRETED,
            )  # fmt: skip
        summed = tl.where(foreign != 0, float("nan"), tl.sum(total, 1))
        finish(
            highest[:, None], summed[:, None], mixed, split, row * KV_HEADS + head, length,
            capacity, out_ptr, mixed_ptr, sums_ptr, counters_ptr, D, GROUP, ROWS,
        )  # fmt: skip


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

    With `write`, the decode step: x is fp32 qkv [rows, (heads + 2 kv_heads) * D] of rows of
    distinct sequences, each the token at position length-1, which is turned, stored to its page
    and attended to in this launch. Without, x is fp32 [rows, heads * D], the queries that
    `rope_write` turned, and rows may be of one sequence: n rows of lengths p+1 .. p+n have the
    bits of n steps.

    lengths, sequences: int32 [rows]; sequence s has row s of `tables`, int32 [sequences,
    max_pages]. out: fp32 [rows, heads * D]; 0 for length 0, which is no fault, so that a batch
    can be padded. faults: int32 [rows], cleared by the caller: a row whose sequence, length or
    page is not there gets a bit (FAULT_*) and comes out NaN, and other rows as ever. max_length:
    what the launch has programs for. dependent: programmatic dependent launch; lengths, sequences
    and tables, which no launch ahead may write, are read while those still run, and pages asked
    for. Raises TypeError or ValueError.

    Moves `cache.token_bytes()` per position, x, out, and twice the partial results, for every
    256 positions and head D + 2 numbers of fp32. Source: Dao et al., Flash-Decoding for
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
        workspace.splits, **constants, WRITE=write is not None, PDL=dependent, **options, **launch,
    )  # fmt: skip


_MIN_DOT_ROWS = 16
"""The fewest rows that `tl.dot` takes."""
_TILE_BYTES = 32_768
"""Of keys, and of values, that a program reads in one step at most."""


def decode_plan(
    heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype
) -> tuple[dict[str, Any], dict[str, int]]:
    """(constants, launch options), from the shape of the heads and the cache's type alone.

    Warps are as many as leave a thread CELLS numbers of the heads that a program merges, since it
    holds sixteen partial results at a time, with two sums each: 96 registers.
    """
    constants = softmax_plan(heads, kv_heads, head_dim, dtype)
    rows = next_power_of_2(constants["GROUP"])
    row_bytes = constants["BLOCK_D"] * dtype.itemsize
    # Numbers of 8 bits need registers to become bf16: half a page at a time, twice as far ahead.
    widest, stages = (PAGE_TOKENS // 2, 5) if dtype.itemsize == 1 else (PAGE_TOKENS, 3)
    if dtype == torch.float32:  # no tensor core takes it: what is multiplied lies in registers
        widest = _MIN_DOT_ROWS
    constants |= {
        "ROWS": rows,
        "DOT_ROWS": max(_MIN_DOT_ROWS, rows),
        "TILE": min(widest, _TILE_BYTES // row_bytes),
        "STAGES": stages,
    }
    cells = rows * constants["BLOCK_D"]
    return constants, {"num_warps": min(max(4, cells // (32 * CELLS)), 16)}


SHAPES = ATTENTION_SHAPES


def variants(shape: DecoderShape) -> Iterator[Variant]:
    """A decode step, and rows of one sequence behind `rope_write`, at 256 positions."""
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
                expects=("LDGSTS",) if dtype == torch.float32 else ("HMMA", "LDGSTS"),
                bytes_moved=SPLIT_TOKENS * 2 * shape.keys * dtype.itemsize,
                step="attend" if first else None,
                num_warps=options["num_warps"],
                launch_pdl=dependent,
            )
