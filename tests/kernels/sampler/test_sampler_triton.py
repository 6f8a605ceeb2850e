"""The sampler in Triton, beside its oracle."""

# mypy: disallow-untyped-calls=False, disallow-untyped-decorators=False
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from tailrace.kernels.sampler.draw_triton import noise, noise_words, weights
from tailrace.kernels.sampler.sampler import Sampling, gumbel, philox, sample
from tailrace.kernels.sampler.sampler import weights as oracle_weights
from tailrace.kernels.sampler.sampler_rows import SamplerRows, SamplerWorkspace
from tailrace.kernels.sampler.sampler_triton import (
    FAULT_EMPTY_MASK,
    FAULT_NOT_FINITE,
    sample_rows,
    variants,
)
from tailrace.kernels.shapes import BITNET_2B4T, QWEN3_8B, DecoderShape
from tests.kernels.guarded import Guarded

PLAIN = Sampling(temperature=0.9, seed=11)
SELECTIONS: dict[str, tuple[Any, ...]] = {
    "top_k": (0, 5),
    "top_p": (1.0, 0.8),
    "min_p": (0.0, 0.02),
}


@triton.jit
def store_noise(ids_ptr, words_ptr, noise_ptr, seed_ptr, position, block: tl.constexpr):
    at = tl.arange(0, block)
    ids, seed = tl.load(ids_ptr + at), tl.load(seed_ptr)
    tl.store(words_ptr + at, noise_words(ids, seed, position).to(tl.int64))
    tl.store(noise_ptr + at, noise(ids, seed, position))


@triton.jit
def store_weights(scores_ptr, weights_ptr, block: tl.constexpr):
    at = tl.arange(0, block)
    tl.store(weights_ptr + at, weights(tl.load(scores_ptr + at)))


def random_logits(rows: int, vocab: int, seed: int) -> Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 3


def random_mask(rows: int, vocab: int, seed: int) -> Tensor:
    random = torch.Generator().manual_seed(seed)
    words = torch.randint(-(2**31), 2**31, (rows, -(-vocab // 32)), generator=random)
    words[:, 0] |= 1
    return words.to(torch.int32)


def random_counts(rows: int, vocab: int, seed: int) -> Tensor:
    random = torch.Generator().manual_seed(seed)
    return torch.randint(-2, 4, (rows, vocab), generator=random).clamp(min=0).to(torch.int32)


def drawn(
    device: torch.device,
    logits: Tensor,
    samplings: Sequence[Sampling],
    positions: Iterable[int] | None = None,
    mask: Tensor | None = None,
    counts: Tensor | None = None,
) -> list[int]:
    """Return what the kernels draw; no row may have a fault."""
    ids, faults = run(device, logits, samplings, positions, mask, counts)
    assert not any(faults)
    return ids


def run(
    device: torch.device,
    logits: Tensor,
    samplings: Sequence[Sampling],
    positions: Iterable[int] | None = None,
    mask: Tensor | None = None,
    counts: Tensor | None = None,
) -> tuple[list[int], list[int]]:
    rows = SamplerRows.of(
        samplings,
        list(range(len(samplings)) if positions is None else positions),
        device,
        None if mask is None else mask.to(device),
        None if counts is None else counts.to(device),
    )
    workspace = SamplerWorkspace(logits.shape[0], logits.shape[1], device)
    ids = torch.full((len(samplings),), -1, dtype=torch.int32, device=device)
    faults = torch.full_like(ids, -1)
    sample_rows(logits.to(device), rows, ids, faults, workspace)
    return ids.tolist(), faults.tolist()


def expected(
    logits: Tensor,
    samplings: Sequence[Sampling],
    mask: Tensor | None = None,
    counts: Tensor | None = None,
) -> list[int]:
    """Return the oracle's draws for the rows; a row's number is its position."""
    return [
        sample(
            logits[row],
            sampling,
            row,
            None if mask is None else mask[row],
            None if counts is None else counts[row],
        )
        for row, sampling in enumerate(samplings)
    ]


def combinations(temperature: float) -> list[Sampling]:
    return [
        Sampling(temperature, top_k, top_p, 7 * index, min_p)
        for index, (top_k, top_p, min_p) in enumerate(itertools.product(*SELECTIONS.values()))
    ]


@pytest.mark.parametrize("seed", [0, 1, 2**63, 2**64 - 1, 0xFEDCBA9876543210])
def test_random_words_and_noise_are_those_of_the_oracle(device: torch.device, seed: int) -> None:
    ids = torch.cat((torch.arange(1020), torch.tensor([128_255, 151_935, 2**24, 2**31 - 1])))
    words = torch.zeros(1024, dtype=torch.int64, device=device)
    noises = torch.zeros(1024, device=device)
    key = torch.tensor([seed - (seed >> 63 << 64)], device=device)
    on_device = ids.to(torch.int32).to(device)
    store_noise[(1,)](on_device, words, noises, key, 40_959, block=1024)
    counter = torch.stack((ids, torch.full_like(ids, 40_959), ids * 0, ids * 0))
    assert words.cpu().equal(philox(counter, seed)[0])
    assert noises.cpu().equal(gumbel(ids, seed, 40_959))


def test_weights_are_those_of_the_oracle(device: torch.device) -> None:
    scores = -torch.rand(4096, generator=torch.Generator().manual_seed(1)) * 30
    scores[::7] *= 1e-3
    scores[:4] = torch.tensor([0.0, -0.0, -1e-45, -torch.inf])
    result = torch.zeros(4096, dtype=torch.int64, device=device)
    store_weights[(1,)](scores.to(device), result, block=4096, enable_fp_fusion=False)
    assert result.cpu().equal(oracle_weights(scores))


@pytest.mark.parametrize("restricted", [False, True])
def test_every_combination_of_settings_draws_what_the_oracle_draws(
    device: torch.device, restricted: bool
) -> None:
    samplings = [Sampling(), *combinations(0.7), *combinations(2.0)]
    logits = random_logits(len(samplings), 100, 1)
    mask = counts = None
    if restricted:
        samplings = [
            replace(s, repetition=1.3, presence=0.4, frequency=-0.2) if row % 3 else s
            for row, s in enumerate(samplings)
        ]
        mask = random_mask(len(samplings), 100, 2)
        counts = random_counts(len(samplings), 100, 3)
    assert drawn(device, logits, samplings, None, mask, counts) == expected(
        logits, samplings, mask, counts
    )


@pytest.mark.parametrize("vocab", [1, 2, 31, 1000, 1024, 4097])
def test_every_size_of_vocabulary_with_many_equal_logits(device: torch.device, vocab: int) -> None:
    samplings = [
        Sampling(),
        Sampling(1.5, seed=1),
        Sampling(1.5, top_k=max(vocab // 3, 1), seed=2),
        Sampling(4.0, top_p=0.6, seed=3),
        Sampling(2.0, top_k=17, top_p=0.7, min_p=0.01, seed=4),
    ]
    logits = (random_logits(5, vocab, vocab) / 3).round()
    assert drawn(device, logits, samplings) == expected(logits, samplings)


def test_of_equal_logits_the_lowest_ids_survive(device: torch.device) -> None:
    logits = torch.zeros(8, 2500)
    samplings = [Sampling(1.0, top_k=3, seed=seed) for seed in range(3)]
    samplings += [Sampling(1.0, top_p=4 / 2500, seed=seed) for seed in range(3)]
    samplings += [Sampling(), Sampling(1.0, top_k=1300, top_p=0.5, seed=9)]
    ids = drawn(device, logits, samplings)
    assert ids == expected(logits, samplings)
    assert max(ids[:3]) < 3
    assert max(ids[3:6]) < 4
    assert ids[6] == 0
    assert ids[7] < 650


def test_of_equal_best_logits_in_many_blocks_greedy_takes_the_lowest_id(
    device: torch.device,
) -> None:
    logits = torch.zeros(2, 3000)
    logits[0, [1023, 1024, 2999]] = 1.0
    logits[1, [2047, 2999]] = 1.0
    assert drawn(device, logits, [Sampling()] * 2) == [1023, 2047]


@pytest.mark.parametrize("top_k", [1, 60, 61, 2**31, 2**40])
def test_top_k_of_one_of_the_vocabulary_and_beyond(device: torch.device, top_k: int) -> None:
    logits = random_logits(2, 60, 4)
    samplings = [Sampling(3.0, top_k=top_k, seed=5), Sampling(3.0, top_k, top_p=0.9, seed=6)]
    ids = drawn(device, logits, samplings)
    assert ids == expected(logits, samplings)
    if top_k == 1:
        assert ids == logits.argmax(-1).tolist()
    elif top_k >= 60:
        assert ids == drawn(device, logits, [replace(s, top_k=0) for s in samplings])


def test_scores_far_below_the_best_are_ranked_but_never_drawn(device: torch.device) -> None:
    """The kernels bin scores down to -32 only; the oracle sorts them all."""
    logits = -torch.arange(50.0).expand(4, 50) * 20
    samplings = [
        Sampling(1.0, top_k=30, seed=1),
        Sampling(1.0, top_p=0.9999, seed=2),
        Sampling(1.0, top_k=30, top_p=0.9999, seed=3),
        Sampling(100.0, top_k=30, top_p=0.95, seed=4),
    ]
    assert drawn(device, logits, samplings) == expected(logits, samplings)


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
def test_extreme_temperatures_draw_what_the_oracle_draws(device: torch.device) -> None:
    logits = random_logits(5, 40, 8)
    samplings = [Sampling(1e-38, seed=1), Sampling(1e-38, 3, 0.5), Sampling(1e-50, 3)]
    samplings += [Sampling(3e38, seed=2), Sampling(3e38, 7, 0.5, seed=3)]
    ids = drawn(device, logits, samplings)
    assert ids == expected(logits, samplings)
    assert ids[:3] == logits[:3].argmax(-1).tolist()


def test_a_row_is_drawn_alike_in_batches_of_every_size(device: torch.device) -> None:
    logits = random_logits(17, 70, 5)
    samplings = [Sampling() if row % 8 else replace(PLAIN, seed=row) for row in range(17)]
    samplings[0] = Sampling(1.2, top_k=20, top_p=0.9, seed=3)
    whole = expected(logits, samplings)
    for rows in range(1, 18):
        assert drawn(device, logits[:rows], samplings[:rows]) == whole[:rows]


def test_a_row_is_drawn_alike_at_every_place_in_the_batch(device: torch.device) -> None:
    logits = random_logits(4, 70, 6)
    samplings = [Sampling(1.5, 30, 0.9, seed=1), PLAIN, Sampling(1.5, top_p=0.7, seed=2), PLAIN]
    whole = drawn(device, logits, samplings)
    turned = drawn(device, logits.roll(1, 0), samplings[-1:] + samplings[:-1], [3, 0, 1, 2])
    assert turned == whole[-1:] + whole[:-1]


def test_sizes_of_blocks_change_nothing(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits = random_logits(4, 5000, 7)
    samplings = [
        Sampling(),
        Sampling(1.1, seed=1),
        Sampling(1.1, 50, 0.9, 2),
        Sampling(3, 0, 0.9, 3),
    ]
    small = drawn(device, logits, samplings)
    monkeypatch.setattr("tailrace.kernels.sampler.sampler_plan.MAX_SMALL_BLOCKS", 0)
    assert drawn(device, logits, samplings) == small
    monkeypatch.setattr("tailrace.kernels.sampler.sampler_plan.CANDIDATE_BLOCK", 16)
    monkeypatch.setattr("tailrace.kernels.sampler.sampler_plan.EDGE_WAYS", 32)
    assert drawn(device, logits[2:], samplings[2:], [2, 3]) == small[2:]


def test_draws_follow_the_chances_of_the_survivors(device: torch.device) -> None:
    """Chi-square of 40 draws among four survivors, with fixed seeds."""
    draws = 40
    logits = torch.tensor([0.5, -9.0, 0.0, 1.0, -8.0, 0.2]).expand(draws, 6).contiguous()
    sampling = Sampling(1.0, min_p=0.01, seed=2)
    counts = Counter(drawn(device, logits, [sampling] * draws))
    chances = logits[0, [0, 2, 3, 5]].softmax(-1).tolist()
    assert set(counts) == {0, 2, 3, 5}
    chi_square = sum(
        (counts[id] - draws * chance) ** 2 / (draws * chance)
        for id, chance in zip((0, 2, 3, 5), chances, strict=True)
    )
    assert chi_square < 11.3  # 3 degrees of freedom: exceeded once in a hundred seeds


def test_a_row_with_a_fault_leaves_the_others_as_they_are(device: torch.device) -> None:
    samplings = [PLAIN, PLAIN, Sampling(1.0, 5, 0.9), Sampling(), PLAIN, PLAIN, Sampling(1.0, 5)]
    logits = random_logits(7, 1100, 9)
    mask = torch.full((7, 35), -1, dtype=torch.int32)
    whole = drawn(device, logits, samplings, None, mask)
    logits[1, 1099] = torch.nan
    logits[2, 0] = torch.inf
    logits[3, 1030] = -torch.inf
    mask[4] = 0
    mask[4, 34] = ~0xFFF  # only bits beyond the vocabulary
    mask[5] = 0
    logits[5, 3] = torch.nan
    ids, faults = run(device, logits, samplings, None, mask)
    not_finite = [FAULT_NOT_FINITE] * 3
    assert faults == [0, *not_finite, FAULT_EMPTY_MASK, FAULT_NOT_FINITE, 0]
    assert ids == [whole[0], 0, 0, 0, 0, 0, whole[6]]


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
def test_a_logit_that_a_penalty_makes_infinite_is_a_fault(device: torch.device) -> None:
    logits = torch.full((1, 40), -1e30)
    counts = torch.zeros(1, 40, dtype=torch.int32)
    counts[0, 39] = 1
    _, faults = run(device, logits, [Sampling(repetition=1e30)], counts=counts)
    assert faults == [FAULT_NOT_FINITE]


def test_settings_without_meaning_are_read_as_the_rows_say(device: torch.device) -> None:
    rows = SamplerRows.of([replace(PLAIN, seed=row) for row in range(8)], range(8), device)
    logits = random_logits(8, 90, 10)
    changes = (
        ("temperature", -1.0),
        ("temperature", torch.nan),
        ("top_k", -3),
        ("top_p", 1.5),
        ("top_p", -1.0),
        ("min_p", -1.0),
        ("min_p", 2.0),
        ("temperature", torch.inf),
    )
    for row, (name, value) in enumerate(changes):
        getattr(rows, name)[row] = value
    ids = torch.full((8,), -1, dtype=torch.int32, device=device)
    faults = torch.full_like(ids, -1)
    sample_rows(logits.to(device), rows, ids, faults, SamplerWorkspace(8, 90, device))
    best = logits.argmax(-1).tolist()
    plain = expected(logits, [replace(PLAIN, seed=row) for row in range(8)])
    hottest = sample(logits[7], Sampling(torch.finfo(torch.float32).max, seed=7), 7)
    assert not faults.any()
    assert ids.tolist() == [*best[:2], *plain[2:4], best[4], plain[5], best[6], hottest]


def guarded(tensor: Tensor) -> tuple[Guarded, Tensor]:
    """Return a copy of a tensor within guarded margins, and their keeper."""
    keeper = Guarded(tensor.view(torch.int32) if tensor.dtype == torch.int64 else tensor)
    return keeper, keeper.tensor.view(tensor.dtype)


@pytest.mark.parametrize("vocab", [33, 1025])
def test_nothing_is_read_or_written_outside_the_tensors(device: torch.device, vocab: int) -> None:
    samplings = [Sampling(), PLAIN, Sampling(2.0, 9, 0.9, 1, 0.01), Sampling(2.0, 0, 0.9, 2)]
    samplings = [replace(s, presence=0.5) for s in samplings]
    logits = random_logits(4, vocab, 11)
    mask, counts = random_mask(4, vocab, 12), random_counts(4, vocab, 13)
    keepers = []

    def copied(tensor: Tensor) -> Tensor:
        keeper, copy = guarded(tensor)
        keepers.append(keeper)
        return copy

    rows = SamplerRows.of(samplings, range(4), device, mask.to(device), counts.to(device))
    rows = SamplerRows(*(copied(getattr(rows, field.name)) for field in fields(rows)))
    workspace = SamplerWorkspace(4, vocab, device)
    for name, tensor in vars(workspace).items():
        if isinstance(tensor, Tensor):
            setattr(workspace, name, copied(torch.zeros_like(tensor)))
    ids = copied(torch.full((4,), -1, dtype=torch.int32, device=device))
    faults = copied(torch.full_like(ids, -1))
    sample_rows(copied(logits.to(device)), rows, ids, faults, workspace)
    assert ids.tolist() == expected(logits, samplings, mask, counts)
    assert not faults.any()
    assert all(keeper.intact() for keeper in keepers)


def test_a_workspace_may_hold_anything_and_have_room_to_spare(device: torch.device) -> None:
    workspace = SamplerWorkspace(5, 80, device)
    for tensor in vars(workspace).values():
        if isinstance(tensor, Tensor):
            tensor.view(torch.uint8).fill_(0x7F)
    logits = random_logits(2, 80, 14)
    samplings = [Sampling(1.5, 11, 0.9, 1), Sampling(1.5, 0, 0.9, 2)]
    rows = SamplerRows.of(samplings, range(2), device)
    ids = torch.full((2,), -1, dtype=torch.int32, device=device)
    sample_rows(logits.to(device), rows, ids, torch.zeros_like(ids), workspace)
    assert ids.tolist() == expected(logits, samplings)


def test_no_rows_is_no_launch(device: torch.device) -> None:
    assert run(device, torch.zeros(0, 5), []) == ([], [])


CPU = torch.device("cpu")
WRONG_ROWS: list[tuple[str, type[Exception], Tensor | None]] = [
    ("temperature", ValueError, torch.zeros(3)),
    ("top_k", TypeError, torch.zeros(2)),
    ("top_p", TypeError, torch.zeros(2, dtype=torch.float16)),
    ("min_p", ValueError, torch.zeros(2, 1)),
    ("seed", TypeError, torch.zeros(2, dtype=torch.int32)),
    ("position", ValueError, torch.zeros(1, dtype=torch.int32)),
    ("mask", ValueError, torch.zeros(2, 3, dtype=torch.int32)),
    ("counts", TypeError, torch.zeros(2, 64)),
    ("counts", ValueError, None),
    ("penalties", ValueError, torch.zeros(2, 2)),
]
WRONG_ARGUMENTS: list[tuple[str, type[Exception], object]] = [
    ("logits", TypeError, torch.zeros(2, 64, dtype=torch.float64)),
    ("logits", ValueError, torch.zeros(64)),
    ("logits", ValueError, torch.zeros(64, 2).T),
    ("logits", ValueError, torch.zeros(2, 0)),
    ("ids", TypeError, torch.zeros(2, dtype=torch.int64)),
    ("faults", ValueError, torch.zeros(3, dtype=torch.int32)),
    ("workspace", ValueError, SamplerWorkspace(1, 64, CPU)),
    ("workspace", ValueError, SamplerWorkspace(2, 65, CPU)),
]


def right_arguments() -> dict[str, Any]:
    counts = torch.zeros(2, 64, dtype=torch.int32)
    return {
        "logits": torch.zeros(2, 64),
        "rows": SamplerRows.of([PLAIN] * 2, range(2), CPU, None, counts),
        "ids": torch.zeros(2, dtype=torch.int32),
        "faults": torch.zeros(2, dtype=torch.int32),
        "workspace": SamplerWorkspace(2, 64, CPU),
    }


@pytest.mark.parametrize(("name", "error", "value"), WRONG_ARGUMENTS)
def test_an_argument_that_does_not_fit_is_named(
    name: str, error: type[Exception], value: object
) -> None:
    with pytest.raises(error, match=rf"^{name}\b"):
        sample_rows(**right_arguments() | {name: value})


@pytest.mark.parametrize(("name", "error", "value"), WRONG_ROWS)
def test_a_setting_of_the_rows_that_does_not_fit_is_named(
    name: str, error: type[Exception], value: Tensor | None
) -> None:
    call = right_arguments()
    with pytest.raises(error, match=rf"^{name}\b"):
        sample_rows(**call | {"rows": replace(call["rows"], **{name: value})})


def test_rows_that_penalise_need_counts() -> None:
    with pytest.raises(ValueError, match="counts"):
        SamplerRows.of([Sampling(presence=0.1)], [0], torch.device("cpu"))


@pytest.mark.parametrize("shape", [BITNET_2B4T, QWEN3_8B], ids=lambda shape: shape.name)
def test_variants_have_names_of_their_own_and_all_arguments(shape: DecoderShape) -> None:
    found = list(variants(shape))
    assert len({variant.name for variant in found}) == len(found)
    for rows, dependent in ((1, False), (1, True), (16, False), (64, False)):
        own = [v for v in found if v.launch_pdl is dependent and f"rows={rows}" in v.name.split()]
        assert len(own) == (4 if dependent else 7)
    for variant in found:
        given = [*variant.signature, *variant.constants]
        assert sorted(given) == sorted(variant.kernel.arg_names)
