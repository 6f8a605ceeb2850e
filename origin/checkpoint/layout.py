"""The tensors that a model of a given shape needs, and a check that a checkpoint has them.

All three model families use the tensor names of Llama. The tensors are in model.safetensors, or in
the shards that model.safetensors.index.json names. A safetensors file consists of the length of
its header (u64, little-endian), the header (JSON: name -> dtype, shape, data_offsets) and the bytes
of the tensors, without gaps (https://huggingface.co/docs/safetensors). This module does not use
torch.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from tailrace.kernels.shapes import WEIGHTS_PER_BYTE, Family
from tailrace.origin.checkpoint.finding import Findings, JsonObject, read_object, shown
from tailrace.origin.checkpoint.model_config import ModelConfig

WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
SUFFIX = ".safetensors"

LENGTH_BYTES = 8
MAX_HEADER_BYTES = 100_000_000
"""Maximum size in bytes of a file's header, as the safetensors format defines it."""
READ_BYTES = 1 << 20
BYTES_OF = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1,
    "U16": 2, "I16": 2, "F16": 2, "BF16": 2,
    "U32": 4, "I32": 4, "F32": 4,
    "U64": 8, "I64": 8, "F64": 8,
}  # fmt: skip

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
FLOATING = ("BF16", "F16", "F32")
PACKED = ("U8",)
# Older checkpoints contain this tensor, although its values are computed from the config.
IGNORED_SUFFIX = "rotary_emb.inv_freq"
Expected = tuple[tuple[str, ...], tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor as described in its file's header; `dtype` is the safetensors name."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int
    """`start` and `end` are offsets in bytes from the first tensor's first byte."""


def main_file(directory: Path) -> Path:
    """Return model.safetensors, or the index of the shards if only that exists."""
    whole, index = directory / WEIGHTS_FILE, directory / INDEX_FILE
    return whole if whole.exists() or not index.exists() else index


def weight_files(directory: Path, findings: Findings) -> list[Path]:
    """Return the files that hold tensors, in the order of their names."""
    main = main_file(directory)
    if main.name != INDEX_FILE:
        return [main]
    return [directory / name for name in sorted(set(_weight_map(main, findings).values()))]


def stored_tensors(directory: Path, findings: Findings) -> dict[str, StoredTensor]:
    """Return all tensors by name; add a fault for each file that cannot be read."""
    stored: dict[str, StoredTensor] = {}
    for path in weight_files(directory, findings):
        for name, tensor in read_header(path, findings).items():
            if name in stored:
                findings.fault(path, name, f"is in {stored[name].file.name} too")
            stored[name] = tensor
    main = main_file(directory)
    if main.name == INDEX_FILE:
        _check_index(main, stored, findings)
    return stored


def read_header(path: Path, findings: Findings) -> dict[str, StoredTensor]:
    """Return the tensors of one file.

    If the header cannot be read, the result is empty, and a fault is added.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(LENGTH_BYTES), "little")
            if size < LENGTH_BYTES or length > min(MAX_HEADER_BYTES, size - LENGTH_BYTES):
                findings.fault(path, "", f"is cut off within its header ({size} bytes)")
                return {}
            header = json.loads(file.read(length), object_pairs_hook=_unique)
    except FileNotFoundError:
        findings.fault(path, "", "cannot be read: there is no such file", "weights as safetensors")
        return {}
    except (OSError, ValueError, RecursionError) as exc:
        findings.fault(path, "", f"has a header that cannot be read: {exc}")
        return {}
    if not isinstance(header, dict):
        findings.fault(path, "", "has a header that is not a JSON object")
        return {}
    header.pop("__metadata__", None)
    parsed = {name: _parsed(path, name, entry, findings) for name, entry in header.items()}
    tensors = {name: tensor for name, tensor in parsed.items() if tensor is not None}
    if len(tensors) == len(header):
        _check_cover(path, tensors, size - LENGTH_BYTES - length, findings)
    return tensors


def same_bytes(one: StoredTensor, other: StoredTensor) -> bool:
    """Return True if two tensors of equal dtype and shape have equal bytes; may raise OSError."""
    with _opened(one) as ours, _opened(other) as theirs:
        left = one.end - one.start
        while left > 0:
            piece = ours.read(min(left, READ_BYTES))
            if not piece or piece != theirs.read(len(piece)):
                return False
            left -= len(piece)
    return True


def _opened(tensor: StoredTensor) -> BinaryIO:
    """Open a tensor's file, positioned at the first byte of the tensor."""
    file = tensor.file.open("rb")
    length = int.from_bytes(file.read(LENGTH_BYTES), "little")
    file.seek(LENGTH_BYTES + length + tensor.start)
    return file


def _parsed(path: Path, name: str, entry: Any, findings: Findings) -> StoredTensor | None:
    entry = entry if isinstance(entry, dict) else {}
    dtype, shape, offsets = (entry.get(key) for key in ("dtype", "shape", "data_offsets"))
    if not isinstance(dtype, str) or dtype not in BYTES_OF:
        findings.fault(path, name, f"dtype {shown(dtype)}", "one of " + ", ".join(BYTES_OF))
        return None
    if not (_are_sizes(shape) and _are_sizes(offsets) and len(offsets) == 2):
        findings.fault(path, name, f"shape {shown(shape)} at {shown(offsets)}", "whole numbers")
        return None
    start, end = offsets
    if end - start != math.prod(shape) * BYTES_OF[dtype]:
        problem = f"{end - start} bytes"
        findings.fault(path, name, problem, f"those of {dtype} {tuple(shape)}")
        return None
    return StoredTensor(path, dtype, tuple(shape), start, end)


def _are_sizes(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)


def _check_cover(
    path: Path, tensors: dict[str, StoredTensor], data_bytes: int, findings: Findings
) -> None:
    """Add a fault unless the tensors fill the file without gaps."""
    at = 0
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].start, item[1].end)):
        if tensor.start != at:
            findings.fault(path, name, f"begins at byte {tensor.start}", f"byte {at}")
            return
        at = tensor.end
    if at != data_bytes:
        problem = f"has {data_bytes} bytes of tensors: it is cut off, or something was appended"
        findings.fault(path, "", problem, f"the {at} bytes of its header")


def _weight_map(index: Path, findings: Findings) -> dict[str, str]:
    """Return the file name of each tensor's shard, from the index of the shards.

    An entry that is not a plain file name is a fault.
    """
    raw = read_object(index, findings)
    if raw is None:
        return {}
    child = JsonObject(index, raw, findings).child("weight_map")
    if child is None or not child.raw:
        findings.fault(index, "weight_map", "is missing or empty", "tensor -> shard")
        return {}
    good = {name: shard for name, shard in child.raw.items() if _is_plain(shard)}
    for name in sorted(child.raw.keys() - good.keys()):
        right = f"the name of a {SUFFIX} file in the same folder"
        findings.fault(index, f"weight_map.{name}", shown(child.raw[name]), right)
    return good


def _is_plain(shard: object) -> bool:
    """Return True if `shard` names a safetensors file in the folder itself, without a path."""
    if not isinstance(shard, str) or not shard.endswith(SUFFIX):
        return False
    return shard.isprintable() and not set(shard) & set("/\\:") and not shard.startswith(".")


def _check_index(index: Path, stored: dict[str, StoredTensor], findings: Findings) -> None:
    """Add a fault for each difference between the index and the shards."""
    said = _weight_map(index, Findings())
    read = {tensor.file.name for tensor in stored.values()}
    for name, shard in said.items():
        found = stored.get(name)
        if found is None and shard in read:
            findings.fault(index, f"weight_map.{name}", f"is not in {shard}")
        elif found is not None and found.file.name != shard:
            findings.fault(index, f"weight_map.{name}", shown(shard), found.file.name)
    for name in sorted(stored.keys() - said.keys()):
        findings.fault(index, "weight_map", f"does not name {name} of {stored[name].file.name}")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len({name for name, _ in pairs}) != len(pairs):
        raise ValueError("a JSON object has the same name twice")
    return dict(pairs)


def is_ignored(name: str, config: ModelConfig) -> bool:
    """Return True for a tensor that many checkpoints contain although the model does not use it."""
    return name.endswith(IGNORED_SUFFIX) or (name == HEAD and config.tied_head)


def linears(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """Return (outputs, inputs) of each linear map of a layer, by its name within the layer."""
    return {
        "self_attn.q_proj": (config.queries, config.hidden),
        "self_attn.k_proj": (config.keys, config.hidden),
        "self_attn.v_proj": (config.keys, config.hidden),
        "self_attn.o_proj": (config.hidden, config.queries),
        "mlp.gate_proj": (config.ffn, config.hidden),
        "mlp.up_proj": (config.ffn, config.hidden),
        "mlp.down_proj": (config.hidden, config.ffn),
    }


def norms(config: ModelConfig) -> dict[str, int]:
    """Return the size of each norm of a layer, by its name within the layer."""
    sizes = {"input_layernorm": config.hidden, "post_attention_layernorm": config.hidden}
    match config.family:
        case Family.BITNET:
            sizes |= {"self_attn.attn_sub_norm": config.hidden, "mlp.ffn_sub_norm": config.ffn}
        case Family.QWEN3:
            sizes |= {
                "self_attn.q_norm": config.head_dim,
                "self_attn.k_norm": config.head_dim,
            }
    return sizes


def expected_tensors(config: ModelConfig) -> Iterator[tuple[str, Expected]]:
    """Yield (name, (allowed dtypes, shape)) of every tensor that a checkpoint must have."""
    yield EMBEDDING, (FLOATING, (config.vocab, config.hidden))
    yield "model.norm.weight", (FLOATING, (config.hidden,))
    if not config.tied_head:
        yield HEAD, (FLOATING, (config.vocab, config.hidden))
    for layer in range(config.layers):
        prefix = f"model.layers.{layer}"
        for name, (rows, columns) in linears(config).items():
            if config.packed:
                yield f"{prefix}.{name}.weight", (PACKED, (rows // WEIGHTS_PER_BYTE, columns))
                yield f"{prefix}.{name}.weight_scale", (FLOATING, (1,))
            else:
                yield f"{prefix}.{name}.weight", (FLOATING, (rows, columns))
        for name, size in norms(config).items():
            yield f"{prefix}.{name}.weight", (FLOATING, (size,))


def examine_weights(
    directory: Path, config: ModelConfig, findings: Findings
) -> dict[str, StoredTensor]:
    """Return the tensors of a checkpoint by name.

    A tensor that is missing, superfluous, or of a wrong shape or dtype is a fault. If a file cannot
    be read, that is the only fault: no missing tensors are reported, as they may be in that file.
    """
    before = len(findings.faults)
    stored = stored_tensors(directory, findings)
    whole = len(findings.faults) == before
    expected = dict(expected_tensors(config))
    for name, (dtypes, shape) in expected.items():
        if name in stored:
            _check_tensor(name, stored[name], dtypes, shape, findings)
        elif whole:
            findings.fault(main_file(directory), name, "is missing", f"{dtypes[0]} {shape}")
    _check_others(stored, expected, config, findings)
    return stored


def _check_others(
    stored: dict[str, StoredTensor],
    expected: dict[str, Expected],
    config: ModelConfig,
    findings: Findings,
) -> None:
    for name in sorted(stored.keys() - expected.keys()):
        if name == HEAD and config.tied_head:
            _check_tied(stored, expected[EMBEDDING][1], findings)
        elif not is_ignored(name, config):
            findings.fault(stored[name].file, name, "is not part of the model")


def _check_tied(
    stored: dict[str, StoredTensor], shape: tuple[int, ...], findings: Findings
) -> None:
    """Add a fault if the LM head is tied to the embedding, but stored with other values."""
    head, embedding = stored[HEAD], stored.get(EMBEDDING)
    if embedding is None or embedding.shape != shape:
        return  # a fault was already added for the embedding
    _check_tensor(HEAD, head, (embedding.dtype,), shape, findings)
    if (head.dtype, head.shape) != (embedding.dtype, shape):
        return
    try:
        is_same = same_bytes(head, embedding)
    except OSError as exc:
        findings.fault(head.file, HEAD, f"cannot be read: {exc}")
        return
    if not is_same:
        right = "the same bytes, or tie_word_embeddings false"
        findings.fault(head.file, HEAD, f"differs from {EMBEDDING}", right)


def _check_tensor(
    name: str,
    tensor: StoredTensor,
    dtypes: tuple[str, ...],
    shape: tuple[int, ...],
    findings: Findings,
) -> None:
    if tensor.dtype not in dtypes:
        findings.fault(tensor.file, name, f"dtype {tensor.dtype}", " or ".join(dtypes))
    if tensor.shape != shape:
        findings.fault(tensor.file, name, f"shape {tensor.shape}", f"{shape}")
