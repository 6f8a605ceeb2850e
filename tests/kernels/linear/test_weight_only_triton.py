from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kernels.linear import weight_only
from kernels.linear.epilogue import Epilogue
from kernels.linear.linear_plan import LinearWorkspace
from kernels.linear.weight_only import WeightOnly, pack_words, quantise_int4, quantise_int8
from kernels.linear.weight_only_triton import variants, weight_only_linear, weight_only_plan
from kernels.rows.norm import order_free_rms_norm
from kernels.shapes import BITNET_2B4T, LLAMA_8B
from tests.kernels.guarded import Guarded

STORE = Epilogue.STORE
Quantise = Callable[[Tensor], WeightOnly]


def quantise_to_one_side(w: Tensor) -> WeightOnly:
    return quantise_int4(w + 0.5)


FORMATS: list[Quantise] = [quantise_int8, quantise_int4, quantise_to_one_side]
every_format = pytest.mark.parametrize("quantise", FORMATS)


def normal(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def run(
    x: Tensor,
    weights: WeightOnly,
    norm: Tensor | None = None,
    epilogue: Epilogue = STORE,
    workspace: LinearWorkspace | None = None,
) -> Tensor:
    width = weights.shape[0] // 2 if epilogue.gated else weights.shape[0]
    out = torch.ones(len(x), width, device=x.device)
    workspace = workspace or LinearWorkspace(
        [weight_only_plan(weights, epilogue)], len(x), x.device
    )
    weight_only_linear(x, weights, out, workspace=workspace, norm=norm, epilogue=epilogue)
    return out


@every_format
@pytest.mark.parametrize("epilogue", [STORE, Epilogue.ADD, Epilogue.SWIGLU])
@pytest.mark.parametrize(("rows", "out", "inputs"), [(1, 128, 512), (18, 70, 128)])
def test_it_equals_the_oracle(
    device: torch.device, quantise: Quantise, epilogue: Epilogue, rows: int, out: int, inputs: int
) -> None:
    weights = quantise(normal(out, inputs, seed=2).to(device))
    x = normal(rows, inputs).to(device)
    expected = torch.ones(rows, out // 2 if epilogue.gated else out, device=device)
    weight_only.weight_only_linear(x, weights, expected, epilogue=epilogue)
    torch.testing.assert_close(run(x, weights, None, epilogue), expected, rtol=2e-5, atol=2e-3)


@pytest.mark.parametrize("bits", [4, 8])
def test_every_code_becomes_its_whole_number(device: torch.device, bits: int) -> None:
    codes = torch.arange(256).repeat(1, 2)[:, : 128 * (2 if bits == 8 else 1)] % (1 << bits)
    size = codes.shape[1]
    scale = torch.ones(1) if bits == 8 else torch.ones(1, 1)
    zero = None if bits == 8 else torch.full((1, 1), 3, dtype=torch.uint8)
    weights = WeightOnly(bits, pack_words(codes, bits).to(device), scale.to(device), zero)
    if zero is not None:
        weights = replace(weights, zero=zero.to(device))
    found = torch.cat(
        [run(eye, weights) for eye in torch.eye(size, device=device).chunk(size // 64)]
    )
    expected = codes - 3 if bits == 4 else (codes ^ 0x80) - 0x80
    assert torch.equal(found.cpu()[:, 0], expected[0].float())


@every_format
def test_a_row_has_the_same_bits_in_every_batch(device: torch.device, quantise: Quantise) -> None:
    weights = quantise(normal(20, 1024, seed=4).to(device))
    assert weight_only_plan(weights).splits > 1
    x = normal(34, 1024).to(device)
    whole = run(x, weights)
    for rows in (1, 16, 17):
        assert torch.equal(run(x[:rows].clone(), weights), whole[:rows])
    for row in (16, 33):
        assert torch.equal(run(x[row : row + 1].clone(), weights), whole[row : row + 1])
    assert torch.equal(run(x.bfloat16(), weights), whole)


@every_format
def test_a_norm_in_the_launch_gives_the_bits_of_a_norm_before_it(
    device: torch.device, quantise: Quantise
) -> None:
    x, norm = 3.0 * normal(4, 256).to(device), normal(256, seed=5).to(device)
    weights = quantise(normal(16, 256, seed=6).to(device))
    before = order_free_rms_norm(x.cpu(), norm.cpu(), 1e-5).to(device)
    assert torch.equal(run(x, weights, norm), run(before, weights))


@every_format
@pytest.mark.parametrize("epilogue", [STORE, Epilogue.SWIGLU])
@pytest.mark.parametrize("inputs", [128, 1024])
def test_nothing_is_read_or_written_beyond_the_tensors(
    device: torch.device, quantise: Quantise, epilogue: Epilogue, inputs: int
) -> None:
    x, weights = normal(3, inputs).to(device), quantise(normal(22, inputs, seed=3).to(device))
    expected = run(x, weights, None, epilogue)
    workspace = LinearWorkspace([weight_only_plan(weights, epilogue)], 3, device)
    partials, counters = Guarded(workspace.partials), Guarded(workspace.counters)
    workspace.partials, workspace.counters = partials.tensor, counters.tensor
    out = Guarded(torch.zeros_like(expected))
    in_poison = replace(
        weights,
        words=Guarded(weights.words.view(torch.uint8)).tensor.view(torch.int16),
        scale=Guarded(weights.scale).tensor,
        zero=None if weights.zero is None else Guarded(weights.zero).tensor,
    )
    weight_only_linear(
        Guarded(x).tensor, in_poison, out.tensor, workspace=workspace, epilogue=epilogue
    )
    assert torch.equal(out.tensor, expected)
    assert all(guarded.intact() for guarded in (out, partials, counters))


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_row_that_is_not_finite_spoils_no_other(device: torch.device, bad: float) -> None:
    x, weights = normal(3, 256).to(device), quantise_int4(normal(8, 256, seed=9).to(device))
    sound = run(x, weights)
    x[1, 77] = bad
    out = run(x, weights)
    assert torch.equal(out[[0, 2]], sound[[0, 2]])
    assert not out[1].isfinite().any()


def test_an_empty_batch_launches_nothing(device: torch.device) -> None:
    weights = quantise_int8(normal(8, 128).to(device))
    assert run(torch.empty(0, 128, device=device), weights).shape == (0, 8)


def test_arguments_that_do_not_fit_are_refused_by_name(device: torch.device) -> None:
    x = normal(2, 128).to(device)
    int8, int4 = (quantise(normal(8, 128).to(device)) for quantise in FORMATS[:2])
    byte = torch.zeros(1, 8, dtype=torch.uint8, device=device)
    with pytest.raises(ValueError, match="bits"):
        run(x, replace(int8, bits=3))
    with pytest.raises(ValueError, match="words"):
        run(x, replace(int8, bits=4))
    with pytest.raises(TypeError, match="words"):
        run(x, replace(int8, words=int8.words.int()))
    with pytest.raises(ValueError, match="scale"):
        run(x, replace(int8, scale=int4.scale))
    with pytest.raises(ValueError, match="scale"):
        run(x, replace(int4, scale=int8.scale))
    with pytest.raises(ValueError, match="zero"):
        run(x, replace(int8, zero=byte))
    with pytest.raises(ValueError, match="zero"):
        run(x, replace(int4, zero=None))
    with pytest.raises(TypeError, match="zero"):
        run(x, replace(int4, zero=byte.int()))
    with pytest.raises(TypeError, match="x"):
        run(x.half(), int8)
    with pytest.raises(ValueError, match="x"):
        run(x[:, :100].clone(), int8)
    with pytest.raises(ValueError, match="epilogue"):
        run(x, int8, epilogue=Epilogue.RELU2_GATE)


def test_variants_are_a_second_set_beside_the_dense_step() -> None:
    llama = list(variants(LLAMA_8B))
    assert all(variant.step is None for variant in llama)
    assert {name.split()[0].split(".")[1] for name in (v.name for v in llama)} == {
        "qkv", "o", "gate_up", "down",
    }  # fmt: skip
    assert list(variants(BITNET_2B4T)) == []
    for variant in llama:
        assert set(variant.signature) | set(variant.constants) == set(variant.kernel.arg_names)
