from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kernels import layers
from kernels.linear import dense, dense_triton
from kernels.linear.dense_triton import dense_linear, dense_plan, variants
from kernels.linear.epilogue import Epilogue
from kernels.linear.linear_plan import LinearWorkspace, plan_linear
from kernels.rows.norm import order_free_rms_norm
from kernels.shapes import BITNET_2B4T, LLAMA_8B
from tests.kernels.guarded import Guarded

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
STORE = Epilogue.STORE


def normal(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def run(
    x: Tensor,
    weight: Tensor,
    norm: Tensor | None = None,
    epilogue: Epilogue = STORE,
    workspace: LinearWorkspace | None = None,
) -> Tensor:
    width = len(weight) // 2 if epilogue.gated else len(weight)
    out = torch.ones(len(x), width, device=x.device)
    workspace = workspace or LinearWorkspace([dense_plan(weight, epilogue)], len(x), x.device)
    dense_linear(x, weight, out, workspace=workspace, norm=norm, epilogue=epilogue)
    return out


def assert_like_the_oracle(
    x: Tensor, weight: Tensor, norm: Tensor | None = None, epilogue: Epilogue = STORE
) -> None:
    out = run(x, weight, norm, epilogue)
    expected = torch.ones_like(out)
    dense.dense_linear(x, weight, expected, norm=norm, epilogue=epilogue)
    torch.testing.assert_close(out, expected, rtol=2e-5, atol=2e-4)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "out", "inputs"), [(1, 64, 64), (3, 130, 100), (18, 7, 33)])
def test_it_equals_the_oracle_at_sizes_that_divide_and_that_do_not(
    device: torch.device, dtype: torch.dtype, rows: int, out: int, inputs: int
) -> None:
    weight = normal(out, inputs, seed=2).to(device, dtype)
    assert_like_the_oracle(normal(rows, inputs).to(device), weight)


@pytest.mark.parametrize("epilogue", [Epilogue.ADD, Epilogue.SWIGLU])
@pytest.mark.parametrize(("out", "inputs"), [(128, 512), (140, 90)])
def test_epilogues_equal_the_oracle_with_and_without_splits(
    device: torch.device, epilogue: Epilogue, out: int, inputs: int
) -> None:
    weight = normal(out, inputs, seed=3).to(device, torch.bfloat16)
    assert (dense_plan(weight, epilogue).splits > 1) == (inputs == 512)
    assert_like_the_oracle(5.0 * normal(2, inputs).to(device), weight, epilogue=epilogue)


def test_activations_are_rounded_to_nearest_even(device: torch.device) -> None:
    weight = torch.eye(64, dtype=torch.bfloat16, device=device)
    x = normal(2, 64).to(device)
    x[0, :4] = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, -(1 + 2**-8), 1 + 2**-8 + 2**-16])
    assert torch.equal(run(x, weight), x.bfloat16().float())


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_has_the_same_bits_in_every_batch(device: torch.device, dtype: torch.dtype) -> None:
    weight = normal(40, 512, seed=4).to(device, dtype)
    assert dense_plan(weight).splits > 1
    x = normal(70, 512).to(device)
    whole = run(x, weight)
    for rows in [*range(1, 18, 1 if dtype is torch.bfloat16 else 8), 33]:
        assert torch.equal(run(x[:rows].clone(), weight), whole[:rows])
    for row in (16, 31, 64, 69):
        assert torch.equal(run(x[row : row + 1].clone(), weight), whole[row : row + 1])


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("epilogue", [STORE, Epilogue.SWIGLU])
def test_a_norm_in_the_launch_gives_the_bits_of_a_norm_before_it(
    device: torch.device, rows: int, epilogue: Epilogue
) -> None:
    x, norm = 3.0 * normal(rows, 300).to(device), normal(300, seed=5).to(device)
    weight = normal(48, 300, seed=6).to(device, torch.bfloat16)
    before = order_free_rms_norm(x.cpu(), norm.cpu(), 1e-5).to(device)
    assert torch.equal(run(x, weight, norm, epilogue), run(before, weight, None, epilogue))


def test_activations_that_are_rounded_already_give_the_same_bits(device: torch.device) -> None:
    x, weight = normal(20, 128).to(device), normal(24, 128, seed=7).to(device, torch.bfloat16)
    assert torch.equal(run(x.bfloat16(), weight), run(x, weight))


def test_splits_are_added_in_order_and_counters_are_left_at_zero(device: torch.device) -> None:
    weight = normal(128, 1024, seed=8).to(device)
    plan = dense_plan(weight)
    x = normal(2, 1024).to(device)
    workspace = LinearWorkspace([plan], 2, x.device)
    out = run(x, weight, workspace=workspace)
    size = 1024 // plan.splits
    parts = [
        run(x[:, at : at + size].clone(), weight[:, at : at + size].clone())
        for at in range(0, 1024, size)
    ]
    assert plan.splits > 1 and plan_linear(128, size, 4).splits == 1
    total = torch.zeros_like(out)
    for part in parts:
        total += part
    assert torch.equal(out, total)
    assert workspace.counters.eq(0).all()
    assert torch.equal(run(x, weight, workspace=workspace), out)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("with_norm", [False, True])
def test_a_row_that_is_not_finite_spoils_no_other(
    device: torch.device, bad: float, with_norm: bool
) -> None:
    x, weight = normal(3, 512).to(device), normal(16, 512, seed=9).to(device, torch.bfloat16)
    norm = torch.ones(512, device=device) if with_norm else None
    sound = run(x, weight, norm)
    x[1, 77] = bad
    out = run(x, weight, norm)
    assert torch.equal(out[[0, 2]], sound[[0, 2]])
    assert not out[1].isfinite().any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("epilogue", [STORE, Epilogue.SWIGLU])
@pytest.mark.parametrize(("rows", "inputs"), [(1, 65), (17, 512)])
def test_nothing_is_read_or_written_beyond_the_tensors(
    device: torch.device, dtype: torch.dtype, epilogue: Epilogue, rows: int, inputs: int
) -> None:
    x, weight = normal(rows, inputs).to(device), normal(22, inputs, seed=3).to(device, dtype)
    norm = torch.ones(inputs, device=device) if rows == 1 else None
    expected = run(x, weight, norm, epilogue)
    workspace = LinearWorkspace([dense_plan(weight, epilogue)], rows, device)
    partials, counters = Guarded(workspace.partials), Guarded(workspace.counters)
    workspace.partials, workspace.counters = partials.tensor, counters.tensor
    out = Guarded(torch.zeros_like(expected))
    inputs_in_poison = [Guarded(t) for t in (x, weight)]
    dense_linear(
        inputs_in_poison[0].tensor,
        inputs_in_poison[1].tensor,
        out.tensor,
        workspace=workspace,
        norm=None if norm is None else Guarded(norm).tensor,
        epilogue=epilogue,
    )
    assert torch.equal(out.tensor, expected)
    assert all(g.intact() for g in (out, partials, counters, *inputs_in_poison))


def test_an_empty_batch_launches_nothing(device: torch.device) -> None:
    assert run(torch.empty(0, 64, device=device), normal(8, 64).to(device)).shape == (0, 8)


def test_arguments_that_do_not_fit_are_refused_by_name(device: torch.device) -> None:
    x, weight = normal(2, 64).to(device), normal(8, 64).to(device, torch.bfloat16)
    with pytest.raises(TypeError, match="weight"):
        run(x, weight.to(torch.int8))
    with pytest.raises(ValueError, match="weight"):
        run(x, weight[:0])
    with pytest.raises(ValueError, match="weight"):
        run(x, weight[:7].clone(), epilogue=Epilogue.SWIGLU)
    with pytest.raises(ValueError, match="weight"):
        run(x, normal(64, 8).to(device).T)
    with pytest.raises(TypeError, match="x"):
        run(x.to(torch.float16), weight)
    with pytest.raises(ValueError, match="x"):
        run(x[:, :63].clone(), weight)
    with pytest.raises(ValueError, match="norm"):
        run(x, weight, torch.ones(63, device=device))
    with pytest.raises(ValueError, match="norm"):
        run(normal(5, 64).to(device), weight, torch.ones(64, device=device))
    with pytest.raises(TypeError, match="x"):
        run(x.bfloat16(), weight, torch.ones(64, device=device))
    with pytest.raises(ValueError, match="epilogue"):
        run(x, weight, epilogue=Epilogue.RELU2_GATE)
    workspace = LinearWorkspace([], 1, device)
    with pytest.raises(TypeError, match="out"):
        dense_linear(x, weight, torch.empty(2, 8).half().to(device), workspace=workspace)
    norm, out = torch.ones(64, device=device), torch.empty(2, 8, device=device)
    with pytest.raises(ValueError, match="eps"):
        dense_linear(x, weight, out, workspace=workspace, norm=norm, eps=0.0)


def test_a_workspace_without_room_is_refused_by_name(device: torch.device) -> None:
    x, weight = normal(1, 4096).to(device), normal(16, 4096).to(device, torch.bfloat16)
    with pytest.raises(ValueError, match="workspace"):
        run(x, weight, workspace=LinearWorkspace([], 1, device))


def test_variants_cover_each_linear_of_a_step_once_and_the_head() -> None:
    llama = list(variants(LLAMA_8B))
    steps = [variant.step for variant in llama if variant.step]
    assert sorted(steps) == ["down", "gate_up", "o", "qkv"]
    assert {v.name.split()[0] for v in variants(BITNET_2B4T)} == {"bitnet-2b4t.head"}
    for variant in llama:
        arguments = set(variant.signature) | set(variant.constants)
        assert arguments == set(variant.kernel.arg_names)


def test_rows_too_wide_for_a_norm_in_the_linear_are_normed_before(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (dense_triton, layers):
        monkeypatch.setattr(module, "NORM_MAX_INPUTS", 64)
    inputs, rows = 96, 2
    x, norm = normal(rows, inputs).to(device), normal(inputs, seed=2).to(device)
    weight = normal(16, inputs, seed=3).to(device, torch.bfloat16)
    scratch = layers.Scratch(replace(LLAMA_8B, hidden=inputs, ffn=64), rows, device)
    workspace = LinearWorkspace([dense_plan(weight, STORE)], rows, device)
    out = torch.empty(rows, 16, device=device)
    layers.normed_linear(x, norm, 1e-5, weight, out, scratch, workspace, STORE, dependent=False)
    expected = run(order_free_rms_norm(x, norm, 1e-5).bfloat16(), weight)
    assert torch.equal(out, expected)
