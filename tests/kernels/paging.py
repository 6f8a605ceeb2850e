"""Paged caches for the tests of attention, with poison where no kernel may read or write."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tailrace.kernels.attention.paged_kv import FP8, SCALED_DTYPES, PagedKv
from tailrace.kernels.attention.rope import Rope, rope_table
from tailrace.kernels.shapes import PAGE_TOKENS

GUARD_PAGES = 2
"""Pages of poison before and after a cache."""
CONTEXT = 8192


@dataclass(frozen=True, slots=True)
class GuardedCache:
    """A cache inside larger buffers, and those buffers."""

    cache: PagedKv
    buffers: tuple[Tensor, ...]

    def margins_are_untouched(self) -> bool:
        ends = (slice(None, GUARD_PAGES), slice(-GUARD_PAGES, None))
        return all(bool(is_poison(b[end]).all()) for b in self.buffers for end in ends)


def is_poison(x: Tensor) -> Tensor:
    return x == 0x7F if x.dtype == torch.int8 else x.float().isnan()


def poisoned(*shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """NaN, or 0x7f, which is NaN in fp8 too."""
    if dtype in (torch.int8, FP8):
        return torch.full(shape, 0x7F, dtype=torch.int8, device=device).view(dtype)
    return torch.full(shape, torch.nan, dtype=dtype, device=device)


def guarded_cache(
    pages: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
) -> GuardedCache:
    """Return a cache of poison, with margins of it."""
    shape = (pages + 2 * GUARD_PAGES, kv_heads, PAGE_TOKENS, head_dim)
    buffers = [poisoned(*shape, dtype=dtype, device=device) for _ in range(2)]
    if dtype in SCALED_DTYPES:
        buffers += [poisoned(*shape[:3], dtype=torch.float32, device=device) for _ in range(2)]
    inner = [buffer[GUARD_PAGES:-GUARD_PAGES] for buffer in buffers]
    return GuardedCache(PagedKv(*inner), tuple(buffers))


def shuffled_tables(sequences: int, max_pages: int, device: torch.device) -> Tensor:
    """Block tables int32 [sequences, max_pages] in which no page has two holders."""
    random = torch.Generator().manual_seed(sequences * 31 + max_pages)
    order = torch.randperm(sequences * max_pages, generator=random, dtype=torch.int32)
    return order.view(sequences, max_pages).to(device)


def normal(*shape: int, device: torch.device, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device)


def int32(values: list[int] | list[list[int]], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def random_rope(head_dim: int, device: torch.device, *, norm: bool = False) -> Rope:
    cos, sin = (x.to(device) for x in rope_table(CONTEXT, head_dim, 10_000.0))
    if not norm:
        return Rope(cos, sin)
    weights = [1 + 0.1 * normal(head_dim, device=device, seed=seed) for seed in (5, 6)]
    return Rope(cos, sin, weights[0], weights[1])


def fill(cache: PagedKv, tables: Tensor, lengths: list[int], seed: int = 3) -> None:
    """Write random keys and values to positions 0 to length - 1 of each sequence."""
    shape = (cache.kv_heads, cache.head_dim)
    for sequence, length in enumerate(lengths):
        keys = normal(length, *shape, device=tables.device, seed=seed + 2 * sequence)
        values = normal(length, *shape, device=tables.device, seed=seed + 2 * sequence + 1)
        positions = torch.arange(length, device=tables.device)
        cache.write(tables[sequence], positions, keys, values)
