import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from ledger.errors import ModelError
from origin.checkpoint import read_config, read_tensors
from tests.origin.tiny_checkpoint import Shape, write_checkpoint

Q_PROJ = "model.layers.0.self_attn.q_proj.weight"


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "model", Shape(layers=1))


def change_json(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def change_tensors(directory: Path, change: Callable[[dict[str, Tensor]], None]) -> None:
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors")


def test_a_whole_checkpoint_is_read(checkpoint: Path) -> None:
    config = read_config(checkpoint)
    assert (config.vocab, config.hidden, config.ffn, config.layers) == (300, 64, 96, 2)
    assert (config.heads, config.kv_heads, config.head_dim, config.context) == (4, 2, 16, 256)
    assert (config.norm_eps, config.rope_theta, config.tied_head) == (1e-5, 500_000.0, True)
    tensors = read_tensors(checkpoint, config)
    assert tensors[Q_PROJ].dtype == torch.uint8
    assert tensors[Q_PROJ].shape == (16, 64)


def test_an_untied_head_is_read(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, Shape(layers=1, tied_head=False))
    assert "lm_head.weight" in read_tensors(tmp_path, read_config(tmp_path))


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        ({"eos_token_id": [3, 4]}, {"eos_token_id": 5}, {3, 4}),
        ({"eos_token_id": 3}, {"eos_token_id": 5}, {3}),
        ({}, {"eos_token_id": 5}, {5}),
        (None, {"eos_token_id": [5]}, {5}),
        (None, {"eos_token_id": None}, set()),
    ],
)
def test_the_end_of_text_is_that_of_generation_config_if_it_names_one(
    copy: Path, generation: dict[str, Any] | None, config: dict[str, Any], expected: set[int]
) -> None:
    path = copy / "generation_config.json"
    if generation is None:
        path.unlink()
    else:
        path.write_text(json.dumps(generation))
    change_json(copy / "config.json", lambda raw: raw.update(config))
    assert read_config(copy).eos_ids == expected


def test_rope_theta_is_found_where_newer_files_keep_it(copy: Path) -> None:
    def move(raw: dict[str, Any]) -> None:
        del raw["rope_theta"]
        raw["rope_parameters"] = {"rope_type": "default", "rope_theta": 1234.0}

    change_json(copy / "config.json", move)
    assert read_config(copy).rope_theta == 1234.0


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("model_type", "llama"),
        ("hidden_act", "silu"),
        ("attention_bias", True),
        ("rope_scaling", {"type": "linear"}),
        ("rope_parameters", {"rope_type": "yarn"}),
        ("quantization_config", None),
        ("hidden_size", 66),
        ("num_hidden_layers", 0),
        ("num_hidden_layers", True),
        ("num_key_value_heads", 3),
        ("vocab_size", "300"),
        ("rms_norm_eps", -1.0),
        ("max_position_embeddings", None),
    ],
)
def test_a_config_that_cannot_be_served_is_refused_with_file_and_key(
    copy: Path, key: str, value: object
) -> None:
    change_json(copy / "config.json", lambda raw: raw.update({key: value}))
    (copy / "generation_config.json").unlink()
    named = "num_attention_heads" if key == "hidden_size" else key
    with pytest.raises(ModelError, match=named) as caught:
        read_config(copy)
    assert caught.value.field == str(copy / "config.json")


@pytest.mark.parametrize(
    ("key", "value"),
    [("linear_class", "bitlinear"), ("quantization_mode", "online"), ("quant_method", "gptq")],
)
def test_another_way_of_quantising_is_refused(copy: Path, key: str, value: str) -> None:
    change_json(copy / "config.json", lambda raw: raw["quantization_config"].update({key: value}))
    with pytest.raises(ModelError, match=f"quantization_config.{key}"):
        read_config(copy)


def test_an_end_of_text_outside_the_vocabulary_is_refused(copy: Path) -> None:
    (copy / "generation_config.json").write_text('{"eos_token_id": 300}')
    with pytest.raises(ModelError, match="eos_token_id") as caught:
        read_config(copy)
    assert caught.value.field == str(copy / "generation_config.json")


@pytest.mark.parametrize("content", ["", "[]", "{", "\udcff"])
def test_a_config_that_is_no_json_object_is_refused(copy: Path, content: str) -> None:
    (copy / "config.json").write_bytes(content.encode("utf-8", "surrogateescape"))
    with pytest.raises(ModelError):
        read_config(copy)


def test_a_directory_without_a_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"config\.json"):
        read_config(tmp_path)


@pytest.mark.parametrize(
    ("tensor", "problem"),
    [
        (None, "is missing"),
        (torch.zeros(16, 60, dtype=torch.uint8), r"shape \(16, 60\), expected \(16, 64\)"),
        (torch.zeros(16, 64), "dtype torch.float32, expected torch.uint8"),
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
    with pytest.raises(ModelError, match=f"{Q_PROJ}: {problem}") as caught:
        read_tensors(copy, read_config(copy))
    assert caught.value.field == str(copy / "model.safetensors")


def test_a_tensor_too_many_is_refused_by_name(copy: Path) -> None:
    change_tensors(copy, lambda tensors: tensors.update({"extra.bias": torch.zeros(1)}))
    with pytest.raises(ModelError, match=r"extra\.bias"):
        read_tensors(copy, read_config(copy))


@pytest.mark.parametrize("keep_bytes", [0, 5, 200, 10_000])
def test_a_truncated_weights_file_is_refused(copy: Path, keep_bytes: int) -> None:
    path = copy / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep_bytes])
    with pytest.raises(ModelError) as caught:
        read_tensors(copy, read_config(copy))
    assert caught.value.field == str(path)
