"""Sampling a batch of rows gives each row's own draw."""

import math
from random import Random

import pytest
import torch
from torch import Tensor

from tailrace.kernels.sampler.sampler import Sampling, sample
from tailrace.kernels.sampler.sampler_batch import NO_TOKEN, sample_batch


def random_sampling(random: Random) -> Sampling:
    """Return every setting on or off, with values at which it bites."""
    on = [random.random() < 0.5 for _ in range(6)]
    return Sampling(
        temperature=random.choice([0.0, 2.0**-149, 1e-6, 0.3, 0.8, 1.0, 3.0]),
        top_k=random.choice([1, 2, 5, 40, 10_000]) if on[0] else 0,
        top_p=random.choice([1e-9, 0.3, 0.9, 0.95, 1 - 1e-9]) if on[1] else 1.0,
        min_p=random.choice([1e-60, 1e-12, 0.05, 0.4, 1.0]) if on[2] else 0.0,
        repetition=random.choice([0.7, 1.3]) if on[3] else 1.0,
        presence=random.choice([-0.5, 1.5]) if on[4] else 0.0,
        frequency=random.choice([-0.3, 0.4]) if on[5] else 0.0,
        seed=random.choice([0, 7, 2**32 + 1, 2**64 - 1, random.randrange(2**64)]),
    )


def random_row(random: Random, vocab: int) -> Tensor:
    logits = torch.randn(vocab, generator=torch.Generator().manual_seed(random.randrange(10**6)))
    # Many equal scores, or scores far apart.
    return random.choice([logits, (logits * 2).round(), logits * 30, torch.zeros(vocab)])


def random_mask(random: Random, vocab: int) -> Tensor | None:
    if random.random() < 0.6:
        return None
    words = torch.tensor(
        [random.choice([0, 0, -1, random.getrandbits(31)]) for _ in range(-(-vocab // 32))]
    )
    words[random.randrange(vocab // 32)] |= 1 << random.randrange(31)
    return words.to(torch.int32)


class Case:
    """The arguments of one random batch."""

    def __init__(self, random: Random, rows: int) -> None:
        vocab = random.choice([64, 77, 300, 1024])
        self.logits = torch.stack([random_row(random, vocab) for _ in range(rows)])
        self.samplings = [random_sampling(random) for _ in range(rows)]
        self.positions = [random.randrange(5000) for _ in range(rows)]
        self.masks = [random_mask(random, vocab) for _ in range(rows)]
        self.counts = [
            torch.tensor(random.choices([0, 0, 1, 5], k=vocab), dtype=torch.int32)
            for _ in range(rows)
        ]

    def batch(self) -> list[int]:
        return sample_batch(self.logits, self.samplings, self.positions, self.masks, self.counts)

    def one_by_one(self) -> list[int]:
        rows = zip(
            self.logits, self.samplings, self.positions, self.masks, self.counts, strict=True
        )
        return [sample(*row) for row in rows]


@pytest.mark.parametrize("seed", range(40))
def test_a_batch_draws_what_its_rows_draw_alone(seed: int) -> None:
    random = Random(seed)
    case = Case(random, random.choice([1, 2, 5, 17, 33]))
    assert case.batch() == case.one_by_one()


@pytest.mark.parametrize("sampling", [
    Sampling(),
    Sampling(temperature=0.8, top_k=40, top_p=0.95),
    Sampling(temperature=1.0),
    Sampling(temperature=1.0, min_p=0.1),
    Sampling(temperature=1.0, top_p=0.5),
    Sampling(temperature=1.0, top_k=3),
], ids=str)  # fmt: skip
def test_rows_of_one_kind_draw_what_they_draw_alone(sampling: Sampling) -> None:
    case = Case(Random(3), 16)
    case.samplings = [sampling] * 16
    assert case.batch() == case.one_by_one()
    assert len(set(case.batch())) > 3


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_row_that_is_not_finite_has_no_token_and_changes_no_other(bad: float) -> None:
    case = Case(Random(8), 9)
    expected = case.batch()
    case.logits[4, 11] = bad
    expected[4] = NO_TOKEN
    assert case.batch() == expected


def test_the_penalised_logits_are_what_must_be_finite() -> None:
    logits = torch.full((2, 40), 3e38)
    counts = torch.ones(40, dtype=torch.int32)
    samplings = [Sampling(repetition=0.5), Sampling()]
    tokens = sample_batch(logits, samplings, [0, 0], [None, None], [counts, None])
    assert tokens == [NO_TOKEN, 0]


@pytest.mark.parametrize("rows", [1, 3])
def test_what_is_missing_or_does_not_fit_is_refused_by_name(rows: int) -> None:
    logits, nothing = torch.zeros(rows, 40), torch.zeros(2, dtype=torch.int32)
    greedy, positions = [Sampling()] * rows, [0] * rows
    none: list[Tensor | None] = [None] * rows
    with pytest.raises(ValueError, match="counts: missing"):
        sample_batch(logits, [Sampling(presence=1)] * rows, positions, none, none)
    with pytest.raises(ValueError, match="counts: shape"):
        sample_batch(logits, [Sampling(presence=1)] * rows, positions, none, [nothing] * rows)
    with pytest.raises(ValueError, match="mask: it allows no token"):
        sample_batch(logits, greedy, positions, [nothing] * rows, none)
    with pytest.raises(ValueError, match="mask: shape"):
        sample_batch(logits, greedy, positions, [nothing[:1]] * rows, none)
