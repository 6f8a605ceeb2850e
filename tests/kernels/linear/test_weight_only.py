"""Weight-only quantisation to 8 and 4 bits on the CPU."""

import pytest
import torch
from torch import Tensor

from tailrace.kernels.linear.epilogue import Epilogue
from tailrace.kernels.linear.weight_only import (
    WeightOnly,
    dequantise,
    pack_words,
    quantise_int4,
    quantise_int8,
    unpack_words,
    weight_only_linear,
)


def normal(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("bits", [4, 8])
def test_unpacking_gives_back_every_code(bits: int) -> None:
    codes = torch.randint(0, 1 << bits, (6, 384), generator=torch.Generator().manual_seed(1))
    words = pack_words(codes, bits)
    assert words.shape == (3, 6, 8 * bits)
    assert torch.equal(unpack_words(words, bits), codes.int())


def test_a_word_holds_one_input_of_each_part_of_its_group() -> None:
    codes = torch.arange(256).reshape(1, 256) % 16
    codes[0, 128 + 5], codes[0, 128 + 37], codes[0, 128 + 69], codes[0, 128 + 101] = 1, 2, 3, 12
    assert int(pack_words(codes, 4)[1, 0, 5]) & 0xFFFF == 0xC321
    assert pack_words(torch.full((1, 128), -1), 8).eq(-1).all()


def test_int8_is_within_half_a_step_of_the_weight() -> None:
    w = normal(5, 256)
    error = (dequantise(quantise_int8(w)) - w).abs()
    assert bool((error <= w.abs().amax(1, keepdim=True) / 127 * 0.501).all())


@pytest.mark.parametrize("middle", [0.0, 2.0])
def test_int4_is_within_a_step_of_the_weight(middle: float) -> None:
    w = normal(5, 256) + middle
    groups = w.reshape(5, 2, 128)
    low, high = groups.amin(2).clamp(max=0), groups.amax(2).clamp(min=0)
    error = (dequantise(quantise_int4(w)) - w).abs().reshape(5, 2, 128)
    assert bool((error.amax(2) <= (high - low) / 15 * 1.001).all())


def test_a_row_of_zeros_stays_zero() -> None:
    zeros = torch.zeros(2, 128)
    for weights in (quantise_int8(zeros), quantise_int4(zeros)):
        assert dequantise(weights).eq(0).all()


def test_the_linear_is_the_product_with_the_dequantised_weight() -> None:
    weights = quantise_int4(normal(12, 256))
    assert weights.shape == (12, 256)
    x, out = normal(3, 256, seed=2), torch.ones(3, 12)
    weight_only_linear(x, weights, out, epilogue=Epilogue.ADD)
    exact = 1.0 + x.bfloat16().double() @ dequantise(weights).double().T
    torch.testing.assert_close(out.double(), exact, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("shape", [(4, 100), (0, 128), (128,)])
def test_weights_that_do_not_divide_are_refused_by_name(shape: tuple[int, ...]) -> None:
    for quantise in (quantise_int8, quantise_int4):
        with pytest.raises(ValueError, match="w:"):
            quantise(torch.ones(shape))
    with pytest.raises(ValueError, match="codes"):
        pack_words(torch.ones(shape), 8)


def test_whole_numbers_are_not_weights() -> None:
    with pytest.raises(TypeError, match="w:"):
        quantise_int8(torch.ones(2, 128, dtype=torch.int8))


def test_the_epilogue_of_ternary_linears_is_refused_by_name() -> None:
    weights: WeightOnly = quantise_int8(normal(4, 128))
    with pytest.raises(ValueError, match="epilogue"):
        weight_only_linear(normal(1, 128), weights, torch.empty(1, 2), epilogue=Epilogue.RELU2_GATE)
