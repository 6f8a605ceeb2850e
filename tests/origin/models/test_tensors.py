"""Reading the tensors of a checkpoint."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tailrace.kernels.linear.ternary import quantize_absmean, unpack_ternary
from tailrace.kernels.shapes import Family
from tailrace.ledger.errors import ModelError
from tailrace.origin.checkpoint.model_config import read_config
from tailrace.origin.models.tensors import absmean, read_tensors
from tests.origin.tiny_checkpoint import Shape, random_tensors, write_checkpoint, write_weights

Q_PROJ = "model.layers.0.self_attn.q_proj.weight"
NORM = "model.norm.weight"
HEAD = "lm_head.weight"


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "model", Shape(layers=1))


def read(directory: Path) -> dict[str, Tensor]:
    return read_tensors(directory, read_config(directory))


def change_tensors(directory: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    path = directory / "model.safetensors"
    # A copy: the loaded ones may lie in the file that is written.
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    change(tensors)
    save_file(tensors, path)


def refused(directory: Path, match: str) -> None:
    with pytest.raises(ModelError, match=match) as caught:
        read(directory)
    assert caught.value.field == str(directory / "model.safetensors")


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize(
    "shape",
    [
        Shape(),
        Shape(tied_head=False),
        Shape(family=Family.LLAMA),
        Shape(family=Family.LLAMA, tied_head=False, head_dim=24),
        Shape(family=Family.QWEN3, head_dim=24, kv_heads=1),
    ],
)
def test_every_tensor_is_read_as_it_was_written(tmp_path: Path, shape: Shape, shards: int) -> None:
    written = dict(random_tensors(shape, seed=1))
    write_checkpoint(tmp_path, shape)
    (tmp_path / "model.safetensors").unlink()
    write_weights(tmp_path, written, shards)
    found = read(tmp_path)
    assert found.keys() == written.keys()
    for name, tensor in written.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_unpacked_weights_become_ternary_by_their_mean(tmp_path: Path, dtype: torch.dtype) -> None:
    write_checkpoint(tmp_path, Shape(layers=1, packed=False))

    def change(tensors: dict[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            tensors[name] = tensor.to(dtype)

    change_tensors(tmp_path, change)
    real = load_file(tmp_path / "model.safetensors")[Q_PROJ]
    found = read(tmp_path)
    ternary, scale = quantize_absmean(real)
    assert torch.equal(unpack_ternary(found[Q_PROJ]), ternary)
    torch.testing.assert_close(found[f"{Q_PROJ}_scale"], scale.reshape(1))
    assert set(ternary.flatten().tolist()) == {-1, 0, 1}


def test_the_scale_is_the_same_whatever_the_number_of_threads() -> None:
    """In fp32 sums it is not: these shapes are among those where it differs."""
    before = torch.get_num_threads()
    try:
        for seed in range(6):
            random = torch.Generator().manual_seed(seed)
            real = torch.randn(512, 640 + 128 * seed, generator=random).bfloat16().float()
            scales = set()
            for threads in (1, 2, 3, 4):
                torch.set_num_threads(threads)
                scales.add(float(absmean(real)))
            assert scales == {float(real.double().abs().mean().float())}
    finally:
        torch.set_num_threads(before)


# ---- tensors that do not fit ----


@pytest.mark.parametrize(
    ("tensor", "problem"),
    [
        (None, r"is missing \(expected U8 \(16, 64\)\)"),
        (torch.zeros(16, 60, dtype=torch.uint8), r"shape \(16, 60\) \(expected \(16, 64\)\)"),
        (torch.zeros(16, 64), r"dtype F32 \(expected U8\)"),
        (torch.full((16, 64), 0b11_01_01_01, dtype=torch.uint8), "holds the code 3"),
        (torch.full((16, 64), 0b01_01_01_11, dtype=torch.uint8), "holds the code 3"),
    ],
)
def test_a_tensor_that_does_not_fit_the_config_is_refused_by_name(
    copy: Path, tensor: Tensor | None, problem: str
) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        del tensors[Q_PROJ]
        if tensor is not None:
            tensors[Q_PROJ] = tensor

    change_tensors(copy, change)
    refused(copy, f"{Q_PROJ}: {problem}")


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_one_value_that_is_no_number_is_refused_by_name(
    copy: Path, value: float, dtype: torch.dtype
) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors[NORM] = tensors[NORM].to(dtype)
        tensors[NORM][17] = value

    change_tensors(copy, change)
    refused(copy, f"{NORM}: holds NaN or infinite values")


def test_a_tensor_too_many_is_refused_by_name(copy: Path) -> None:
    change_tensors(copy, lambda tensors: tensors.update({"extra.bias": torch.zeros(1)}))
    refused(copy, r"extra\.bias: is not part of the model")


def test_frequencies_that_older_files_hold_are_left_out(copy: Path) -> None:
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    change_tensors(copy, lambda tensors: tensors.update({name: torch.zeros(8)}))
    assert name not in read(copy)


def test_a_head_beside_a_tied_embedding_is_left_out_if_it_is_equal(copy: Path) -> None:
    def repeat(tensors: dict[str, Tensor]) -> None:
        tensors[HEAD] = tensors["model.embed_tokens.weight"].clone()

    change_tensors(copy, repeat)
    assert HEAD not in read(copy)
    change_tensors(copy, lambda tensors: tensors[HEAD][5].neg_())
    refused(copy, f"{HEAD}: differs from model.embed_tokens.weight")
    change_tensors(copy, lambda tensors: tensors.update({HEAD: torch.zeros(3, 64)}))
    refused(copy, rf"{HEAD}: .*\(3, 64\)|{HEAD}: dtype")


def test_a_head_that_is_missing_beside_an_untied_embedding_is_refused(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, Shape(layers=1, family=Family.LLAMA, tied_head=False))
    change_tensors(tmp_path, lambda tensors: tensors.pop(HEAD))
    refused(tmp_path, f"{HEAD}: is missing")


def test_every_tensor_at_fault_is_counted(copy: Path) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if name.endswith("_proj.weight")]:
            del tensors[name]

    change_tensors(copy, change)
    refused(copy, "is missing, and 6 more that")
