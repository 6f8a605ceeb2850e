"""RMS norm in Triton, beside its oracle."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tailrace.kernels.linear.ternary import quantize_activations
from tailrace.kernels.rows.norm import order_free_rms_norm
from tailrace.kernels.rows.norm_triton import (
    MAX_COLUMNS,
    rms_norm,
    rms_norm_int8,
    variants,
)
from tailrace.kernels.shapes import BITNET_2B4T, LLAMA_8B
from tests.kernels.guarded import Guarded
from tests.kernels.refusals import assert_refused

EPS = 1e-5


def normal(*size: int, seed: int = 1) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed))


def quantised(normed: Tensor) -> tuple[Tensor, Tensor]:
    """Return the oracle's integers and factors, as the kernels store them."""
    values, factor = quantize_activations(normed)
    return values.nan_to_num(nan=0.0).to(torch.int8), factor.squeeze(-1)


def norm_of(x: Tensor, weight: Tensor, device: torch.device) -> Tensor:
    out = torch.empty_like(x, device=device)
    rms_norm(x.to(device), weight.to(device), EPS, out)
    return out.cpu()


def int8_of(x: Tensor, weight: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
    q = torch.empty(x.shape, dtype=torch.int8, device=device)
    factor = torch.empty(len(x), device=device)
    rms_norm_int8(x.to(device), weight.to(device), EPS, q, factor)
    return q.cpu(), factor.cpu()


def same(found: Tensor, expected: Tensor) -> bool:
    """Equal bit for bit; any NaN equals any other."""
    return torch.equal(found.isnan(), expected.isnan()) and torch.equal(
        found.nan_to_num(0.0), expected.nan_to_num(0.0)
    )


@pytest.mark.parametrize("size", [1, 2, 127, 128, 129, 640])
def test_the_norm_has_the_bits_of_its_oracle(size: int, device: torch.device) -> None:
    x, weight = normal(3, size), normal(size, seed=2)
    assert same(norm_of(x, weight, device), order_free_rms_norm(x, weight, EPS))


@pytest.mark.parametrize("size", [1, 127, 640])
def test_the_quantised_norm_has_the_integers_and_factors_of_its_oracle(
    size: int, device: torch.device
) -> None:
    x, weight = normal(3, size), normal(size, seed=2)
    q, factor = int8_of(x, weight, device)
    expected, expected_factor = quantised(order_free_rms_norm(x, weight, EPS))
    assert torch.equal(q, expected)
    assert torch.equal(factor, expected_factor)
    assert int(q.abs().max()) == 127


def test_the_largest_row_fits(device: torch.device) -> None:
    x, weight = normal(1, MAX_COLUMNS), normal(MAX_COLUMNS, seed=2)
    expected = order_free_rms_norm(x, weight, EPS)
    assert same(norm_of(x, weight, device), expected)
    assert torch.equal(int8_of(x, weight, device)[0], quantised(expected)[0])


@pytest.mark.parametrize("rows", [1, 2, 16, 17])
def test_a_row_has_the_same_bits_in_any_batch(rows: int, device: torch.device) -> None:
    x, weight = normal(17, 96), normal(96, seed=2)
    whole, (q, factor) = norm_of(x, weight, device), int8_of(x, weight, device)
    assert torch.equal(norm_of(x[-rows:], weight, device), whole[-rows:])
    part_q, part_factor = int8_of(x[-rows:], weight, device)
    assert torch.equal(part_q, q[-rows:])
    assert torch.equal(part_factor, factor[-rows:])


def test_the_result_may_take_the_place_of_the_input(device: torch.device) -> None:
    x, weight = normal(2, 48), normal(48, seed=2)
    row = x.to(device, copy=True)
    rms_norm(row, weight.to(device), EPS, row)
    assert same(row.cpu(), order_free_rms_norm(x, weight, EPS))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_narrower_result_is_the_same_one_rounded(
    dtype: torch.dtype, device: torch.device
) -> None:
    x, weight = normal(3, 96), normal(96, seed=2)
    x[1, 5] = float("nan")
    out = torch.empty(3, 96, dtype=dtype, device=device)
    rms_norm(x.to(device), weight.to(device), EPS, out)
    assert same(out.cpu().float(), order_free_rms_norm(x, weight, EPS).to(dtype).float())


@pytest.mark.parametrize("scale", [0.0, 1e-30, 1e-6, 1e20, 1e38])
def test_rows_of_any_magnitude_agree_with_the_oracle(scale: float, device: torch.device) -> None:
    x, weight = normal(2, 64).clamp(-1, 1) * scale, torch.ones(64)
    expected = order_free_rms_norm(x, weight, EPS)
    assert expected.isfinite().all()
    assert same(norm_of(x, weight, device), expected)
    assert torch.equal(int8_of(x, weight, device)[0], quantised(expected)[0])


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_row_that_is_not_finite_says_so_and_spares_its_neighbours(
    bad: float, device: torch.device
) -> None:
    x, weight = normal(3, 40), normal(40, seed=2)
    healthy, (q_healthy, _) = norm_of(x, weight, device), int8_of(x, weight, device)
    x[1, 7] = bad
    out, (q, factor) = norm_of(x, weight, device), int8_of(x, weight, device)
    assert out[1].isnan().all()
    assert factor.isnan().tolist() == [False, True, False]
    assert q[1].eq(0).all()
    for row in (0, 2):
        assert torch.equal(out[row], healthy[row])
        assert torch.equal(q[row], q_healthy[row])


def test_nothing_beyond_the_tensors_is_read_or_written(device: torch.device) -> None:
    x, weight = normal(2, 37), normal(37, seed=2)
    tensors = x, weight, torch.zeros(2, 37, dtype=torch.int8), torch.zeros(2)
    guarded = [Guarded(tensor.to(device)) for tensor in tensors]
    gx, gw, gq, gf = (g.tensor for g in guarded)
    rms_norm_int8(gx, gw, EPS, gq, gf)
    q, factor = int8_of(x, weight, device)
    assert torch.equal(gq.cpu(), q)
    assert torch.equal(gf.cpu(), factor)
    assert all(g.intact() for g in guarded)

    out = Guarded(torch.zeros(2, 37, device=device))
    rms_norm(gx, gw, EPS, out.tensor)
    assert same(out.tensor.cpu(), order_free_rms_norm(x, weight, EPS))
    assert out.intact()


def test_an_empty_batch_is_no_launch(device: torch.device) -> None:
    empty, weight = torch.empty(0, 8, device=device), torch.ones(8, device=device)
    rms_norm(empty, weight, EPS, empty.clone())
    q = torch.empty(0, 8, dtype=torch.int8, device=device)
    rms_norm_int8(empty, weight, EPS, q, torch.empty(0, device=device))


def test_what_does_not_fit_is_refused_by_name(device: torch.device) -> None:
    x, weight = torch.ones(2, 8, device=device), torch.ones(8, device=device)
    bad = [(ValueError, "eps: ", {"eps": eps}) for eps in (0.0, -1.0, float("nan"))]
    arguments = {"x": x, "weight": weight, "eps": EPS}
    assert_refused(rms_norm, {**arguments, "out": torch.empty_like(x)}, *bad)
    q, factor = torch.empty_like(x, dtype=torch.int8), torch.empty(2, device=device)
    assert_refused(rms_norm_int8, {**arguments, "q": q, "factor": factor}, *bad)


@pytest.mark.parametrize("size", [0, MAX_COLUMNS + 1])
def test_rows_that_no_register_file_holds_are_refused(size: int, device: torch.device) -> None:
    x = torch.empty(1, size, device=device)
    with pytest.raises(ValueError, match=f"^x: rows of {size}, expected 1 to {MAX_COLUMNS}"):
        rms_norm(x, torch.ones(size, device=device), EPS, x.clone())


def test_variants_cover_both_results_and_count_their_bytes() -> None:
    found = {variant.name: variant for variant in variants(BITNET_2B4T)}
    plain = found["bitnet-2b4t.norm hidden rows=16"]
    assert plain.bytes_moved == 16 * 2560 * 8 + 2560 * 4
    rounded = found["bitnet-2b4t.norm hidden bf16 rows=16"]
    assert rounded.bytes_moved == 16 * 2560 * 6 + 2560 * 4
    quantised = found["bitnet-2b4t.norm hidden int8 rows=8"]
    assert quantised.bytes_moved == 8 * (2560 * 5 + 4) + 2560 * 4
    assert quantised.signature["q_ptr"] == "*i8"
    assert not any("queries" in variant.name for variant in variants(LLAMA_8B))
