"""Ternary matrix products in Triton, beside their oracle."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tailrace.kernels.linear.epilogue import Epilogue
from tailrace.kernels.linear.ternary import pack_ternary, quantize_activations
from tailrace.kernels.linear.ternary_gemm_triton import ternary_gemm, variants
from tailrace.kernels.linear.ternary_rows_triton import NARROW_ROWS
from tailrace.kernels.linear.ternary_triton import ternary_gemv
from tailrace.kernels.linear.ternary_weights import TernaryWeights
from tailrace.kernels.shapes import BITNET_2B4T, QWEN3_8B
from tests.kernels.guarded import Guarded
from tests.kernels.linear.ternary_rows import make, oracle
from tests.kernels.refusals import assert_refused


def rows_of(rows: int, width: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """x, and x as int8 with its factors."""
    x = torch.randn(rows, width, generator=torch.Generator().manual_seed(rows))
    q, factor = quantize_activations(x)
    return x, q.to(torch.int8).to(device), factor[:, 0].contiguous().to(device)


def run(
    q: Tensor, factor: Tensor, weights: TernaryWeights, epilogue: Epilogue = Epilogue.STORE
) -> Tensor:
    width = weights.outs[0] if epilogue.gated else weights.out_features
    out = torch.full((len(q), width), 0.5, device=q.device)
    ternary_gemm(q, factor, weights, out, epilogue=epilogue)
    return out.cpu()


@pytest.mark.parametrize("rows", range(1, 18))
def test_a_row_has_the_bits_of_the_oracle_in_every_batch(rows: int, device: torch.device) -> None:
    weights = make((12, 4, 8), 192, device)
    x, q, factor = rows_of(rows, 192, device)
    assert torch.equal(run(q, factor, weights), oracle(x, weights))


@pytest.mark.parametrize("width", [4, 132, 516, 1028, 3084, 8708, 10_308])
def test_a_width_that_no_tile_divides_reads_nothing_beyond_it(
    width: int, device: torch.device
) -> None:
    weights = make((68,), width, device)
    x, q, factor = rows_of(3, width, device)
    assert torch.equal(run(q, factor, weights), oracle(x, weights))


@pytest.mark.parametrize("rows", [65, NARROW_ROWS, NARROW_ROWS + 1])
def test_narrow_and_wide_tiles_give_the_same_bits(rows: int, device: torch.device) -> None:
    weights = make((4, 8), 132, device)
    x, q, factor = rows_of(rows, 132, device)
    assert torch.equal(run(q, factor, weights), oracle(x, weights))


@pytest.mark.parametrize("rows", [1, 9, NARROW_ROWS + 1])
@pytest.mark.parametrize("out", [4, 20, 68])
def test_a_gate_has_the_bits_of_the_gemv(out: int, rows: int, device: torch.device) -> None:
    weights = make((out, out), 132, device)
    x, q, factor = rows_of(rows, 132, device)
    found = run(q, factor, weights, Epilogue.RELU2_GATE)
    gate, up = oracle(x, weights).chunk(2, 1)
    assert torch.equal(found, gate.relu().square() * up)
    assert found.any()
    one = torch.full((1, out), 0.5, device=device)
    ternary_gemv(x[:1].to(device), weights, one, epilogue=Epilogue.RELU2_GATE)
    assert torch.equal(one.cpu(), found[:1])


def test_it_has_the_bits_of_the_gemv(device: torch.device) -> None:
    weights = make((20,), 132, device)
    x, q, factor = rows_of(2, 132, device)
    out = torch.full((2, 20), 0.5, device=device)
    for row in (0, 1):
        one = slice(row, row + 1)
        ternary_gemv(x[one].to(device), weights, out[one], epilogue=Epilogue.ADD)
    assert torch.equal(run(q, factor, weights, Epilogue.ADD), out.cpu())


def test_the_largest_activations_do_not_overflow_a_field(device: torch.device) -> None:
    ternary = torch.ones(4, 4096, dtype=torch.int8)
    ternary[1] = -1
    weights = TernaryWeights.from_parts(
        [(pack_ternary(ternary).to(device), torch.ones(1, device=device))]
    )
    q = torch.full((2, 4096), 127, dtype=torch.int8, device=device)
    q[1] = -127
    out = run(q, torch.ones(2, device=device), weights)
    total = 127.0 * 4096
    assert out.tolist() == [[total, -total, total, total], [-total, total, -total, -total]]


def test_a_row_whose_factor_is_nan_gives_nan_and_leaves_the_others(device: torch.device) -> None:
    weights = make((8,), 132, device)
    x, q, factor = rows_of(3, 132, device)
    factor[1] = float("nan")
    out = run(q, factor, weights)
    assert out[1].isnan().all()
    assert torch.equal(out[::2], oracle(x, weights)[::2])
    gated = run(q, factor, make((8, 8), 132, device), Epilogue.RELU2_GATE)
    assert gated.isnan().all(1).tolist() == [False, True, False]


def test_it_neither_reads_nor_writes_beyond_its_tensors(device: torch.device) -> None:
    plain = make((4, 4), 132, device)
    x, q, factor = rows_of(3, 132, device)
    guards = [Guarded(t) for t in (plain.packed, plain.scale, q, factor)]
    packed, scale, q, factor = (guard.tensor for guard in guards)
    out = Guarded(torch.full((3, 8), 0.5, device=device))
    weights = TernaryWeights(packed, plain.outs, scale)
    ternary_gemm(q, factor, weights, out.tensor, epilogue=Epilogue.ADD)
    assert torch.equal(out.tensor.cpu(), 0.5 + oracle(x, plain))
    assert all(guard.intact() for guard in (*guards, out))


def test_an_empty_batch_launches_nothing(device: torch.device) -> None:
    assert run(*rows_of(0, 8, device)[1:], make((4,), 8, device)).shape == (0, 4)


def test_every_argument_of_a_variant_is_typed_or_constant() -> None:
    found = list(variants(BITNET_2B4T))
    assert len({variant.name for variant in found}) == len(found) == 4
    for variant in found:
        assert set(variant.signature) | set(variant.constants) == set(variant.kernel.arg_names)
    assert not list(variants(QWEN3_8B))


def test_a_wrong_argument_is_refused_by_name(device: torch.device) -> None:
    assert_refused(
        ternary_gemm,
        {
            "q": torch.zeros(2, 8, dtype=torch.int8, device=device),
            "factor": torch.ones(2, device=device),
            "weights": make((8, 8), 8, device),
            "out": torch.zeros(2, 16, device=device),
        },
        (ValueError, "q on", {"factor": torch.ones(2, device="meta")}),
        (ValueError, "out: ", {"epilogue": Epilogue.RELU2_GATE}),
        (ValueError, "epilogue: SWIGLU", {"epilogue": Epilogue.SWIGLU}),
    )
