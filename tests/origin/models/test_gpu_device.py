"""Steps on the kernels whose ids come from where the step before drew them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tailrace.kernels.sampler.sampler import Sampling
from tailrace.kernels.shapes import Family
from tailrace.origin.models import gpu_model
from tailrace.origin.models.gpu_model import GpuLaunch, GpuModel
from tailrace.origin.models.model import (
    AtOnce,
    Draw,
    Drawn,
    Piece,
    StepDevice,
    drawn_before,
)
from tests.origin.tiny_checkpoint import KERNEL_SHAPES, write_checkpoint

pytestmark = pytest.mark.usefixtures("few_programs")

SAMPLED = Sampling(temperature=1.5, seed=3)


def three_steps(device: StepDevice) -> list[Sequence[Drawn]]:
    """Launch the second before the first is read; the third asks one row for scores."""

    def draws(position: int, logprobs: int | None = None) -> list[Draw]:
        return [Draw(SAMPLED, position), Draw(SAMPLED, position, logprobs=logprobs)]

    prompts = [Piece([1, 2, 3], 0, [0], True), Piece([4], 0, [1], True)]
    first = device.launch(prompts, [2, 3], draws(0))
    rows = [Piece([drawn_before(1)], 1, [1], False), Piece([drawn_before(0)], 3, [0], False)]
    second = device.launch(rows, [0, 1], draws(1))
    if isinstance(device, GpuModel):
        assert isinstance(first, GpuLaunch) and first.flags == 4
        assert isinstance(second, GpuLaunch) and second.flags == 0, "one graph"
    found = [first.read()]
    rows = [Piece([drawn_before(1)], 4, [0], False), Piece([drawn_before(0)], 2, [1], False)]
    third = device.launch(rows, [0, 1], draws(2, logprobs=2))
    if isinstance(device, GpuModel):
        assert isinstance(third, GpuLaunch) and third.flags == 0, "scores leave no graph"
    found += [second.read(), third.read()]
    assert all(all(each.fine) for each in found)
    return [each.drawn for each in found]


def test_tokens_are_those_of_a_host_that_waits_for_each_step(
    tmp_path: Path, device: torch.device
) -> None:
    folder = write_checkpoint(tmp_path, KERNEL_SHAPES[Family.LLAMA])
    model = gpu_model.load(folder, device=device)
    expected = three_steps(AtOnce(model))
    assert three_steps(model) == expected
    assert expected[2][1].scores is not None and expected[2][0].scores is None


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_a_row_at_fault_of_a_step_that_is_filled_up_fails_alone(
    tmp_path: Path, device: torch.device
) -> None:
    folder = write_checkpoint(tmp_path, KERNEL_SHAPES[Family.LLAMA])
    model = gpu_model.load(folder, device=device)
    draws = [Draw(replace(SAMPLED, seed=seed), 0) for seed in range(3)]
    rows = [Piece([token], 0, [token], False) for token in range(3)]
    expected = AtOnce(model).launch(rows, range(3), draws).read()
    assert model.launch(rows, range(3), draws).read() == expected
    model._decoder.table[1] = torch.nan
    results = model.launch(rows, range(3), draws).read()
    assert results.fine == [True, False, True]
    assert results.drawn == [expected.drawn[0], Drawn(-1), expected.drawn[2]]


def test_masks_penalties_and_scores_are_drawn_after_the_captured_step(
    tmp_path: Path, device: torch.device
) -> None:
    """Each row beside the others gives what one gives alone that is waited for; counts grow."""
    folder = write_checkpoint(tmp_path, KERNEL_SHAPES[Family.LLAMA])
    model = gpu_model.load(folder, device=device)
    vocab = model.config.vocab
    penalised = replace(SAMPLED, repetition=1.5, frequency=0.5)
    mask = torch.zeros(-(-vocab // 32), dtype=torch.int32)
    mask[1] = 1 << 7
    generated: list[int] = []
    for step in range(3):
        counts = torch.bincount(torch.tensor(generated, dtype=torch.int64), minlength=vocab).int()
        draws = [
            Draw(SAMPLED, step),
            Draw(SAMPLED, step, mask, logprobs=2),
            Draw(penalised, step, None, counts, generated=generated),
            Draw(penalised, step, None, counts, logprobs=1),
        ]
        tokens = (1, 2, 3, 3)
        rows = [Piece([token], step, [row], False) for row, token in enumerate(tokens)]
        expected = AtOnce(model).launch(rows, range(len(draws)), draws).read()
        launch = model.launch(rows, range(len(draws)), draws)
        assert isinstance(launch, GpuLaunch) and launch.flags == 0, "one graph"
        found = launch.read()
        assert found == expected
        assert found.drawn[1].token == 39
        assert found.drawn[2].token == found.drawn[3].token
        generated += [found.drawn[2].token, step]


def test_a_mask_that_allows_nothing_is_refused_when_the_step_is_read(
    tmp_path: Path, device: torch.device
) -> None:
    model = gpu_model.load(write_checkpoint(tmp_path, KERNEL_SHAPES[Family.LLAMA]), device=device)
    mask = torch.zeros(-(-model.config.vocab // 32), dtype=torch.int32)
    rows = [Piece([1], 0, [0], False), Piece([2], 0, [1], False)]
    launch = model.launch(rows, [0, 1], [Draw(SAMPLED, 0), Draw(SAMPLED, 0, mask)])
    with pytest.raises(ValueError, match="mask: it allows no token"):
        launch.read()
