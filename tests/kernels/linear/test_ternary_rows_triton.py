"""Ternary products of few rows in Triton, beside their oracle."""

from __future__ import annotations

import pytest
import torch

from tailrace.kernels.linear.epilogue import Epilogue
from tailrace.kernels.linear.ternary import quantize_activations
from tailrace.kernels.linear.ternary_gemm_triton import ternary_gemm
from tailrace.kernels.linear.ternary_rows_triton import (
    CHUNK,
    MAX_STEPS,
    NARROW_ROWS,
    RowsPlan,
    ternary_rows_kernel,
    variants,
)
from tailrace.kernels.linear.ternary_weights import MAX_IN
from tailrace.kernels.shapes import BITNET_2B4T, LLAMA_8B
from tests.kernels.linear.ternary_rows import make, oracle


@pytest.mark.parametrize("width", [4, 60, 64, 68, 192, 512, 520, 2560, 6912, 14_336, MAX_IN])
@pytest.mark.parametrize("rows", [1, 8, 9, NARROW_ROWS])
def test_a_plan_covers_a_row_within_the_registers(width: int, rows: int) -> None:
    plan = RowsPlan.of(8, width, rows)
    in_a_pass = plan.slices * plan.steps * CHUNK
    assert (plan.passes - 1) * in_a_pass < width <= plan.passes * in_a_pass
    assert 2 <= plan.slices == 2 ** plan.constants()["LEVELS"] <= 16
    assert plan.steps <= MAX_STEPS
    assert plan.groups == (1 if rows <= 8 else 2)
    assert plan.ahead <= (plan.steps if plan.passes == 1 else 0)


def test_a_real_row_is_one_pass_without_a_step_to_spare() -> None:
    hidden, ffn = BITNET_2B4T.hidden, BITNET_2B4T.ffn
    assert RowsPlan.of(960, hidden, 8) == RowsPlan(slices=8, steps=5, passes=1, groups=1)
    assert RowsPlan.of(hidden // 4, ffn, 8) == RowsPlan(slices=16, steps=7, passes=1, groups=1)


def test_programs_of_which_four_share_a_multiprocessor_have_few_warps() -> None:
    assert RowsPlan.of(2 * BITNET_2B4T.ffn // 4, BITNET_2B4T.hidden, 8).slices == 4
    assert RowsPlan.of(2 * BITNET_2B4T.ffn // 4, LLAMA_8B.hidden, 8).slices == 8


@pytest.mark.parametrize("rows", [8, 16])
def test_a_dependent_launch_gives_the_same_bits(rows: int, device: torch.device) -> None:
    weights = make((20, 12), 192, device)
    x = torch.randn(rows, 192, generator=torch.Generator().manual_seed(rows))
    q, factor = quantize_activations(x)
    out = torch.zeros(rows, 32, device=device)
    for _ in range(2):
        ternary_gemm(
            q.to(torch.int8).to(device), factor[:, 0].contiguous().to(device), weights, out,
            epilogue=Epilogue.ADD, dependent=True,
        )  # fmt: skip
    once = oracle(x, weights)
    assert torch.equal(out.cpu(), once + once)


def test_every_argument_of_a_variant_is_typed_or_constant() -> None:
    found = list(variants(BITNET_2B4T))
    assert len({variant.name for variant in found}) == len(found) == 16
    for variant in found:
        assert variant.kernel is ternary_rows_kernel
        assert set(variant.signature) | set(variant.constants) == set(variant.kernel.arg_names)
    assert not list(variants(LLAMA_8B))
