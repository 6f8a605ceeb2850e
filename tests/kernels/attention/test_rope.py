"""Rotary position embedding and its scalings, beside their definitions."""

import math
from collections.abc import Callable

import pytest
import torch

from tailrace.kernels.attention.rope import apply_rope, rope_frequencies, rope_table
from tailrace.kernels.attention.rope_scaling import (
    LinearScaling,
    Llama3Scaling,
    YarnScaling,
    yarn_attention_factor,
)


def turn_as_complex_numbers(x: torch.Tensor, theta: float) -> torch.Tensor:
    """Rotate by the definition: each pair (d, d + D/2) is a complex number.

    It is turned by position * frequency.
    """
    tokens, _, head_dim = x.shape
    half = head_dim // 2
    frequency = theta ** (-torch.arange(half, dtype=torch.float64) * 2 / head_dim)
    angle = torch.arange(tokens, dtype=torch.float64)[:, None, None] * frequency
    pairs = torch.complex(x[..., :half].double(), x[..., half:].double())
    turned = pairs * torch.polar(torch.ones_like(angle), angle)
    return torch.cat((turned.real, turned.imag), -1).float()


def test_it_turns_pairs_by_the_angle_of_their_position() -> None:
    x = torch.randn(30, 3, 16, generator=torch.Generator().manual_seed(1))
    cos, sin = rope_table(30, 16, 500_000.0)
    expected = turn_as_complex_numbers(x, 500_000.0)
    torch.testing.assert_close(apply_rope(x, cos, sin), expected, rtol=1e-5, atol=1e-5)


def test_position_zero_is_left_as_it_is() -> None:
    x = torch.randn(1, 2, 8, generator=torch.Generator().manual_seed(2))
    cos, sin = rope_table(4, 8, 10_000.0)
    assert torch.equal(apply_rope(x, cos[:1], sin[:1]), x)


def test_scores_depend_on_the_distance_only() -> None:
    random = torch.Generator().manual_seed(3)
    q, k = torch.randn(1, 1, 16, generator=random), torch.randn(1, 1, 16, generator=random)
    cos, sin = rope_table(64, 16, 10_000.0)

    def score(i: int, j: int) -> torch.Tensor:
        turned_q = apply_rope(q, cos[i : i + 1], sin[i : i + 1])
        turned_k = apply_rope(k, cos[j : j + 1], sin[j : j + 1])
        return (turned_q * turned_k).sum()

    torch.testing.assert_close(score(9, 4), score(59, 54), rtol=1e-4, atol=1e-4)


def test_an_odd_head_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="head_dim"):
        rope_table(4, 7, 10_000.0)


def test_factors_for_other_tokens_are_refused_by_name() -> None:
    cos, sin = rope_table(4, 8, 10_000.0)
    with pytest.raises(ValueError, match="cos, sin"):
        apply_rope(torch.ones(3, 1, 8), cos, sin)


# ---- scaling, against the definitions ----


def turns(frequency: torch.Tensor, tokens: int) -> torch.Tensor:
    """Return how often a pair turns round within `tokens` tokens."""
    return frequency.double() * tokens / (2 * math.pi)


def test_linear_scaling_puts_position_n_where_position_1_was() -> None:
    plain, _ = rope_table(8, 16, 10_000.0)
    cos, _ = rope_table(33, 16, 10_000.0, LinearScaling(4.0))
    torch.testing.assert_close(cos[::4][:8], plain)


def test_llama3_scaling_leaves_the_fast_and_divides_the_slow() -> None:
    scaling = Llama3Scaling(factor=8.0, low_turns=1.0, high_turns=4.0, original_context=8192)
    plain = rope_frequencies(128, 500_000.0)
    scaled = rope_frequencies(128, 500_000.0, scaling)
    before = turns(plain, 8192)
    assert torch.equal(scaled[before > 4], plain[before > 4])
    torch.testing.assert_close(scaled[before < 1], plain[before < 1] / 8)
    between = (before > 1) & (before < 4)
    assert int(between.sum()) > 3
    share = (before - 1) / 3
    expected = plain * (share + (1 - share) / 8)
    torch.testing.assert_close(scaled[between], expected[between].float())


def test_yarn_goes_over_from_unscaled_to_divided_and_grows_both_factors() -> None:
    scaling = YarnScaling(4.0, 32_768, yarn_attention_factor(4.0))
    plain = rope_frequencies(128, 1e6)
    scaled = rope_frequencies(128, 1e6, scaling)
    before = turns(plain, 32_768)
    assert torch.equal(scaled[before > 40], plain[before > 40])
    torch.testing.assert_close(scaled[before < 0.8], plain[before < 0.8] / 4)
    assert bool((scaled[1:] < scaled[:-1]).all())
    cos, sin = rope_table(5, 128, 1e6, scaling)
    length = (cos**2 + sin**2).sqrt()
    torch.testing.assert_close(length, torch.full_like(length, 0.1 * math.log(4) + 1))


def test_yarn_can_begin_its_ramp_between_two_dimensions() -> None:
    whole = YarnScaling(4.0, 512, 1.0)
    assert all(isinstance(end, int) for end in whole.ramp(64, 1e4))
    first, last = YarnScaling(4.0, 512, 1.0, truncate=False).ramp(64, 1e4)
    assert (first % 1, last % 1) != (0, 0)


def test_a_ramp_always_has_a_length() -> None:
    scaling = YarnScaling(4.0, 4, 1.0, fast_turns=3.0, slow_turns=2.0)
    first, last = scaling.ramp(8, 1e4)
    assert last > first
    assert bool(rope_frequencies(8, 1e4, scaling).isfinite().all())


def test_the_attention_factor_of_yarn_is_that_of_the_paper_or_of_both_weights() -> None:
    assert yarn_attention_factor(1.0) == 1.0
    assert yarn_attention_factor(math.e) == pytest.approx(1.1)
    assert yarn_attention_factor(math.e, 2.0, 1.0) == pytest.approx(1.2 / 1.1)
    assert yarn_attention_factor(math.e, 2.0) == pytest.approx(1.1)


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: LinearScaling(0.0), "factor"),
        (lambda: LinearScaling(math.nan), "factor"),
        (lambda: Llama3Scaling(8.0, 4.0, 4.0, 64), "high_turns"),
        (lambda: Llama3Scaling(8.0, 1.0, 4.0, 0), "original_context"),
        (lambda: YarnScaling(4.0, 64, 1.0, fast_turns=1.0), "fast_turns"),
        (lambda: YarnScaling(4.0, 64, 0.0), "attention_factor"),
    ],
)
def test_a_scaling_that_makes_no_sense_is_refused_by_name(
    make: Callable[[], object], named: str
) -> None:
    with pytest.raises(ValueError, match=named):
        make()
