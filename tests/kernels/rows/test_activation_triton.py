# mypy: disallow-untyped-calls=False, disallow-untyped-decorators=False
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.launch import OPTIONS
from kernels.rows import activation
from kernels.rows.activation_triton import relu2_gate_norm_int8, silu, variants
from kernels.rows.norm_triton import MAX_COLUMNS
from kernels.shapes import BITNET_2B4T, LLAMA_8B
from tests.kernels.guarded import Guarded
from tests.kernels.refusals import assert_refused

EPS = 1e-5


def normal(*size: int, seed: int = 1) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed))


@triton.jit
def silu_kernel(gate_ptr, out_ptr):
    """The device function alone, of eight gates."""
    at = tl.arange(0, 8)
    tl.store(out_ptr + at, silu(tl.load(gate_ptr + at)))


def relu2_of(gate_up: Tensor, weight: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
    q = torch.empty(len(gate_up), len(weight), dtype=torch.int8, device=device)
    factor = torch.empty(len(gate_up), device=device)
    relu2_gate_norm_int8(gate_up.to(device), weight.to(device), EPS, q, factor)
    return q.cpu(), factor.cpu()


def test_silu_neither_overflows_nor_hides_what_is_not_finite(device: torch.device) -> None:
    gate = torch.tensor([-1e38, -200.0, -0.0, 200.0, 1e38, torch.inf, -torch.inf, torch.nan])
    out = torch.empty(8, device=device)
    silu_kernel[(1,)](gate.to(device), out, **OPTIONS)
    found = out.cpu()
    expected = torch.tensor([-0.0, -0.0, -0.0, 200.0, 1e38, torch.inf, torch.nan, torch.nan])
    assert torch.equal(found.isnan(), expected.isnan())
    assert torch.equal(found[:6], expected[:6])


@pytest.mark.parametrize("size", [1, 100, 640])
def test_squared_relu_has_the_integers_and_factors_of_its_oracle(
    size: int, device: torch.device
) -> None:
    gate_up, weight = normal(3, 2 * size) * 4, normal(size, seed=2)
    q, factor = relu2_of(gate_up, weight, device)
    expected, expected_factor = activation.relu2_gate_norm_int8(gate_up, weight, EPS)
    assert torch.equal(q, expected)
    assert torch.equal(factor, expected_factor)


def test_a_row_without_a_positive_gate_is_zeros(device: torch.device) -> None:
    gate_up = torch.cat([-normal(1, 24).abs(), normal(1, 24)], 1)
    q, factor = relu2_of(gate_up, torch.ones(24), device)
    assert q.eq(0).all()
    assert torch.equal(factor, activation.relu2_gate_norm_int8(gate_up, torch.ones(24), EPS)[1])


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_row_that_is_not_finite_says_so_and_spares_its_neighbours(
    bad: float, device: torch.device
) -> None:
    gate_up, weight = normal(3, 48), normal(24, seed=2)
    healthy = relu2_of(gate_up, weight, device)
    gate_up[1, 5] = bad
    q, factor = relu2_of(gate_up, weight, device)
    assert factor.isnan().tolist() == [False, True, False]
    assert q[1].eq(0).all()
    assert torch.equal(q[[0, 2]], healthy[0][[0, 2]])
    assert torch.equal(factor[[0, 2]], healthy[1][[0, 2]])


@pytest.mark.parametrize("rows", [1, 2, 16, 17])
def test_a_row_has_the_same_bits_in_any_batch(rows: int, device: torch.device) -> None:
    gate_up, weight = normal(17, 72), normal(36, seed=2)
    q, factor = relu2_of(gate_up, weight, device)
    part_q, part_factor = relu2_of(gate_up[-rows:], weight, device)
    assert torch.equal(part_q, q[-rows:])
    assert torch.equal(part_factor, factor[-rows:])


def test_nothing_beyond_the_tensors_is_read_or_written(device: torch.device) -> None:
    gate_up, weight = normal(2, 74), normal(37, seed=2)
    tensors = gate_up, weight, torch.zeros(2, 37, dtype=torch.int8), torch.zeros(2)
    guarded = [Guarded(tensor.to(device)) for tensor in tensors]
    g, w, q, factor = (tensor.tensor for tensor in guarded)
    relu2_gate_norm_int8(g, w, EPS, q, factor)
    assert torch.equal(q.cpu(), relu2_of(gate_up, weight, device)[0])
    assert torch.equal(factor.cpu(), relu2_of(gate_up, weight, device)[1])
    assert all(tensor.intact() for tensor in guarded)


def test_an_empty_batch_is_no_launch(device: torch.device) -> None:
    gate_up, weight = torch.empty(0, 16, device=device), torch.ones(8, device=device)
    q = torch.empty(0, 8, dtype=torch.int8, device=device)
    relu2_gate_norm_int8(gate_up, weight, EPS, q, torch.empty(0, device=device))


def test_what_does_not_fit_is_refused_by_name(device: torch.device) -> None:
    gate_up = torch.ones(2, 16, device=device)
    assert_refused(
        relu2_gate_norm_int8,
        {
            "gate_up": gate_up,
            "weight": torch.ones(8, device=device),
            "eps": EPS,
            "q": torch.empty(2, 8, dtype=torch.int8, device=device),
            "factor": torch.empty(2, device=device),
        },
        (ValueError, "gate_up: 15 columns", {"gate_up": gate_up[:, :15].contiguous()}),
        (ValueError, "gate_up: 0 columns", {"gate_up": gate_up[:, :0].contiguous()}),
        (ValueError, "eps: ", {"eps": 0.0}),
        (
            ValueError,
            "gate_up: rows of 16385",
            {"gate_up": torch.ones(1, 2 * MAX_COLUMNS + 2, device=device)},
        ),
    )


def test_only_bitnet_has_an_activation_that_is_a_launch() -> None:
    name = "bitnet-2b4t.relu2_gate_norm_int8 rows=8"
    assert [v.name for v in variants(BITNET_2B4T)] == [name, f"{name} dependent"]
    assert [v.name for v in variants(LLAMA_8B)] == []
