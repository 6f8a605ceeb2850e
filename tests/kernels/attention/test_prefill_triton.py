"""Prefill attention in Triton, beside its oracle."""

from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tailrace.kernels.attention import prefill_triton
from tailrace.kernels.attention.paged_attention import (
    FAULT_PAGE,
    FAULT_POSITION,
    FAULT_SEQUENCE,
    paged_attention,
)
from tailrace.kernels.attention.paged_kv import FP8
from tailrace.kernels.attention.prefill_triton import prefill_attention, prefill_plan
from tailrace.kernels.shapes import PAGE_TOKENS
from tailrace.origin.models.model import PREFILL_CHUNK_TOKENS
from tests.kernels.paging import (
    GuardedCache,
    fill,
    guarded_cache,
    int32,
    normal,
    shuffled_tables,
)
from tests.kernels.refusals import assert_refused

Chunk = tuple[int, int, int]
"""(sequence, position of the first token, tokens)"""


@dataclass(frozen=True, slots=True)
class Stage:
    """A guarded cache and its page tables, on which chunks attend."""

    guarded: GuardedCache
    tables: Tensor

    def attend(self, q: Tensor, chunks: list[Chunk], max_tokens: int) -> tuple[Tensor, list[int]]:
        """Launch for chunks whose rows follow one another; returns the result and the faults."""
        device = q.device
        out = torch.full_like(q, 7.0)
        faults = torch.zeros(len(q), dtype=torch.int32, device=device)
        first_rows = int32([0, *accumulate(tokens for _, _, tokens in chunks)], device)
        starts = int32([start for _, start, _ in chunks], device)
        sequences = int32([sequence for sequence, _, _ in chunks], device)
        prefill_attention(
            q,
            first_rows,
            starts,
            sequences,
            self.guarded.cache,
            self.tables,
            out,
            faults,
            max_tokens=max_tokens,
        )
        assert self.guarded.margins_are_untouched()
        return out, faults.tolist()

    def expected(self, q: Tensor, chunks: list[Chunk]) -> Tensor:
        rows = [(s, start + t + 1) for s, start, tokens in chunks for t in range(tokens)]
        lengths = int32([length for _, length in rows], q.device)
        sequences = int32([sequence for sequence, _ in rows], q.device)
        return paged_attention(q, lengths, sequences, self.guarded.cache, self.tables)


def stage(
    lengths: list[int],
    device: torch.device,
    *,
    kv_heads: int = 1,
    head_dim: int = 32,
    dtype: torch.dtype = torch.float32,
) -> Stage:
    tables = shuffled_tables(len(lengths), -(-max(lengths) // PAGE_TOKENS), device)
    guarded = guarded_cache(tables.numel(), kv_heads, head_dim, dtype, device)
    fill(guarded.cache, tables, lengths)
    return Stage(guarded, tables)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, FP8])
def test_chunks_of_several_sequences_equal_the_oracle(
    dtype: torch.dtype, device: torch.device
) -> None:
    """A first chunk, one that begins and ends inside pages, a full page, and a single token."""
    chunks = [(0, 0, 20), (1, 50, 33), (2, 64, 64), (3, 70, 1)]
    made = stage([20, 83, 128, 71], device, dtype=dtype)
    q = normal(118, 2 * 32, device=device)
    out, faults = made.attend(q, chunks, 64)
    error = 2e-6 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(out, made.expected(q, chunks), rtol=error, atol=error)
    assert not any(faults)


@pytest.mark.parametrize(
    ("head_dim", "heads", "kv_heads"),
    [(64, 3, 1), (80, 2, 2), (96, 1, 1), (128, 2, 1), (256, 1, 1)],
)
def test_any_size_and_group_of_heads_equals_the_oracle(
    head_dim: int, heads: int, kv_heads: int, device: torch.device
) -> None:
    made = stage([75], device, kv_heads=kv_heads, head_dim=head_dim)
    q = normal(12, heads * head_dim, device=device)
    out, _ = made.attend(q, [(0, 63, 12)], 12)
    torch.testing.assert_close(out, made.expected(q, [(0, 63, 12)]), rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8, FP8])
def test_the_widest_heads_in_less_than_fp32_equal_the_oracle(
    dtype: torch.dtype, device: torch.device
) -> None:
    made = stage([75], device, head_dim=256, dtype=dtype)
    q = normal(12, 256, device=device)
    out, _ = made.attend(q, [(0, 63, 12)], 12)
    torch.testing.assert_close(out, made.expected(q, [(0, 63, 12)]), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
def test_a_row_is_the_same_in_any_batch_and_any_chunk(
    dtype: torch.dtype, device: torch.device
) -> None:
    made = stage([100, 100], device, dtype=dtype)
    q = normal(100, 32, device=device)
    whole, _ = made.attend(q, [(0, 0, 100)], 100)
    parts, _ = made.attend(q, [(0, 0, 30), (0, 30, 35), (0, 65, 35)], 100)
    assert torch.equal(parts, whole)
    twice = torch.cat((q[90:], q[30:60]))
    mixed, _ = made.attend(twice, [(1, 90, 10), (0, 30, 30)], 30)
    assert torch.equal(mixed[10:], whole[30:60])


def rows_alone(a: Any, b: Any, **more: Any) -> Any:
    """Return the product of two matrices, each element of which is summed in the same order."""
    return np.einsum("ik,kj->ij", a, b, **more)


def test_a_block_is_a_chunk_and_a_larger_one_gives_the_same_bits(
    monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    # numpy's BLAS, which computes the products of the interpreter, may round the rows of a larger
    # block in another way. Of the kernel itself each row is computed alone.
    monkeypatch.setattr(np, "matmul", rows_alone)
    constants, _ = prefill_plan(2, 1, 32, torch.bfloat16)
    assert constants["BLOCK_M"] == PREFILL_CHUNK_TOKENS
    made = stage([150], device, dtype=torch.bfloat16)
    q = normal(150, 2 * 32, device=device)
    chunks = [(0, 0, 64), (0, 64, 64), (0, 128, 22)]
    small, _ = made.attend(q, chunks, 64)

    def large(*given: Any) -> tuple[dict[str, Any], dict[str, int]]:
        return prefill_plan(*given)[0] | {"BLOCK_M": 128}, {"num_warps": 8}

    monkeypatch.setattr(prefill_triton, "prefill_plan", large)
    assert torch.equal(made.attend(q, chunks, 64)[0], small)
    assert torch.equal(made.attend(q, [(0, 0, 150)], 150)[0], small)


def test_later_positions_and_foreign_pages_behind_them_change_nothing(
    device: torch.device,
) -> None:
    made = stage([128], device)
    q = normal(20, 32, device=device)
    before, _ = made.attend(q, [(0, 10, 20)], 20)
    made.guarded.cache.keys[made.tables[0, 0].long(), :, 30:] = torch.nan
    made.guarded.cache.values[made.tables[0, 0].long(), :, 30:] = torch.nan
    made.tables[0, 1] = -5
    after, faults = made.attend(q, [(0, 10, 20)], 20)
    assert torch.equal(after, before)
    assert not any(faults)


@pytest.mark.parametrize(
    ("chunk", "fault"),
    [
        ((-1, 0, 5), FAULT_SEQUENCE),
        ((2, 0, 5), FAULT_SEQUENCE),
        ((0, -1, 5), FAULT_POSITION),
        ((0, 124, 5), FAULT_POSITION),
        ((0, 2**31 - 3, 5), FAULT_POSITION),
        ((1, 62, 5), FAULT_PAGE),
    ],
)
def test_a_chunk_with_a_fault_is_nan_and_harms_no_other(
    chunk: Chunk, fault: int, device: torch.device
) -> None:
    made = stage([128, 128], device)
    made.tables[1, 1] = made.guarded.cache.pages
    q = normal(9, 32, device=device)
    alone, _ = made.attend(q[5:], [(1, 20, 4)], 5)
    out, faults = made.attend(q, [chunk, (1, 20, 4)], 5)
    # A foreign page is met by the rows of the second block alone, the others by all.
    bad = [row for row in range(5) if fault != FAULT_PAGE or row >= 2]
    assert faults == [fault if row in bad else 0 for row in range(9)]
    assert bool(out[bad].isnan().all())
    assert torch.equal(out[5:], alone)


def test_a_chunk_longer_than_the_launch_is_marked(device: torch.device) -> None:
    made = stage([128], device)
    _, faults = made.attend(normal(100, 32, device=device), [(0, 0, 100)], 32)
    assert faults[0] == FAULT_POSITION


def test_chunks_without_rows_and_no_chunks_are_left_alone(device: torch.device) -> None:
    made = stage([40], device)
    q = normal(3, 32, device=device)
    out, faults = made.attend(q, [(0, 0, 0), (0, 20, 3), (0, 9, 0)], 3)
    torch.testing.assert_close(out, made.expected(q, [(0, 20, 3)]), rtol=2e-6, atol=2e-6)
    assert faults == [0, 0, 0]
    assert made.attend(q[:0], [], 3)[1] == []


def test_arguments_that_do_not_fit_are_refused_by_name(device: torch.device) -> None:
    made = stage([40], device)
    q = normal(1, 32, device=device)
    assert_refused(
        partial(prefill_attention, cache=made.guarded.cache, tables=made.tables),
        {
            "q": q,
            "first_rows": int32([0, 1], device),
            "starts": int32([0], device),
            "sequences": int32([0], device),
            "out": q.clone(),
            "faults": int32([0], device),
            "max_tokens": 1,
        },
        (ValueError, "max_tokens", {"max_tokens": -1}),
    )
