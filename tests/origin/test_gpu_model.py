"""The kernels in the engine of an origin: on a GPU where there is one, else in the interpreter."""

import gc
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from kernels.sampler import Sampling
from ledger.errors import ModelError, TooLarge
from origin import gpu_model
from origin.checkpoint import read_config, read_tensors
from origin.config import DEMO_MODEL
from origin.cpu_model import BitNetModel, load
from origin.engine import Engine
from origin.gpu_model import GpuModel
from origin.model import Device, Model, load_model, prefill_chunks
from tests.origin.runs import make_run, run_all
from tests.origin.tiny_checkpoint import Shape, write_checkpoint

PROMPT = "Once upon a time there was a fox"
TOKENS = 4
SAMPLED = Sampling(temperature=0.8, top_k=40, top_p=0.95, seed=7)


@pytest.fixture(scope="module")
def heads_of_32(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The least that the kernels take."""
    return write_checkpoint(tmp_path_factory.mktemp("heads"), Shape(heads=2, kv_heads=1))


@pytest.fixture(scope="module")
def on_cpu(heads_of_32: Path) -> BitNetModel:
    return load(heads_of_32)


@pytest.fixture(scope="module")
def on_gpu(heads_of_32: Path, device: torch.device) -> GpuModel:
    return gpu_model.load(heads_of_32, device=device)


def generate(model: Model, prompt: list[int], sampling: Sampling) -> list[int]:
    cache = model.new_cache()
    for chunk in prefill_chunks(prompt):
        hidden = model.advance(chunk, cache)
    ids: list[int] = []
    for position in range(TOKENS):
        ids.append(model.sample(hidden, sampling, position))
        hidden = model.advance(ids[-1:], cache)
    return ids


@pytest.mark.parametrize("sampling", [Sampling(), SAMPLED], ids=["greedy", "seeded"])
def test_the_demo_model_gives_the_tokens_of_the_cpu_path(
    sampling: Sampling, device: torch.device
) -> None:
    prompt = Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json")).encode(PROMPT).ids
    expected = generate(load(DEMO_MODEL), prompt, sampling)
    assert generate(gpu_model.load(DEMO_MODEL, device=device), prompt, sampling) == expected


def test_logits_are_those_of_the_cpu_path(on_cpu: BitNetModel, on_gpu: GpuModel) -> None:
    prompt = list(range(1, 68))  # a whole chunk and a short one
    torch.testing.assert_close(
        on_gpu.forward(prompt).cpu(), on_cpu.forward(prompt), rtol=1e-4, atol=1e-4
    )


def test_an_engine_runs_on_it(on_cpu: BitNetModel, on_gpu: GpuModel, tokenizer: Tokenizer) -> None:
    run = make_run(max_tokens=TOKENS, temperature=0.7, seed=3)
    expected = run_all(Engine(on_cpu, tokenizer), {1: run})
    assert run_all(Engine(on_gpu, tokenizer), {1: run}) == expected


def test_a_continued_run_draws_what_the_uninterrupted_one_drew(on_gpu: GpuModel) -> None:
    prompt = list(range(1, 9))
    whole = generate(on_gpu, prompt, SAMPLED)
    cache = on_gpu.new_cache()
    hidden = on_gpu.advance(prompt, cache)
    for token in whole[:2]:
        hidden = on_gpu.advance([token], cache)
    assert on_gpu.sample(hidden, SAMPLED, 2) == whole[2]


def test_a_cache_that_nobody_holds_is_given_back(heads_of_32: Path, device: torch.device) -> None:
    config = read_config(heads_of_32)
    tensors = read_tensors(heads_of_32, config)
    few = GpuModel(config, tensors, "", device, lambda *_: None, sequences=1)
    held = few.new_cache()
    with pytest.raises(TooLarge, match="every sequence of the KV cache is taken"):
        few.new_cache()
    del held
    gc.collect()
    few.new_cache()


def test_tokens_beyond_the_context_are_refused(on_gpu: GpuModel) -> None:
    cache = on_gpu.new_cache()
    cache.length = on_gpu.config.context
    with pytest.raises(TooLarge, match="257 tokens do not fit a context of 256"):
        on_gpu.advance([1], cache)


def test_it_says_what_it_runs_on(on_cpu: BitNetModel, on_gpu: GpuModel) -> None:
    assert on_gpu.device.partition(" (")[0] in ("cuda triton", "cpu triton")
    assert on_gpu.fingerprint != on_cpu.fingerprint


def test_heads_that_the_kernels_do_not_take_are_refused_by_name(
    checkpoint: Path, device: torch.device
) -> None:
    with pytest.raises(ModelError, match="heads of 16 elements, expected one of 32, 64"):
        gpu_model.load(checkpoint, device=device)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_said_so(checkpoint: Path) -> None:
    with pytest.raises(ModelError, match="no CUDA device is there"):
        load_model(checkpoint, device=Device.CUDA)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_cpu_serves(checkpoint: Path) -> None:
    assert load_model(checkpoint).device == "cpu torch"
