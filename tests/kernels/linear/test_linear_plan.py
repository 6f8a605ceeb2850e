"""Plans of linear layers: tiles, splits and workspace."""

import pytest
import torch

from tailrace.kernels.launch import MULTIPROCESSORS
from tailrace.kernels.linear.linear_plan import (
    MAX_GROUPS,
    MAX_SHARED,
    MIN_CHUNKS,
    TARGET_PROGRAMS,
    LinearPlan,
    LinearWorkspace,
    Tile,
    plan_linear,
)
from tailrace.kernels.shapes import LLAMA_8B, QWEN3_8B


def real_plans() -> list[LinearPlan]:
    return [
        plan_linear(out, inputs, 2, bits, gated=step == "gate_up")
        for shape in (LLAMA_8B, QWEN3_8B)
        for step, (out, inputs) in shape.linears.items()
        for bits in (0, 4, 8)
    ]


def test_real_weights_give_every_multiprocessor_work() -> None:
    assert all(plan.tiles * plan.splits >= TARGET_PROGRAMS for plan in real_plans())


def test_splits_are_even_and_not_too_short() -> None:
    for plan in real_plans():
        chunks = plan.inputs // plan.block_in
        assert chunks % plan.splits == 0
        assert chunks // plan.splits >= MIN_CHUNKS


@pytest.mark.parametrize("x_bytes", [2, 4])
def test_groups_fit_shared_memory_and_cover_up_to_64_rows(x_bytes: int) -> None:
    for plan in real_plans():
        for rows in (1, 16, 17, 33, 64, 1000):
            groups = plan.groups(rows, x_bytes)
            assert plan.shared(groups, x_bytes) <= MAX_SHARED
            assert groups <= MAX_GROUPS
            assert groups == 1 or groups * 8 < rows
        if x_bytes == 2:
            assert plan.groups(64, x_bytes) == MAX_GROUPS


def test_programs_that_share_a_multiprocessor_fit_it_together() -> None:
    shared_by_all = MAX_SHARED + 1024
    for plan in real_plans():
        if plan.tiles * plan.splits > MULTIPROCESSORS:
            assert 2 * (plan.shared(1, 4) + 1024) <= shared_by_all


def test_a_weight_that_does_not_divide_has_one_split() -> None:
    assert plan_linear(70, 64 * 13 - 5, 2).splits == 1


def test_a_gated_tile_takes_as_many_rows_of_both_halves() -> None:
    tile = Tile(128, 64, 4, 4)
    assert plan_linear(512, 512, 2, gated=True, tile=tile).tiles == 4
    assert plan_linear(260, 512, 2, gated=True, tile=tile).tiles == 3


def test_a_workspace_serves_fewer_rows_than_it_was_made_for() -> None:
    plan = plan_linear(128, 4096, 2)
    workspace = LinearWorkspace([plan], 64, torch.device("cpu"))
    for rows in range(1, 65):
        workspace.check(plan, rows)
    with pytest.raises(ValueError, match="workspace"):
        workspace.check(plan, 65)


def test_a_workspace_of_no_linears_is_small() -> None:
    assert LinearWorkspace([], 64, torch.device("cpu")).partials.numel() == 1
