"""Inputs of captured steps lie at fixed addresses and leave nothing to the next step."""

from random import Random

import pytest
import torch
from torch import Tensor

from tailrace.kernels.block_tables import NO_PAGE, BlockTables
from tailrace.kernels.one_copy import ALIGNED_BYTES
from tailrace.kernels.sampler.sampler import Sampling
from tailrace.kernels.sampler.sampler_rows import SamplerRows
from tailrace.kernels.step_inputs import NO_POSITION, PrefillInputs, StepInputs

ROWS = ("ids", "positions", "lengths", "sequences")
SETTINGS = ("temperature", "top_k", "top_p", "min_p", "seed", "position")


def inputs_of(count: int, pages: int, device: torch.device) -> StepInputs:
    return StepInputs(count, BlockTables(count, pages, device))


def tables_of_rows(inputs: StepInputs, count: int) -> Tensor:
    """Return the block tables of the first rows, as kernels find them."""
    inputs.update()
    return inputs.tables[inputs.rows.sequences[:count].long()]


def test_rows_beyond_those_filled_in_have_no_length_and_no_position(device: torch.device) -> None:
    inputs = inputs_of(4, 3, device)
    inputs.fill([7, 8], [5, 64], [0, 1], [[9], [2, 6]])
    rows = inputs.rows
    assert rows.ids.tolist() == [7, 8, 0, 0]
    assert rows.positions.tolist() == [5, 64, NO_POSITION, NO_POSITION]
    assert rows.lengths.tolist() == [6, 65, 0, 0]
    assert tables_of_rows(inputs, 2).tolist() == [[9, NO_PAGE, NO_PAGE], [2, 6, NO_PAGE]]


def test_rows_of_one_sequence_share_its_table(device: torch.device) -> None:
    inputs = inputs_of(4, 3, device)
    inputs.fill([7, 8, 9], [64, 5, 65], [0, 1, 0], [[2, 6], [9]])
    found = tables_of_rows(inputs, 3).tolist()
    assert found == [[2, 6, NO_PAGE], [9, NO_PAGE, NO_PAGE], [2, 6, NO_PAGE]]


def test_a_step_leaves_nothing_to_the_next(device: torch.device) -> None:
    random = Random(1)
    inputs = inputs_of(3, 4, device)
    for _ in range(100):
        used = random.randrange(4)
        ids, positions = (random.sample(range(9), used) for _ in range(2))
        fresh = inputs_of(3, 4, device)
        for each in (inputs, fresh):
            each.fill(ids, positions, [*range(used)], [[row] for row in range(used)])
        for name in ROWS[:-1]:
            assert getattr(inputs.rows, name).equal(getattr(fresh.rows, name))


def test_settings_are_those_that_a_row_has_alone_and_greedy_where_there_is_none(
    device: torch.device,
) -> None:
    some = [Sampling(0.5, 7, 0.9, 2**64 - 3, 0.1), Sampling(1.5, seed=4)]
    inputs = inputs_of(3, 1, device)
    for given in (some, some[:1]):
        inputs.fill([1, 2], [5, 6], [0, 1], [[0], [1]], given, [8, 9][: len(given)])
        alone = SamplerRows.of(given, [8, 9][: len(given)], device)
        for name in SETTINGS:
            held, expected = getattr(inputs.settings, name), getattr(alone, name)
            assert held[: len(given)].equal(expected)
            assert not held[len(given) :].any()


@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_every_tensor_stays_where_it_is_and_begins_where_kernels_expect_it(
    count: int, device: torch.device
) -> None:
    inputs = inputs_of(count, 5, device)
    parts = [getattr(inputs.rows, name) for name in ROWS]
    parts += [inputs.tables, *(getattr(inputs.settings, name) for name in SETTINGS)]
    before = [part.data_ptr() for part in parts]
    inputs.fill([1], [2], [0], [[4]])
    assert [part.data_ptr() for part in parts] == before
    assert all(pointer % ALIGNED_BYTES == 0 for pointer in before)


def test_chunks_of_a_prefill_have_their_rows_and_padding_has_none(device: torch.device) -> None:
    inputs = PrefillInputs(8, 4, BlockTables(4, 3, device))
    first, second = [5, 6], [7]
    # The second step must not see anything that the first one left behind.
    inputs.fill([[1, 2, 3], [4], [9, 9]], [0, 64, 64], [first, second, first])
    inputs.update()
    inputs.fill([[1, 2, 3], [4]], [64, 0], [first, second])
    inputs.update()
    rows, chunks = inputs.rows, inputs.chunks
    assert rows.ids.tolist() == [1, 2, 3, 4, 0, 0, 0, 0]
    assert rows.positions.tolist() == [64, 65, 66, 0, *[NO_POSITION] * 4]
    assert rows.lengths.tolist() == [65, 66, 67, 1, 0, 0, 0, 0]
    assert chunks.first_rows.tolist() == [0, 3, 4, 4, 4]
    assert chunks.starts.tolist() == [64, 0, 0, 0]
    owners = chunks.sequences[:2].tolist()
    assert rows.sequences[:4].tolist() == [owners[0]] * 3 + [owners[1]]
    assert inputs.tables[owners].tolist() == [[5, 6, NO_PAGE], [7, NO_PAGE, NO_PAGE]]
