"""Speculative decoding: drafts by prompt lookup and by a draft model."""

import itertools
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tailrace.kernels.sampler.sampler import Sampling
from tailrace.origin.engine.drafts import (
    CATCH_UP_TOKENS,
    FIRST_DRAFT_TOKENS,
    LOOKUP_TOKENS,
    MAX_DRAFT_TOKENS,
    NGRAM_TOKENS,
    Asked,
    Drafter,
    DraftLength,
    DraftModel,
    PromptLookup,
    accepted,
)
from tailrace.origin.models import cpu_model
from tailrace.origin.models.model import PREFILL_CHUNK_TOKENS, Draw, Model, Piece, prefill
from tailrace.origin.scheduler.pages import PagePool
from tests.origin.tiny_checkpoint import Shape, write_checkpoint

# ---- acceptance ----


@pytest.mark.parametrize(
    ("drafts", "drawn", "tokens"),
    [
        ([], [5], [5]),
        ([5, 6], [5, 6, 7], [5, 6, 7]),
        ([5, 6], [5, 8, 7], [5, 8]),
        ([5, 6], [9, 6, 7], [9]),
        ([5, 6], [5], [5]),
        ([5], [], []),
        ([5, 6], [5, -1, 3], [5, -1]),
    ],
)
def test_draws_count_up_to_the_first_that_is_not_its_draft(
    drafts: list[int], drawn: list[int], tokens: list[int]
) -> None:
    assert accepted(drafts, drawn) == tokens


def next_token(ids: Sequence[int]) -> int:
    """Return the next token of a made-up model: it depends on the last ids, and repeats itself."""
    return random.Random(sum(ids[-3:]) % 11).randrange(6)


def decode(prompt: list[int], count: int, drafter: Drafter | None) -> tuple[list[int], int]:
    """`count` tokens and the steps that they took: the rows of a step see all drafts before."""
    ids, steps = list(prompt), 0
    while len(ids) < len(prompt) + count:
        room = len(prompt) + count - len(ids) - 1
        drafts = propose(drafter, ids, room) if drafter is not None else []
        assert len(drafts) <= room
        drawn = [next_token([*ids, *drafts[:row]]) for row in range(len(drafts) + 1)]
        tokens = accepted(drafts, drawn)
        if drafter is not None:
            drafter.learn(1, len(drafts), len(tokens) - 1)
        ids += tokens
        steps += 1
    return ids[len(prompt) :], steps


def propose(drafter: Drafter, ids: Sequence[int], limit: int, run: int = 1) -> Sequence[int]:
    """Return what one run alone is proposed."""
    (guesses,) = drafter.propose([Asked(run, ids, limit)])
    return guesses


class Guesses:
    """Drafts of no merit."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def propose(self, asked: Sequence[Asked]) -> list[Sequence[int]]:
        return [self._guess(min(each.limit, self._random.randrange(6))) for each in asked]

    def _guess(self, count: int) -> list[int]:
        return [self._random.randrange(6) for _ in range(count)]

    def learn(self, run: int, drafted: int, accepted: int) -> None: ...

    def release(self, run: int) -> None: ...


@settings(max_examples=60)
@given(st.lists(st.integers(0, 5), min_size=1, max_size=20), st.integers(1, 40), st.integers(0, 99))
def test_drafts_never_change_the_text(prompt: list[int], count: int, seed: int) -> None:
    plain, _ = decode(prompt, count, None)
    assert decode(prompt, count, Guesses(seed))[0] == plain
    assert decode(prompt, count, PromptLookup())[0] == plain


def test_a_text_that_repeats_itself_takes_fewer_steps() -> None:
    _, steps = decode([1, 2, 3], 200, PromptLookup())
    assert steps < 100


# ---- how many ----


def test_the_length_grows_while_all_drafts_are_right_and_falls_when_one_is_wrong() -> None:
    length = DraftLength()
    assert length.tokens == FIRST_DRAFT_TOKENS
    length.learn(FIRST_DRAFT_TOKENS, FIRST_DRAFT_TOKENS)
    assert length.tokens == FIRST_DRAFT_TOKENS + 2
    for _ in range(9):
        length.learn(length.tokens, length.tokens)
    assert length.tokens == MAX_DRAFT_TOKENS
    length.learn(MAX_DRAFT_TOKENS, 2)
    assert length.tokens == 3
    length.learn(3, 0)
    assert length.tokens == 1
    length.learn(0, 0)
    assert length.tokens == 1


# ---- prompt lookup ----


def test_it_drafts_what_followed_the_last_time() -> None:
    ids = [1, 2, 3, 4, 9, 1, 2, 3, 5, 8, 1, 2, 3]
    assert propose(PromptLookup(), ids, 2) == [5, 8]


def test_a_longer_match_counts_before_a_later_one() -> None:
    ids = [7, 1, 2, 3, 4, 9, 0, 2, 3, 5, 8, 7, 1, 2, 3]
    assert propose(PromptLookup(), ids, 2) == [4, 9]


def test_what_repeats_is_drafted_round_and_round() -> None:
    assert propose(PromptLookup(), [3, 4, 3, 4], 4) == [3, 4, 3, 4]
    assert propose(PromptLookup(), [5, 5, 5], 3) == [5, 5, 5]


@pytest.mark.parametrize("ids", [[], [1], [1, 2], [1, 2, 3, 4]])
def test_without_a_match_there_are_no_drafts(ids: list[int]) -> None:
    assert propose(PromptLookup(), ids, 4) == ()


def test_there_are_no_more_drafts_than_it_may_give() -> None:
    lookup = PromptLookup()
    assert propose(lookup, [1, 2, 1, 2], 0) == ()
    assert len(propose(lookup, [1, 2, 1, 2], 99)) == FIRST_DRAFT_TOKENS


@given(st.lists(st.integers(0, 3), max_size=30), st.data())
def test_what_is_indexed_step_by_step_is_what_a_search_finds(
    ids: list[int], data: st.DataObject
) -> None:
    lookup = PromptLookup()
    cuts = data.draw(st.sets(st.integers(0, len(ids))))
    for cut in sorted(cuts):
        found = next(filter(None, (search(ids[:cut], size) for size in NGRAM_TOKENS)), None)
        first = list(propose(lookup, ids[:cut], 1))
        assert first == ([] if found is None else [ids[found]])


def search(ids: list[int], size: int) -> int | None:
    """Return where the last follower of the last `size` tokens is."""
    ends = [at for at in range(size, len(ids)) if ids[at - size : at] == ids[-size:]]
    return ends[-1] if ends else None


def test_what_is_long_ago_is_forgotten_and_what_is_not_is_remembered() -> None:
    phrase = [1, 2, 3, 4, 5]
    noise = itertools.count(10)
    ids = [*phrase, *itertools.islice(noise, LOOKUP_TOKENS - 10), *phrase[:4]]
    lookup = PromptLookup()
    assert propose(lookup, ids, 1) == [5]
    for _ in range(12):
        ids += itertools.islice(noise, LOOKUP_TOKENS // 4)
        assert propose(lookup, ids, 1) == ()
    ids += phrase[:4]
    assert propose(lookup, ids, 1) == ()
    assert propose(PromptLookup(), ids, 1) == ()


# ---- a draft model ----


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    torch.set_num_threads(1)
    shape = Shape(context=1024, layers=1)
    return cpu_model.load(write_checkpoint(tmp_path_factory.mktemp("draft"), shape))


def greedy(model: Model, ids: Sequence[int], count: int) -> list[int]:
    """Return what the model itself writes after `ids`; its cache is all its own here."""
    pages = list(range(model.pages - 16, model.pages))
    hidden = prefill(model, ids, pages)
    tokens: list[int] = []
    while True:
        tokens.append(model.draw(hidden[-1:], [Draw(Sampling(), len(tokens))])[0].token)
        if len(tokens) == count:
            return tokens
        hidden = model.forward([Piece(tokens[-1:], len(ids) + len(tokens) - 1, pages, False)])


def pool_for(model: Model) -> PagePool:
    """Pages that `greedy` does not use."""
    return PagePool(model.pages - 16)


@pytest.mark.parametrize("prompt_tokens", [1, 63, 64, 65, 200])
def test_a_draft_model_proposes_what_it_would_write(model: Model, prompt_tokens: int) -> None:
    ids = [(7 * at) % 290 + 1 for at in range(prompt_tokens)]
    drafter = DraftModel(model, pool_for(model))
    assert propose(drafter, ids, 3) == greedy(model, ids, 3)


def test_after_wrong_drafts_it_goes_on_from_the_text(model: Model) -> None:
    ids = [(5 * at) % 290 + 1 for at in range(70)]
    drafter = DraftModel(model, pool_for(model))
    for right in (0, 2, 4, 1):
        drafts = list(propose(drafter, ids, 4))
        assert drafts == greedy(model, ids, len(drafts))
        tokens = [*drafts[:right], 7 if drafts[min(right, len(drafts) - 1)] != 7 else 8]
        drafter.learn(1, len(drafts), min(right, len(drafts)))
        ids += tokens


def test_a_long_text_is_taken_in_over_several_steps(model: Model) -> None:
    ids = [(3 * at) % 290 + 1 for at in range(CATCH_UP_TOKENS + 200)]
    drafter = DraftModel(model, pool_for(model))
    assert propose(drafter, ids, 2) == []
    ids += [5]
    assert propose(drafter, ids, 2) == greedy(model, ids, 2)


def test_the_drafts_of_many_runs_are_one_batch_and_those_of_each_alone(model: Model) -> None:
    class Counting:
        def __init__(self) -> None:
            self.config, self.batches = model.config, 0
            self.draw = model.draw

        def forward(self, pieces: Sequence[Piece]) -> torch.Tensor:
            self.batches += 1
            return model.forward(pieces)

    texts = [[(step * at) % 290 + 1 for at in range(20 + 7 * step)] for step in range(1, 9)]
    counting: Any = Counting()
    together = DraftModel(counting, pool_for(model))
    limits = [run % 4 + 1 for run in range(len(texts))]
    asked = [Asked(run, ids, limits[run]) for run, ids in enumerate(texts)]
    expected = [greedy(model, ids, limit) for ids, limit in zip(texts, limits, strict=True)]
    assert together.propose(asked) == expected
    chunks = -(-max(map(len, texts)) // PREFILL_CHUNK_TOKENS)
    assert counting.batches == chunks + max(limits)


def test_a_step_takes_in_so_much_of_all_runs_together(model: Model) -> None:
    """Those that came first are caught up first; the others propose nothing yet."""
    texts = [[(3 * at) % 290 + run for at in range(200)] for run in range(1, 5)]
    drafter = DraftModel(model, pool_for(model))
    asked = [Asked(run, ids, 2) for run, ids in enumerate(texts)]
    first = [bool(drafts) for drafts in drafter.propose(asked)]
    assert first != [True] * 4
    assert [list(drafts) for drafts in drafter.propose(asked)] == [
        greedy(model, ids, 2) for ids in texts
    ]


def test_it_gives_its_pages_back_and_can_go_on_after(model: Model) -> None:
    pool = pool_for(model)
    before = pool.free
    drafter = DraftModel(model, pool)
    ids = [9, 8, 7]
    drafts = propose(drafter, ids, 2)
    assert pool.free == before - 1
    drafter.release(1)
    assert pool.free == before
    assert propose(drafter, ids, 2) == drafts


def test_without_pages_or_room_in_the_context_it_proposes_nothing(model: Model) -> None:
    pool = pool_for(model)
    taken = pool.take(pool.free)
    drafter = DraftModel(model, pool)
    assert propose(drafter, [1, 2, 3], 4) == ()
    assert taken is not None
    pool.release(taken)
    assert len(propose(drafter, [1, 2, 3], 4)) == 4
    assert propose(drafter, [1] * 1024, 4) == ()
