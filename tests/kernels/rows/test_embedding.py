"""Embedding lookups on the CPU."""

import torch

from tailrace.kernels.attention.paged_attention import FAULT_PAGE, FAULT_POSITION, FAULT_SEQUENCE
from tailrace.kernels.rows.embedding import FAULT_TOKEN, embed


def test_tokens_name_rows_of_the_table() -> None:
    table = torch.arange(12.0).view(4, 3).bfloat16()
    x, faults = embed(torch.tensor([3, 0, 3], dtype=torch.int32), table)
    assert x.dtype == torch.float32
    assert x.tolist() == [[9.0, 10.0, 11.0], [0.0, 1.0, 2.0], [9.0, 10.0, 11.0]]
    assert faults.tolist() == [0, 0, 0]


def test_a_token_outside_the_vocabulary_is_a_fault_and_zeros() -> None:
    x, faults = embed(torch.tensor([-1, 4], dtype=torch.int32), torch.ones(4, 2))
    assert x.eq(0).all()
    assert faults.dtype == torch.int32
    assert faults.tolist() == [FAULT_TOKEN, FAULT_TOKEN]


def test_the_fault_has_a_bit_of_its_own() -> None:
    assert FAULT_TOKEN & (FAULT_PAGE | FAULT_POSITION | FAULT_SEQUENCE) == 0
