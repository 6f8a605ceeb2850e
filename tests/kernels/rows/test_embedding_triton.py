"""Embedding lookups in Triton, beside their oracle."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tailrace.kernels.rows import embedding
from tailrace.kernels.rows.embedding import FAULT_TOKEN, TABLE_DTYPES
from tailrace.kernels.rows.embedding_triton import embed, variants
from tailrace.kernels.shapes import QWEN3_8B
from tests.kernels.guarded import Guarded
from tests.kernels.refusals import assert_refused


def tokens(*ids: int) -> Tensor:
    return torch.tensor(ids, dtype=torch.int32)


def table_of(vocab: int, size: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(vocab, size, generator=torch.Generator().manual_seed(1)).to(dtype)


def embed_on(ids: Tensor, table: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
    out = torch.full((len(ids), table.shape[1]), torch.nan, device=device)
    faults = torch.zeros(len(ids), dtype=torch.int32, device=device)
    embed(ids.to(device), table.to(device), out, faults)
    return out.cpu(), faults.cpu()


@pytest.mark.parametrize("dtype", TABLE_DTYPES)
@pytest.mark.parametrize("size", [1, 1000, 1025])
def test_it_has_the_bits_of_its_oracle(dtype: torch.dtype, size: int, device: torch.device) -> None:
    table, ids = table_of(5, size, dtype), tokens(4, 0, 4)
    out, faults = embed_on(ids, table, device)
    assert torch.equal(out, embedding.embed(ids, table)[0])
    assert faults.eq(0).all()


@pytest.mark.parametrize("rows", [1, 16, 17])
def test_a_row_has_the_same_bits_in_any_batch(rows: int, device: torch.device) -> None:
    table, ids = table_of(17, 40), torch.arange(17, dtype=torch.int32)
    whole = embed_on(ids, table, device)[0]
    assert torch.equal(embed_on(ids[-rows:], table, device)[0], whole[-rows:])


@pytest.mark.parametrize("foreign", [-1, 6, 2**31 - 1, -(2**31)])
def test_a_token_outside_the_vocabulary_is_a_fault_and_zeros(
    foreign: int, device: torch.device
) -> None:
    table = Guarded(table_of(6, 24).to(device))
    ids = tokens(5, foreign, 0)
    out, faults = embed_on(ids, table.tensor, device)
    expected, expected_faults = embedding.embed(ids, table.tensor.cpu())
    assert torch.equal(out, expected)
    assert torch.equal(faults, expected_faults)
    assert faults.tolist() == [0, FAULT_TOKEN, 0]


def test_an_id_below_0_stands_for_one_that_was_drawn_before(device: torch.device) -> None:
    table, ids = table_of(6, 24).to(device), tokens(-2, 5, -1, -4).to(device)
    out, faults = torch.empty(4, 24, device=device), tokens(0, 0, 0, 0).to(device)
    before = Guarded(tokens(3, 1, 7).to(device))
    embed(ids, table, out, faults, before=before.tensor)
    assert torch.equal(out[:3], table[[1, 5, 3]].float())
    assert faults.tolist() == [0, 0, 0, FAULT_TOKEN]
    embed(ids - 1, table, out, faults, before=before.tensor)
    assert faults.tolist() == [FAULT_TOKEN, 0, 0, FAULT_TOKEN], "7 is in no vocabulary of 6"


def test_a_fault_keeps_the_bits_that_were_there(device: torch.device) -> None:
    faults = tokens(1, 2).to(device)
    table, ids = table_of(4, 8).to(device), tokens(3, 4).to(device)
    embed(ids, table, torch.empty(2, 8, device=device), faults)
    assert faults.tolist() == [1, 2 | FAULT_TOKEN]


def test_nothing_beyond_the_tensors_is_read_or_written(device: torch.device) -> None:
    tensors = tokens(3, 0), table_of(4, 37), torch.zeros(2, 37), tokens(0, 0)
    guarded = [Guarded(tensor.to(device)) for tensor in tensors]
    ids, table, out, faults = (g.tensor for g in guarded)
    embed(ids, table, out, faults)
    assert torch.equal(out.cpu(), table[[3, 0]].float().cpu())
    assert faults.tolist() == [0, 0]
    assert all(g.intact() for g in guarded)


def test_an_empty_batch_is_no_launch(device: torch.device) -> None:
    out, faults = embed_on(tokens(), table_of(4, 8), device)
    assert out.shape == (0, 8)
    assert faults.shape == (0,)


def test_what_does_not_fit_is_refused_by_name(device: torch.device) -> None:
    table = table_of(4, 8).to(device)
    assert_refused(
        embed,
        {
            "ids": tokens(0, 1).to(device),
            "table": table,
            "out": torch.empty(2, 8, device=device),
            "faults": tokens(0, 0).to(device),
        },
        (ValueError, "table: shape (0, 8), expected sizes above 0", {"table": table[:0]}),
    )


def test_a_step_starts_with_one_row_of_the_table() -> None:
    plain, head = variants(QWEN3_8B)
    assert plain.bytes_moved == head.bytes_moved == 4096 * 2 + 4096 * 4
    assert (plain.instructions, head.instructions) == ((), ("PREEXIT",))
    assert not head.launch_pdl, "an ordinary launch, that dependent ones may follow"
