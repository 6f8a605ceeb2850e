"""Linear layers of floating-point, int8 and int4 weights in Triton, beside their oracles."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tailrace.kernels import layers
from tailrace.kernels.linear import float_triton
from tailrace.kernels.linear.dense import dense_linear
from tailrace.kernels.linear.epilogue import Epilogue
from tailrace.kernels.linear.float_triton import Weight, float_linear, float_plan, variants
from tailrace.kernels.linear.linear_plan import LinearWorkspace, plan_linear
from tailrace.kernels.linear.weight_only import (
    WeightOnly,
    pack_words,
    quantise_int4,
    quantise_int8,
    weight_only_linear,
)
from tailrace.kernels.rows.norm import order_free_rms_norm
from tailrace.kernels.shapes import BITNET_2B4T, LLAMA_8B
from tests.kernels.guarded import Guarded

STORE = Epilogue.STORE
Format = Callable[[Tensor], Weight]


def bf16(weight: Tensor) -> Tensor:
    return weight.bfloat16()


def fp16(weight: Tensor) -> Tensor:
    return weight.half()


def fp32(weight: Tensor) -> Tensor:
    return weight


def int4_to_one_side(weight: Tensor) -> WeightOnly:
    return quantise_int4(weight + 0.5)


DENSE: list[Format] = [bf16, fp16, fp32]
QUANTISED: list[Format] = [quantise_int8, quantise_int4, int4_to_one_side]
every_format = pytest.mark.parametrize("made", [*DENSE, *QUANTISED])


def normal(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def result_of(x: Tensor, weight: Weight, epilogue: Epilogue = STORE) -> Tensor:
    out = weight.shape[0]
    return torch.ones(len(x), out // 2 if epilogue.gated else out, device=x.device)


def run(
    x: Tensor,
    weight: Weight,
    norm: Tensor | None = None,
    epilogue: Epilogue = STORE,
    workspace: LinearWorkspace | None = None,
) -> Tensor:
    out = result_of(x, weight, epilogue)
    workspace = workspace or LinearWorkspace([float_plan(weight, epilogue)], len(x), x.device)
    float_linear(x, weight, out, workspace=workspace, norm=norm, epilogue=epilogue)
    return out


def assert_like_the_oracle(x: Tensor, weight: Weight, epilogue: Epilogue = STORE) -> None:
    expected = result_of(x, weight, epilogue)
    if isinstance(weight, WeightOnly):
        weight_only_linear(x, weight, expected, epilogue=epilogue)
    else:
        dense_linear(x, weight, expected, epilogue=epilogue)
    atol = 2e-3 if isinstance(weight, WeightOnly) else 2e-4
    torch.testing.assert_close(run(x, weight, None, epilogue), expected, rtol=2e-5, atol=atol)


@pytest.mark.parametrize("made", DENSE)
@pytest.mark.parametrize(("rows", "out", "inputs"), [(1, 64, 64), (3, 130, 100), (18, 7, 33)])
def test_it_equals_the_oracle_at_sizes_that_divide_and_that_do_not(
    device: torch.device, made: Format, rows: int, out: int, inputs: int
) -> None:
    assert_like_the_oracle(
        normal(rows, inputs).to(device), made(normal(out, inputs, seed=2).to(device))
    )


@pytest.mark.parametrize("epilogue", [Epilogue.ADD, Epilogue.SWIGLU])
@pytest.mark.parametrize(("out", "inputs"), [(128, 512), (140, 90)])
def test_epilogues_equal_the_oracle_with_and_without_splits(
    device: torch.device, epilogue: Epilogue, out: int, inputs: int
) -> None:
    weight = normal(out, inputs, seed=3).to(device, torch.bfloat16)
    assert (float_plan(weight, epilogue).splits > 1) == (inputs == 512)
    assert_like_the_oracle(5.0 * normal(2, inputs).to(device), weight, epilogue)


@pytest.mark.parametrize("made", QUANTISED)
@pytest.mark.parametrize("epilogue", [STORE, Epilogue.ADD, Epilogue.SWIGLU])
@pytest.mark.parametrize(("rows", "out", "inputs"), [(1, 128, 512), (18, 70, 128)])
def test_quantised_weights_equal_the_oracle(
    device: torch.device, made: Format, epilogue: Epilogue, rows: int, out: int, inputs: int
) -> None:
    weight = made(normal(out, inputs, seed=2).to(device))
    assert_like_the_oracle(normal(rows, inputs).to(device), weight, epilogue)


@pytest.mark.parametrize("bits", [4, 8])
def test_every_code_becomes_its_whole_number(device: torch.device, bits: int) -> None:
    codes = torch.arange(256).repeat(1, 2)[:, : 128 * (2 if bits == 8 else 1)] % (1 << bits)
    size = codes.shape[1]
    scale = torch.ones(1) if bits == 8 else torch.ones(1, 1)
    zero = None if bits == 8 else torch.full((1, 1), 3, dtype=torch.uint8).to(device)
    weights = WeightOnly(bits, pack_words(codes, bits).to(device), scale.to(device), zero)
    found = torch.cat(
        [run(eye, weights) for eye in torch.eye(size, device=device).chunk(size // 64)]
    )
    expected = codes - 3 if bits == 4 else (codes ^ 0x80) - 0x80
    assert torch.equal(found.cpu()[:, 0], expected[0].float())


def test_activations_are_rounded_to_nearest_even(device: torch.device) -> None:
    weight = torch.eye(64, dtype=torch.bfloat16, device=device)
    x = normal(2, 64).to(device)
    x[0, :4] = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, -(1 + 2**-8), 1 + 2**-8 + 2**-16])
    assert torch.equal(run(x, weight), x.bfloat16().float())


@every_format
def test_a_row_has_the_same_bits_in_every_batch(device: torch.device, made: Format) -> None:
    weight = made(normal(40, 1024, seed=4).to(device))
    assert float_plan(weight).splits > 1
    x = normal(70, 1024).to(device)
    whole = run(x, weight)
    for rows in [*range(1, 18, 1 if made is bf16 else 8), 33]:
        assert torch.equal(run(x[:rows].clone(), weight), whole[:rows])
    for row in (16, 31, 64, 69):
        assert torch.equal(run(x[row : row + 1].clone(), weight), whole[row : row + 1])
    if made is bf16 or made in QUANTISED:
        assert torch.equal(run(x.bfloat16(), weight), whole)


@every_format
@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("epilogue", [STORE, Epilogue.SWIGLU])
def test_a_norm_in_the_launch_gives_the_bits_of_a_norm_before_it(
    device: torch.device, made: Format, rows: int, epilogue: Epilogue
) -> None:
    inputs = 256 if made in QUANTISED else 300
    x, norm = 3.0 * normal(rows, inputs).to(device), normal(inputs, seed=5).to(device)
    weight = made(normal(48, inputs, seed=6).to(device))
    before = order_free_rms_norm(x.cpu(), norm.cpu(), 1e-5).to(device)
    assert torch.equal(run(x, weight, norm, epilogue), run(before, weight, None, epilogue))


def test_splits_are_added_in_order_and_counters_are_left_at_zero(device: torch.device) -> None:
    weight = normal(128, 1024, seed=8).to(device)
    plan = float_plan(weight)
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
@pytest.mark.parametrize("made", [bf16, quantise_int4])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("with_norm", [False, True])
def test_a_row_that_is_not_finite_spoils_no_other(
    device: torch.device, made: Format, bad: float, with_norm: bool
) -> None:
    x, weight = normal(3, 512).to(device), made(normal(16, 512, seed=9).to(device))
    norm = torch.ones(512, device=device) if with_norm else None
    sound = run(x, weight, norm)
    x[1, 77] = bad
    out = run(x, weight, norm)
    assert torch.equal(out[[0, 2]], sound[[0, 2]])
    assert not out[1].isfinite().any()


def in_poison(weight: Weight) -> Weight:
    if isinstance(weight, Tensor):
        return Guarded(weight).tensor
    return replace(
        weight,
        words=Guarded(weight.words.view(torch.uint8)).tensor.view(torch.int16),
        scale=Guarded(weight.scale).tensor,
        zero=None if weight.zero is None else Guarded(weight.zero).tensor,
    )


@pytest.mark.parametrize("epilogue", [STORE, Epilogue.SWIGLU])
@pytest.mark.parametrize(
    ("made", "rows", "inputs"),
    [
        *((made, *size) for made in (bf16, fp32) for size in ((1, 65), (17, 512))),
        *((made, 3, inputs) for made in QUANTISED for inputs in (128, 1024)),
    ],
)
def test_nothing_is_read_or_written_beyond_the_tensors(
    device: torch.device, made: Format, epilogue: Epilogue, rows: int, inputs: int
) -> None:
    x, weight = normal(rows, inputs).to(device), made(normal(22, inputs, seed=3).to(device))
    norm = torch.ones(inputs, device=device) if rows == 1 else None
    expected = run(x, weight, norm, epilogue)
    workspace = LinearWorkspace([float_plan(weight, epilogue)], rows, device)
    partials, counters = Guarded(workspace.partials), Guarded(workspace.counters)
    workspace.partials, workspace.counters = partials.tensor, counters.tensor
    out, given = Guarded(torch.zeros_like(expected)), Guarded(x)
    float_linear(
        given.tensor,
        in_poison(weight),
        out.tensor,
        workspace=workspace,
        norm=None if norm is None else Guarded(norm).tensor,
        epilogue=epilogue,
    )
    assert torch.equal(out.tensor, expected)
    assert all(guarded.intact() for guarded in (out, partials, counters, given))


@pytest.mark.parametrize("made", [bf16, quantise_int8])
def test_an_empty_batch_launches_nothing(device: torch.device, made: Format) -> None:
    weight = made(normal(8, 128).to(device))
    assert run(torch.empty(0, 128, device=device), weight).shape == (0, 8)


def test_arguments_that_do_not_fit_are_refused_by_name(device: torch.device) -> None:
    x, weight = normal(2, 64).to(device), normal(8, 64).to(device, torch.bfloat16)
    norm, out = torch.ones(64, device=device), torch.empty(2, 8, device=device)
    space = LinearWorkspace([], 1, device)
    refusals: list[tuple[type[Exception], str, Callable[[], object]]] = [
        (TypeError, "weight", lambda: run(x, weight.to(torch.int8))),
        (ValueError, "weight", lambda: run(x, weight[:0])),
        (ValueError, "weight", lambda: run(x, weight[:7].clone(), epilogue=Epilogue.SWIGLU)),
        (ValueError, "weight", lambda: run(x, normal(64, 8).to(device).T)),
        (TypeError, "x", lambda: run(x.to(torch.float16), weight)),
        (ValueError, "x", lambda: run(x[:, :63].clone(), weight)),
        (ValueError, "norm", lambda: run(x, weight, norm[:63])),
        (ValueError, "norm", lambda: run(normal(5, 64).to(device), weight, norm)),
        (TypeError, "x", lambda: run(x.bfloat16(), weight, norm)),
        (ValueError, "epilogue", lambda: run(x, weight, epilogue=Epilogue.RELU2_GATE)),
        (TypeError, "out", lambda: float_linear(x, weight, out.half(), workspace=space)),
        (
            ValueError,
            "eps",
            lambda: float_linear(x, weight, out, workspace=space, norm=norm, eps=0.0),
        ),
    ]
    for error, name, call in refusals:
        with pytest.raises(error, match=name):
            call()


def test_quantised_weights_that_do_not_fit_together_are_refused_by_name(
    device: torch.device,
) -> None:
    x = normal(2, 128).to(device)
    int8, int4 = (
        quantise(normal(8, 128).to(device)) for quantise in (quantise_int8, quantise_int4)
    )
    byte = torch.zeros(1, 8, dtype=torch.uint8, device=device)
    for error, name, weight in (
        (ValueError, "bits", replace(int8, bits=3)),
        (ValueError, "words", replace(int8, bits=4)),
        (TypeError, "words", replace(int8, words=int8.words.int())),
        (ValueError, "scale", replace(int8, scale=int4.scale)),
        (ValueError, "scale", replace(int4, scale=int8.scale)),
        (ValueError, "zero", replace(int8, zero=byte)),
        (ValueError, "zero", replace(int4, zero=None)),
        (TypeError, "zero", replace(int4, zero=byte.int())),
    ):
        with pytest.raises(error, match=name):
            run(x, weight)


def test_a_workspace_without_room_is_refused_by_name(device: torch.device) -> None:
    x, weight = normal(1, 4096).to(device), normal(16, 4096).to(device, torch.bfloat16)
    with pytest.raises(ValueError, match="workspace"):
        run(x, weight, workspace=LinearWorkspace([], 1, device))


def test_variants_cover_each_linear_of_a_step_once_and_the_head() -> None:
    llama = list(variants(LLAMA_8B))
    steps = [variant.step for variant in llama if variant.step]
    assert sorted(steps) == ["down", "gate_up", "o", "qkv"]
    quantised = [variant for variant in llama if " int" in variant.name]
    assert {v.name.split()[0].split(".")[1] for v in quantised} == {*steps}
    assert all(variant.step is None for variant in quantised)
    assert {v.name.split()[0] for v in variants(BITNET_2B4T)} == {"bitnet-2b4t.head"}
    for variant in llama:
        arguments = set(variant.signature) | set(variant.constants)
        assert arguments == set(variant.kernel.arg_names)


def test_rows_too_wide_for_a_norm_in_the_linear_are_normed_before(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (float_triton, layers):
        monkeypatch.setattr(module, "NORM_MAX_INPUTS", 64)
    inputs, rows = 96, 2
    x, norm = normal(rows, inputs).to(device), normal(inputs, seed=2).to(device)
    weight = normal(16, inputs, seed=3).to(device, torch.bfloat16)
    scratch = layers.Scratch(replace(LLAMA_8B, hidden=inputs, ffn=64), rows, device)
    workspace = LinearWorkspace([float_plan(weight, STORE)], rows, device)
    out = torch.empty(rows, 16, device=device)
    layers.normed_linear(x, norm, 1e-5, weight, out, scratch, workspace, STORE, dependent=False)
    expected = run(order_free_rms_norm(x, norm, 1e-5).bfloat16(), weight)
    assert torch.equal(out, expected)
