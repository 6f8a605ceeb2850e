"""Checks of a checkpoint's weight files."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tailrace.kernels.shapes import Family
from tailrace.ledger.errors import ModelError
from tailrace.origin.checkpoint.model_config import read_config
from tailrace.origin.models.tensors import checkpoint_files, read_tensors
from tests.origin.tiny_checkpoint import Shape, write_checkpoint

NORM = "model.norm.weight"
FIRST_SHARD = "model-00001-of-00003.safetensors"
INDEX = "model.safetensors.index.json"


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "model", Shape(layers=1))


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    shape = Shape(layers=1, family=Family.LLAMA, shards=3)
    return write_checkpoint(tmp_path / "sharded", shape)


def change_index(directory: Path, change: Callable[[dict[str, str]], object]) -> None:
    index = json.loads((directory / INDEX).read_text())
    change(index["weight_map"])
    (directory / INDEX).write_text(json.dumps(index))


def refused(directory: Path, match: str, file: str = "model.safetensors") -> None:
    with pytest.raises(ModelError, match=match) as caught:
        read_tensors(directory, read_config(directory))
    assert caught.value.field == str(directory / file)


@pytest.mark.parametrize("keep_bytes", [0, 5, 8, 200, 10_000, -1])
def test_a_truncated_weights_file_is_refused(copy: Path, keep_bytes: int) -> None:
    path = copy / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep_bytes])
    refused(copy, "cut off")


def test_a_weights_file_with_more_bytes_than_its_tensors_is_refused(copy: Path) -> None:
    with (copy / "model.safetensors").open("ab") as file:
        file.write(b"\0")
    refused(copy, "something was appended")


@pytest.mark.parametrize(
    ("header", "problem"),
    [
        (b"[]", "not a JSON object"),
        (b"{]", "has a header that cannot be read"),
        (b"\xff\xff", "has a header that cannot be read"),
        (b"[" * 99_999, "has a header that cannot be read"),
        (b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},'
         b'"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}', "twice"),
        (b'{"a":{"dtype":"F12","shape":[1],"data_offsets":[0,4]}}', 'a: dtype "F12"'),
        (b'{"a":{"dtype":["U8"],"shape":[1],"data_offsets":[0,4]}}', "a: dtype"),
        (b'{"a":{"dtype":"U8","shape":[-1],"data_offsets":[0,4]}}', r"a: shape \[-1\]"),
        (b'{"a":{"dtype":"U8","shape":[4],"data_offsets":[0]}}', "a: shape"),
        (b'{"a":{"dtype":"U8","shape":[9],"data_offsets":[0,4]}}', "a: 4 bytes"),
        (b'{"a":{"dtype":"U8","shape":[2],"data_offsets":[2,4]}}', "a: begins at byte 2"),
        (b'{"a":7}', "a: dtype null"),
    ],
)  # fmt: skip
def test_a_header_that_lies_is_refused(copy: Path, header: bytes, problem: str) -> None:
    content = len(header).to_bytes(8, "little") + header + b"\0" * 4
    (copy / "model.safetensors").write_bytes(content)
    refused(copy, problem)


def test_a_header_longer_than_the_format_allows_is_refused(copy: Path) -> None:
    (copy / "model.safetensors").write_bytes((1 << 40).to_bytes(8, "little") + b"{}")
    refused(copy, "is cut off within its header")


def test_a_folder_without_weights_is_refused(copy: Path) -> None:
    (copy / "model.safetensors").unlink()
    refused(copy, r"no such file \(expected weights as safetensors\)")


def test_a_missing_shard_is_refused_by_its_name(sharded: Path) -> None:
    (sharded / FIRST_SHARD).unlink()
    refused(sharded, "no such file", FIRST_SHARD)


def test_a_truncated_shard_is_refused_by_its_name(sharded: Path) -> None:
    path = sharded / FIRST_SHARD
    path.write_bytes(path.read_bytes()[:-1])
    refused(sharded, "cut off", FIRST_SHARD)


@pytest.mark.parametrize(
    "name",
    ["../model.safetensors", "/tmp/x.safetensors", "a\\b.safetensors", "..safetensors",
     "model.bin", "x\0.safetensors", "c:x.safetensors", 3, None, ""],
)  # fmt: skip
def test_a_shard_outside_the_folder_is_refused(sharded: Path, name: object) -> None:
    change_index(sharded, lambda weights: weights.update({NORM: name}))  # type: ignore[dict-item]
    refused(sharded, f"weight_map.{NORM}", INDEX)


def test_an_index_that_names_the_wrong_shard_is_refused(sharded: Path) -> None:
    other = "model-00003-of-00003.safetensors"

    def swap(weights: dict[str, str]) -> None:
        assert weights[NORM] != other
        weights[NORM] = other

    change_index(sharded, swap)
    refused(sharded, f"weight_map.{NORM}", INDEX)


def test_an_index_that_names_a_tensor_that_is_nowhere_is_refused(sharded: Path) -> None:
    change_index(sharded, lambda weights: weights.update({"nowhere": FIRST_SHARD}))
    refused(sharded, f"nowhere: is not in {FIRST_SHARD}", INDEX)


def test_an_index_that_leaves_a_tensor_out_is_refused(sharded: Path) -> None:
    change_index(sharded, lambda weights: weights.pop(NORM))
    refused(sharded, f"does not name {NORM}", INDEX)


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"weight_map": {}}', '{"weight_map": 1}'])
def test_an_index_that_is_none_is_refused(sharded: Path, content: str) -> None:
    (sharded / INDEX).write_text(content)
    refused(sharded, "cannot be read|not a JSON object|weight_map", INDEX)


def test_the_fingerprint_covers_every_shard(sharded: Path, copy: Path) -> None:
    names = [path.name for path in checkpoint_files(sharded)]
    assert names == [
        "config.json",
        "tokenizer.json",
        "generation_config.json",
        INDEX,
        *(f"model-0000{at}-of-00003.safetensors" for at in (1, 2, 3)),
    ]
    assert [path.name for path in checkpoint_files(copy)][-1] == "model.safetensors"
    assert all(path.exists() for path in checkpoint_files(copy))
    (sharded / INDEX).write_text("{}")
    with pytest.raises(ModelError, match="weight_map"):
        checkpoint_files(sharded)
