"""Ternary quantisation, packing and linear layers on the CPU."""

import re
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tailrace.kernels.linear.ternary import (
    pack_ternary,
    quantize_absmean,
    quantize_activations,
    ternary_linear,
    unpack_ternary,
)


def ternary(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-1, 2, (rows, columns), generator=generator, dtype=torch.int8)


@given(st.integers(1, 5), st.integers(1, 9), st.integers(0, 2**31))
def test_unpacking_undoes_packing(quarter: int, columns: int, seed: int) -> None:
    weight = ternary(4 * quarter, columns, seed)
    packed = pack_ternary(weight)
    assert packed.shape == (quarter, columns)
    assert torch.equal(unpack_ternary(packed), weight)


def test_bits_2i_of_a_byte_hold_the_row_i_times_a_quarter_further_down() -> None:
    weight = torch.tensor([[1], [0], [0], [-1], [-1], [1], [1], [0]], dtype=torch.int8)
    first = 2 | 1 << 2 | 0 << 4 | 2 << 6
    second = 1 | 0 << 2 | 2 << 4 | 1 << 6
    assert pack_ternary(weight).tolist() == [[first], [second]]


def test_absmean_quantisation_rounds_to_the_nearest_ternary_multiple_of_the_mean() -> None:
    weight, scale = quantize_absmean(torch.tensor([2.0, -2.0, 0.1, -0.1, 0.8]))
    assert scale.item() == pytest.approx(1.0)
    assert weight.tolist() == [1, -1, 0, 0, 1]


def test_a_weight_of_zeros_quantises_to_zeros_and_a_usable_scale() -> None:
    weight, scale = quantize_absmean(torch.zeros(4, 4))
    assert not weight.any()
    assert scale.item() > 0


def test_activations_use_the_whole_int8_range_and_round_half_to_even() -> None:
    quantized, factor = quantize_activations(torch.tensor([[127.0, 0.5, 1.5, -2.5, -127.0]]))
    assert factor.item() == 1.0
    assert quantized.tolist() == [[127.0, 0.0, 2.0, -2.0, -127.0]]


def test_a_token_of_zeros_gives_zeros() -> None:
    out = ternary_linear(torch.zeros(1, 8), ternary(4, 8), torch.tensor([0.5]))
    assert out.tolist() == [[0.0] * 4]


def test_the_oracle_equals_the_float_definition() -> None:
    weight, x = ternary(16, 32), torch.randn(3, 5, 32, generator=torch.Generator().manual_seed(1))
    scale = torch.tensor([0.25], dtype=torch.bfloat16)
    quantized, factor = quantize_activations(x)
    expected = (quantized / factor).double() @ weight.double().T * scale.double()
    torch.testing.assert_close(ternary_linear(x, weight, scale).double(), expected)


def test_packed_and_unpacked_weights_give_the_same_bits() -> None:
    weight, x = ternary(8, 12), torch.randn(4, 12, generator=torch.Generator().manual_seed(2))
    scale = torch.tensor([1.5])
    assert torch.equal(
        ternary_linear(x, pack_ternary(weight), scale), ternary_linear(x, weight, scale)
    )


def test_a_row_has_the_same_bits_alone_and_in_a_batch() -> None:
    weight, x = ternary(64, 192), torch.randn(33, 192, generator=torch.Generator().manual_seed(3))
    scale = torch.tensor([0.7])
    together = ternary_linear(x, weight, scale)
    for row in range(len(x)):
        assert torch.equal(ternary_linear(x[row : row + 1], weight, scale)[0], together[row])


REFUSED: list[tuple[Callable[[], object], type[Exception], str]] = [
    (lambda: quantize_absmean(torch.ones(2, dtype=torch.int32)), TypeError, "w: dtype"),
    (lambda: pack_ternary(torch.zeros(4, 2)), TypeError, "w: dtype"),
    (lambda: pack_ternary(ternary(6, 2)), ValueError, "w: shape"),
    (lambda: pack_ternary(torch.full((4, 2), 2, dtype=torch.int8)), ValueError, "w: values"),
    (lambda: pack_ternary(torch.full((4, 2), -128, dtype=torch.int8)), ValueError, "w: values"),
    (lambda: unpack_ternary(ternary(4, 2)), TypeError, "packed: dtype"),
    (lambda: unpack_ternary(torch.zeros(4, dtype=torch.uint8)), ValueError, "packed: shape"),
    (
        lambda: unpack_ternary(torch.full((1, 1), 3, dtype=torch.uint8)),
        ValueError,
        "packed: holds the code 3",
    ),
    (
        lambda: ternary_linear(torch.ones(1, 2, dtype=torch.int8), ternary(4, 2), torch.ones(1)),
        TypeError,
        "x: dtype",
    ),
    (
        lambda: ternary_linear(torch.ones(1, 3), ternary(4, 2), torch.ones(1)),
        ValueError,
        "x: last dimension 3",
    ),
    (
        lambda: ternary_linear(torch.ones(1, 2), torch.ones(4, 2), torch.ones(1)),
        TypeError,
        "weight: torch.float32",
    ),
    (
        lambda: ternary_linear(torch.ones(1, 2), ternary(4, 2), torch.ones(2)),
        ValueError,
        "scale: 2 elements",
    ),
]


@pytest.mark.parametrize(("call", "error", "said"), REFUSED)
def test_a_wrong_argument_is_refused_by_name(
    call: Callable[[], object], error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=re.escape(said)):
        call()
