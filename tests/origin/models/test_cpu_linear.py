"""Linear layers of the CPU model, beside their oracles."""

from pathlib import Path

import pytest
import torch

from tailrace.kernels.linear.int8_linear import int8_linear, quantise_rows
from tailrace.kernels.linear.ternary import pack_ternary, ternary_linear
from tailrace.kernels.linear.weight_only import quantise_int4, quantise_int8, weight_only_linear
from tailrace.origin.models import cpu_linear
from tailrace.origin.models.cpu_linear import (
    MOST_EXACT_SUM,
    TILE_ROWS,
    DenseLinear,
    Int4WeightLinear,
    Int8Linear,
    Int8WeightLinear,
    Products,
    TernaryLinear,
)
from tailrace.origin.models.cpu_model import load
from tests.origin.models.sequences import prompt_logits

QUANTISED = {8: (quantise_int8, Int8WeightLinear), 4: (quantise_int4, Int4WeightLinear)}
quantised_bits = pytest.mark.parametrize("bits", QUANTISED)


def noise(*size: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


def random_ternary(rows: int, columns: int, seed: int) -> torch.Tensor:
    random = torch.Generator().manual_seed(seed)
    return torch.randint(-1, 2, (rows, columns), generator=random, dtype=torch.int8)


BOTH_WAYS = pytest.mark.parametrize("in_fp32", [False, True])


@BOTH_WAYS
def test_fused_ternary_layers_equal_the_oracle_of_each_bit_for_bit(in_fp32: bool) -> None:
    x = noise(5, 48) * 3
    parts = [
        (pack_ternary(random_ternary(rows, 48, rows)), noise(1, seed=rows).abs().bfloat16())
        for rows in (16, 8, 4)
    ]
    expected = torch.cat([ternary_linear(x, packed, scale) for packed, scale in parts], -1)
    assert torch.equal(TernaryLinear(parts, in_fp32)(x), expected)


@BOTH_WAYS
def test_a_ternary_layer_is_exact_in_any_batch(in_fp32: bool) -> None:
    layer = TernaryLinear([(pack_ternary(random_ternary(64, 512, 2)), torch.ones(1))], in_fp32)
    x = noise(33, 512)
    assert torch.equal(layer(x), torch.cat([layer(row[None]) for row in x]))


@BOTH_WAYS
def test_a_row_that_holds_nan_or_infinity_gives_nan_and_its_neighbours_do_not(
    in_fp32: bool,
) -> None:
    ternary = torch.ones(8, 16, dtype=torch.int8)
    x = torch.ones(3, 16)
    x[0, 5], x[2, 5] = torch.nan, torch.inf
    out = TernaryLinear([(pack_ternary(ternary), torch.ones(1))], in_fp32)(x)
    assert out.isnan().all(-1).tolist() == [True, False, True]


@pytest.mark.parametrize("inputs", [1, 33])
def test_nothing_is_never_minus_zero(inputs: int) -> None:
    """A BLAS may give 0 times -1 as -0 where it adds it to nothing: one does for one input."""
    minus, one, x = -torch.ones(8, inputs, dtype=torch.int8), torch.ones(8), torch.zeros(2, inputs)
    assert not torch.signbit(Int8Linear(minus, one, in_fp32=True)(x)).any()


@pytest.mark.parametrize(
    ("rows", "inputs", "outputs"),
    [(1, 33, 8), (2, 192, 384), (7, 512, 192), (16, 1024, 96), (64, 300, 20), (3, 6912, 64)],
)
def test_products_in_int8_and_in_fp32_have_the_same_bits(
    rows: int, inputs: int, outputs: int
) -> None:
    parts = [(pack_ternary(random_ternary(outputs, inputs, 3)), torch.full((1,), 0.37))]
    x = noise(rows, inputs)
    x[0] = -1e-3  # beside one large value all of them round to -0
    x[0, 0] = 1.0
    ways = [TernaryLinear(parts, in_fp32)(x).view(torch.int32) for in_fp32 in (False, True)]
    assert torch.equal(*ways)


@pytest.mark.parametrize("more", [0, 1])
@pytest.mark.parametrize("largest", [1, 127])
def test_the_largest_sums_are_exact_in_fp32_too(largest: int, more: int) -> None:
    """More inputs than fp32 holds the sum of go in two sums."""
    inputs = MOST_EXACT_SUM // (127 * largest) + more
    weight, scale = torch.full((4, inputs), largest, dtype=torch.int8), torch.ones(4)
    x = torch.ones(1, inputs)
    x[0, 7] = 126 / 127  # a sum that is odd
    ways = [Int8Linear(weight, scale, in_fp32, largest)(x) for in_fp32 in (False, True)]
    assert torch.equal(*ways)


def test_a_sum_far_beyond_what_fp32_holds_is_that_of_whole_numbers() -> None:
    inputs = 64 * (MOST_EXACT_SUM // (127 * 127)) + 1
    weight, scale = torch.full((4, inputs), 127, dtype=torch.int8), torch.ones(4)
    drawn = torch.randint(100, 128, (1, inputs), generator=torch.Generator().manual_seed(1))
    drawn[0, 0] = 127
    ways = [Int8Linear(weight, scale, in_fp32)(drawn / 127) for in_fp32 in (False, True)]
    assert torch.equal(*ways)


@BOTH_WAYS
def test_an_int8_layer_equals_the_oracle_bit_for_bit(in_fp32: bool) -> None:
    weight, scale = quantise_rows(noise(30, 2100).bfloat16())
    x = noise(5, 2100, seed=2) * 3
    x[2, 7], x[3] = torch.nan, 0.0
    found, expected = Int8Linear(weight, scale, in_fp32)(x), int8_linear(x, weight, scale)
    assert torch.equal(found.view(torch.int32), expected.view(torch.int32))


def test_a_processor_that_is_slow_at_int8_multiplies_in_fp32(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    product = torch._int_mm

    def one_by_one(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return [product(x, weight) for _ in range(500)][-1]

    monkeypatch.setattr(torch, "_int_mm", one_by_one)
    assert cpu_linear.is_fp32_quicker(outputs=24, inputs=40)
    parts = [(pack_ternary(random_ternary(24, 40, 4)), torch.ones(1))]
    x = noise(3, 40)
    assert torch.equal(TernaryLinear(parts)(x), ternary_linear(x, *parts[0]))
    cpu_linear.is_fp32_quicker.cache_clear()


def test_what_is_quicker_changes_neither_the_fingerprint_nor_a_bit(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[tuple[str, torch.Tensor]] = []
    for in_fp32 in (False, True):
        monkeypatch.setattr(cpu_linear, "is_fp32_quicker", lambda *_, quicker=in_fp32: quicker)
        model = load(checkpoint)
        found.append((model.fingerprint, prompt_logits(model, list(range(1, 80)))))
    (one, logits), (other, others) = found
    assert one == other
    assert torch.equal(logits.view(torch.int32), others.view(torch.int32))


@pytest.fixture(scope="module", params=[(1024, 192), (300, 64), (97, 101), (7, 33), (2000, 700)])
def dense(request: pytest.FixtureRequest) -> DenseLinear:
    rows, columns = request.param
    return DenseLinear([(noise(rows, columns), None)], Products())


def test_a_dense_layer_computes_the_product(dense: DenseLinear) -> None:
    x = noise(21, dense.weight.shape[1], seed=2)
    expected = (x.double() @ dense.weight.double().t()).float()
    torch.testing.assert_close(dense(x), expected, rtol=1e-5, atol=1e-4)


def test_a_row_of_a_dense_layer_has_the_same_bits_in_any_batch(dense: DenseLinear) -> None:
    x = noise(150, dense.weight.shape[1], seed=3)
    alone = torch.cat([dense(row[None]) for row in x])
    for count in (*range(1, 20), 31, 32, 33, 63, 64, 65, 150):
        assert torch.equal(dense(x[:count]), alone[:count])
        # In another place, which begins where no cache line does.
        assert torch.equal(dense(x[150 - count :]), alone[150 - count :])


def test_a_row_beside_nan_has_the_same_bits(dense: DenseLinear) -> None:
    x = noise(20, dense.weight.shape[1], seed=4)
    expected = dense(x)
    x[3], x[18, 5] = torch.nan, torch.inf
    out, whole = dense(x), [row for row in range(20) if row not in (3, 18)]
    assert torch.equal(out[whole], expected[whole])
    assert not out[[3, 18]].isfinite().any()


def test_fused_dense_layers_are_those_layers_side_by_side() -> None:
    first, second, x = noise(24, 32), noise(8, 32, seed=2), noise(3, 32, seed=3)
    fused = DenseLinear([(first.bfloat16(), None), (second.half(), None)], Products())
    rounded = first.bfloat16().float(), second.half().float()
    torch.testing.assert_close(fused(x), torch.cat([x @ weight.t() for weight in rounded], 1))
    assert torch.equal(fused.weight, torch.cat(rounded))


def test_where_a_place_in_the_tile_matters_rows_go_one_by_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    product = torch.nn.functional.linear

    def uneven(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        out = product(x, weight)
        out[5:6] += 1e-6
        return out

    with monkeypatch.context() as patch:
        patch.setattr("tailrace.origin.models.cpu_linear.F.linear", uneven)
        layer = DenseLinear([(noise(40, 24), None)], Products())
    assert layer.rows == (1,)
    x = noise(TILE_ROWS + 3, 24, seed=2)
    assert torch.equal(layer(x), torch.cat([layer(row[None]) for row in x]))


def test_products_that_sum_in_another_order_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    product = torch.nn.functional.linear

    def other_for_few_or_many(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return product(x, weight) + (0 if len(x) in (4, TILE_ROWS) else 1e-6)

    monkeypatch.setattr("tailrace.origin.models.cpu_linear.F.linear", other_for_few_or_many)
    # With one column there is only one order of summation.
    layer = DenseLinear([(noise(40, 1), None)], Products())
    assert layer.rows == (4, TILE_ROWS)
    x = noise(13, 1, seed=2)
    torch.testing.assert_close(layer(x), product(x, layer.weight), rtol=0, atol=0)


@quantised_bits
def test_a_quantised_layer_is_the_oracle_in_bf16(bits: int) -> None:
    """Its 40 rows are no multiple of those that a product takes together."""
    quantise, layer = QUANTISED[bits]
    parts, x = [noise(24, 384).bfloat16(), noise(16, 384, seed=2).bfloat16()], noise(5, 384, seed=3)
    expected = torch.empty(5, 40)
    weight_only_linear(x, quantise(torch.cat(parts)), expected)
    found = layer([(part, None) for part in parts], Products())(x)
    error = (found - expected).square().mean().sqrt() / expected.std()
    assert 1e-5 < error < 0.004  # half a last place of bf16, and of the scales of int4


@quantised_bits
def test_a_row_of_a_quantised_layer_has_the_same_bits_in_any_batch(bits: int) -> None:
    layer = QUANTISED[bits][1]([(noise(64, 256), None)], Products())
    x = noise(80, 256, seed=2)
    alone = torch.cat([layer(row[None]) for row in x])
    x[5] = torch.nan
    for count in (2, 3, 5, 8, 9, 33, 64, 80):
        end = layer(x[-count:])
        whole = [row for row in range(count) if 80 - count + row != 5]
        assert torch.equal(end[whole], alone[-count:][whole])
