"""Linear layers of int8 weights and activations in Triton, beside their oracle."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tailrace.kernels.gpu_limits import HOPPER, GpuLimits
from tailrace.kernels.linear import int8_triton
from tailrace.kernels.linear.int8_linear import int8_linear, quantise_rows
from tailrace.kernels.linear.int8_triton import (
    GEMV_MAX_IN,
    GEMV_MAX_ROWS,
    TILE_OUT,
    GemvPlan,
    int8_gemm,
    int8_gemv,
    variants,
)
from tailrace.kernels.linear.ternary import quantize_activations
from tailrace.kernels.rows.norm_triton import rms_norm_int8
from tailrace.kernels.shapes import REAL_SHAPES
from tests.kernels.guarded import Guarded
from tests.kernels.refusals import assert_refused

EPS = 1e-5


def normal(*size: int, seed: int = 7) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed))


def make(out: int, width: int, device: torch.device) -> tuple[Tensor, Tensor]:
    weight, scale = quantise_rows(normal(out, width, seed=out + width))
    return weight.to(device), scale.to(device)


def oracle(x: Tensor, weight: Tensor, scale: Tensor, norm: Tensor | None = None) -> Tensor:
    norm = None if norm is None else norm.cpu()
    return int8_linear(x.cpu(), weight.cpu(), scale.cpu(), norm, EPS)


def gemv(x: Tensor, weight: Tensor, scale: Tensor, norm: Tensor | None = None) -> Tensor:
    out = torch.full((len(x), len(weight)), 0.5, device=x.device)
    for row in range(len(x)):
        one = slice(row, row + GEMV_MAX_ROWS)
        int8_gemv(x[one], weight, scale, out[one], norm=norm, eps=EPS)
    return out.cpu()


def quantised(x: Tensor) -> tuple[Tensor, Tensor]:
    q, factor = quantize_activations(x.cpu())
    return q.to(torch.int8).to(x.device), factor[:, 0].contiguous().to(x.device)


def gemm(q: Tensor, factor: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    out = torch.full((len(q), len(weight)), 0.5, device=q.device)
    int8_gemm(q, factor, weight, scale, out)
    return out.cpu()


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(
    ("out", "width"),
    [
        (1, 4),  # one row, one word
        (13, 192),  # a tile half empty; half a line
        (8, 640),  # several warps, a step half empty
    ],
)
def test_a_row_has_the_bits_of_the_oracle(
    out: int, width: int, normed: bool, device: torch.device
) -> None:
    weight, scale = make(out, width, device)
    x = normal(2, width).to(device)
    norm = normal(width, seed=8).to(device) if normed else None
    assert torch.equal(gemv(x, weight, scale, norm), oracle(x, weight, scale, norm))


def test_a_program_goes_on_to_further_tiles(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = GpuLimits(HOPPER.shared_bytes, multiprocessors=1)
    monkeypatch.setattr(int8_triton, "limits_of", lambda _: one)
    weight, scale = make(6 * TILE_OUT + 3, 132, device)
    x = normal(2, 132).to(device)
    assert GemvPlan.of(len(weight), 132, one).programs < 3
    assert torch.equal(gemv(x, weight, scale), oracle(x, weight, scale))


def test_a_row_has_the_same_bits_in_every_batch(device: torch.device) -> None:
    weight, scale = make(9, 192, device)
    x, norm = normal(17, 192).to(device), normal(192, seed=8).to(device)
    expected = oracle(x, weight, scale)
    assert torch.equal(gemv(x[:3], weight, scale), expected[:3])
    q, factor = torch.empty_like(x, dtype=torch.int8), torch.empty(17, device=device)
    rms_norm_int8(x, norm, EPS, q, factor)
    normed = gemv(x[:3], weight, scale, norm)
    assert torch.equal(gemm(q, factor, weight, scale)[:3], normed)
    q, factor = quantised(x)
    for rows in range(1, len(x) + 1):
        result = gemm(q[:rows].contiguous(), factor[:rows].contiguous(), weight, scale)
        assert torch.equal(result, expected[:rows])


@pytest.mark.parametrize(("out", "width", "rows"), [(129, 132, 65), (3, 4, 17), (70, 1028, 2)])
def test_a_gemm_whose_sizes_no_tile_divides_has_the_bits_of_the_oracle(
    out: int, width: int, rows: int, device: torch.device
) -> None:
    weight, scale = make(out, width, device)
    x = normal(rows, width).to(device)
    assert torch.equal(gemm(*quantised(x), weight, scale), oracle(x, weight, scale))


def test_the_largest_products_do_not_overflow(device: torch.device) -> None:
    width = 1 << 16
    weight = torch.full((2, width), 127, dtype=torch.int8, device=device)
    weight[1] = -127
    q = torch.full((1, width), 127, dtype=torch.int8, device=device)
    ones = torch.ones(2, device=device)
    total = float(127 * 127 * width)
    assert gemm(q, ones[:1], weight, ones).tolist() == [[total, -total]]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("normed", [False, True])
def test_a_row_with_nan_or_inf_gives_nan_and_leaves_the_others(
    bad: float, normed: bool, device: torch.device
) -> None:
    weight, scale = make(8, 132, device)
    x = normal(3, 132).to(device)
    norm = normal(132, seed=8).to(device) if normed else None
    expected = oracle(x, weight, scale, norm)
    x[1, 131] = bad
    out = gemv(x, weight, scale, norm)
    assert out[1].isnan().all()
    assert torch.equal(out[::2], expected[::2])


def test_a_gemm_row_whose_factor_is_nan_gives_nan(device: torch.device) -> None:
    weight, scale = make(8, 132, device)
    x = normal(2, 132).to(device)
    q, factor = quantised(x)
    factor[0] = float("nan")
    out = gemm(q, factor, weight, scale)
    assert out[0].isnan().all()
    assert torch.equal(out[1], oracle(x, weight, scale)[1])


def test_neither_reads_nor_writes_beyond_its_tensors(device: torch.device) -> None:
    plain = (*make(9, 132, device), normal(3, 132).to(device), normal(132, seed=8).to(device))
    guards = [Guarded(tensor) for tensor in (*plain, *quantised(plain[2]))]
    weight, scale, x, norm, q, factor = (guard.tensor for guard in guards)
    out = Guarded(torch.full((3, 9), 0.5, device=device))
    int8_gemv(x[:1], weight, scale, out.tensor[:1], norm=norm, eps=EPS)
    assert torch.equal(out.tensor[:1].cpu(), oracle(plain[2][:1], plain[0], plain[1], plain[3]))
    assert out.tensor[1:].eq(0.5).all()
    int8_gemm(q, factor, weight, scale, out.tensor)
    assert torch.equal(out.tensor.cpu(), oracle(plain[2], plain[0], plain[1]))
    assert all(guard.intact() for guard in (*guards, out))


def test_an_empty_batch_or_weight_launches_nothing(device: torch.device) -> None:
    weight, scale = make(4, 8, device)
    x = torch.empty(0, 8, device=device)
    assert gemv(x, weight, scale).shape == (0, 4)
    assert gemm(*quantised(x), weight, scale).shape == (0, 4)
    assert gemv(torch.ones(1, 8, device=device), weight[:0], scale[:0]).shape == (1, 0)


@pytest.mark.parametrize("shape", REAL_SHAPES, ids=lambda shape: shape.name)
def test_every_argument_of_a_variant_is_typed_or_constant(shape: object) -> None:
    found = list(variants(shape))  # type: ignore[arg-type]
    assert len({variant.name for variant in found}) == len(found) == 6
    for variant in found:
        assert set(variant.signature) | set(variant.constants) == set(variant.kernel.arg_names)


@pytest.mark.parametrize("width", [4, 512, 516, 2560, 2564, GEMV_MAX_IN])
def test_a_plan_covers_the_row_and_has_the_registers(width: int) -> None:
    plan = GemvPlan.of(128_256, width)
    assert (plan.steps - 1) * plan.lines * 128 < width <= plan.steps * plan.lines * 128
    assert plan.registers * plan.lines * 32 <= 65_536


def test_a_wrong_argument_is_refused_by_name(device: torch.device) -> None:
    weight, scale = make(4, 8, device)
    common = {"weight": weight, "scale": scale, "out": torch.zeros(2, 4, device=device)}
    width = GEMV_MAX_IN + 4
    wide = torch.zeros(4, width, dtype=torch.int8, device=device)
    odd = torch.zeros(4, 6, dtype=torch.int8, device=device)
    x = torch.zeros(1, 8, device=device)
    assert_refused(
        int8_gemv,
        {"x": x, **common, "out": torch.zeros(1, 4, device=device)},
        (ValueError, "x: 2 rows", {"x": torch.zeros(2, 8, device=device)}),
        (
            ValueError,
            f"weight: in = {width}",
            {"x": torch.zeros(1, width, device=device), "weight": wide},
        ),
        (ValueError, "weight: in: 6", {"x": x[:, :6].contiguous(), "weight": odd}),
        (ValueError, "norm: shape", {"norm": torch.ones(4, device=device)}),
        (ValueError, "eps: -1.0", {"eps": -1.0}),
        (ValueError, "x on", {"out": torch.zeros(1, 4, device="meta")}),
    )
    q = torch.zeros(2, 8, dtype=torch.int8, device=device)
    assert_refused(int8_gemm, {"q": q, "factor": torch.ones(2, device=device), **common})
