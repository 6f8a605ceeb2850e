"""Ternary matrix-vector products in Triton, beside their oracle."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tailrace.kernels.linear.epilogue import Epilogue
from tailrace.kernels.linear.ternary import pack_ternary
from tailrace.kernels.linear.ternary_gemm_triton import ternary_gemm
from tailrace.kernels.linear.ternary_triton import (
    GEMV_MAX_IN,
    GEMV_MAX_ROWS,
    GemvPlan,
    TernaryWeights,
    ternary_gemv,
    ternary_gemv_kernel,
    variants,
)
from tailrace.kernels.rows.norm import order_free_rms_norm
from tailrace.kernels.rows.norm_triton import rms_norm_int8
from tailrace.kernels.shapes import BITNET_2B4T, LLAMA_8B
from tests.kernels.guarded import Guarded
from tests.kernels.linear.ternary_rows import make
from tests.kernels.linear.ternary_rows import oracle as linear_oracle
from tests.kernels.refusals import assert_refused

EPS = 1e-5


def normal(*size: int, seed: int = 7) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed))


def oracle(x: Tensor, weights: TernaryWeights, norm: Tensor | None = None) -> Tensor:
    """Return the exact product, of normed rows if `norm` is given."""
    return linear_oracle(
        x if norm is None else order_free_rms_norm(x.cpu(), norm.cpu(), EPS), weights
    )


def run(
    x: Tensor,
    weights: TernaryWeights,
    norm: Tensor | None = None,
    epilogue: Epilogue = Epilogue.STORE,
) -> Tensor:
    width = weights.outs[0] if epilogue.gated else weights.out_features
    out = torch.full((len(x), width), 0.5, device=x.device)
    for row in range(len(x)):
        one = slice(row, row + GEMV_MAX_ROWS)
        ternary_gemv(x[one], weights, out[one], norm=norm, eps=EPS, epilogue=epilogue)
    return out.cpu()


def same_bits(left: Tensor, right: Tensor) -> bool:
    return torch.equal(left.view(torch.int32), right.view(torch.int32))


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(
    ("outs", "width"),
    [
        ((4,), 4),  # one packed row, one word
        ((12, 4, 8), 192),  # groups that straddle parts; half a line
        ((20,), 132),  # a row beyond the group; one word beyond the line
        ((8, 8), 640),  # several warps, a step half empty
        ((4,), 2564),  # three steps; one word beyond the line
    ],
)
def test_a_row_has_the_bits_of_the_oracle(
    outs: tuple[int, ...], width: int, normed: bool, device: torch.device
) -> None:
    weights, x = make(outs, width, device), normal(2, width).to(device)
    norm = normal(width, seed=8).to(device) if normed else None
    assert same_bits(run(x, weights, norm), oracle(x, weights, norm))


@pytest.mark.parametrize("rows", [2, 8, 9])
def test_a_row_has_the_same_bits_in_every_batch(rows: int, device: torch.device) -> None:
    weights, x = make((8,), 192, device), normal(rows, 192).to(device)
    norm = normal(192, seed=8).to(device)
    alone = run(x, weights, norm)
    assert same_bits(alone, oracle(x, weights, norm))
    q = torch.empty(rows, 192, dtype=torch.int8, device=device)
    factor, out = torch.empty(rows, device=device), torch.empty(rows, 8, device=device)
    rms_norm_int8(x, norm, EPS, q, factor)
    ternary_gemm(q, factor, weights, out)
    assert same_bits(out.cpu(), alone)


def test_rows_of_extreme_values_have_the_bits_of_the_oracle(device: torch.device) -> None:
    x = normal(8, 132)
    scales = torch.tensor([0.0, 1e-44, 1e-39, 1e-20, 1e-6, 1e18, 1e37, 1.0])
    x = (x * scales[:, None]).to(device)
    x[7] = 0.0
    x[7, 131] = -3.0
    weights, norm = make((8,), 132, device), normal(132, seed=8).to(device)
    assert same_bits(run(x, weights), oracle(x, weights))
    assert same_bits(run(x, weights, norm), oracle(x, weights, norm))


@pytest.mark.parametrize("width", [3584, GEMV_MAX_IN])
def test_the_largest_sum_of_squares_and_of_products_has_the_bits_of_the_oracle(
    width: int, device: torch.device
) -> None:
    weights = TernaryWeights.from_parts(
        [
            (
                pack_ternary(torch.ones(4, width, dtype=torch.int8)).to(device),
                torch.ones(1, device=device),
            )
        ]
    )
    x, norm = torch.full((1, width), 2.0).to(device), torch.ones(width, device=device)
    x[0, 1] = -1.0
    assert same_bits(run(x, weights, norm), oracle(x, weights, norm))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("normed", [False, True])
def test_a_row_with_nan_or_inf_gives_nan_and_leaves_the_others(
    bad: float, normed: bool, device: torch.device
) -> None:
    weights, x = make((4,), 132, device), normal(2, 132).to(device)
    norm = normal(132, seed=8).to(device) if normed else None
    expected = oracle(x, weights, norm)
    x[1, 131] = bad
    out = run(x, weights, norm)
    assert out[1].isnan().all()
    assert same_bits(out[:1], expected[:1])


def test_add_adds_to_what_is_there(device: torch.device) -> None:
    weights, x = make((20,), 192, device), normal(2, 192).to(device)
    assert same_bits(run(x, weights, epilogue=Epilogue.ADD), 0.5 + oracle(x, weights))


@pytest.mark.parametrize("width", [192, 3588])
def test_the_gate_is_squared_and_multiplies_up(width: int, device: torch.device) -> None:
    weights, x = make((20, 20), width, device), normal(2, width).to(device)
    norm = normal(width, seed=8).to(device)
    both = oracle(x, weights, norm)
    gate, up = both[:, :20].clamp(min=0.0), both[:, 20:]
    out = run(x, weights, norm, Epilogue.RELU2_GATE)
    assert torch.equal(out, gate * gate * up)
    x[0, 3] = float("nan")
    assert run(x, weights, norm, Epilogue.RELU2_GATE)[0].isnan().all()


@pytest.mark.parametrize("epilogue", [Epilogue.ADD, Epilogue.RELU2_GATE])
def test_it_neither_reads_nor_writes_beyond_its_tensors(
    epilogue: Epilogue, device: torch.device
) -> None:
    plain = make((4, 4), 132, device)
    packed, scale = Guarded(plain.packed), Guarded(plain.scale)
    weights = TernaryWeights(packed.tensor, plain.outs, scale.tensor)
    x, norm = Guarded(normal(1, 132).to(device)), Guarded(normal(132, seed=8).to(device))
    out = Guarded(torch.full((1, 4 if epilogue.gated else 8), 0.5, device=device))
    ternary_gemv(x.tensor, weights, out.tensor, norm=norm.tensor, eps=EPS, epilogue=epilogue)
    expected = run(x.tensor.clone(), plain, norm.tensor.clone(), epilogue)
    assert expected.isfinite().all()
    assert same_bits(out.tensor.cpu(), expected)
    assert all(guarded.intact() for guarded in (packed, scale, x, norm, out))


def test_a_dependent_launch_gives_the_same_bits(device: torch.device) -> None:
    weights, x = make((8,), 132, device), normal(1, 132).to(device)
    out = torch.empty(1, 8, device=device)
    ternary_gemv(x, weights, out, dependent=True)
    ternary_gemv(out @ torch.eye(8, 132, device=device) + x, weights, out, dependent=True)
    first = oracle(x, weights)
    assert same_bits(out.cpu(), oracle(first @ torch.eye(8, 132) + x.cpu(), weights))


def test_an_empty_batch_launches_nothing(device: torch.device) -> None:
    weights = make((4,), 8, device)
    ternary_gemv(torch.empty(0, 8, device=device), weights, torch.empty(0, 4, device=device))


@pytest.mark.parametrize("width", [4, 128, 512, 516, 2560, 3584, 6912, GEMV_MAX_IN])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("packed_rows", [1, 4, 5, 640, 960, 1728, 7168, 32_064])
def test_a_plan_covers_the_weight_within_the_registers(
    packed_rows: int, width: int, gated: bool
) -> None:
    plan = GemvPlan.of(packed_rows, width, gated)
    assert plan.steps <= 2 ** plan.constants()["LEVELS"] < 2 * plan.steps
    assert (plan.steps - 1) * plan.lines * 128 < width <= plan.steps * plan.lines * 128
    assert (plan.programs - 1) * plan.own < packed_rows <= plan.programs * plan.own
    assert plan.lines % (plan.own * (1 + gated)) == 0
    assert plan.lines * 32 * plan.registers <= 2**16


def test_every_argument_of_a_variant_is_typed_or_constant() -> None:
    found = list(variants(BITNET_2B4T))
    assert {variant.step for variant in found} == {"qkv", "o", "gate_up", "down", None}
    assert len({variant.name for variant in found}) == len(found)
    for variant in found:
        assert variant.kernel is ternary_gemv_kernel
        named = set(variant.signature) | set(variant.constants)
        assert named == set(variant.kernel.arg_names)
    assert not list(variants(LLAMA_8B))


def test_a_wrong_argument_is_refused_by_name(device: torch.device) -> None:
    wide = GEMV_MAX_IN + 4
    gate = {"epilogue": Epilogue.RELU2_GATE}
    assert_refused(
        ternary_gemv,
        {
            "x": torch.zeros(1, 8, device=device),
            "weights": make((8, 8), 8, device),
            "out": torch.zeros(1, 16, device=device),
            "norm": torch.zeros(8, device=device),
        },
        (
            ValueError,
            "x: 2 rows",
            {"x": torch.zeros(2, 8, device=device), "out": torch.zeros(2, 16, device=device)},
        ),
        (ValueError, "out: shape (3, 16)", {"out": torch.zeros(3, 16, device=device)}),
        (ValueError, "x on", {"norm": torch.zeros(8, device="meta")}),
        (ValueError, "eps: 0.0", {"eps": 0.0}),
        (ValueError, "epilogue: SWIGLU", {"epilogue": Epilogue.SWIGLU}),
        (ValueError, "weights: parts of (8, 4)", {"weights": make((8, 4), 8, device), **gate}),
        (ValueError, "out: shape (1, 16), expected [1, 8]", gate),
        (
            ValueError,
            f"x: in = {wide}",
            {"x": torch.zeros(1, wide, device=device), "weights": make((8, 8), wide, device)},
        ),
    )
