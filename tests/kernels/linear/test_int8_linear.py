"""Linear layers of int8 weights and activations on the CPU."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch

from tailrace.kernels.linear.int8_linear import MAX_IN, int8_linear, quantise_rows
from tailrace.kernels.rows.norm import order_free_rms_norm


def normal(*size: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed))


def test_a_row_uses_the_whole_int8_range_with_a_scale_of_its_own() -> None:
    weight, scale = quantise_rows(torch.tensor([[127.0, -63.5, 0.4], [0.0, -2.54, 1.27]]))
    assert scale.tolist() == pytest.approx([1.0, 0.02])
    assert weight.tolist() == [[127, -64, 0], [0, -127, 64]]


def test_a_row_of_zeros_has_a_scale_that_divides() -> None:
    weight, scale = quantise_rows(torch.zeros(2, 3))
    assert not weight.any()
    assert scale.gt(0).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_rounding_error_is_at_most_half_a_step(dtype: torch.dtype) -> None:
    real = normal(8, 64).to(dtype)
    weight, scale = quantise_rows(real)
    error = (weight * scale[:, None] - real.float()).abs()
    assert (error <= 0.5001 * scale[:, None]).all()


def test_it_approximates_the_float_linear() -> None:
    x, real = normal(4, 256), normal(32, 256, seed=2)
    out = int8_linear(x, *quantise_rows(real))
    exact = x @ real.T
    assert (out - exact).norm() < 0.02 * exact.norm()


def test_the_norm_comes_first() -> None:
    x, norm = normal(4, 64), normal(64, seed=3)
    weight, scale = quantise_rows(normal(8, 64, seed=2))
    normed = order_free_rms_norm(x, norm, 1e-5)
    assert torch.equal(int8_linear(x, weight, scale, norm), int8_linear(normed, weight, scale))


def test_sums_beyond_2_to_the_24_are_exact_before_they_are_rounded_once() -> None:
    weight = torch.full((2, 4096), 127, dtype=torch.int8)
    weight[1, 0] = 126
    out = int8_linear(torch.full((1, 4096), 5.0), weight, torch.ones(2))
    factor = 127.0 / torch.full((1,), 5.0)
    sums = torch.tensor([127 * 127 * 4096, 127 * 127 * 4096 - 127]).float()
    assert torch.equal(out[0], sums / factor)


def test_a_row_has_the_same_bits_alone_and_in_a_batch() -> None:
    x = normal(17, 192)
    weight, scale = quantise_rows(normal(24, 192, seed=2))
    together = int8_linear(x, weight, scale)
    alone = torch.cat([int8_linear(row[None], weight, scale) for row in x])
    assert torch.equal(together, alone)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_row_with_nan_or_inf_gives_nan_and_leaves_the_others(bad: float) -> None:
    x = normal(2, 16)
    weight, scale = quantise_rows(normal(8, 16, seed=2))
    expected = int8_linear(x, weight, scale)[1]
    x[0, 3] = bad
    out = int8_linear(x, weight, scale)
    assert out[0].isnan().all()
    assert torch.equal(out[1], expected)


INT8 = torch.zeros(4, 8, dtype=torch.int8)
REFUSED: list[tuple[Callable[[], object], type[Exception], str]] = [
    (lambda: quantise_rows(INT8), TypeError, "weight: dtype torch.int8"),
    (lambda: quantise_rows(torch.zeros(4)), ValueError, "weight: shape (4,)"),
    (lambda: quantise_rows(torch.zeros(4, 0)), ValueError, "weight: in = 0"),
    (lambda: quantise_rows(torch.zeros(1, MAX_IN + 1)), ValueError, "weight: in = 65537"),
    (lambda: quantise_rows(torch.tensor([[1.0, float("nan")]])), ValueError, "weight: holds NaN"),
    (lambda: quantise_rows(torch.tensor([[float("inf")]])), ValueError, "weight: holds NaN or inf"),
    (lambda: int8_linear(torch.ones(1, 4), INT8, torch.ones(4)), ValueError, "x: shape (1, 4)"),
    (lambda: int8_linear(torch.ones(1, 8).half(), INT8, torch.ones(4)), TypeError, "x: dtype"),
    (lambda: int8_linear(torch.ones(1, 8), INT8, torch.ones(3)), ValueError, "scale: shape (3,)"),
    (
        lambda: int8_linear(torch.ones(1, 8), INT8.float(), torch.ones(4)),
        TypeError,
        "weight: dtype",
    ),
    (
        lambda: int8_linear(torch.ones(1, 8), INT8, torch.ones(4), torch.ones(4)),
        ValueError,
        "weight: shape (4,)",
    ),
]


@pytest.mark.parametrize(("call", "error", "said"), REFUSED)
def test_a_wrong_argument_is_refused_by_name(
    call: Callable[[], object], error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=re.escape(said)):
        call()
