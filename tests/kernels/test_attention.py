import pytest
import torch
from torch import Tensor

from kernels.attention import causal_attention
from kernels.kv_cache import KvCache


def attend_one_by_one(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The definition, for one query head and one position at a time, in double precision."""
    tokens, heads, head_dim = q.shape
    positions, kv_heads, _ = k.shape
    out = torch.zeros(tokens, heads, head_dim, dtype=torch.float64)
    for t in range(tokens):
        seen = positions - tokens + t + 1
        for h in range(heads):
            own = h // (heads // kv_heads)
            scores = k[:seen, own].double() @ q[t, h].double() / head_dim**0.5
            out[t, h] = scores.softmax(0) @ v[:seen, own].double()
    return out.float().view(tokens, heads * head_dim)


def random_qkv(tokens: int, positions: int) -> tuple[Tensor, Tensor, Tensor]:
    random = torch.Generator().manual_seed(tokens * 100 + positions)
    q = torch.randn(tokens, 6, 8, generator=random)
    k = torch.randn(positions, 3, 8, generator=random)
    return q, k, torch.randn(positions, 3, 8, generator=random)


@pytest.mark.parametrize(("tokens", "positions"), [(1, 1), (1, 9), (4, 4), (5, 12)])
def test_it_equals_the_definition(tokens: int, positions: int) -> None:
    q, k, v = random_qkv(tokens, positions)
    out = causal_attention(q, k.permute(1, 2, 0), v.transpose(0, 1))
    torch.testing.assert_close(out, attend_one_by_one(q, k, v), rtol=1e-5, atol=1e-6)


def test_a_later_position_changes_nothing() -> None:
    q, k, v = random_qkv(3, 8)
    before = causal_attention(q, k.permute(1, 2, 0), v.transpose(0, 1))
    k[7], v[7] = 50.0, 50.0
    after = causal_attention(q, k.permute(1, 2, 0), v.transpose(0, 1))
    assert torch.equal(before[:2], after[:2])
    assert not torch.equal(before[2], after[2])


def test_keys_that_do_not_fit_are_refused_by_name() -> None:
    q, k, v = random_qkv(2, 4)
    with pytest.raises(ValueError, match="keys"):
        causal_attention(q, k.permute(1, 2, 0)[:, :4], v.transpose(0, 1))
    with pytest.raises(ValueError, match="values"):
        causal_attention(q, k.permute(1, 2, 0), v.transpose(0, 1)[:, :3])


def test_the_cache_gives_back_every_token_in_the_layout_of_attention() -> None:
    _, k, v = random_qkv(1, 7)
    cache = KvCache(layers=2, kv_heads=3, head_dim=8, context=10)
    cache.extend(1, k[:4], v[:4])
    cache.length = 4
    keys, values = cache.extend(1, k[4:], v[4:])
    assert torch.equal(keys, k.permute(1, 2, 0))
    assert torch.equal(values, v.transpose(0, 1))
