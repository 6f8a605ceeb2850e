"""The sampler on a GPU: every row of a batch, whatever its settings, in four launches.

It draws the same ids as kernels.sampler.sample, bit for bit. A program reads one block of one row's
vocabulary. Programs combine only maxima, integer sums and lowest ids, so a row's id does not depend
on the batch, on the size of blocks or on the order in which programs run.

1. `scan`:   finds the best logit of each block and its id, finds NaN and infinity, and clears the
             counts.
2. `spread`: for rows without top-k and top-p, draws one id per block, the block's winner. For other
             rows, adds up the number and weight of ids in a histogram of scores, whose bins are
             1/64 wide (integer atomics).
3. `split`:  finds the bin in which top-k or top-p ends. Ids in better bins are kept for certain, so
             a winner is drawn from them in each block. Ids in that bin become candidates, which are
             stored in any order.
4. `settle`: with one program per row, finds the exact cutoff among the candidates, draws from those
             that are kept, and takes the best of this id and the winners of all blocks.

These are four launches, not one launch with barriers, because each step needs the results of all
blocks from the preceding step. Programs of a row that needs no step 2 or 3, or no cutoff in step 4,
return at once. Scores of -32 and less are in no bin: their weight is 0, and no noise can make them
win, so it does not matter which of them top-k keeps. If a row has both top-k and top-p, all ids
down to the cutoff of top-k are candidates, since top-p needs the total weight of the ids that top-k
keeps.

The sampler reads 4 V bytes per row twice, or three times with top-k or top-p; all but the first
time they are in the GPU's L2 cache. Penalties and masks add the bytes of counts and mask words.
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

from tailrace.kernels.checks import check_same_device, check_tensor
from tailrace.kernels.dependent_triton import wait_for_launches_ahead
from tailrace.kernels.launch import dependent_launch
from tailrace.kernels.sampler.cutoff_triton import cutoff, draw_candidates
from tailrace.kernels.sampler.draw_triton import (
    best,
    better,
    draw,
    least_weight,
    score_keys,
    selects,
    top_p_weight,
    weights,
)
from tailrace.kernels.sampler.sampler import MASK_BITS
from tailrace.kernels.sampler.sampler_plan import (
    BINS_PER_UNIT,
    SCORE_BINS,
    SETTLE_WARPS,
    SamplerPlan,
)
from tailrace.kernels.sampler.sampler_rows import SamplerRows, SamplerWorkspace
from tailrace.kernels.shapes import DecoderShape
from tailrace.kernels.variant import Variant

FAULT_NOT_FINITE = 1
"""Fault bit: a logit is NaN or infinite, possibly only after penalties."""
FAULT_EMPTY_MASK = 2
"""Fault bit: the grammar mask allows no id."""

_NOT_FINITE = tl.constexpr(FAULT_NOT_FINITE)
_EMPTY_MASK = tl.constexpr(FAULT_EMPTY_MASK)
_BINS = tl.constexpr(SCORE_BINS)
_BINS_PER_UNIT = tl.constexpr(float(BINS_PER_UNIT))
_MASK_BITS = tl.constexpr(MASK_BITS)
_INFINITY = tl.constexpr(float("inf"))
_LARGEST = tl.constexpr(torch.finfo(torch.float32).max)


@triton.jit
def block_logits(
    logits_ptr, mask_ptr, counts_ptr, penalties_ptr, row, block, vocab, BLOCK: tl.constexpr
):
    """Return the ids of a block, their logits after penalties, and a mask of the allowed ids.

    Ids beyond the vocabulary have the logit 0 and are not allowed.
    """
    ids = block * BLOCK + tl.arange(0, BLOCK)
    allowed = ids < vocab
    at = row.to(tl.int64) * vocab + ids
    logits = tl.load(logits_ptr + at, mask=allowed, other=0.0)
    if counts_ptr is not None:
        counts = tl.load(counts_ptr + at, mask=allowed, other=0)
        repetition = tl.load(penalties_ptr + 3 * row)
        presence = tl.load(penalties_ptr + 3 * row + 1)
        frequency = tl.load(penalties_ptr + 3 * row + 2)
        seen = counts > 0
        repeated = tl.where(logits > 0, tl.div_rn(logits, repetition), logits * repetition)
        logits = tl.where(seen, repeated, logits)
        logits = logits - counts.to(tl.float32) * frequency - seen.to(tl.float32) * presence
    if mask_ptr is not None:
        words = tl.cdiv(vocab, _MASK_BITS)
        word_at = row.to(tl.int64) * words + ids // _MASK_BITS
        bits = tl.load(mask_ptr + word_at, mask=allowed, other=0) >> (ids % _MASK_BITS)
        allowed = allowed & ((bits & 1) == 1)
    return ids, logits, allowed


@triton.jit
def best_of_row(scores_ptr, ids_ptr, row, blocks, PARTS: tl.constexpr):
    """Return the best (score, id) of a row, given the best of each of its blocks."""
    part = tl.arange(0, PARTS)
    inside = part < blocks
    at = row * blocks + part
    scores = tl.load(scores_ptr + at, mask=inside, other=-_INFINITY)
    return best(scores, tl.load(ids_ptr + at, mask=inside, other=0x7FFFFFFF))


@triton.jit
def score_bins(scores):
    """Return the bins of scores, int32: 0 for the best score, SCORE_BINS for -32 and less."""
    return tl.minimum(-scores * _BINS_PER_UNIT, float(_BINS)).to(tl.int32)


@triton.jit
def scan(
    logits_ptr, mask_ptr, counts_ptr, penalties_ptr, highs_ptr, high_ids_ptr, bin_counts_ptr,
    bin_weights_ptr, sizes_ptr, vocab, BLOCK: tl.constexpr, CLEARED: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Find the best logit of each block and clear the bins; the grid is (blocks, rows)."""
    wait_for_launches_ahead(PDL)
    block, row = tl.program_id(0), tl.program_id(1)
    ids, logits, allowed = block_logits(
        logits_ptr, mask_ptr, counts_ptr, penalties_ptr, row, block, vocab, BLOCK
    )
    top, id = best(tl.where(allowed & (logits == logits), logits, -_INFINITY), ids)
    broken = tl.max((tl.abs(logits) < _INFINITY).to(tl.int32) ^ 1, 0)
    at = row * tl.num_programs(0) + block
    tl.store(highs_ptr + at, tl.where(broken > 0, _INFINITY, top))
    tl.store(high_ids_ptr + at, id)
    bins = block * CLEARED + tl.arange(0, CLEARED)
    tl.store(bin_counts_ptr + row * _BINS + bins, 0, mask=bins < _BINS)
    tl.store(bin_weights_ptr + row * _BINS + bins, 0, mask=bins < _BINS)
    if block == 0:
        tl.store(sizes_ptr + row, 0)


@triton.jit
def block_scores(
    logits_ptr, mask_ptr, counts_ptr, penalties_ptr, row, block, vocab, high, temperature,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Return the ids of a block and their scores: (logit - row's best logit) / temperature.

    The score of an id that is not allowed is -inf.
    """
    ids, logits, allowed = block_logits(
        logits_ptr, mask_ptr, counts_ptr, penalties_ptr, row, block, vocab, BLOCK
    )
    return ids, tl.where(allowed, tl.div_rn(logits - high, temperature), -_INFINITY)


@triton.jit
def row_temperature(temperature_ptr, row):
    """Load a row's temperature.

    An infinite temperature would turn all scores into NaN, so it is replaced by the largest number.
    """
    return tl.minimum(tl.load(temperature_ptr + row), _LARGEST)


@triton.jit
def spread(
    logits_ptr, mask_ptr, counts_ptr, penalties_ptr, temperature_ptr, top_k_ptr, top_p_ptr,
    min_p_ptr, seed_ptr, position_ptr, highs_ptr, high_ids_ptr, winners_ptr, winner_ids_ptr,
    bin_counts_ptr, bin_weights_ptr, vocab, BLOCK: tl.constexpr, PARTS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Draw one winner per block; for rows with top-k or top-p, fill the bins instead.

    The grid is (blocks, rows).
    """
    wait_for_launches_ahead(PDL)
    block, row, blocks = tl.program_id(0), tl.program_id(1), tl.num_programs(0)
    temperature = row_temperature(temperature_ptr, row)
    high, _ = best_of_row(highs_ptr, high_ids_ptr, row, blocks, PARTS)
    if (temperature > 0) & (tl.abs(high) < _INFINITY):
        top_k, top_p = tl.load(top_k_ptr + row), tl.load(top_p_ptr + row)
        ids, scores = block_scores(
            logits_ptr, mask_ptr, counts_ptr, penalties_ptr, row, block, vocab, high,
            temperature, BLOCK,
        )  # fmt: skip
        if selects(temperature, top_k, top_p, vocab):
            bins = score_bins(scores)
            at = row * _BINS + bins
            if top_k > 0:
                tl.atomic_add(bin_counts_ptr + at, 1, mask=bins < _BINS, sem="relaxed")
            if top_p < 1:
                weight = weights(scores)
                heavy = (bins < _BINS) & (weight > 0)
                tl.atomic_add(bin_weights_ptr + at, weight, mask=heavy, sem="relaxed")
        else:
            least = least_weight(tl.load(min_p_ptr + row))
            if least > 0:
                scores = tl.where(weights(scores) >= least, scores, -_INFINITY)
            top, id = draw(scores, ids, tl.load(seed_ptr + row), tl.load(position_ptr + row))
            tl.store(winners_ptr + row * blocks + block, top)
            tl.store(winner_ids_ptr + row * blocks + block, id)


@triton.jit
def split_bins(bin_counts_ptr, bin_weights_ptr, row, top_k, top_p, vocab):
    """Return first and last bin of the candidates, and the number and weight of those to keep.

    A target of 0 means that top-k or top-p does not limit the row. A weight target of -1 means that
    it depends on what top-k keeps, and so is computed later.
    """
    at = row * _BINS + tl.arange(0, _BINS)
    counts = tl.cumsum(tl.load(bin_counts_ptr + at), 0)
    limited = (top_k > 0) & (top_k < vocab)
    wanted = tl.where(limited, top_k, 0x7FFFFFFF)
    last = tl.sum((counts < wanted).to(tl.int32), 0)
    first = last
    count_target = wanted - tl.max(tl.where(counts < wanted, counts, 0), 0)
    weight_target = tl.full([], 0, tl.int64)
    if top_p < 1:
        if limited:
            first = 0
            count_target = wanted
            weight_target = tl.full([], -1, tl.int64)
        else:
            sums = tl.cumsum(tl.load(bin_weights_ptr + at), 0)
            wanted_weight = top_p_weight(tl.max(sums, 0), top_p)
            short = sums < wanted_weight
            last = tl.sum(short.to(tl.int32), 0)
            first = last
            count_target = 0
            weight_target = wanted_weight - tl.max(tl.where(short, sums, 0), 0)
    return first, last, count_target, weight_target


@triton.jit
def split(
    logits_ptr, mask_ptr, counts_ptr, penalties_ptr, temperature_ptr, top_k_ptr, top_p_ptr,
    min_p_ptr, seed_ptr, position_ptr, highs_ptr, high_ids_ptr, winners_ptr, winner_ids_ptr,
    bin_counts_ptr, bin_weights_ptr, targets_ptr, sizes_ptr, candidate_keys_ptr,
    candidate_ids_ptr, vocab, BLOCK: tl.constexpr, PARTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Store a block's candidates, and draw its winner from the ids in better bins.

    Candidates are the ids in the bins that `split_bins` returns; all ids in better bins are kept.
    The grid is (blocks, rows).
    """
    wait_for_launches_ahead(PDL)
    block, row, blocks = tl.program_id(0), tl.program_id(1), tl.num_programs(0)
    temperature = row_temperature(temperature_ptr, row)
    top_k, top_p = tl.load(top_k_ptr + row), tl.load(top_p_ptr + row)
    high, _ = best_of_row(highs_ptr, high_ids_ptr, row, blocks, PARTS)
    if selects(temperature, top_k, top_p, vocab) & (tl.abs(high) < _INFINITY):
        first, last, count_target, weight_target = split_bins(
            bin_counts_ptr, bin_weights_ptr, row, top_k, top_p, vocab
        )
        if block == 0:
            tl.store(targets_ptr + 3 * row, count_target.to(tl.int64))
            tl.store(targets_ptr + 3 * row + 1, weight_target)
            tl.store(targets_ptr + 3 * row + 2, last.to(tl.int64))
        ids, scores = block_scores(
            logits_ptr, mask_ptr, counts_ptr, penalties_ptr, row, block, vocab, high,
            temperature, BLOCK,
        )  # fmt: skip
        bins = score_bins(scores)
        candidate = (bins >= first) & (bins <= last) & (bins < _BINS)
        size = tl.sum(candidate.to(tl.int32), 0)
        if size > 0:
            start = tl.atomic_add(sizes_ptr + row, size, sem="relaxed")
            rank = tl.cumsum(candidate.to(tl.int32), 0) - 1
            at = row.to(tl.int64) * vocab + start + rank
            tl.store(candidate_keys_ptr + at, score_keys(scores), mask=candidate)
            tl.store(candidate_ids_ptr + at, ids, mask=candidate)
        least = least_weight(tl.load(min_p_ptr + row))
        certain = tl.where(bins < first, scores, -_INFINITY)
        if least > 0:
            certain = tl.where(weights(certain) >= least, certain, -_INFINITY)
        top, id = draw(certain, ids, tl.load(seed_ptr + row), tl.load(position_ptr + row))
        tl.store(winners_ptr + row * blocks + block, top)
        tl.store(winner_ids_ptr + row * blocks + block, id)


# Triton 3.6 aborts on this kernel if a vocabulary of 1 is compiled in as a constant.
@triton.jit(do_not_specialize=["vocab", "blocks"])
def settle(
    temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, seed_ptr, position_ptr, highs_ptr,
    high_ids_ptr, winners_ptr, winner_ids_ptr, targets_ptr, sizes_ptr, candidate_keys_ptr,
    candidate_ids_ptr, ids_ptr, faults_ptr, vocab, blocks, PARTS: tl.constexpr,
    BLOCK: tl.constexpr, WAYS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Find the cutoff among the candidates and choose each row's token; the grid is (rows,)."""
    wait_for_launches_ahead(PDL)
    row = tl.program_id(0)
    temperature = row_temperature(temperature_ptr, row)
    top, id = best_of_row(highs_ptr, high_ids_ptr, row, blocks, PARTS)
    fault = tl.where(top == _INFINITY, _NOT_FINITE, tl.where(top == -_INFINITY, _EMPTY_MASK, 0))
    if fault > 0:
        id = id * 0
    elif temperature > 0:
        top, id = best_of_row(winners_ptr, winner_ids_ptr, row, blocks, PARTS)
        top_p = tl.load(top_p_ptr + row)
        if selects(temperature, tl.load(top_k_ptr + row), top_p, vocab):
            size = tl.load(sizes_ptr + row)
            keys_ptr = candidate_keys_ptr + row.to(tl.int64) * vocab
            row_ids_ptr = candidate_ids_ptr + row.to(tl.int64) * vocab
            last_key, last_id = cutoff(
                keys_ptr, row_ids_ptr, size, tl.load(targets_ptr + 3 * row),
                tl.load(targets_ptr + 3 * row + 1),
                tl.load(targets_ptr + 3 * row + 2).to(tl.int32), top_p, vocab, BLOCK, WAYS,
            )  # fmt: skip
            least = least_weight(tl.load(min_p_ptr + row))
            other_top, other_id = draw_candidates(
                keys_ptr, row_ids_ptr, size, last_key, last_id, least,
                tl.load(seed_ptr + row), tl.load(position_ptr + row), BLOCK,
            )  # fmt: skip
            top, id = better(top, id, other_top, other_id)
    tl.store(ids_ptr + row, id)
    tl.store(faults_ptr + row, fault)


def sample_rows(
    logits: Tensor,
    rows: SamplerRows,
    ids: Tensor,
    faults: Tensor,
    workspace: SamplerWorkspace,
    *,
    dependent: bool = False,
) -> None:
    """Choose one token for each row, as `sampler.sample` does.

    logits: fp32 [rows, V]. ids: int32 [rows], written; 0 where faults is not 0. faults: int32
    [rows], written: 0, FAULT_NOT_FINITE or FAULT_EMPTY_MASK (the former if both apply). A fault of
    one row does not affect others. Without rows nothing is launched. dependent: programmatic
    dependent launches. Raises TypeError or ValueError that names an argument which does not fit the
    others.
    """
    count, vocab = _check(logits, rows, ids, faults, workspace)
    if count == 0:
        return
    plan = SamplerPlan.of(count, vocab)
    grid = (plan.blocks, count)
    row_logits = (logits, rows.mask, rows.counts, rows.penalties)
    settings = (rows.temperature, rows.top_k, rows.top_p, rows.min_p, rows.seed, rows.position)
    highs = (workspace.highs, workspace.high_ids)
    winners = (workspace.winners, workspace.winner_ids)
    bins = (workspace.bin_counts, workspace.bin_weights)
    candidates = (workspace.targets, workspace.sizes, workspace.keys, workspace.ids)
    dependent, launch = dependent_launch(dependent)
    launch = {"PDL": dependent, **launch}
    options = {"num_warps": plan.warps, **launch}
    scan[grid](*row_logits, *highs, *bins, workspace.sizes, vocab, **plan.scan, **options)
    spread[grid](*row_logits, *settings, *highs, *winners, *bins, vocab, **plan.spread, **options)
    split[grid](
        *row_logits, *settings, *highs, *winners, *bins, *candidates, vocab, **plan.spread,
        **options,
    )  # fmt: skip
    settle[(count,)](
        *settings, *highs, *winners, *candidates, ids, faults, vocab, plan.blocks,
        **plan.settle, num_warps=SETTLE_WARPS, **launch,
    )  # fmt: skip


def _check(
    logits: Tensor, rows: SamplerRows, ids: Tensor, faults: Tensor, workspace: SamplerWorkspace
) -> tuple[int, int]:
    """Check the arguments of `sample_rows`; return the number of rows and the vocabulary's size."""
    check_tensor("logits", logits, torch.float32, None, None)
    count, vocab = logits.shape
    if not vocab:
        raise ValueError("logits: a vocabulary of 0, expected at least 1")
    rows.check(count, vocab)
    check_tensor("ids", ids, torch.int32, count)
    check_tensor("faults", faults, torch.int32, count)
    if workspace.vocab != vocab or workspace.max_rows < count:
        room = f"{workspace.max_rows} rows of {workspace.vocab}"
        raise ValueError(f"workspace: made for {room} logits, expected {count} rows of {vocab}")
    check_same_device(
        logits=logits, ids=ids, faults=faults, temperature=rows.temperature, workspace=workspace.ids
    )
    return count, vocab


_TYPES = {
    "logits_ptr": "*fp32", "mask_ptr": "*i32", "counts_ptr": "*i32", "penalties_ptr": "*fp32",
    "temperature_ptr": "*fp32", "top_k_ptr": "*i32", "top_p_ptr": "*fp32", "min_p_ptr": "*fp32",
    "seed_ptr": "*i64", "position_ptr": "*i32", "highs_ptr": "*fp32", "high_ids_ptr": "*i32",
    "winners_ptr": "*fp32", "winner_ids_ptr": "*i32", "bin_counts_ptr": "*i32",
    "bin_weights_ptr": "*i64", "targets_ptr": "*i64", "sizes_ptr": "*i32",
    "candidate_keys_ptr": "*i32", "candidate_ids_ptr": "*i32", "ids_ptr": "*i32",
    "faults_ptr": "*i32", "vocab": "i32", "blocks": "i32",
}  # fmt: skip
_OPTIONAL = ("mask_ptr", "counts_ptr", "penalties_ptr")


def variants(shape: DecoderShape) -> Iterator[Variant]:
    """Yield the four launches at small and large batch, with and without mask and penalties."""
    for rows, dependent in ((1, False), (1, True), (16, False), (64, False)):
        plan = SamplerPlan.of(rows, shape.vocab)
        launches = ((scan, plan.scan), (spread, plan.spread), (split, plan.spread))
        for kernel, constants in launches:
            for optional in (False, True)[: 1 if dependent else None]:
                yield _variant(shape, rows, kernel, constants, plan.warps, optional, dependent)
        yield _variant(shape, rows, settle, plan.settle, SETTLE_WARPS, True, dependent)


def _variant(
    shape: DecoderShape,
    rows: int,
    kernel: Any,
    constants: dict[str, int],
    warps: int,
    optional: bool,
    dependent: bool,
) -> Variant:
    names = [name for name in kernel.arg_names if name in _TYPES]
    unaligned = {"blocks", "vocab"} if kernel is settle else set[str]()
    absent = {} if optional else {name: None for name in names if name in _OPTIONAL}
    reads = "logits_ptr" in names
    per_id = (4 + 4 + 1 / 8 if optional else 4) if reads else 0
    return Variant(
        name=f"{shape.name}.sampler {kernel.__name__} rows={rows}"
        + " masked" * (optional and reads)
        + " dependent" * dependent,
        kernel=kernel,
        signature={name: _TYPES[name] for name in names if name not in absent},
        constants={**constants, **absent, "PDL": dependent},
        divisible=frozenset(names) - unaligned - set(absent),
        num_warps=warps,
        launch_pdl=dependent,
        bytes_moved=int(rows * shape.vocab * per_id),
    )
