"""Keys and values of many sequences on the CPU, in pages that they share."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tailrace.kernels.attention.paged_kv import FP8, SCALED_DTYPES, quantise_heads
from tailrace.kernels.shapes import PAGE_TOKENS

FP8_VALUES = torch.arange(256, dtype=torch.uint8).view(FP8).float()
"""What each byte of fp8 stands for, NaN included."""
Place = Tensor | int
"""Where a sequence's pages lie: int64 [n] of their ids, or the first where they follow it."""


class KvCache:
    """fp32 [layers, 2 * kv_heads, pages, PAGE_TOKENS, head_dim], key heads before value heads.

    Position t of a sequence lies in page `pages[t // PAGE_TOKENS]` of its block table. What no
    position was written to is never computed with, so the memory starts as it is found: a page
    that nobody has used costs none. in_place: pages that follow one another are read where they
    lie; else they too are copied. dtype: fp32, or int8 or fp8, which go with an fp32 scale per
    token and head as in a `PagedKv`, and are always read as an fp32 copy. Raises ValueError for
    sizes that are not above 0.
    """

    def __init__(
        self,
        layers: int,
        pages: int,
        kv_heads: int,
        head_dim: int,
        *,
        in_place: bool = True,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        if min(layers, pages, kv_heads, head_dim) < 1:
            raise ValueError(f"pages: {layers} layers of {pages}, {kv_heads} heads of {head_dim}")
        self.pages = pages
        scaled = dtype in SCALED_DTYPES
        self.in_place = in_place and not scaled
        self.kv_heads = kv_heads
        self.head_dim = head_dim
        self.dtype = dtype
        # torch copies bytes where it cannot copy fp8.
        held = torch.uint8 if dtype == FP8 else dtype
        places = layers, 2 * kv_heads, pages * PAGE_TOKENS
        self._positions = torch.empty(*places, head_dim, dtype=held).unbind()
        self._scales = torch.empty(places).unbind() if scaled else ()
        size = 2 * kv_heads, pages, PAGE_TOKENS * head_dim
        self._pages = [layer.view(size) for layer in self._positions]

    @staticmethod
    def slots(pages: Sequence[int], positions: range) -> list[int]:
        """Where positions of a sequence are written, as `write` takes them."""
        return [pages[t // PAGE_TOKENS] * PAGE_TOKENS + t % PAGE_TOKENS for t in positions]

    def place(self, pages: Sequence[int]) -> Place:
        """Return the pages that a sequence reads. Raises ValueError for one that is not there."""
        if not pages or min(pages) < 0 or max(pages) >= self.pages:
            raise ValueError(f"pages: {list(pages)}, of {self.pages}")
        first = pages[0]
        if self.in_place and all(page == first + index for index, page in enumerate(pages)):
            return first
        return torch.tensor(pages)

    def write(self, layer: int, slots: Tensor, keys_values: Tensor) -> None:
        """Store T tokens of one layer: slots int64 [T], fp32 [T, 2 * kv_heads, head_dim]."""
        if self._scales:
            keys_values, scales = quantise_heads(keys_values, self.dtype)
            keys_values = keys_values.view(self._positions[layer].dtype)
            self._scales[layer].index_copy_(1, slots, scales.t())
        self._positions[layer].index_copy_(1, slots, keys_values.transpose(0, 1))

    def read(self, layer: int, place: Place, length: int) -> tuple[Tensor, Tensor]:
        """Return a sequence's first positions: keys fp32 [kv_heads, head_dim, length], transposed, and
        values fp32 [kv_heads, length, head_dim].

        Both are views, of the cache or of a copy.
        """
        heads, size = self.kv_heads, self.head_dim
        if isinstance(place, int):
            source, start = self._positions[layer], place * PAGE_TOKENS * size
        elif self._scales:
            source, start = self._unscaled(layer, place), 0
        else:
            source, start = self._pages[layer].index_select(1, place), 0
        start += int(source.storage_offset())
        per_head = source.numel() // (2 * heads)
        # One view each, where slices by head and by position and a transposition are six.
        keys = source.as_strided((heads, size, length), (per_head, 1, size), start)
        start += heads * per_head
        return keys, source.as_strided((heads, length, size), (per_head, size, 1), start)

    def _unscaled(self, layer: int, pages: Tensor) -> Tensor:
        """fp32 [2 * kv_heads, positions of these pages, head_dim]."""
        stored = self._pages[layer].index_select(1, pages)
        if self.dtype == FP8:
            # Six times as quick as torch's conversion.
            real = FP8_VALUES.index_select(0, stored.view(-1).int())
        else:
            real = stored.float()
        per_page = self._scales[layer].view(len(stored), -1, PAGE_TOKENS)
        scales = per_page.index_select(1, pages).view(len(stored), -1, 1)
        return real.view(len(stored), -1, self.head_dim).mul_(scales)
