"""Partial results of decode attention, which the last program to finish merges.

For each KV head, a row's pages are divided among at most MAX_SPLITS programs. Their partial results
are added in the order of their positions, so the order of summation depends on the length alone.
"""

# mypy: disallow-untyped-calls=False, disallow-untyped-decorators=False
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tailrace.kernels.attention.paged_attention import MAX_SPLITS
from tailrace.kernels.attention.paged_kv import PagedKv
from tailrace.kernels.checks import check_same_device
from tailrace.kernels.shapes import PAGE_TOKENS

_PAGE = tl.constexpr(PAGE_TOKENS)
_MAX_SPLITS = tl.constexpr(MAX_SPLITS)
# Number of partial results that a thread loads at once when it merges them.
_MERGED = tl.constexpr(8)


class DecodeWorkspace:
    """Buffers for the partial results of a launch; only one launch at a time may use them.

    They serve up to `rows` rows of up to `max_length` positions. Each row and KV head has a slot
    for every split. mixed: fp32 [slots * group * D], the weighted sums of values of the group's
    query heads. sums: fp32 [slots * 2 * group], their highest scores, then their sums of weights.
    counters: int32 [rows * kv_heads], how many positions the finished splits cover; 0 between
    launches.
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
        slots = rows * heads * splits_of(max_length)
        self.mixed = torch.empty(slots * head_dim, device=device)
        self.sums = torch.empty(slots * 2, device=device)
        self.counters = torch.zeros(rows * kv_heads, dtype=torch.int32, device=device)

    def check(self, rows: int, heads: int, cache: PagedKv, max_length: int) -> None:
        """Raise ValueError if the workspace is too small for a launch, or made for other heads."""
        shape = (heads, cache.kv_heads, cache.head_dim)
        if shape != (self.heads, self.kv_heads, self.head_dim):
            raise ValueError(
                f"workspace: made for {(self.heads, self.kv_heads, self.head_dim)} heads, KV heads "
                f"and head size, expected {shape}"
            )
        if rows > self.rows or not 0 < max_length <= self.max_length:
            have = f"{self.rows} rows of 1 .. {self.max_length}"
            raise ValueError(f"max_length: {rows} rows of {max_length}, expected at most {have}")
        check_same_device(keys=cache.keys, workspace=self.mixed)


def splits_of(max_length: int) -> int:
    """Return the maximum number of programs per KV head for rows of `max_length` positions."""
    return min(-(-max_length // PAGE_TOKENS), MAX_SPLITS)


@triton.jit
def split_span(length):
    """Return the positions per program for a row of `length` positions: a multiple of the page."""
    return tl.cdiv(tl.cdiv(length, _PAGE), _MAX_SPLITS) * _PAGE


@triton.jit
def finish(
    highest, total, mixed, split, own, length, place, out_ptr, mixed_ptr, sums_ptr, counters_ptr,
    D: tl.constexpr, GROUP: tl.constexpr, BLOCK_GROUP: tl.constexpr,
):  # fmt: skip
    """Store a split's partial result; the last split also merges all and stores heads at out_ptr.

    highest, total: fp32 [ROWS]. mixed: fp32 [BLOCK_D, ROWS]. own: the number of this split's
    positions, of the row's `length`. place: row * KV heads + KV head, int64.
    """
    BLOCK_D: tl.constexpr = mixed.shape[0]
    slots = place * tl.num_programs(0)
    mixed_ptr += slots * (GROUP * D)
    sums_ptr += slots * (2 * GROUP)
    head, column = tl.arange(0, mixed.shape[1]), tl.arange(0, BLOCK_D)[:, None]
    sums = sums_ptr + split * (2 * GROUP) + head
    tl.store(sums, highest, mask=head < GROUP)
    tl.store(sums + GROUP, total, mask=head < GROUP)
    cell = mixed_ptr + split * (GROUP * D) + head[None, :] * D + column
    tl.store(cell, mixed, mask=(head < GROUP)[None, :] & (column < D))
    # The barrier makes sure that all threads have stored before one thread adds to the counter. The
    # last program to finish resets the counter for the next launch.
    tl.debug_barrier()
    if tl.atomic_add(counters_ptr + place, own, sem="acq_rel") == length - own:
        tl.store(counters_ptr + place, 0)
        _merge(length, out_ptr, mixed_ptr, sums_ptr, D, BLOCK_D, GROUP, BLOCK_GROUP)


@triton.jit
def _merge(
    length, out_ptr, mixed_ptr, sums_ptr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    GROUP: tl.constexpr, BLOCK_GROUP: tl.constexpr,
):  # fmt: skip
    """Add the partial results of all splits, in ascending order, and store the heads.

    A thread has four numbers of one head and its own copy of that head's sums, so that threads
    exchange no values. The partial results are read from the L2 cache, because L1 may still hold
    those of an earlier launch.
    """
    span = split_span(length)
    some = tl.arange(0, BLOCK_GROUP * BLOCK_D // 4)
    head = some // (BLOCK_D // 4)
    column = (some % (BLOCK_D // 4) * 4)[:, None] + tl.arange(0, 4)[None, :]
    inside = (head < GROUP)[:, None] & (column < D)
    place = head[:, None] * D + column
    mixed_ptr += place
    sums_ptr += head
    highest = tl.full(head.shape, float("-inf"), tl.float32)
    total = tl.zeros(head.shape, tl.float32)
    mixed = tl.zeros(place.shape, tl.float32)
    begin = 0
    while begin < length:
        # Padding heads have no score. They get 0, to avoid -inf minus -inf below.
        higher = tl.where(head < GROUP, highest, 0.0)
        for step in tl.static_range(_MERGED):
            here = (head < GROUP) & (begin + step * span < length)
            own = _partial(sums_ptr + step * (2 * GROUP), here, float("-inf"))
            higher = tl.maximum(higher, own)
        shrink = tl.math.exp2(highest - higher)
        total *= shrink
        mixed *= shrink[:, None]
        for step in tl.static_range(_MERGED):
            there = begin + step * span < length
            here = (head < GROUP) & there
            own = _partial(sums_ptr + step * (2 * GROUP), here, float("-inf"))
            own_total = _partial(sums_ptr + step * (2 * GROUP) + GROUP, here, 0.0)
            own_mixed = _partial(mixed_ptr + step * (GROUP * D), inside & there, 0.0)
            weight = tl.math.exp2(own - higher)
            total = tl.fma(weight, own_total, total)
            mixed = tl.fma(tl.broadcast_to(weight[:, None], mixed.shape), own_mixed, mixed)
        highest = higher
        begin += _MERGED * span
        sums_ptr += _MERGED * (2 * GROUP)
        mixed_ptr += _MERGED * (GROUP * D)
    # Padding heads have no weight. They get 1, to avoid a division by 0.
    mixed *= tl.div_rn(1.0, tl.where(head < GROUP, total, 1.0))[:, None]
    tl.store(out_ptr + place, mixed, mask=inside)


@triton.jit
def _partial(pointers, mask, absent):
    return tl.load(pointers, mask=mask, other=absent, cache_modifier=".cg")
