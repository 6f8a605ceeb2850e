"""Attention on the CPU, beside its definition in double precision."""

import pytest
import torch
from torch import Tensor

from tailrace.kernels.attention.attention import causal_attention, row_attention


def attend_one_by_one(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return the definition, for one query head and one position at a time, in double precision."""
    tokens, heads, head_dim = q.shape
    kv_heads, positions, _ = k.shape
    out = torch.zeros(tokens, heads, head_dim, dtype=torch.float64)
    for t in range(tokens):
        seen = positions - tokens + t + 1
        for h in range(heads):
            own = h // (heads // kv_heads)
            scores = k[own, :seen].double() @ q[t, h].double() / head_dim**0.5
            out[t, h] = scores.softmax(0) @ v[own, :seen].double()
    return out.float().view(tokens, heads * head_dim)


def random_qkv(tokens: int, positions: int) -> tuple[Tensor, Tensor, Tensor]:
    random = torch.Generator().manual_seed(tokens * 100 + positions)
    q = torch.randn(tokens, 6, 8, generator=random)
    k = torch.randn(3, positions, 8, generator=random)
    return q, k, torch.randn(3, positions, 8, generator=random)


@pytest.mark.parametrize(("tokens", "positions"), [(1, 1), (1, 9), (4, 4), (5, 12), (64, 130)])
def test_it_equals_the_definition(tokens: int, positions: int) -> None:
    q, k, v = random_qkv(tokens, positions)
    out = causal_attention(q, k.mT, v)
    torch.testing.assert_close(out, attend_one_by_one(q, k, v), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("positions", [1, 9, 64, 200])
def test_the_attention_of_one_row_equals_the_definition(positions: int) -> None:
    q, k, v = random_qkv(1, positions)
    out = row_attention(q.view(3, 2, 8), k.mT, v, torch.tensor(8**-0.5)).view(1, -1)
    torch.testing.assert_close(out, attend_one_by_one(q, k, v), rtol=1e-5, atol=1e-6)


def test_a_later_position_changes_nothing() -> None:
    q, k, v = random_qkv(3, 8)
    before = causal_attention(q, k.mT, v)
    k[:, 7], v[:, 7] = 50.0, 50.0
    after = causal_attention(q, k.mT, v)
    assert torch.equal(before[:2], after[:2])
    assert not torch.equal(before[2], after[2])


def test_keys_that_do_not_fit_are_refused_by_name() -> None:
    q, k, v = random_qkv(2, 4)
    with pytest.raises(ValueError, match="keys"):
        causal_attention(q, k[..., :4].mT, v)
    with pytest.raises(ValueError, match="values"):
        causal_attention(q, k.mT, v[:, :3])
