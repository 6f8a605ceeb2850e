"""The kernel that rotates queries and keys and writes the cache, beside its oracle."""

from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor

from tailrace.kernels.attention.paged_attention import FAULT_PAGE, FAULT_POSITION, FAULT_SEQUENCE
from tailrace.kernels.attention.paged_kv import KV_DTYPES
from tailrace.kernels.attention.rope import Rope
from tailrace.kernels.attention.rope_triton import rope_write
from tailrace.kernels.shapes import PAGE_TOKENS
from tests.kernels.paging import (
    CONTEXT,
    GuardedCache,
    guarded_cache,
    int32,
    normal,
    random_rope,
    shuffled_tables,
)
from tests.kernels.refusals import assert_refused

HEADS, KV_HEADS, PAGES = 4, 2, 6


def write_rows(
    qkv: Tensor, rope: Rope, guarded: GuardedCache, tables: Tensor, rows: list[tuple[int, int]]
) -> tuple[Tensor, list[int]]:
    """Launch for rows of (sequence, position); returns the queries and the faults."""
    device, cache = qkv.device, guarded.cache
    heads = qkv.shape[1] // cache.head_dim - 2 * cache.kv_heads
    q_out = torch.full((len(qkv), heads * cache.head_dim), torch.inf, device=device)
    faults = torch.zeros(len(qkv), dtype=torch.int32, device=device)
    sequences = int32([sequence for sequence, _ in rows], device)
    positions = int32([position for _, position in rows], device)
    rope_write(qkv, positions, sequences, rope, cache, tables, q_out, faults)
    return q_out, faults.tolist()


def expect_rows(
    qkv: Tensor, rope: Rope, guarded: GuardedCache, tables: Tensor, rows: list[tuple[int, int]]
) -> Tensor:
    """Return the same in torch, on the CPU."""
    norms = [None if x is None else x.cpu() for x in (rope.q_norm, rope.k_norm)]
    cpu = Rope(rope.cos.cpu(), rope.sin.cpu(), norms[0], norms[1], rope.eps)
    cache = guarded.cache
    parts = qkv.cpu().view(len(qkv), -1, cache.head_dim)
    heads = parts.shape[1] - 2 * cache.kv_heads
    q, k, v = parts.tensor_split([heads, heads + cache.kv_heads], dim=1)
    positions = torch.tensor([position for _, position in rows])
    turned = cpu.turn(k, positions, cpu.k_norm)
    for row, (sequence, position) in enumerate(rows):
        at = torch.tensor([position])
        cache.write(tables[sequence].cpu(), at, turned[row : row + 1], v[row : row + 1])
    return cpu.turn(q, positions, cpu.q_norm).flatten(1)


def bits_of(guarded: GuardedCache) -> list[Tensor]:
    return [buffer.cpu().view(torch.uint8) for buffer in guarded.buffers]


@pytest.mark.parametrize("dtype", KV_DTYPES)
def test_queries_and_cache_have_the_bits_of_the_oracle(
    dtype: torch.dtype, device: torch.device
) -> None:
    rope = random_rope(32, device)
    qkv = normal(3, (HEADS + 2 * KV_HEADS) * 32, device=device)
    qkv[2] *= 1e-3
    tables = shuffled_tables(2, 3, device)
    rows = [(0, 0), (1, PAGE_TOKENS - 1), (0, 2 * PAGE_TOKENS)]
    guarded = guarded_cache(PAGES, KV_HEADS, 32, dtype, device)
    q, faults = write_rows(qkv, rope, guarded, tables, rows)
    oracle = guarded_cache(PAGES, KV_HEADS, 32, dtype, torch.device("cpu"))
    assert torch.equal(q.cpu(), expect_rows(qkv, rope, oracle, tables, rows))
    for got, wanted in zip(bits_of(guarded), bits_of(oracle), strict=True):
        assert torch.equal(got, wanted)
    assert faults == [0, 0, 0]


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize(("head_dim", "heads"), [(64, 1), (80, 3), (96, 2), (128, 4), (256, 1)])
def test_any_size_and_group_of_heads_is_normed_and_turned(
    head_dim: int, heads: int, norm: bool, device: torch.device
) -> None:
    rope = random_rope(head_dim, device, norm=norm)
    qkv = normal(2, (heads + 2) * head_dim, device=device)
    tables = shuffled_tables(1, 2, device)
    rows = [(0, 3), (0, PAGE_TOKENS)]
    guarded = guarded_cache(2, 1, head_dim, torch.float32, device)
    oracle = guarded_cache(2, 1, head_dim, torch.float32, torch.device("cpu"))
    q, _ = write_rows(qkv, rope, guarded, tables, rows)
    # A norm takes a root, which torch does not round correctly on every processor.
    error = 3e-7 if norm else 0.0
    wanted = expect_rows(qkv, rope, oracle, tables, rows)
    torch.testing.assert_close(q.cpu(), wanted, rtol=error, atol=error)
    for got, stored in zip(guarded.buffers, oracle.buffers, strict=True):
        torch.testing.assert_close(got.cpu(), stored, rtol=error, atol=error, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_values_that_are_not_finite_leave_a_scale_of_nan(
    dtype: torch.dtype, device: torch.device
) -> None:
    qkv = normal(2, 3 * 32, device=device)
    qkv[0, 70], qkv[1, 70] = torch.nan, torch.inf
    guarded = guarded_cache(1, 1, 32, dtype, device)
    with np.errstate(invalid="ignore"):
        write_rows(qkv, random_rope(32, device), guarded, int32([[0]], device), [(0, 0), (0, 1)])
    assert guarded.cache.value_scales is not None
    assert bool(guarded.cache.value_scales[0, 0, :2].isnan().all())
    assert guarded.cache.key_scales is not None
    assert bool(guarded.cache.key_scales[0, 0, :2].isfinite().all())


@pytest.mark.parametrize(
    ("row", "fault"),
    [
        ((-1, 0), FAULT_SEQUENCE),
        ((2, 0), FAULT_SEQUENCE),
        ((0, -1), FAULT_POSITION),
        ((0, 3 * PAGE_TOKENS), FAULT_POSITION),
        ((0, 2**31 - 1), FAULT_POSITION),
        ((1, PAGE_TOKENS), FAULT_PAGE),
        ((1, 2 * PAGE_TOKENS), FAULT_PAGE),
    ],
)
def test_a_row_that_has_no_place_is_marked_and_written_nowhere(
    row: tuple[int, int], fault: int, device: torch.device
) -> None:
    tables = int32([[0, 1, 2], [3, -1, PAGES]], device)
    qkv = normal(2, (HEADS + 2 * KV_HEADS) * 32, device=device)
    guarded = guarded_cache(PAGES, KV_HEADS, 32, torch.float32, device)
    alone = guarded_cache(PAGES, KV_HEADS, 32, torch.float32, device)
    q, faults = write_rows(qkv, random_rope(32, device), guarded, tables, [row, (1, 5)])
    q_alone, _ = write_rows(qkv[1:], random_rope(32, device), alone, tables, [(1, 5)])
    assert faults == [fault, 0]
    assert not q[0].any()  # attention reads them, and then says NaN
    assert torch.equal(q[1:], q_alone)
    for got, wanted in zip(bits_of(guarded), bits_of(alone), strict=True):
        assert torch.equal(got, wanted)


def test_a_position_beyond_the_rotary_table_is_marked(device: torch.device) -> None:
    rope = random_rope(32, device)
    short = Rope(rope.cos[:10].contiguous(), rope.sin[:10].contiguous())
    guarded = guarded_cache(1, 1, 32, torch.float32, device)
    qkv = normal(2, 3 * 32, device=device)
    _, faults = write_rows(qkv, short, guarded, int32([[0]], device), [(0, 9), (0, 10)])
    assert faults == [0, FAULT_POSITION]
    assert CONTEXT > PAGE_TOKENS


def test_no_rows_are_no_launch(device: torch.device) -> None:
    guarded = guarded_cache(1, 1, 32, torch.float32, device)
    qkv = torch.empty(0, 3 * 32, device=device)
    _, faults = write_rows(qkv, random_rope(32, device), guarded, int32([[0]], device), [])
    assert faults == []


def test_arguments_that_do_not_fit_are_refused_by_name(device: torch.device) -> None:
    cache = guarded_cache(1, 1, 32, torch.float32, device).cache
    row = int32([0], device)
    assert_refused(
        partial(rope_write, cache=cache, tables=int32([[0]], device)),
        {
            "qkv": normal(1, 96, device=device),
            "positions": row,
            "sequences": row.clone(),
            "rope": random_rope(32, device),
            "q_out": normal(1, 32, device=device),
            "faults": row.clone(),
        },
        (ValueError, "qkv: shape (1, 64)", {"qkv": normal(1, 64, device=device)}),
        (ValueError, "cos", {"rope": random_rope(64, device)}),
    )


def test_a_rope_that_is_not_whole_is_refused_by_name() -> None:
    cos, weight = torch.zeros(4, 32), torch.ones(32)
    with pytest.raises(ValueError, match="sin"):
        Rope(cos, torch.zeros(3, 32))
    with pytest.raises(ValueError, match="k_norm"):
        Rope(cos, cos, weight)
    with pytest.raises(ValueError, match="q_norm"):
        Rope(cos, cos, weight[:16], weight)
    with pytest.raises(ValueError, match="eps"):
        Rope(cos, cos, weight, weight, 0.0)
