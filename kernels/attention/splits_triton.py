"""Partial results of decode attention, and how the last program to arrive merges them.

Splits of SPLIT_TOKENS positions are merged to groups of MERGED_SPLITS, and groups to the row's
result, each in ascending order: which sums are added to which depends on the length alone.
One level would have a single program read all partial results of 32k positions, 260 KiB, once
the last split is done. At the 33 to 100 bytes per ns that one multiprocessor may get that is 3 to
8 us, where the whole cache at batch 1 takes 31 us; computed, not measured. With two levels it
reads 16 partial results and then up to 8, and other groups are merged while splits still run.
"""

# mypy: disallow-untyped-calls=False, disallow-untyped-decorators=False
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.attention.paged_attention import MERGED_SPLITS, SPLIT_TOKENS
from kernels.attention.paged_kv import PagedKv
from kernels.checks import check_same_device

_SPLIT = tl.constexpr(SPLIT_TOKENS)
_MERGED = tl.constexpr(MERGED_SPLITS)

CELLS = 4
"""Numbers of a head that a thread merges, 128 bits."""
_CELLS = tl.constexpr(CELLS)


class DecodeWorkspace:
    """Where the splits of a launch leave their partial results; one launch at a time uses it.

    For up to `rows` rows of up to `max_length` positions. Each row and KV head has a slot for
    every split, then for every group of splits: mixed, fp32 [slots * group * D], and sums, fp32
    [slots * 2 * group], hold its heads' values, highest scores and sums of weights. counters,
    int32, one for the groups and one for each group's splits, are 0 between launches.
    """

    def __init__(
        self,
        rows: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        max_length: int,
        device: torch.device,
    ) -> None:
        self.rows, self.max_length = rows, max_length
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, head_dim
        self.splits = splits_of(max_length)
        groups = -(-self.splits // MERGED_SPLITS)
        slots = rows * heads * (self.splits + groups)
        self.mixed = torch.empty(slots * head_dim, device=device)
        self.sums = torch.empty(slots * 2, device=device)
        counters = rows * kv_heads * (1 + groups)
        self.counters = torch.zeros(counters, dtype=torch.int32, device=device)

    def check(self, rows: int, heads: int, cache: PagedKv, max_length: int) -> None:
        """Refuse a launch that it is too small for, or that has other heads. Raises ValueError."""
        shape = (heads, cache.kv_heads, cache.head_dim)
        if shape != (self.heads, self.kv_heads, self.head_dim):
            raise ValueError(f"workspace: made for other heads than {shape}")
        if rows > self.rows or not 0 < max_length <= self.max_length:
            have = f"{self.rows} rows of 1 .. {self.max_length}"
            raise ValueError(f"max_length: {rows} rows of {max_length}, the workspace has {have}")
        check_same_device(keys=cache.keys, workspace=self.mixed)


def splits_of(length: int) -> int:
    """Programs for each KV head of a row of `length` positions."""
    return -(-length // SPLIT_TOKENS)


@triton.jit
def finish(
    highest, total, mixed, split, place, length, capacity, out_ptr, mixed_ptr, sums_ptr,
    counters_ptr, D: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Leave a split's partial result; store the heads at out_ptr once all splits of them are in.

    highest, total: fp32 [16 or more, 1]. mixed: fp32 [16 or more, BLOCK_D]. place: the number of
    the row and KV head, int64. capacity: splits that the workspace has for it. A row of one
    split needs no workspace, and has the bits that a merge of one would have.
    """
    BLOCK_D: tl.constexpr = mixed.shape[1]
    member = tl.arange(0, mixed.shape[0])[:, None]
    column = tl.arange(0, BLOCK_D)[None, :]
    splits = tl.cdiv(length, _SPLIT)
    if splits == 1:
        store_heads(tl.div_rn(mixed, total), out_ptr, member, column, D, GROUP)
    else:
        group, groups = split // _MERGED, tl.cdiv(splits, _MERGED)
        capacity_groups = tl.cdiv(capacity, _MERGED)
        mixed_ptr += place * (capacity + capacity_groups) * (GROUP * D)
        sums_ptr += place * (capacity + capacity_groups) * (2 * GROUP)
        counters_ptr += place * (1 + capacity_groups)
        _leave(highest, total, mixed, member, column, mixed_ptr, sums_ptr, split, D, GROUP)
        members = tl.minimum(splits - group * _MERGED, _MERGED)
        if _is_last(counters_ptr + 1 + group, members):
            _merge_group(
                group, members, groups, capacity, out_ptr, mixed_ptr, sums_ptr, counters_ptr,
                D, BLOCK_D, GROUP, ROWS,
            )  # fmt: skip


@triton.jit
def _merge_group(
    group, members, groups, capacity, out_ptr, mixed_ptr, sums_ptr, counters_ptr,
    D: tl.constexpr, BLOCK_D: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Merge the splits of a group, and the groups after the last of them."""
    # The sums of a lone head are the same in all threads, and ptxas spills what it makes of that.
    CELLS: tl.constexpr = _CELLS if ROWS > 1 else 1
    some = tl.arange(0, ROWS * BLOCK_D // CELLS)
    member = some // (BLOCK_D // CELLS)
    heads = member[:, None]
    column = (some % (BLOCK_D // CELLS) * CELLS)[:, None] + tl.arange(0, CELLS)[None, :]
    first, count, more = group * _MERGED, members, groups > 1
    merging = True
    # Both merges are one piece of code: most of the kernel's.
    while merging:
        highest, total, mixed = _merge(mixed_ptr, sums_ptr, first, count, member, column, D, GROUP)
        merging = more
        if more:
            slot = capacity + group
            _leave(
                highest[:, None], total[:, None], mixed, heads, column, mixed_ptr, sums_ptr, slot,
                D, GROUP,
            )  # fmt: skip
            merging = _is_last(counters_ptr, groups)
            first, count, more = capacity, groups, False
        else:
            store_heads(tl.div_rn(mixed, total[:, None]), out_ptr, heads, column, D, GROUP)


@triton.jit
def _leave(
    highest, total, mixed, member, column, mixed_ptr, sums_ptr, slot, D: tl.constexpr,
    GROUP: tl.constexpr,
):  # fmt: skip
    """Store a partial result in a slot."""
    sums = sums_ptr + slot * (2 * GROUP) + member + column * 0
    first = (member < GROUP) & (column == 0)
    tl.store(sums, tl.broadcast_to(highest, mixed.shape), mask=first)
    tl.store(sums + GROUP, tl.broadcast_to(total, mixed.shape), mask=first)
    store_heads(mixed, mixed_ptr + slot * (GROUP * D), member, column, D, GROUP)


@triton.jit
def _is_last(counter_ptr, expected):
    """Whether this is the last of `expected` programs; what the others stored is then seen.

    The barrier puts every thread's stores before the addition that one of them does. The last
    one leaves the counter at 0, for the next launch.
    """
    tl.debug_barrier()
    last = tl.atomic_add(counter_ptr, 1, sem="acq_rel") == expected - 1
    if last:
        tl.store(counter_ptr, 0)
    return last


@triton.jit
def _merge(
    mixed_ptr, sums_ptr, first, count, member, column, D: tl.constexpr, GROUP: tl.constexpr
):  # fmt: skip
    """Add `count` partial results from slot `first` on, in ascending order, MERGED at a time.

    member: int32 [n], which head. column: int32 [n, CELLS], numbers of it side by side. Returns
    highest and total, fp32 [n], and mixed, fp32 [n, CELLS], as of one split. A thread has its own
    copy of its head's sums, so that no value passes from one to another and all loads are under way
    at once. They go to the second-level cache: the first one may hold what another launch left.
    """
    live = member < GROUP
    inside = live[:, None] & (column < D)
    mixed_ptr += member[:, None] * D + column
    sums_ptr += member
    highest = tl.full(member.shape, float("-inf"), tl.float32)
    total = tl.zeros(member.shape, tl.float32)
    mixed = tl.zeros(column.shape, tl.float32)
    for start in range(0, count, _MERGED):
        higher = highest
        for step in tl.static_range(_MERGED):
            here = live & (start + step < count)
            own = _partial(sums_ptr + (first + start + step) * (2 * GROUP), here, float("-inf"))
            # Padding has no score: 0 keeps it from -inf less -inf.
            higher = tl.maximum(higher, tl.where(live, own, 0.0))
        shrink = tl.math.exp2(highest - higher)
        total *= shrink
        mixed *= shrink[:, None]
        for step in tl.static_range(_MERGED):
            slot, there = first + start + step, start + step < count
            own = _partial(sums_ptr + slot * (2 * GROUP), live & there, float("-inf"))
            own_total = _partial(sums_ptr + slot * (2 * GROUP) + GROUP, live & there, 0.0)
            own_mixed = _partial(mixed_ptr + slot * (GROUP * D), inside & there, 0.0)
            weight = tl.math.exp2(own - higher)
            total += weight * own_total
            mixed += weight[:, None] * own_mixed
        highest = higher
    # Nor a weight: 1 keeps it from 0 by 0.
    return highest, tl.where(live, total, 1.0), mixed


@triton.jit
def _partial(pointers, mask, absent):
    return tl.load(pointers, mask=mask, other=absent, cache_modifier=".cg")


@triton.jit
def store_heads(mixed, out_ptr, member, column, D: tl.constexpr, GROUP: tl.constexpr):
    """Store number `column` of head `member` at out_ptr, [GROUP, D], for those that are there."""
    tl.store(out_ptr + member * D + column, mixed, mask=(member < GROUP) & (column < D))
