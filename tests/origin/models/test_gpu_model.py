"""The kernels in the engine of an origin: on a GPU where there is one, else in the interpreter."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import structlog
import torch
from tokenizers import Tokenizer
from torch import Tensor

from tailrace.kernels.attention.paged_kv import page_bytes
from tailrace.kernels.gpu_limits import LIMITS
from tailrace.kernels.sampler.sampler import Sampling
from tailrace.kernels.sampler.sampler_triton import sample_rows
from tailrace.kernels.shapes import Family
from tailrace.ledger.errors import ModelError, TooLarge
from tailrace.origin.checkpoint.layout import EMBEDDING, HEAD
from tailrace.origin.checkpoint.model_check import check_model
from tailrace.origin.checkpoint.model_config import ModelConfig, read_config
from tailrace.origin.config import DEMO_MODEL
from tailrace.origin.formats import Formats
from tailrace.origin.models import cpu_model, gpu_draw, gpu_model, load
from tailrace.origin.models.gpu_layers import INTERPRETED_SEQUENCES, DecoderParts
from tailrace.origin.models.gpu_model import GpuModel
from tailrace.origin.models.load import load_model
from tailrace.origin.models.model import Device, Draw, Drawn, Model, Piece, prefill
from tailrace.origin.models.tensors import read_tensors
from tests.origin.engine.runs import engine_of, make_run, run_all
from tests.origin.held_bytes import held_bytes
from tests.origin.tiny_checkpoint import KERNEL_SHAPES, Shape, write_checkpoint

PROMPT = "Once upon a time there was a fox"
TOKENS = 3
GREEDY = Sampling()
SAMPLED = Sampling(temperature=0.8, top_k=40, top_p=0.95, seed=7)
PAGES = [4, 1, 6]
CLOSE = 1e-4
"""Tolerance for hidden rows and logits in fp32, which the two paths sum in different orders."""
Load = Callable[[Family], Path]

pytestmark = pytest.mark.usefixtures("few_programs")


@pytest.fixture(scope="module")
def write(tmp_path_factory: pytest.TempPathFactory) -> Load:
    written: dict[Family, Path] = {}

    def of(family: Family) -> Path:
        if family not in written:
            written[family] = write_checkpoint(
                tmp_path_factory.mktemp("tiny"), KERNEL_SHAPES[family]
            )
        return written[family]

    return of


@pytest.fixture(scope="module")
def quantisable(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a checkpoint whose inputs are whole quantisation groups."""
    shape = Shape(hidden=128, ffn=128, layers=1, family=Family.LLAMA, tied_head=False)
    return write_checkpoint(tmp_path_factory.mktemp("quantisable"), shape)


@pytest.fixture(scope="module")
def on_gpu(write: Load, device: torch.device) -> GpuModel:
    return gpu_model.load(write(Family.BITNET), device=device)


def generate(model: Model, prompt: list[int], samplings: list[Sampling]) -> list[list[int]]:
    """TOKENS ids of each of several requests for the same prompt, which run side by side."""
    tables = [[2 * index + 1, 2 * index] for index in range(len(samplings))]
    hidden = model.forward([Piece(prompt, 0, table, prefill=True) for table in tables])
    hidden = hidden[len(prompt) - 1 :: len(prompt)]
    drawn: list[list[int]] = [[] for _ in samplings]
    for position in range(TOKENS):
        if position:
            at = len(prompt) + position - 1
            rows = zip(drawn, tables, strict=True)
            hidden = model.forward([Piece(ids[-1:], at, table, False) for ids, table in rows])
        draws = [Draw(sampling, position) for sampling in samplings]
        for ids, found in zip(drawn, model.draw(hidden, draws), strict=True):
            ids.append(found.token)
    return drawn


@pytest.mark.timeout(600)
def test_the_demo_model_gives_the_tokens_of_the_cpu_path(device: torch.device) -> None:
    """Two requests of 8 tokens are one tile of rows: each forward of it is seconds of work."""
    prompt = Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json")).encode(PROMPT).ids[:8]
    expected = generate(cpu_model.load(DEMO_MODEL), prompt, [GREEDY, SAMPLED])
    on_gpu = gpu_model.load(DEMO_MODEL, device=device)
    assert generate(on_gpu, prompt, [GREEDY, SAMPLED]) == expected


@pytest.mark.parametrize("family", [Family.LLAMA, Family.QWEN3])
def test_dense_weights_of_fp32_give_the_tokens_of_the_cpu_path(
    family: Family, write: Load, device: torch.device
) -> None:
    """The best logit is far enough above the next for the last bits of sums not to matter."""
    config, tensors = in_fp32(write(family))
    on_cpu, prompt = cpu_model.CpuModel(config, dict(tensors), ""), [*range(1, 8)]
    (expected,) = generate(on_cpu, prompt, [GREEDY])
    logits = on_cpu.logits(through(on_cpu, prompt + expected)[:, : config.hidden])
    best, second = logits.topk(2).values.unbind(1)
    assert float((best - second).min()) > 100 * CLOSE
    assert generate(gpu_of(config, tensors, device), prompt, [GREEDY]) == [expected]


@pytest.mark.parametrize("family", Family)
def test_hidden_rows_and_logits_are_those_of_the_cpu_path(
    family: Family, write: Load, device: torch.device
) -> None:
    """A prompt, a whole chunk longer than that of the others in one family, and rows after it."""
    config, tensors = in_fp32(write(family))
    length = 70 if family is Family.LLAMA else 6
    models: list[Model] = [cpu_model.CpuModel(config, dict(tensors), "")]
    models.append(gpu_of(config, tensors, device))
    expected, found = (through(model, [*range(1, length)]) for model in models)
    torch.testing.assert_close(found, expected, rtol=CLOSE, atol=CLOSE)


def test_dense_weights_of_bf16_are_multiplied_with_activations_of_bf16(
    write: Load, device: torch.device
) -> None:
    """Far nearer to the CPU path, which computes in fp32, than logits are to one another."""
    directory = write(Family.LLAMA)
    expected = through(cpu_model.load(directory), [1, 2, 3, 4])
    found = through(gpu_model.load(directory, device=device), [1, 2, 3, 4])
    error = (found - expected).square().mean().sqrt() / expected.std()
    assert 1e-5 < error < 0.02


def test_an_int8_head_draws_from_nearly_the_same_logits(
    write: Load, on_gpu: GpuModel, device: torch.device
) -> None:
    quantised = gpu_model.load(write(Family.BITNET), device=device, formats=Formats(head="int8"))
    hidden = on_gpu.forward([Piece([1, 2, 3], 0, [0], prefill=True)])[[0, 1, 2] * 3]
    expected, found = on_gpu.logits(hidden), quantised.logits(hidden)
    error = (found - expected).square().mean().sqrt() / expected.std()
    assert 1e-5 < error < 0.02
    assert quantised.fingerprint != on_gpu.fingerprint


@pytest.mark.parametrize("formats", [Formats("int8", "fp8", "int8"), Formats("int4", "int8")])
def test_quantised_formats_compute_what_they_do_on_the_cpu(
    formats: Formats, quantisable: Path, device: torch.device
) -> None:
    """But for the last bits of sums and what they become in bf16; and not what plain ones do."""
    plain, on_cpu = cpu_model.load(quantisable), cpu_model.load(quantisable, formats=formats)
    on_gpu = gpu_model.load(quantisable, device=device, formats=formats)
    exact, expected, found = (through(model, [1, 2, 3, 4]) for model in (plain, on_cpu, on_gpu))
    assert (found - expected).square().mean() < (found - exact).square().mean() / 4
    assert on_cpu.device == f"cpu torch, {formats}"
    assert on_gpu.device.endswith(f"), {formats}")
    assert on_cpu.fingerprint != plain.fingerprint


@pytest.mark.parametrize("formats", [Formats(), Formats("int8", "fp8", "int8"), Formats("int4")])
def test_the_bytes_on_a_gpu_are_those_of_the_loaded_parts(
    formats: Formats, quantisable: Path, device: torch.device
) -> None:
    config = read_config(quantisable)
    tensors = read_tensors(quantisable, config)
    parts = DecoderParts(config, tensors, device, lambda *_: None, formats, dependent=False)
    footprint = check_model(quantisable, formats).footprints["gpu"]
    buffers = [getattr(part, "workspace", None) for part in (*parts.layers, parts.head)]
    all_bytes = held_bytes([parts.table, parts.layers, parts.ropes, parts.head])
    assert all_bytes - held_bytes([parts._scratch, *buffers]) == footprint.weights_bytes
    cache = parts.decoder(pages=3, step_rows=4).parts
    assert held_bytes([cells for _, _, cells in cache]) == 3 * footprint.kv_page_bytes
    assert bytes_of_page(config, cache[0][2].keys.dtype) == footprint.kv_page_bytes


@pytest.mark.parametrize(
    ("capability", "asked", "setting"),
    [
        ((8, 6), {"formats": Formats(kv_cache="fp8")}, "kv_cache"),
        ((8, 9), {"dependent": True}, "dependent_launches"),
    ],
)
def test_what_a_gpu_has_no_instructions_for_is_refused(
    capability: tuple[int, int],
    asked: dict[str, Any],
    setting: str,
    write: Load,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    with pytest.raises(ModelError, match="or more, this one is sm_8") as caught:
        gpu_model.load(write(Family.LLAMA), device=torch.device("cuda"), **asked)
    assert caught.value.field == setting


def test_dependent_launches_are_those_of_every_step(
    write: Load, on_gpu: GpuModel, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also those of the sampler; the tokens stay."""
    said: list[bool] = []

    def sample(*args: Any, dependent: bool) -> None:
        said.append(dependent)
        sample_rows(*args, dependent=dependent)

    monkeypatch.setattr(gpu_draw, "sample_rows", sample)
    dependent = gpu_model.load(write(Family.BITNET), device=device, dependent=True)
    assert dependent._decoder.dependent
    assert generate(dependent, [1, 2], [SAMPLED]) == generate(on_gpu, [1, 2], [SAMPLED])
    assert said == [True] * TOKENS + [False] * TOKENS
    assert dependent.fingerprint == on_gpu.fingerprint


def test_a_batch_draws_what_each_draws_alone(on_gpu: GpuModel) -> None:
    """More rows than are drawn at a time, with pages of their own."""
    hidden = on_gpu.forward([Piece([5, 6, 7], 0, [2], prefill=True)])
    several = hidden[[0, 1, 2] * 12]
    draws = [Draw(Sampling(temperature=0.8, seed=7), position) for position in range(36)]
    together = on_gpu.draw(several, draws)
    for row in (31, 32):
        assert on_gpu.draw(several[row : row + 1], [draws[row]]) == [together[row]]
    assert len({drawn.token for drawn in together}) > 3
    assert on_gpu.logits(several)[33:36].equal(on_gpu.logits(hidden))


def test_a_continued_run_draws_what_the_uninterrupted_one_drew(on_gpu: GpuModel) -> None:
    """The generated tokens go through together, in other pages."""
    prompt = [*range(1, 9)]
    (whole,) = generate(on_gpu, prompt, [SAMPLED])
    on_gpu.forward([Piece(prompt, 0, [9, 2], prefill=True)])
    hidden = on_gpu.forward([Piece(whole[:-1], len(prompt), [9, 2], prefill=False)])
    assert on_gpu.draw(hidden[-1:], [Draw(SAMPLED, TOKENS - 1)]) == [Drawn(whole[-1])]


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_a_sequence_with_nan_has_no_token_and_disturbs_no_other(
    write: Load, device: torch.device
) -> None:
    config = read_config(write(Family.BITNET))
    tensors = read_tensors(write(Family.BITNET), config)
    bad = 17
    tensors[EMBEDDING][bad] = torch.nan
    tensors[HEAD] = torch.nan_to_num(tensors[EMBEDDING])
    model = gpu_of(replace(config, tied_head=False), tensors, device)
    good = [Piece([1, 2], 0, [0], prefill=True), Piece([3], 0, [2], prefill=True)]
    expected = model.forward(good)
    hidden = model.forward([good[0], Piece([4, bad, 5], 0, [1], prefill=True), good[1]])
    assert hidden[[0, 1, 5]].equal(expected)
    rows = [Piece([6], 2, [0], False), Piece([6], 3, [1], False), Piece([6], 1, [2], False)]
    draws = [Draw(SAMPLED, 0)] * 3
    drawn = model.draw(model.forward(rows), draws)
    assert [one.token for one in drawn].count(-1) == 1
    assert drawn[1] == Drawn(-1)
    alone = model.forward([rows[0], rows[2]])
    assert model.draw(alone, draws[:2]) == [drawn[0], drawn[2]]


def test_an_engine_runs_on_it(write: Load, on_gpu: GpuModel, tokenizer: Tokenizer) -> None:
    run = make_run(max_tokens=TOKENS, temperature=0.7, seed=3)
    expected = run_all(engine_of(cpu_model.load(write(Family.BITNET)), tokenizer), {1: run})
    assert run_all(engine_of(on_gpu, tokenizer), {1: run}) == expected


REFUSED: dict[str, tuple[Piece, type[Exception], str]] = {
    "beyond the context": (Piece([1], 256, [*range(5)], False), TooLarge, "257 tokens do not fit"),
    "beyond its pages": (Piece([1], 64, [0], False), TooLarge, "65 tokens do not fit the 64"),
    "nothing": (Piece([], 0, [0], True), ValueError, "0 tokens at 0 are not a valid piece"),
    "within a page": (Piece([1], 8, [0], True), ValueError, "1 tokens at 8 are not a valid piece"),
    "two pages": (
        Piece([1] * 65, 0, [0, 1], True),
        ValueError,
        "65 tokens at 0 are not a valid piece",
    ),
    "no id": (Piece([300], 0, [0], True), ValueError, "outside the vocabulary of 300"),
    "no page": (Piece([1], 0, [16], True), ValueError, "outside the 16 of the cache"),
}


@pytest.mark.parametrize(("piece", "error", "said"), REFUSED.values(), ids=REFUSED)
def test_a_piece_that_cannot_be_computed_is_refused(
    piece: Piece, error: type[Exception], said: str, on_gpu: GpuModel
) -> None:
    with pytest.raises(error, match=said):
        on_gpu.forward([piece])


def test_it_says_what_it_runs_on_and_how_many_pages_it_has(write: Load, on_gpu: GpuModel) -> None:
    assert on_gpu.device.partition(" (")[0] in ("cuda triton", "cpu triton")
    assert on_gpu.fingerprint != cpu_model.load(write(Family.BITNET)).fingerprint
    if not torch.cuda.is_available():
        assert on_gpu.pages == INTERPRETED_SEQUENCES * 256 // 64


def test_a_gpu_with_other_plans_is_another_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slice of a GPU may have its name, and fewer multiprocessors."""
    gpu = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H100")
    whole = LIMITS[9, 0]
    slices = [whole, replace(whole, multiprocessors=16), replace(whole, shared_bytes=99 << 10)]
    machines = set()
    for limits in slices:
        monkeypatch.setattr(gpu_model, "limits_of", lambda _, found=limits: found)
        machines.add(gpu_model._machine(gpu))
    assert len(machines) == len(slices)


def test_its_cache_is_as_large_as_asked_and_holds_a_whole_context(
    write: Load, device: torch.device
) -> None:
    folder = write(Family.LLAMA)
    page = bytes_of_page(read_config(folder))
    pages = [gpu_model.load(folder, device=device, kv_bytes=n * page).pages for n in (1, 7)]
    assert pages == [256 // 64, 7]


def test_heads_that_the_kernels_do_not_take_are_refused_by_name(
    checkpoint: Path, device: torch.device
) -> None:
    with pytest.raises(ModelError, match="heads of 16 elements, expected one of 32, 64") as caught:
        gpu_model.load(checkpoint, device=device)
    assert caught.value.hint == "set device to cpu"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_said_so(checkpoint: Path) -> None:
    with pytest.raises(
        ModelError, match="the GPU cannot be used: there is no NVIDIA GPU"
    ) as caught:
        load_model(checkpoint, device=Device.CUDA)
    assert caught.value.hint is not None and "or set device to cpu" in caught.value.hint


def test_a_gpu_is_checked_before_the_checkpoint_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse() -> None:
        raise ModelError("no compiler")

    monkeypatch.setattr(load, "require_gpu", refuse)
    with pytest.raises(ModelError, match="no compiler"):
        load_model(tmp_path / "none", device=Device.CUDA)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_cpu_serves(checkpoint: Path) -> None:
    assert load_model(checkpoint).device == "cpu torch"


def test_a_gpu_whose_kernels_lack_the_models_heads_is_left_alone_and_the_log_says_so(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load, "gpu_is_usable", lambda: True)
    with structlog.testing.capture_logs() as logged:
        assert load_model(checkpoint).device == "cpu torch"
    assert [one["event"] for one in logged] == ["device.cpu"]
    assert "heads of 16 elements" in str(logged)


def in_fp32(directory: Path) -> tuple[ModelConfig, dict[str, Tensor]]:
    """Return a checkpoint with its floating tensors in fp32, so that no path rounds activations."""
    config = read_config(directory)
    tensors = read_tensors(directory, config)
    return config, {n: t.float() if t.is_floating_point() else t for n, t in tensors.items()}


def bytes_of_page(config: ModelConfig, dtype: torch.dtype = torch.float32) -> int:
    return page_bytes(config.layers, config.kv_heads, config.head_dim, dtype)


def gpu_of(config: ModelConfig, tensors: dict[str, Tensor], device: torch.device) -> GpuModel:
    pages = 8 * bytes_of_page(config)
    return GpuModel(config, tensors, "", device, lambda *_: None, kv_bytes=pages)


def through(model: Model, ids: list[int]) -> Tensor:
    """Hidden rows and logits of a prompt and of two rows after it, fp32 [len(ids), H + vocab]."""
    hidden = prefill(model, ids[:-2], PAGES)
    rows = model.forward([Piece(ids[-2:], len(ids) - 2, PAGES, prefill=False)])
    hidden = torch.cat([hidden, rows])[-4:]
    return torch.cat([hidden, model.logits(hidden)], 1).cpu()
