"""Draws of a batch on the GPU: each row is drawn as the oracle of the sampler draws it alone."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tailrace.kernels.sampler.sampler import Sampling, sample
from tailrace.kernels.sampler.sampler_batch import NO_TOKEN
from tailrace.origin.models.gpu_draw import GpuDraw
from tailrace.origin.models.model import Draw, Drawn

VOCAB = 70
SAMPLED = Sampling(temperature=0.8, top_k=40, top_p=0.95, seed=7)
PENALISED = replace(SAMPLED, repetition=1.3, presence=0.5, frequency=0.25)


def logits_of(rows: int, device: torch.device) -> Tensor:
    random = torch.Generator().manual_seed(rows)
    return (3 * torch.randn(rows, VOCAB, generator=random)).to(device)


def only(*ids: int) -> Tensor:
    """Return a mask that allows these ids."""
    bits = torch.zeros(96, dtype=torch.int64)
    bits[list(ids)] = 1
    words = (bits.view(3, 32) << torch.arange(32)).sum(1)
    return (words - (words >> 31 << 32)).to(torch.int32)


def counts_of(*ids: int) -> Tensor:
    return torch.bincount(torch.tensor(ids), minlength=VOCAB).to(torch.int32)


def tokens(drawn: list[Drawn]) -> list[int]:
    return [one.token for one in drawn]


MIXED = [
    Draw(Sampling(), 0),
    Draw(SAMPLED, 3),
    Draw(SAMPLED, 3, mask=only(1, 33, 69)),
    Draw(PENALISED, 5, counts=counts_of(4, 4, 9, 60)),
    Draw(PENALISED, 6, mask=only(9, 4, 31), counts=counts_of(4, 9)),
]


def test_every_row_is_drawn_as_the_oracle_draws_it(device: torch.device) -> None:
    logits = logits_of(len(MIXED), device)
    drawn = GpuDraw(8, VOCAB, device)(logits, MIXED)
    assert tokens(drawn) == [
        sample(row.cpu(), draw.sampling, draw.position, draw.mask, draw.counts)
        for row, draw in zip(logits, MIXED, strict=True)
    ]
    assert all(one.scores is None for one in drawn)


def test_a_row_is_drawn_alike_alone_and_beside_masks_and_penalties(device: torch.device) -> None:
    logits, draw = logits_of(len(MIXED), device), GpuDraw(8, VOCAB, device)
    together = draw(logits, MIXED)
    assert together == [draw(logits[row : row + 1], [one])[0] for row, one in enumerate(MIXED)]


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_row_that_is_not_finite_has_no_token_and_disturbs_no_other(
    bad: float, device: torch.device
) -> None:
    logits, draws = logits_of(3, device), [Draw(SAMPLED, 1, logprobs=2)] * 3
    draw = GpuDraw(3, VOCAB, device)
    expected = draw(logits, draws)
    logits[1, 68] = bad
    assert draw(logits, draws) == [expected[0], Drawn(NO_TOKEN, None), expected[2]]


def test_scores_are_of_the_plain_logits_and_only_for_rows_that_ask(device: torch.device) -> None:
    logits = logits_of(3, device)
    draws = [Draw(SAMPLED, 0, mask=only(5), logprobs=2), Draw(SAMPLED, 0), Draw(SAMPLED, 0)]
    draws[2] = replace(draws[2], logprobs=0)
    first, second, third = GpuDraw(3, VOCAB, device)(logits, draws)
    assert first.scores is not None and second.scores is None and third.scores is not None
    logprobs = logits.log_softmax(-1)
    assert (first.token, first.scores.chosen) == (5, float(logprobs[0, 5]))
    best, ids = logprobs[0].topk(2)
    assert first.scores.best == tuple(zip(ids.tolist(), best.tolist(), strict=True))
    assert (third.scores.chosen, third.scores.best) == (float(logprobs[2, third.token]), ())


def test_equal_scores_are_listed_by_id(device: torch.device) -> None:
    logits = torch.zeros(1, VOCAB, device=device)
    logits[0, [9, 3, 40]] = 2.0
    (drawn,) = GpuDraw(1, VOCAB, device)(logits, [Draw(Sampling(), 0, logprobs=5)])
    assert drawn.scores is not None
    assert [id for id, _ in drawn.scores.best] == [3, 9, 40, 0, 1]


def test_more_alternatives_than_ids_are_all_of_them(device: torch.device) -> None:
    (drawn,) = GpuDraw(1, VOCAB, device)(
        logits_of(1, device), [Draw(Sampling(), 0, logprobs=VOCAB + 9)]
    )
    assert drawn.scores is not None
    assert sorted(id for id, _ in drawn.scores.best) == [*range(VOCAB)]


def test_a_mask_that_allows_nothing_is_refused(device: torch.device) -> None:
    with pytest.raises(ValueError, match="mask: it allows no token"):
        GpuDraw(1, VOCAB, device)(logits_of(1, device), [Draw(Sampling(), 0, mask=only())])


@pytest.mark.parametrize(
    ("draw", "said"),
    [
        (Draw(PENALISED, 0), "counts: missing"),
        (Draw(PENALISED, 0, counts=torch.zeros(VOCAB - 1, dtype=torch.int32)), "counts: shape"),
        (Draw(SAMPLED, 0, mask=torch.zeros(2, dtype=torch.int32)), "mask: shape"),
    ],
    ids=["no counts", "counts", "mask"],
)
def test_what_does_not_fit_the_vocabulary_is_refused(
    draw: Draw, said: str, device: torch.device
) -> None:
    with pytest.raises(ValueError, match=said):
        GpuDraw(1, VOCAB, device)(logits_of(1, device), [draw])
