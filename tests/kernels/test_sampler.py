from collections import Counter

import pytest
import torch
from torch import Tensor

from kernels.sampler import Sampling, gumbel, philox, sample, survivors

# Known answers of Random123 1.14, file kat_vectors: counter, key, result.
KNOWN_ANSWERS = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000",
     "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff",
     "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0",
     "d16cfe09 94fdcceb 5001e420 24126ea1"),
]  # fmt: skip


def words(text: str) -> Tensor:
    return torch.tensor([int(word, 16) for word in text.split()])


def philox_in_python_integers(counter: list[int], key: list[int]) -> list[int]:
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = p1 >> 32 ^ c1 ^ k0, p1 % 2**32, p0 >> 32 ^ c3 ^ k1, p0 % 2**32
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return [c0, c1, c2, c3]


@pytest.mark.parametrize(("counter", "key", "result"), KNOWN_ANSWERS)
def test_philox_gives_the_published_answers(counter: str, key: str, result: str) -> None:
    low, high = words(key).tolist()
    assert philox(words(counter)[:, None], high << 32 | low)[:, 0].equal(words(result))


def test_philox_over_many_counters_equals_python_integers() -> None:
    random = torch.Generator().manual_seed(1)
    counters = torch.randint(0, 2**32, (4, 50), generator=random)
    seed = 0xFEDCBA9876543210
    expected = [philox_in_python_integers(c, [0x76543210, 0xFEDCBA98]) for c in counters.T.tolist()]
    assert philox(counters, seed).T.tolist() == expected


def test_noise_of_an_id_depends_on_seed_position_and_id_alone() -> None:
    ids = torch.arange(100)
    every = gumbel(ids, seed=7, position=3)
    assert torch.equal(gumbel(ids[40:42], seed=7, position=3), every[40:42])
    for seed, position in ((8, 3), (7, 4), (7 + 2**32, 3)):
        assert not torch.equal(gumbel(ids, seed, position), every)


def test_noise_is_finite_for_the_extreme_words() -> None:
    noise = gumbel(torch.arange(200_000), seed=1, position=0)
    assert noise.isfinite().all()
    assert -2.9 < noise.min() < noise.max() < 16.7


def test_temperature_zero_takes_the_best_and_the_lowest_id_of_equals() -> None:
    logits = torch.tensor([0.0, 2.0, 1.0, 2.0])
    assert sample(logits, Sampling(seed=9), 0) == 1


def test_a_tiny_temperature_takes_the_best() -> None:
    logits = torch.tensor([-3.0, 80.0, 79.0])
    assert sample(logits, Sampling(temperature=1e-38), 0) == 1


def test_equal_seeds_and_positions_draw_equal_tokens() -> None:
    logits = torch.randn(64, generator=torch.Generator().manual_seed(3))
    sampling = Sampling(temperature=1.3, top_k=20, top_p=0.9, seed=2**64 - 1)
    drawn = [sample(logits, sampling, position) for position in range(50)]
    assert drawn == [sample(logits, sampling, position) for position in range(50)]
    assert len(set(drawn)) > 3


def test_draws_follow_the_softmax_at_the_temperature() -> None:
    logits, temperature, draws = torch.tensor([1.0, 0.0, -1.0, 2.0]), 2.0, 4000
    sampling = Sampling(temperature=temperature, seed=5)
    counts = Counter(sample(logits, sampling, position) for position in range(draws))
    chances = (logits / temperature).softmax(-1).tolist()
    chi_square = sum(
        (counts[i] - draws * chance) ** 2 / (draws * chance) for i, chance in enumerate(chances)
    )
    assert chi_square < 16.3  # 3 degrees of freedom: exceeded once in a thousand seeds


def test_top_k_keeps_the_best_and_the_lowest_ids_of_equals() -> None:
    scores = torch.tensor([1.0, 3.0, 2.0, 2.0, 2.0])
    assert survivors(scores, 3, 1.0).tolist() == [1, 2, 3]
    assert survivors(scores, 0, 1.0).tolist() == [0, 1, 2, 3, 4]
    assert survivors(scores, 9, 1.0).tolist() == [0, 1, 2, 3, 4]


def test_top_p_keeps_the_fewest_that_reach_it_and_at_least_one() -> None:
    scores = torch.tensor([0.1, 0.4, 0.2, 0.3]).log()
    assert survivors(scores, 0, 0.69).tolist() == [1, 3]
    assert survivors(scores, 0, 0.71).tolist() == [1, 2, 3]
    assert survivors(scores, 0, 1e-9).tolist() == [1]


def test_top_p_counts_chances_after_top_k() -> None:
    scores = torch.tensor([0.1, 0.4, 0.2, 0.3]).log()
    assert survivors(scores, 2, 0.55).tolist() == [1]


def test_only_survivors_are_drawn() -> None:
    logits = torch.randn(100, generator=torch.Generator().manual_seed(4))
    best = set(logits.topk(5).indices.tolist())
    sampling = Sampling(temperature=5.0, top_k=5, seed=6)
    assert {sample(logits, sampling, position) for position in range(200)} == best


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_logit_that_is_no_number_is_refused(bad: float, temperature: float) -> None:
    logits = torch.zeros(8)
    logits[5] = bad
    with pytest.raises(FloatingPointError):
        sample(logits, Sampling(temperature=temperature), 0)
