"""Attention over a paged cache in plain torch: the reference for the decode and prefill kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from tailrace.kernels.attention.paged_kv import PagedKv, check_tables
from tailrace.kernels.checks import check_tensor
from tailrace.kernels.shapes import PAGE_TOKENS

MAX_SPLITS = 32
"""Maximum number of decode attention programs among which a row's pages are divided, per KV
head."""

FAULT_SEQUENCE = 1
"""Fault bit: the row's sequence is not a valid index into the block tables."""
FAULT_POSITION = 2
"""Fault bit: the row's position or length is negative, or larger than the block table, the rotary
table or the launch allow."""
FAULT_PAGE = 4
"""Fault bit: a page that the row needs is outside the cache."""


def paged_attention(
    q: Tensor, lengths: Tensor, sequences: Tensor, cache: PagedKv, tables: Tensor
) -> Tensor:
    """Attend from every row to positions 0 .. length-1 of its sequence.

    q: fp32 [rows, heads * D], after RoPE. lengths, sequences: int32 [rows]; a row's sequence is an
    index into `tables`, int32 [sequences, max_pages]; several rows may have the same sequence.
    Returns fp32 [rows, heads * D]: zeros for length 0, and NaN for a row with faults
    (`row_faults`). Raises TypeError or ValueError.

    Source: Vaswani et al., Attention Is All You Need, 2017; pages after Kwon et al., Efficient
    Memory Management for Large Language Model Serving with PagedAttention, 2023.
    """
    check_queries("q", q, cache)
    check_tables(tables, sequences, len(q))
    check_tensor("lengths", lengths, torch.int32, len(q))
    faults = row_faults(lengths, sequences, cache, tables)
    out = torch.zeros_like(q)
    for row, (length, sequence) in enumerate(
        zip(lengths.tolist(), sequences.tolist(), strict=True)
    ):
        if faults[row]:
            out[row] = torch.nan
        elif length:
            out[row] = _attend(q[row], *cache.gather(tables[sequence], length))
    return out


def _attend(q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Compute attention of one row, [heads * D], over keys and values [length, kv_heads, D]."""
    _, kv_heads, head_dim = keys.shape
    grouped = q.view(kv_heads, -1, head_dim)
    scores = torch.einsum("hgd,thd->hgt", grouped, keys) * head_dim**-0.5
    return torch.einsum("hgt,thd->hgd", scores.softmax(-1), values).flatten()


def row_faults(lengths: Tensor, sequences: Tensor, cache: PagedKv, tables: Tensor) -> Tensor:
    """Return the fault bits of each row, int32 [rows]; 0 for rows that can be computed."""
    known, max_pages = tables.shape
    faults = torch.zeros_like(lengths)
    for row, (length, sequence) in enumerate(
        zip(lengths.tolist(), sequences.tolist(), strict=True)
    ):
        if not 0 <= sequence < known:
            faults[row] |= FAULT_SEQUENCE
        if not 0 <= length <= max_pages * PAGE_TOKENS:
            faults[row] |= FAULT_POSITION
        if faults[row] == 0:
            needed = tables[sequence, : -(-length // PAGE_TOKENS)]
            if bool(((needed < 0) | (needed >= cache.pages)).any()):
                faults[row] |= FAULT_PAGE
    return faults


def check_queries(name: str, q: Tensor, cache: PagedKv) -> int:
    """Return the number of query heads. Raise unless q, fp32 [rows, heads * D], fits the cache."""
    check_tensor(name, q, torch.float32, None, None)
    heads, rest = divmod(q.shape[1], cache.head_dim)
    if rest or heads == 0 or heads % cache.kv_heads:
        unit = cache.kv_heads * cache.head_dim
        raise ValueError(f"{name}: shape {tuple(q.shape)}, expected a multiple of {unit} columns")
    return heads
