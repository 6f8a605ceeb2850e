import pytest
import torch

from kernels.rope import apply_rope, rope_table


def turn_as_complex_numbers(x: torch.Tensor, theta: float) -> torch.Tensor:
    """The definition: the pair (d, d + D/2) is a complex number turned by position * frequency."""
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
