"""Ternary weights of several layers in one matrix."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch

from tailrace.kernels.linear.ternary import pack_ternary
from tailrace.kernels.linear.ternary_weights import MAX_IN, TernaryWeights


def part(out: int, width: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ternary = torch.randint(-1, 2, (out, width), generator=generator, dtype=torch.int8)
    return pack_ternary(ternary), torch.tensor([0.25 + seed], dtype=torch.bfloat16)


def test_parts_lie_one_after_the_other_as_they_were_packed() -> None:
    query, key, value = part(16, 8, 1), part(4, 8, 2), part(8, 8, 3)
    weights = TernaryWeights.from_parts([query, key, value])
    assert torch.equal(weights.packed, torch.cat([query[0], key[0], value[0]]))
    assert weights.outs == (16, 4, 8)
    assert weights.part_rows() == (4, 1, 2)
    assert (weights.out_features, weights.in_features, weights.packed_rows) == (28, 8, 7)
    assert weights.scale.tolist() == [1.25, 2.25, 3.25]


def test_words_share_the_memory_of_the_bytes() -> None:
    weights = TernaryWeights.from_parts([part(8, 12)])
    assert weights.words.shape == (2, 3)
    assert weights.words.data_ptr() == weights.packed.data_ptr()


def code_3() -> TernaryWeights:
    packed, scale = part(8, 8)
    packed[1, 7] = 0b01_11_00_10
    return TernaryWeights.from_parts([(packed, scale)])


def direct(**changed: object) -> TernaryWeights:
    packed, scale = part(8, 8)
    arguments: dict[str, object] = {"packed": packed, "outs": (8,), "scale": scale.float()}
    return TernaryWeights(**(arguments | changed))  # type: ignore[arg-type]


REFUSED: list[tuple[Callable[[], object], type[Exception], str]] = [
    (code_3, ValueError, "packed: holds the code 3"),
    (lambda: TernaryWeights.from_parts([]), ValueError, "parts: none"),
    (lambda: TernaryWeights.from_parts([part(4, 8)] * 4), ValueError, "outs: 4 parts"),
    (lambda: TernaryWeights.from_parts([part(4, 8), part(4, 12)]), ValueError, "packed: shape"),
    (lambda: TernaryWeights.from_parts([part(4, 6)]), ValueError, "packed: in: 6"),
    (lambda: TernaryWeights.from_parts([part(4, 0)]), ValueError, "packed: in: 0"),
    (
        lambda: TernaryWeights.from_parts([(torch.tensor(1, dtype=torch.uint8), torch.ones(1))]),
        ValueError,
        "packed: shape ()",
    ),
    (
        lambda: TernaryWeights.from_parts([(part(4, 8)[0], torch.ones(2))]),
        ValueError,
        "scale: torch.float32 (2,)",
    ),
    (
        lambda: TernaryWeights.from_parts([(part(4, 8)[0], torch.ones(1, dtype=torch.int32))]),
        ValueError,
        "scale: torch.int32",
    ),
    (
        lambda: TernaryWeights.from_parts([(part(4, 8)[0].to(torch.int8), torch.ones(1))]),
        TypeError,
        "packed: dtype torch.int8",
    ),
    (lambda: direct(outs=(6,)), ValueError, "outs: 6"),
    (lambda: direct(outs=(0,)), ValueError, "outs: 0"),
    (lambda: direct(outs=()), ValueError, "outs: 0 parts"),
    (lambda: direct(outs=(12,)), ValueError, "packed: shape"),
    (lambda: direct(packed=part(8, 16)[0][:, ::2]), ValueError, "packed: strides"),
    (lambda: direct(packed=torch.zeros(2, MAX_IN + 4, dtype=torch.uint8)), ValueError, "in ="),
    (lambda: direct(scale=torch.ones(2)), ValueError, "scale: shape"),
    (lambda: direct(scale=torch.ones(1, dtype=torch.float64)), TypeError, "scale: dtype"),
]


@pytest.mark.parametrize(("call", "error", "said"), REFUSED)
def test_a_wrong_part_is_refused_by_name(
    call: Callable[[], object], error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=re.escape(said)):
        call()
