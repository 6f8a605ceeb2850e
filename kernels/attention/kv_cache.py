"""Keys and values of many sequences on the CPU, in pages that sequences can share."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tailrace.kernels.attention.paged_kv import FP8, SCALED_DTYPES, quantise_heads
from tailrace.kernels.shapes import PAGE_TOKENS

FP8_VALUES = torch.arange(256, dtype=torch.uint8).view(FP8).float()
"""The number that each byte of fp8 (e4m3) stands for, NaN included."""
Place = Tensor | int
"""The pages of a sequence: their ids as int64 [n], or only the first id if they are consecutive."""


class KvCache:
    """Paged keys and values: fp32 [layers, 2 * kv_heads, pages, PAGE_TOKENS, D], keys first.

    Position t of a sequence is in page `pages[t // PAGE_TOKENS]` of its block table. The memory is
    not initialised, because positions that were never written are never read. So the operating
    system allocates memory only for pages that are used. in_place: True to read consecutive pages
    in place; all other pages are copied before they are read. dtype: fp32, or int8 or fp8 with an
    fp32 scale per token and head as in `PagedKv`; int8 and fp8 are always converted to an fp32 copy
    before they are read. Raises ValueError for sizes below 1.
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
            raise ValueError(
                f"layers, pages, kv_heads, head_dim: {layers}, {pages}, {kv_heads}, {head_dim}, "
                "expected 1 or more of each"
            )
        self.pages = pages
        scaled = dtype in SCALED_DTYPES
        self.in_place = in_place and not scaled
        self.kv_heads = kv_heads
        self.head_dim = head_dim
        self.dtype = dtype
        # torch has no copy operations for fp8, so fp8 is stored as bytes.
        held = torch.uint8 if dtype == FP8 else dtype
        places = layers, 2 * kv_heads, pages * PAGE_TOKENS
        self._positions = torch.empty(*places, head_dim, dtype=held).unbind()
        self._scales = torch.empty(places).unbind() if scaled else ()
        size = 2 * kv_heads, pages, PAGE_TOKENS * head_dim
        self._pages = [layer.view(size) for layer in self._positions]

    @staticmethod
    def slots(pages: Sequence[int], positions: range) -> list[int]:
        """Return the cache's slots for these positions of a sequence, to pass to `write`."""
        return [pages[t // PAGE_TOKENS] * PAGE_TOKENS + t % PAGE_TOKENS for t in positions]

    def place(self, pages: Sequence[int]) -> Place:
        """Return a sequence's pages in the form that `read` takes.

        Raises ValueError for a page outside the cache.
        """
        if not pages or min(pages) < 0 or max(pages) >= self.pages:
            raise ValueError(f"pages: {list(pages)}, expected pages below {self.pages}")
        first = pages[0]
        if self.in_place and all(page == first + index for index, page in enumerate(pages)):
            return first
        return torch.tensor(pages)

    def write(self, layer: int, slots: Tensor, keys_values: Tensor) -> None:
        """Store a layer's keys and values.

        keys_values: fp32 [T, 2 * kv_heads, head_dim], keys first. slots: int64 [T], from `slots`.
        """
        if self._scales:
            keys_values, scales = quantise_heads(keys_values, self.dtype)
            keys_values = keys_values.view(self._positions[layer].dtype)
            self._scales[layer].index_copy_(1, slots, scales.t())
        self._positions[layer].index_copy_(1, slots, keys_values.transpose(0, 1))

    def read(self, layer: int, place: Place, length: int) -> tuple[Tensor, Tensor]:
        """Return keys and values of a sequence's first `length` positions.

        keys: fp32 [kv_heads, head_dim, length], transposed. values: fp32 [kv_heads, length,
        head_dim]. Both are views of the cache or of a copy.
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
        # as_strided makes each result as one view. Slicing by head and by position and transposing
        # would make six views in all.
        keys = source.as_strided((heads, size, length), (per_head, 1, size), start)
        start += heads * per_head
        return keys, source.as_strided((heads, length, size), (per_head, size, 1), start)

    def _unscaled(self, layer: int, pages: Tensor) -> Tensor:
        """Dequantise these pages and return them as fp32 [2 * kv_heads, positions, head_dim]."""
        stored = self._pages[layer].index_select(1, pages)
        if self.dtype == FP8:
            # A lookup in a table is six times as fast as torch's conversion from fp8.
            real = FP8_VALUES.index_select(0, stored.view(-1).int())
        else:
            real = stored.float()
        per_page = self._scales[layer].view(len(stored), -1, PAGE_TOKENS)
        scales = per_page.index_select(1, pages).view(len(stored), -1, 1)
        return real.view(len(stored), -1, self.head_dim).mul_(scales)
