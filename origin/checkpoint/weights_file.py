"""Where the tensors of a checkpoint lie, from the headers of its safetensors files; no torch.

One model.safetensors, or the shards that model.safetensors.index.json names. A file is the
length of a header (u64, little-endian), the header (JSON: name -> dtype, shape, data_offsets) and
the tensors' bytes, without holes. Source: the format's own description,
https://huggingface.co/docs/safetensors.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from origin.checkpoint.finding import Findings
from origin.checkpoint.model_json import JsonObject, read_object, shown

WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
SUFFIX = ".safetensors"

LENGTH_BYTES = 8
MAX_HEADER_BYTES = 100_000_000
"""The format's own limit."""
READ_BYTES = 1 << 20
BYTES_OF = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1,
    "U16": 2, "I16": 2, "F16": 2, "BF16": 2,
    "U32": 4, "I32": 4, "F32": 4,
    "U64": 8, "I64": 8, "F64": 8,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor as its file's header describes it; dtype by its safetensors name."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int
    """Bytes from the first tensor's first byte."""


def main_file(directory: Path) -> Path:
    """model.safetensors, or the index of the shards where only that is there."""
    whole, index = directory / WEIGHTS_FILE, directory / INDEX_FILE
    return whole if whole.exists() or not index.exists() else index


def weight_files(directory: Path, findings: Findings) -> list[Path]:
    """The files that hold tensors, by name."""
    main = main_file(directory)
    if main.name != INDEX_FILE:
        return [main]
    return [directory / name for name in sorted(set(_weight_map(main, findings).values()))]


def stored_tensors(directory: Path, findings: Findings) -> dict[str, StoredTensor]:
    """Every tensor by name, of all files that could be read; what is wrong becomes a finding."""
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
    """The tensors of one file; empty, and a fault, if it is not whole."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(LENGTH_BYTES), "little")
            if size < LENGTH_BYTES or length > min(MAX_HEADER_BYTES, size - LENGTH_BYTES):
                findings.fault(path, "", f"ends within its header ({size} bytes)")
                return {}
            header = json.loads(file.read(length), object_pairs_hook=_unique)
    except FileNotFoundError:
        findings.fault(path, "", "cannot be read: there is no such file", "weights as safetensors")
        return {}
    except (OSError, ValueError, RecursionError) as exc:
        findings.fault(path, "", f"has no header that can be read: {exc}")
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
    """Whether two tensors of one dtype and shape are equal; OSError where they cannot be read."""
    with _opened(one) as ours, _opened(other) as theirs:
        left = one.end - one.start
        while left > 0:
            piece = ours.read(min(left, READ_BYTES))
            if not piece or piece != theirs.read(len(piece)):
                return False
            left -= len(piece)
    return True


def _opened(tensor: StoredTensor) -> BinaryIO:
    """The tensor's file, at its first byte."""
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
    """The tensors lie one behind the other and fill the file."""
    at = 0
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].start, item[1].end)):
        if tensor.start != at:
            findings.fault(path, name, f"begins at byte {tensor.start}", f"byte {at}")
            return
        at = tensor.end
    if at != data_bytes:
        problem = f"holds {data_bytes} bytes of tensors: it is cut off or has been added to"
        findings.fault(path, "", problem, f"the {at} bytes that its header tells of")


def _weight_map(index: Path, findings: Findings) -> dict[str, str]:
    """Tensor -> shard, without the entries whose shard is no plain file name."""
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
    """A shard's name never leads out of the folder."""
    if not isinstance(shard, str) or not shard.endswith(SUFFIX):
        return False
    return shard.isprintable() and not set(shard) & set("/\\:") and not shard.startswith(".")


def _check_index(index: Path, stored: dict[str, StoredTensor], findings: Findings) -> None:
    """What the index says of each tensor is what the shards say."""
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
        raise ValueError("a name is there twice")
    return dict(pairs)
