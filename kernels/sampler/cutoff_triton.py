"""Device functions of the sampler: the exact cutoff of top-k and top-p among the candidates.

The candidates of a row are keys and ids in memory, in any order; keys ascend where scores descend.
One program works on a row's candidates, so that selections need no atomics and no barriers.
"""

# mypy: disallow-untyped-calls=False, disallow-untyped-decorators=False
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

import triton
import triton.language as tl

from tailrace.kernels.sampler.draw_triton import better, draw, key_weights, top_p_weight
from tailrace.kernels.sampler.sampler_plan import BINS_PER_UNIT

# Modes of `least_value`: what it adds up over the candidates whose value is at most a pivot.
_COUNT_KEYS = tl.constexpr(0)
_WEIGH_KEYS = tl.constexpr(1)
_COUNT_IDS = tl.constexpr(2)
_MAX_VALUE = tl.constexpr(2**31 - 1)
_BIN_WIDTH = tl.constexpr(1 / BINS_PER_UNIT)


@triton.jit
def least_value(
    keys_ptr, ids_ptr, size, low, high, target, key, each, AMOUNT: tl.constexpr,
    BLOCK: tl.constexpr, WAYS: tl.constexpr,
):  # fmt: skip
    """Return the least value up to which the candidates' amounts sum to at least `target`.

    It is searched for in low .. high; if there is none, return high. AMOUNT decides what value and
    amount of a candidate are: its key and 1 (COUNT_KEYS), its key and its weight (WEIGH_KEYS), or,
    for candidates whose key is `key`, its id and `each` (COUNT_IDS). This is a radix selection:
    each pass sums the amounts up to WAYS pivots, and reduces the range to a WAYS-th. size, low,
    high, key: int32; target, each: int64. Returns int32.
    """
    ways = tl.arange(0, WAYS)
    while low < high:
        step = (high - low) // WAYS + 1
        pivots = low + step * ways + (step - 1)
        sums = tl.zeros([WAYS], tl.int64)
        for start in range(0, size, BLOCK):
            at = start + tl.arange(0, BLOCK)
            inside = at < size
            keys = tl.load(keys_ptr + at, mask=inside, other=0)
            values = keys
            amounts = inside.to(tl.int64)
            if AMOUNT == _COUNT_IDS:
                values = tl.load(ids_ptr + at, mask=inside, other=0)
                amounts = tl.where(inside & (keys == key), each, 0)
            if AMOUNT == _WEIGH_KEYS:
                amounts = tl.where(inside, key_weights(keys), 0)
            within = values[None, :] <= pivots[:, None]
            sums += tl.sum(tl.where(within, amounts[None, :], 0), 1)
        short = tl.sum((sums < target).to(tl.int32), 0)
        low = tl.minimum(low + step * short, high)
        high = tl.minimum(low + step - 1, high)
    return low


@triton.jit
def below(keys_ptr, size, key, BLOCK: tl.constexpr):
    """Return number and weight of candidates with keys below `key`, and number of those equal."""
    less = tl.zeros([BLOCK], tl.int64)
    weight = tl.zeros([BLOCK], tl.int64)
    equal = tl.zeros([BLOCK], tl.int64)
    for start in range(0, size, BLOCK):
        at = start + tl.arange(0, BLOCK)
        keys = tl.load(keys_ptr + at, mask=at < size, other=_MAX_VALUE)
        under = keys < key
        less += under.to(tl.int64)
        weight += tl.where(under, key_weights(tl.where(under, keys, 0)), 0)
        equal += (keys == key).to(tl.int64)
    return tl.sum(less, 0), tl.sum(weight, 0), tl.sum(equal, 0)


@triton.jit
def bin_key(bin):
    """Return the lowest key in a bin of scores, which is that of the bin's best score."""
    return (bin.to(tl.float32) * _BIN_WIDTH).to(tl.int32, bitcast=True)


@triton.jit
def cutoff(
    keys_ptr, ids_ptr, size, count_target, weight_target, last_bin, top_p, vocab,
    BLOCK: tl.constexpr, WAYS: tl.constexpr,
):  # fmt: skip
    """Return the key and id of the last candidate that top-k and top-p keep.

    The targets (`count_target` of top-k, `weight_target` of top-p) and the last bin come from
    `sampler_triton.split_bins`. With both targets the candidates are all ids, in order from the
    best one; with one target they are only the ids of the last bin.
    """
    low, high = bin_key(last_bin), bin_key(last_bin + 1)
    key = high
    each = tl.full([], 1, tl.int64)
    short = tl.full([], 0, tl.int64)
    equal = tl.full([], 0, tl.int64)
    if count_target > 0:
        key = least_value(
            keys_ptr, ids_ptr, size, low, high, count_target, low, each, _COUNT_KEYS, BLOCK, WAYS
        )
        less, weight, equal = below(keys_ptr, size, key, BLOCK)
        short = count_target - less
        if weight_target < 0:
            total = weight + tl.minimum(short, equal) * key_weights(key)
            weight_target = top_p_weight(total, top_p)
            low = low * 0
    if weight_target > 0:
        key = least_value(
            keys_ptr, ids_ptr, size, low, key, weight_target, low, each, _WEIGH_KEYS, BLOCK, WAYS
        )
        less, weight, equal = below(keys_ptr, size, key, BLOCK)
        each = key_weights(key)
        short = weight_target - weight
    id = tl.full([], 0, tl.int32) + (vocab - 1)
    # Several candidates may have the last key. If the target is met without some of them, drop
    # those with the highest ids.
    if each * (equal - 1) >= short:
        id = least_value(
            keys_ptr, ids_ptr, size, id * 0, id, short, key, each, _COUNT_IDS, BLOCK, WAYS
        )
    return key, id


@triton.jit
def draw_candidates(
    keys_ptr, ids_ptr, size, last_key, last_id, least, seed, position, BLOCK: tl.constexpr
):
    """Return the best (noisy score, id) of the candidates up to a cutoff that min-p keeps."""
    top = tl.full([], -float("inf"), tl.float32)
    id = tl.full([], _MAX_VALUE, tl.int32)
    for start in range(0, size, BLOCK):
        at = start + tl.arange(0, BLOCK)
        keys = tl.load(keys_ptr + at, mask=at < size, other=0)
        ids = tl.load(ids_ptr + at, mask=at < size, other=0)
        kept = (keys < last_key) | ((keys == last_key) & (ids <= last_id))
        kept = kept & (at < size) & (key_weights(keys) >= least)
        scores = tl.where(kept, -keys.to(tl.float32, bitcast=True), -float("inf"))
        block_top, block_id = draw(scores, ids, seed, position)
        top, id = better(top, id, block_top, block_id)
    return top, id
