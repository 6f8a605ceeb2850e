"""Inputs of a captured step: padding, tables and their refilling."""

from random import Random

import pytest
import torch

from tailrace.kernels.one_copy import ALIGNED_BYTES
from tailrace.kernels.sampler.sampler import Sampling
from tailrace.kernels.sampler.sampler_rows import SamplerRows
from tailrace.kernels.step_graph import NO_PAGE, NO_POSITION, StepInputs


def test_rows_beyond_those_filled_in_have_no_length_no_position_and_no_pages(
    device: torch.device,
) -> None:
    inputs = StepInputs(4, 3, device)
    inputs.fill([7, 8], [5, 64], [0, 1], [[9], [2, 6]])
    rows = inputs.rows
    assert rows.ids.tolist() == [7, 8, 0, 0]
    assert rows.positions.tolist() == [5, 64, NO_POSITION, NO_POSITION]
    assert rows.lengths.tolist() == [6, 65, 0, 0]
    assert rows.sequences.tolist() == [0, 1, 0, 0]
    nothing = [NO_PAGE] * 3
    assert inputs.tables.tolist() == [[9, NO_PAGE, NO_PAGE], [2, 6, NO_PAGE], nothing, nothing]


def test_a_step_leaves_nothing_to_the_next(device: torch.device) -> None:
    """Tables grow by a page, shrink, move to other rows and go."""
    random = Random(1)
    inputs = StepInputs(3, 4, device)
    tables = [[*range(row, row + 2)] for row in range(3)]
    for _ in range(100):
        row = random.randrange(3)
        if random.random() < 0.6:
            tables[row] = [*tables[row], random.randrange(9)][-5:]
        elif random.random() < 0.7:
            tables[row] = tables[row][: random.randrange(len(tables[row]) + 1)]
        else:
            random.shuffle(tables)
        used = random.randrange(4)
        ids, positions = (random.sample(range(9), used) for _ in range(2))
        fresh = StepInputs(3, 4, device)
        for each in (inputs, fresh):
            each.fill(ids, positions, [*range(used)], tables[:used])
        assert inputs.tables.equal(fresh.tables)
        for name in ("ids", "positions", "lengths", "sequences"):
            assert getattr(inputs.rows, name).equal(getattr(fresh.rows, name))


def test_an_id_below_0_stands_for_one_that_was_drawn(device: torch.device) -> None:
    inputs = StepInputs(4, 1, device)
    inputs.fill([-2, 7, -1], [1, 2, 3], [0, 1, 2], [[0], [1], [2]])
    inputs.take(torch.tensor([8, 9], dtype=torch.int32, device=device))
    assert inputs.rows.ids.tolist() == [9, 7, 8, 0]


def test_pages_that_no_row_of_the_step_reaches_are_left_out(device: torch.device) -> None:
    inputs = StepInputs(1, 2, device)
    inputs.fill([1], [2], [0], [[4, 5, 6]])
    assert inputs.tables.tolist() == [[4, 5]]


def test_settings_are_those_that_a_row_has_alone_and_greedy_where_there_is_none(
    device: torch.device,
) -> None:
    some = [Sampling(0.5, 7, 0.9, 2**64 - 3, 0.1), Sampling(1.5, seed=4)]
    inputs = StepInputs(3, 1, device)
    for given in (some, some[:1]):
        inputs.fill([1, 2], [5, 6], [0, 1], [[0], [1]], given, [8, 9][: len(given)])
        alone = SamplerRows.of(given, [8, 9][: len(given)], device)
        for name in ("temperature", "top_k", "top_p", "min_p", "seed", "position"):
            held, expected = getattr(inputs.settings, name), getattr(alone, name)
            assert held[: len(given)].equal(expected)
            assert not held[len(given) :].any()


@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_every_tensor_stays_where_it_is_and_begins_where_kernels_expect_it(
    count: int, device: torch.device
) -> None:
    inputs = StepInputs(count, 5, device)
    parts = [getattr(inputs.rows, name) for name in ("ids", "positions", "lengths", "sequences")]
    names = ("temperature", "top_k", "top_p", "min_p", "seed", "position")
    parts += [inputs.tables, *(getattr(inputs.settings, name) for name in names)]
    before = [part.data_ptr() for part in parts]
    inputs.fill([1], [2], [0], [[4]])
    assert [part.data_ptr() for part in parts] == before
    assert all((part.data_ptr() - before[0]) % ALIGNED_BYTES == 0 for part in parts)
