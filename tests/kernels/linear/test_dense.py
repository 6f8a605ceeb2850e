"""Dense linear layers on the CPU."""

import pytest
import torch

from tailrace.kernels.linear.dense import dense_linear
from tailrace.kernels.linear.epilogue import Epilogue
from tailrace.kernels.rows.norm import order_free_rms_norm


def normal(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_it_equals_the_product_of_rounded_activations_in_double_precision(
    dtype: torch.dtype,
) -> None:
    x, weight, out = normal(3, 40), normal(24, 40, seed=2).to(dtype), torch.empty(3, 24)
    dense_linear(x, weight, out)
    exact = x.to(dtype).double() @ weight.double().T
    torch.testing.assert_close(out.double(), exact, rtol=1e-6, atol=1e-5)


def test_add_adds_to_what_is_there() -> None:
    x, weight, out = normal(2, 16), normal(8, 16, seed=2), torch.full((2, 8), 3.0)
    dense_linear(x, weight, out, epilogue=Epilogue.ADD)
    torch.testing.assert_close(out, 3.0 + x @ weight.T)


def test_swiglu_takes_gate_rows_before_up_rows() -> None:
    x, weight, out = normal(2, 16), normal(12, 16, seed=2), torch.empty(2, 6)
    dense_linear(x, weight, out, epilogue=Epilogue.SWIGLU)
    gate, up = x @ weight[:6].T, x @ weight[6:].T
    torch.testing.assert_close(out, gate / (1 + (-gate).exp()) * up)


def test_a_norm_comes_before_rounding() -> None:
    x, norm = normal(2, 32), torch.linspace(0.5, 2.0, 32)
    weight = torch.eye(32, dtype=torch.bfloat16)
    out = torch.empty(2, 32)
    dense_linear(x, weight, out, norm=norm, eps=1e-6)
    assert torch.equal(out, order_free_rms_norm(x, norm, 1e-6).bfloat16().float())


def test_an_epilogue_of_ternary_linears_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="epilogue"):
        dense_linear(normal(1, 8), normal(8, 8), torch.empty(1, 4), epilogue=Epilogue.RELU2_GATE)
