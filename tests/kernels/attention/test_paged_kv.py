"""The paged KV cache: its layout, its types, and checks of page tables."""

import pytest
import torch
from torch import Tensor

from tailrace.kernels.attention.paged_kv import (
    FP8,
    KV_DTYPES,
    PagedKv,
    check_tables,
    quantise_heads,
)
from tailrace.kernels.shapes import HEAD_DIMS, PAGE_TOKENS
from tests.kernels.paging import guarded_cache, int32, is_poison, normal, shuffled_tables

CPU = torch.device("cpu")


def cache_of(dtype: torch.dtype) -> PagedKv:
    return PagedKv.allocate(2, 4, 3, 32, dtype=dtype, device=CPU)[1]


@pytest.mark.parametrize("dtype", KV_DTYPES)
def test_what_was_written_is_gathered_in_the_order_of_positions(dtype: torch.dtype) -> None:
    cache = cache_of(dtype)
    table = int32([3, 0, 2], CPU)
    keys, values = normal(130, 3, 32, device=CPU, seed=1), normal(130, 3, 32, device=CPU, seed=2)
    order = torch.randperm(130, generator=torch.Generator().manual_seed(4))
    cache.write(table, order, keys[order], values[order])
    tolerance = {torch.float32: 0.0, torch.float16: 1e-3, torch.bfloat16: 8e-3, FP8: 0.2}
    for got, wanted in zip(cache.gather(table, 130), (keys, values), strict=True):
        torch.testing.assert_close(got, wanted, rtol=0, atol=tolerance.get(dtype, 0.02) * 2)


def test_a_position_lies_in_its_page_and_nowhere_else() -> None:
    guarded = guarded_cache(4, 3, 32, torch.float32, CPU)
    keys = normal(1, 3, 32, device=CPU)
    guarded.cache.write(int32([3, 1], CPU), torch.tensor([PAGE_TOKENS + 5]), keys, keys)
    assert torch.equal(guarded.cache.keys[1, :, 5], keys[0])
    assert int((~is_poison(guarded.cache.keys)).sum()) == keys.numel()
    assert guarded.margins_are_untouched()


@pytest.mark.parametrize("dtype", [torch.int8, FP8])
def test_the_largest_value_of_a_head_takes_the_whole_range(dtype: torch.dtype) -> None:
    x = normal(5, 3, 32, device=CPU) * torch.tensor([1e-3, 1.0, 1e6]).view(1, 3, 1)
    stored, scales = quantise_heads(x, dtype)
    assert torch.equal(
        stored.float().abs().amax(-1), torch.full((5, 3), 127.0 if dtype == torch.int8 else 448.0)
    )
    error = (stored.float() * scales[..., None] - x).abs().amax(-1) / x.abs().amax(-1)
    assert float(error.max()) < (0.005 if dtype == torch.int8 else 0.04)


@pytest.mark.parametrize("dtype", [torch.int8, FP8])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_head_that_is_not_finite_has_no_scale(dtype: torch.dtype, bad: float) -> None:
    x = normal(2, 1, 32, device=CPU)
    x[0, 0, 7] = bad
    _, scales = quantise_heads(x, dtype)
    assert scales.isnan().flatten().tolist() == [True, False]


def test_a_head_of_zeros_is_stored_as_zeros() -> None:
    stored, scales = quantise_heads(torch.zeros(1, 32), torch.int8)
    assert not stored.any()
    assert scales.isfinite().all()


def test_bytes_of_a_token_count_keys_values_and_scales() -> None:
    assert cache_of(torch.bfloat16).token_bytes() == 2 * 3 * 32 * 2
    assert cache_of(torch.int8).token_bytes() == 2 * 3 * (32 + 4)


@pytest.mark.parametrize("positions", [[-1], [3 * PAGE_TOKENS]])
def test_a_position_outside_the_table_is_refused(positions: list[int]) -> None:
    x = torch.zeros(1, 3, 32)
    with pytest.raises(ValueError, match="positions"):
        cache_of(torch.float32).write(int32([0, 1, 2], CPU), torch.tensor(positions), x, x)


@pytest.mark.parametrize("page", [-1, 4])
def test_a_foreign_page_is_refused(page: int) -> None:
    with pytest.raises(ValueError, match="table"):
        cache_of(torch.float32).gather(int32([0, page], CPU), PAGE_TOKENS + 1)


def test_a_foreign_page_after_the_last_is_never_looked_at() -> None:
    keys, _ = cache_of(torch.float32).gather(int32([0, 99], CPU), PAGE_TOKENS)
    assert keys.shape == (PAGE_TOKENS, 3, 32)


def cells(dtype: torch.dtype = torch.float32, head_dim: int = 32) -> Tensor:
    return torch.zeros(4, 3, PAGE_TOKENS, head_dim, dtype=dtype)


def test_tensors_that_are_no_cache_are_refused_by_name() -> None:
    with pytest.raises(TypeError, match="keys"):
        PagedKv(cells(torch.float64), cells(torch.float64))
    with pytest.raises(TypeError, match="values"):
        PagedKv(cells(), cells(torch.bfloat16))
    with pytest.raises(ValueError, match="values"):
        PagedKv(cells(), cells()[:3])
    with pytest.raises(ValueError, match="values"):
        PagedKv(cells(), cells().transpose(2, 3).contiguous().transpose(2, 3))
    with pytest.raises(ValueError, match="keys"):
        PagedKv(cells(head_dim=48), cells(head_dim=48))
    with pytest.raises(ValueError, match="keys"):
        PagedKv(cells()[:0], cells()[:0])


def test_scales_go_with_quantised_caches_alone() -> None:
    scales = torch.zeros(4, 3, PAGE_TOKENS)
    with pytest.raises(TypeError, match="key_scales"):
        PagedKv(cells(torch.int8), cells(torch.int8))
    with pytest.raises(TypeError, match="key_scales"):
        PagedKv(cells(), cells(), scales, scales)
    with pytest.raises(ValueError, match="value_scales"):
        PagedKv(cells(torch.int8), cells(torch.int8), scales, scales[:3])


def test_tables_of_another_type_are_refused_by_name() -> None:
    tables = shuffled_tables(2, 2, CPU)
    with pytest.raises(TypeError, match="tables"):
        check_tables(tables.long(), int32([0], CPU), 1)
    with pytest.raises(ValueError, match="sequences"):
        check_tables(tables, int32([0], CPU), 2)


def test_every_named_size_of_a_head_can_be_allocated() -> None:
    for head_dim in HEAD_DIMS:
        (cache,) = PagedKv.allocate(1, 1, 1, head_dim, dtype=torch.bfloat16, device=CPU)
        assert cache.head_dim == head_dim
