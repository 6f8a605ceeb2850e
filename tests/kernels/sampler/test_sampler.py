"""The sampler of one row: random numbers, filters, penalties and draws."""

import math
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor

from tailrace.kernels.sampler.sampler import (
    Sampling,
    allowed_ids,
    gumbel,
    gumbel_of,
    penalised,
    philox,
    sample,
    survivors,
    top_p_weight,
    weights,
)

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


def test_every_random_word_gives_noise_that_a_library_cannot_change() -> None:
    """A double between two fp32 numbers is rounded alike while its error is below its margin."""
    for first in range(0, 2**24, 2**21):
        uniform = torch.arange(first, first + 2**21, dtype=torch.float64).clamp_(min=0.5) * 2.0**-24
        exponential = -uniform.log()
        assert margin_in_double_ulps(exponential) > 12
        noise = -exponential.to(torch.float32).to(torch.float64).log()
        assert margin_in_double_ulps(noise) > 12
        word = torch.arange(first, first + 2**21) << 8
        assert gumbel_of(word | 0xFF).equal(noise.to(torch.float32))


def margin_in_double_ulps(exact: Tensor) -> float:
    """Return the least distance of fp64 numbers to a tie of rounding to fp32, in their ulps."""
    single = exact.to(torch.float32)
    step = torch.nextafter(single, torch.tensor(torch.inf)).to(torch.float64) - single
    distance = ((exact - single).abs() - step / 2).abs()
    return float((distance / (exact.abs() * 2.0**-52).clamp_(min=1e-300)).min())


def test_weights_are_exp_within_two_units_in_the_last_place() -> None:
    random = torch.Generator().manual_seed(1)
    scores = -torch.cat(
        (
            torch.rand(400_000, generator=random) * 28,
            torch.rand(200_000, generator=random),
            torch.rand(100_000, generator=random).pow(8),
            torch.arange(1, 41) * math.log(2) / 2,
        )
    )
    exact = scores.to(torch.float64).exp()
    _, exponent = torch.frexp(exact)
    ulp = torch.ldexp(torch.ones_like(exact), exponent - 24)
    # A whole number is at most one below what was cut.
    error = (weights(scores).to(torch.float64) * 2.0**-40 - exact) / ulp
    cut = 2.0**-40 / ulp
    assert (error <= 1.2).all()
    assert (error >= -1.2 - cut).all()


def test_the_best_weighs_one_and_the_hopeless_nothing() -> None:
    scores = torch.tensor([0.0, -0.0, -1e-45, -27.7, -27.8, -28.5, -1e30, -torch.inf])
    assert weights(scores).tolist() == [2**40, 2**40, 2**40, 1, 0, 0, 0, 0]


def test_what_top_p_asks_for_is_exact() -> None:
    assert top_p_weight(2**58 + 1, 0.5) == 2**57 + 1
    assert top_p_weight(1000, 1 - 2.0**-24) == 1000
    assert top_p_weight(3 * 2**24, 2.0**-24) == 3
    assert top_p_weight(2**40, 1e-30) == 1


def test_top_p_keeps_the_lowest_ids_of_equals() -> None:
    scores = torch.tensor([-1.0, 0.0, -1.0, -1.0, -1.0])
    assert survivors(scores, 0, 0.5).tolist() == [0, 1]
    assert survivors(scores, 0, 0.6).tolist() == [0, 1, 2]
    assert survivors(torch.zeros(1000), 0, 0.25).tolist() == list(range(250))


def test_min_p_keeps_what_reaches_its_share_of_the_best() -> None:
    scores = torch.tensor([0.1, 0.4, 0.2, 0.3]).log() - math.log(0.4)
    assert survivors(scores, 0, 1.0, 0.49).tolist() == [1, 2, 3]
    assert survivors(scores, 0, 1.0, 0.51).tolist() == [1, 3]
    assert survivors(scores, 0, 1.0, 1.0).tolist() == [1]
    assert survivors(torch.tensor([0.0, -40.0]), 0, 1.0, 1e-30).tolist() == [0, 1]


def test_min_p_does_not_depend_on_top_k_and_top_p() -> None:
    scores = torch.tensor([0.1, 0.4, 0.2, 0.3]).log() - math.log(0.4)
    assert survivors(scores, 3, 1.0, 0.3).tolist() == [1, 2, 3]
    assert survivors(scores, 0, 0.85, 0.6).tolist() == [1, 3]
    assert survivors(scores, 3, 0.7, 0.1).tolist() == [1, 3]


@pytest.mark.parametrize(
    ("settings", "kept"),
    [
        ({"top_k": 3}, [0, 3, 5]),
        ({"top_p": 0.75}, [0, 3, 5]),
        ({"min_p": 0.3}, [0, 3, 5]),
        ({"top_k": 4, "top_p": 0.93, "min_p": 0.55}, [0, 3]),
    ],
)
def test_draws_follow_the_chances_of_the_survivors(
    settings: dict[str, Any], kept: list[int]
) -> None:
    chances = torch.tensor([0.25, 0.05, 0.04, 0.40, 0.06, 0.20])
    sampling, draws = Sampling(temperature=1.0, seed=12, **settings), 1000
    counts = Counter(sample(chances.log(), sampling, position) for position in range(draws))
    expected = draws * chances[kept] / chances[kept].sum()
    found = torch.tensor([counts[id] for id in kept])
    assert sum(counts.values()) == int(found.sum())
    # 2 degrees of freedom at most: exceeded once in a thousand seeds.
    assert float(((found - expected) ** 2 / expected).sum()) < 13.8


def test_penalties_are_those_of_their_sources() -> None:
    logits = torch.tensor([2.0, -2.0, 0.5, 3.0])
    counts = torch.tensor([1, 2, 0, 3], dtype=torch.int32)
    sampling = Sampling(repetition=2.0, presence=0.25, frequency=0.5)
    expected = [2.0 / 2 - 0.5 - 0.25, -2.0 * 2 - 1.0 - 0.25, 0.5, 3.0 / 2 - 1.5 - 0.25]
    assert penalised(logits, sampling, counts).tolist() == expected


def test_penalties_come_before_the_best_is_taken() -> None:
    logits, counts = torch.tensor([2.0, 1.9]), torch.tensor([1, 0], dtype=torch.int32)
    assert sample(logits, Sampling(presence=0.2), 0, counts=counts) == 1
    assert sample(logits, Sampling(), 0, counts=counts) == 0


def test_penalties_need_counts_that_fit() -> None:
    for counts in (None, torch.zeros(3, dtype=torch.int32)):
        with pytest.raises(ValueError, match="counts"):
            sample(torch.zeros(2), Sampling(frequency=1.0), 0, counts=counts)


def test_a_penalty_that_overflows_is_no_number() -> None:
    logits, counts = torch.tensor([-1e30, 0.0]), torch.tensor([1, 0], dtype=torch.int32)
    with pytest.raises(FloatingPointError):
        sample(logits, Sampling(repetition=1e30), 0, counts=counts)


def mask_of(ids: list[int], words: int) -> Tensor:
    mask = torch.zeros(words, dtype=torch.int64)
    for id in ids:
        mask[id // 32] |= 1 << id % 32
    return mask.to(torch.int32)


def test_a_mask_names_ids_bit_by_bit_from_the_lowest() -> None:
    assert allowed_ids(mask_of([0, 31, 32, 69, 70], 3), 70).tolist() == [0, 31, 32, 69]


@pytest.mark.parametrize("temperature", [0.0, 5.0])
def test_only_allowed_ids_are_drawn_with_the_noise_of_their_own(temperature: float) -> None:
    logits = torch.randn(70, generator=torch.Generator().manual_seed(5)) * 3
    allowed = [3, 31, 32, 68]
    closed = torch.full((70,), -1e30)
    closed[allowed] = logits[allowed]
    for position in range(30):
        sampling = Sampling(temperature, seed=8)
        drawn = sample(logits, sampling, position, mask_of(allowed, 3))
        assert drawn == sample(closed, sampling, position)
        assert drawn in allowed


def test_top_k_and_top_p_count_allowed_ids_alone() -> None:
    logits = torch.tensor([9.0, 1.0, 8.0, 2.0, 0.0])
    mask = mask_of([1, 3, 4], 1)
    for settings in ({"top_k": 1}, {"top_p": 0.5}, {"min_p": 0.9}):
        assert sample(logits, Sampling(temperature=2.0, **settings), 0, mask) == 3


@pytest.mark.parametrize("mask", [mask_of([], 1), mask_of([8], 1)])
def test_a_mask_that_allows_nothing_is_refused(mask: Tensor) -> None:
    with pytest.raises(ValueError, match=r"^mask: it allows no token"):
        sample(torch.zeros(8), Sampling(), 0, mask)


def test_a_mask_of_another_size_or_type_is_refused() -> None:
    with pytest.raises(ValueError, match="mask"):
        sample(torch.zeros(33), Sampling(), 0, mask_of([1], 1))
    with pytest.raises(TypeError, match="mask"):
        sample(torch.zeros(8), Sampling(), 0, torch.ones(1, dtype=torch.int64))


def test_a_bad_logit_counts_even_where_the_mask_forbids_it() -> None:
    with pytest.raises(FloatingPointError):
        sample(torch.tensor([0.0, torch.nan]), Sampling(), 0, mask_of([0], 1))


def test_settings_count_as_fp32_numbers() -> None:
    logits = torch.tensor([0.0, 1.0, -40.0])
    assert sample(logits, Sampling(temperature=1e-50), 0) == 1
    assert survivors(logits - 1, 0, 1 - 1e-12).tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -1.0),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 1.5),
        ("seed", 2**64),
        ("seed", -1),
        ("min_p", -0.1),
        ("min_p", math.nan),
        ("repetition", 0.0),
        ("presence", math.inf),
        ("frequency", math.nan),
    ],
)
def test_a_setting_without_meaning_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"^{name}"):
        Sampling(**{name: value})
