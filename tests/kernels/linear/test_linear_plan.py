"""Plans of linear layers: tiles, splits and workspace."""

import pytest
import torch

from tailrace.kernels.gpu_limits import HOPPER, LEAST_SHARED_BYTES, LIMITS, GpuLimits
from tailrace.kernels.linear.linear_plan import (
    MAX_GROUPS,
    MIN_CHUNKS,
    LinearPlan,
    LinearWorkspace,
    Tile,
    plan_linear,
    target_programs,
)
from tailrace.kernels.shapes import ATTENTION_SHAPES, LLAMA_8B, QWEN3_8B

SHARED_BY_CAPABILITY = {
    (8, 0): 163,
    (8, 6): 99,
    (8, 9): 99,
    (9, 0): 227,
    (10, 0): 227,
    (12, 0): 99,
}
"""KiB per program in NVIDIA's table of technical specifications."""
GPUS = pytest.mark.parametrize("limits", LIMITS.values(), ids=map(str, LIMITS))


def real_plans(limits: GpuLimits = HOPPER) -> list[LinearPlan]:
    return [
        plan_linear(out, inputs, 2, bits, gated=step == "gate_up", limits=limits)
        for shape in (LLAMA_8B, QWEN3_8B)
        for step, (out, inputs) in shape.linears.items()
        for bits in (0, 4, 8)
    ]


def test_the_table_has_what_nvidia_states() -> None:
    found = {capability: LIMITS[capability].shared_bytes for capability in SHARED_BY_CAPABILITY}
    assert found == {capability: kib * 1024 for capability, kib in SHARED_BY_CAPABILITY.items()}
    assert min(limits.shared_bytes for limits in LIMITS.values()) == LEAST_SHARED_BYTES


@GPUS
def test_every_plan_fits_the_shared_memory_of_its_gpu(limits: GpuLimits) -> None:
    for shape in ATTENTION_SHAPES:
        linears = {**shape.linears, "head": (shape.vocab, shape.hidden)}
        for step, (out, inputs) in linears.items():
            for word_bytes, bits in ((2, 0), (4, 0), (2, 4), (2, 8)):
                gated = step == "gate_up"
                plan = plan_linear(out, inputs, word_bytes, bits, gated, limits=limits)
                assert plan.tile.num_stages >= 3
                for rows in (1, 16, 17, 64, 512):
                    for x_bytes in (2, 4):
                        groups = plan.groups(rows, x_bytes)
                        assert plan.shared(groups, x_bytes) <= limits.shared_bytes


def test_less_shared_memory_takes_stages_from_the_tile_and_leaves_its_shape() -> None:
    ada, hopper = (
        [plan_linear(4096, 4096, 2, bits, limits=LIMITS[gpu]) for bits in (0, 8, 4)]
        for gpu in ((8, 9), (9, 0))
    )
    assert [plan.tile.num_stages for plan in hopper] == [6, 6, 6]
    assert [plan.tile.num_stages for plan in ada] == [4, 3, 5]
    shapes = [
        [(p.tile.block_out, p.block_in, p.tile.num_warps) for p in plans] for plans in (ada, hopper)
    ]
    assert shapes[0] == shapes[1]


def test_a_gpu_that_holds_no_two_stages_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"limits: 49152 bytes of shared memory.*57344 for 2 stages"
    ):
        plan_linear(4096, 4096, 2, 8, limits=GpuLimits(48 << 10, 40))


@GPUS
def test_real_weights_give_every_multiprocessor_work(limits: GpuLimits) -> None:
    for plan in real_plans(limits):
        assert plan.tiles * plan.splits >= target_programs(limits)


@GPUS
def test_splits_are_even_and_not_too_short(limits: GpuLimits) -> None:
    for plan in real_plans(limits):
        chunks = plan.inputs // plan.block_in
        assert chunks % plan.splits == 0
        assert chunks // plan.splits >= MIN_CHUNKS


@pytest.mark.parametrize("x_bytes", [2, 4])
def test_groups_fit_shared_memory_and_cover_up_to_64_rows(x_bytes: int) -> None:
    for plan in real_plans():
        for rows in (1, 16, 17, 33, 64, 1000):
            groups = plan.groups(rows, x_bytes)
            assert plan.shared(groups, x_bytes) <= HOPPER.shared_bytes
            assert groups <= MAX_GROUPS
            assert groups == 1 or groups * 8 < rows
        if x_bytes == 2:
            assert plan.groups(64, x_bytes) == MAX_GROUPS


def test_programs_that_share_a_multiprocessor_fit_it_together() -> None:
    shared_by_all = HOPPER.shared_bytes + 1024
    for plan in real_plans():
        if plan.tiles * plan.splits > HOPPER.multiprocessors:
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
