"""Storage of keys and values of many sequences, in pages of one size."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tailrace.kernels.checks import check_same_device, check_tensor
from tailrace.kernels.linear.ternary import INT8_MAX, MIN_ABSMAX
from tailrace.kernels.shapes import HEAD_DIMS, PAGE_TOKENS

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
PLAIN_DTYPES = (torch.float32, torch.bfloat16)
SCALED_DTYPES = (torch.int8, FP8)
"""Element types that are stored with an fp32 scale per token and head."""
KV_DTYPES = (*PLAIN_DTYPES, *SCALED_DTYPES)


def page_bytes(layers: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
    """Return the bytes of one page in all layers."""
    scale = torch.float32.itemsize if dtype in SCALED_DTYPES else 0
    return 2 * layers * kv_heads * PAGE_TOKENS * (head_dim * dtype.itemsize + scale)


@dataclass(frozen=True, slots=True)
class PagedKv:
    """One layer's keys and values in pages; the engine assigns pages to sequences.

    keys, values: [pages, kv_heads, PAGE_TOKENS, D] of one of KV_DTYPES, so that the tile that a
    program reads, one page of one head, is contiguous. key_scales, value_scales: fp32 [pages,
    kv_heads, PAGE_TOKENS] for int8 and fp8 (e4m3), else None.

    Position t of a sequence is in page `table[t // PAGE_TOKENS]` at `t % PAGE_TOKENS`, where
    `table` is the sequence's row of the block tables, int32 [sequences, max_pages]. Entries after a
    sequence's last page are never read. Raises TypeError or ValueError.
    """

    keys: Tensor
    values: Tensor
    key_scales: Tensor | None = None
    value_scales: Tensor | None = None

    def __post_init__(self) -> None:
        check_tensor("keys", self.keys, KV_DTYPES, None, None, PAGE_TOKENS, None)
        check_tensor("values", self.values, self.keys.dtype, *self.keys.shape)
        if self.pages == 0 or self.head_dim not in HEAD_DIMS:
            sizes = ", ".join(map(str, HEAD_DIMS))
            raise ValueError(
                f"keys: shape {tuple(self.keys.shape)}, expected pages and D of {sizes}"
            )
        for name, scales in self._scales().items():
            if (scales is not None) != self.scaled:
                wanted = "fp32 scales" if self.scaled else "None"
                raise TypeError(f"{name}: expected {wanted} for keys of {self.keys.dtype}")
            if scales is not None:
                check_tensor(name, scales, torch.float32, *self.keys.shape[:3])
        check_same_device(keys=self.keys, values=self.values, **self._scales())

    @classmethod
    def allocate(
        cls,
        layers: int,
        pages: int,
        kv_heads: int,
        head_dim: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> list[PagedKv]:
        """Return zeroed storage for all layers; a page id means the same page in each layer."""
        shape = (layers, pages, kv_heads, PAGE_TOKENS, head_dim)
        keys, values = (torch.zeros(shape, dtype=dtype, device=device) for _ in range(2))
        if dtype not in SCALED_DTYPES:
            return [cls(k, v) for k, v in zip(keys, values, strict=True)]
        scales = torch.zeros(2, *shape[:4], device=device)
        return [cls(*parts) for parts in zip(keys, values, *scales, strict=True)]

    @property
    def pages(self) -> int:
        return self.keys.shape[0]

    @property
    def kv_heads(self) -> int:
        return self.keys.shape[1]

    @property
    def head_dim(self) -> int:
        return self.keys.shape[3]

    @property
    def scaled(self) -> bool:
        return self.keys.dtype in SCALED_DTYPES

    def token_bytes(self) -> int:
        """Return the bytes of keys, values and scales of one position."""
        scale = 4 if self.scaled else 0
        return 2 * self.kv_heads * (self.head_dim * self.keys.element_size() + scale)

    def write(self, table: Tensor, positions: Tensor, keys: Tensor, values: Tensor) -> None:
        """Store keys and values of T tokens of one sequence.

        table: int32 [max_pages]. positions: integers [T]. keys, values: fp32 [T, kv_heads, D].
        Raises ValueError for a position or page outside the table or the cache.
        """
        pages, slots = self._places(table, positions)
        for x, cells, scales in (
            (keys, self.keys, self.key_scales),
            (values, self.values, self.value_scales),
        ):
            stored, factors = quantise_heads(x, cells.dtype)
            cells[pages, :, slots] = stored
            if scales is not None:
                scales[pages, :, slots] = factors

    def gather(self, table: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """Return keys and values of positions 0 .. length-1, each fp32 [length, kv_heads, D]."""
        pages, slots = self._places(table, torch.arange(length, device=table.device))
        keys, values = self.keys[pages, :, slots].float(), self.values[pages, :, slots].float()
        if self.key_scales is None or self.value_scales is None:
            return keys, values
        return (
            keys * self.key_scales[pages, :, slots][..., None],
            values * self.value_scales[pages, :, slots][..., None],
        )

    def _places(self, table: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        check_tensor("table", table, torch.int32, None)
        known = (positions >= 0) & (positions < len(table) * PAGE_TOKENS)
        if not bool(known.all()):
            raise ValueError(
                f"positions: expected positions in the {len(table)} pages of the table"
            )
        pages = table.long()[positions.long() // PAGE_TOKENS]
        if not bool(((pages >= 0) & (pages < self.pages)).all()):
            raise ValueError(f"table: expected page ids below {self.pages}, the pages of the cache")
        return pages, positions.long() % PAGE_TOKENS

    def _scales(self) -> dict[str, Tensor | None]:
        return {"key_scales": self.key_scales, "value_scales": self.value_scales}


def quantise_heads(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Quantise fp32 x [..., D] to a cache's `dtype`; return the result and fp32 scales [...].

    For int8 and fp8 each head gets a scale with which its largest magnitude becomes the largest
    number of the type: stored * scale is about x. A head with NaN or infinite values gets a NaN
    scale, so that every result that depends on it is NaN. For other types values are rounded to
    nearest, ties to even, and the scales are 1.
    """
    if dtype not in SCALED_DTYPES:
        return x.to(dtype), torch.ones_like(x[..., 0])
    largest = x.abs().amax(-1, keepdim=True)
    # Multiply in the same order as the kernels' `int8_factor`, so that the bits are the same.
    factor = torch.reciprocal(largest.clamp(min=MIN_ABSMAX)) * float(INT8_MAX)
    if dtype == FP8:
        factor *= FP8_MAX / INT8_MAX
    factor = factor.where(largest.isfinite(), torch.nan)
    scaled = (x * factor).nan_to_num(0.0)
    if dtype == torch.int8:
        scaled = scaled.round().clamp(-INT8_MAX, INT8_MAX)
    return scaled.to(dtype), torch.reciprocal(factor).squeeze(-1)


def check_tables(tables: Tensor, sequences: Tensor, rows: int) -> None:
    """Raise unless `tables` is int32 [sequences, max_pages] and `sequences` is int32 [rows]."""
    check_tensor("tables", tables, torch.int32, None, None)
    check_tensor("sequences", sequences, torch.int32, rows)
