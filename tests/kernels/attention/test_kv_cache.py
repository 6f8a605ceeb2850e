"""The KV cache of the CPU path."""

import pytest
import torch

from tailrace.kernels.attention.kv_cache import KvCache
from tailrace.kernels.attention.paged_kv import FP8, PagedKv, page_bytes
from tailrace.kernels.shapes import PAGE_TOKENS

HEADS, SIZE = 3, 8


def filled(pages: list[int], tokens: int) -> tuple[KvCache, torch.Tensor]:
    """Return a cache whose second layer holds a sequence, and what was written; the rest is NaN."""
    cache = KvCache(layers=2, pages=6, kv_heads=HEADS, head_dim=SIZE)
    nowhere = torch.arange(6 * PAGE_TOKENS)
    cache.write(1, nowhere, torch.full((len(nowhere), 2 * HEADS, SIZE), torch.nan))
    random = torch.Generator().manual_seed(1)
    written = torch.randn(tokens, 2 * HEADS, SIZE, generator=random)
    for start in range(0, tokens, 50):
        end = min(start + 50, tokens)
        slots = torch.tensor(cache.slots(pages, range(start, end)))
        cache.write(1, slots, written[start:end])
    return cache, written


@pytest.mark.parametrize("pages", [[0, 1, 2], [3, 4, 5], [5, 0, 3], [1, 3, 4]])
def test_it_gives_back_every_token_wherever_its_page_lies(pages: list[int]) -> None:
    cache, written = filled(pages, 150)
    for length in (1, 63, 64, 65, 128, 150):
        place = cache.place(pages[: -(-length // PAGE_TOKENS)])
        keys, values = cache.read(1, place, length)
        assert torch.equal(keys, written[:length, :HEADS].permute(1, 2, 0))
        assert torch.equal(values, written[:length, HEADS:].transpose(0, 1))


def test_pages_that_follow_one_another_are_read_where_they_lie() -> None:
    cache, _ = filled([2, 3, 4], 150)
    keys, _ = cache.read(1, cache.place([2, 3]), 100)
    again, _ = cache.read(1, cache.place([2, 3]), 100)
    assert keys.data_ptr() == again.data_ptr()


def test_pages_can_always_be_read_as_copies() -> None:
    cache, written = filled([2, 3, 4], 150)
    cache.in_place = False
    keys, values = cache.read(1, cache.place([2, 3]), 100)
    again, _ = cache.read(1, cache.place([2, 3]), 100)
    assert keys.data_ptr() != again.data_ptr()
    assert torch.equal(keys, written[:100, :HEADS].permute(1, 2, 0))
    assert torch.equal(values, written[:100, HEADS:].transpose(0, 1))


def test_a_write_of_one_sequence_changes_no_other() -> None:
    cache, written = filled([0, 1], 128)
    cache.write(1, torch.tensor(cache.slots([4, 2], range(128))), written.neg())
    keys, _ = cache.read(1, cache.place([0, 1]), 128)
    assert torch.equal(keys, written[:, :HEADS].permute(1, 2, 0))


@pytest.mark.parametrize("pages", [[], [6], [0, -1]])
def test_a_page_that_is_not_there_is_refused(pages: list[int]) -> None:
    with pytest.raises(ValueError, match="pages"):
        KvCache(layers=1, pages=6, kv_heads=1, head_dim=4).place(pages)


def test_a_cache_without_pages_is_refused() -> None:
    with pytest.raises(ValueError, match="pages"):
        KvCache(layers=1, pages=0, kv_heads=1, head_dim=4)


def test_a_page_has_the_bytes_that_its_storage_has() -> None:
    cache = KvCache(layers=2, pages=1, kv_heads=HEADS, head_dim=SIZE)
    keys, values = cache.read(0, cache.place([0]), PAGE_TOKENS)
    of_a_layer = (keys.numel() + values.numel()) * keys.element_size()
    assert page_bytes(2, HEADS, SIZE, torch.float32) == 2 * of_a_layer


@pytest.mark.parametrize("dtype", [torch.int8, FP8])
@pytest.mark.parametrize("pages", [[1, 2, 3], [5, 0, 3]])
def test_what_is_quantised_is_what_a_paged_kv_holds(dtype: torch.dtype, pages: list[int]) -> None:
    """A page of 32 elements a head, and a head with NaN, which is seen when it is read."""
    size, tokens = 32, 150
    cache = KvCache(layers=2, pages=6, kv_heads=1, head_dim=size, dtype=dtype)
    paged = PagedKv.allocate(2, 6, 1, size, dtype=dtype, device=torch.device("cpu"))[1]
    written = torch.randn(tokens, 2, size, generator=torch.Generator().manual_seed(1))
    written[70, 0, 3] = torch.nan
    positions = range(tokens)
    cache.write(1, torch.tensor(cache.slots(pages, positions)), written)
    table = torch.tensor(pages, dtype=torch.int32)
    paged.write(table, torch.arange(tokens), written[:, :1], written[:, 1:])
    expected_keys, expected_values = paged.gather(table, tokens)
    keys, values = cache.read(1, cache.place(pages), tokens)
    assert torch.equal(keys.nan_to_num(9.0), expected_keys.permute(1, 2, 0).nan_to_num(9.0))
    assert torch.equal(values, expected_values.transpose(0, 1))
    assert keys[0, :, 70].isnan().all() and not keys[0, :, :70].isnan().any()


def test_a_quantised_page_is_its_elements_and_scales() -> None:
    assert page_bytes(2, HEADS, SIZE, FP8) == 2 * 2 * HEADS * PAGE_TOKENS * (SIZE + 4)
