"""RMS norm on the CPU, with and without a fixed order of summation."""

import pytest
import torch

from tailrace.kernels.rows.norm import order_free_rms_norm, rms_norm


def test_it_equals_the_definition_in_double_precision() -> None:
    x = torch.randn(5, 48, generator=torch.Generator().manual_seed(1))
    weight = torch.linspace(-1.0, 2.0, 48)
    exact = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight
    torch.testing.assert_close(rms_norm(x, weight, 1e-5), exact.float(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("largest", [1.0, 3.0, 1e3, 1e6, 1e30])
def test_without_an_order_it_is_as_near_to_the_definition(largest: float) -> None:
    """Elements have 20 places below the largest: what rounds them weighs less, the longer a row."""
    x = torch.randn(50, 2560, generator=torch.Generator().manual_seed(1))
    x[:, 7] = largest
    exact = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-5).sqrt()
    found = order_free_rms_norm(x, torch.ones(2560), 1e-5)
    torch.testing.assert_close(found, exact.float(), rtol=2**-20, atol=0.0)


def test_a_row_of_zeros_stays_zero() -> None:
    assert rms_norm(torch.zeros(1, 8), torch.ones(8), 1e-5).eq(0).all()


def test_eps_is_added_to_the_mean_square() -> None:
    x = torch.full((1, 4), 1e-3)
    expected = 1e-3 / (1e-6 + 3e-6) ** 0.5
    torch.testing.assert_close(rms_norm(x, torch.ones(4), 3e-6), torch.full((1, 4), expected))


def test_rows_do_not_depend_on_one_another() -> None:
    x = torch.randn(7, 64, generator=torch.Generator().manual_seed(2))
    weight = torch.ones(64)
    alone = torch.cat([rms_norm(row[None], weight, 1e-5) for row in x])
    assert torch.equal(rms_norm(x, weight, 1e-5), alone)


def test_a_weight_of_another_size_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="weight"):
        rms_norm(torch.ones(2, 8), torch.ones(4), 1e-5)
