"""The embedding of tokens on the CPU: the reference for the kernel in embedding_triton."""

from __future__ import annotations

import torch
from torch import Tensor

FAULT_TOKEN = 8
"""Fault bit: the row's token is outside the vocabulary.

`kernels.attention.paged_attention` defines the other bits.
"""
TABLE_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def embed(ids: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    """Return the rows of an embedding table for token ids.

    ids: int32 [rows]. table: bf16, fp16 or fp32 [vocab, H]. Returns fp32 [rows, H] and faults,
    int32 [rows]: 0, or FAULT_TOKEN and a row of zeros for an id outside the vocabulary.
    """
    known = (ids >= 0) & (ids < len(table))
    rows = table[ids.where(known, 0).long()].float()
    return rows.where(known[:, None], 0.0), (~known).int() * FAULT_TOKEN
