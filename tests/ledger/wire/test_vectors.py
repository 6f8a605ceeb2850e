"""The language-neutral vectors, run by this codec; tests/vectors/README.md describes them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tailrace.ledger.errors import FrameError
from tailrace.ledger.frame import FRAMES, Splitter, corr_of, decode, encode, index_of, tag_of
from tailrace.ledger.wire.schema import LOGGED
from tests.vectors import generate


def load(name: str) -> Any:
    return json.loads((generate.HERE / name).read_text(encoding="utf-8"))


def named(vectors: list[dict[str, Any]]) -> list[Any]:
    return [pytest.param(vector, id=vector["name"]) for vector in vectors]


PRIMITIVES = load("primitives.json")
FRAME_VECTORS = load("frames.json")
INVALID = load("invalid.json")
STREAMS = load("streams.json")


@pytest.mark.parametrize("name", generate.FILES)
def test_the_files_are_what_the_generator_writes(name: str) -> None:
    assert (generate.HERE / name).read_text(encoding="utf-8") == generate.text_of(name)


@pytest.mark.parametrize("vector", PRIMITIVES["valid"], ids=lambda v: f"{v['type']} {v['hex']}")
def test_a_primitive_decodes_to_its_value_and_back(vector: dict[str, Any]) -> None:
    of = generate.TYPES[vector["type"]]
    raw = bytes.fromhex(vector["hex"])
    value, end = of.decode(raw, 0)
    out = bytearray()
    of.encode(out, value)
    assert (generate.to_json(value), end) == (vector["value"], len(raw))
    assert out == raw


@pytest.mark.parametrize("vector", PRIMITIVES["invalid"], ids=lambda v: f"{v['type']} {v['why']}")
def test_a_bad_primitive_is_refused_where_it_begins(vector: dict[str, Any]) -> None:
    with pytest.raises(FrameError) as caught:
        generate.TYPES[vector["type"]].decode(bytes.fromhex(vector["hex"]), 0)
    assert caught.value.offset == vector["offset"]


def test_every_primitive_type_has_valid_and_invalid_vectors() -> None:
    for kind in ("valid", "invalid"):
        assert {vector["type"] for vector in PRIMITIVES[kind]} == set(generate.TYPES)


@pytest.mark.parametrize("vector", named(FRAME_VECTORS))
def test_a_frame_decodes_to_its_value_and_back(vector: dict[str, Any]) -> None:
    raw = bytes.fromhex(vector["hex"])
    corr, frame = decode(raw)
    assert (corr, type(frame).__name__) == (vector["corr"], vector["type"])
    assert generate.to_json(frame) == vector["value"]
    assert (tag_of(raw), corr_of(raw)) == (vector["tag"], vector["corr"])
    assert encode(frame, corr) == raw


@pytest.mark.parametrize("vector", named([v for v in FRAME_VECTORS if v["tag"] in LOGGED]))
def test_the_index_of_a_raw_logged_frame_is_its_field(vector: dict[str, Any]) -> None:
    assert index_of(bytes.fromhex(vector["hex"])) == int(vector["value"]["index"])


def test_every_tag_has_a_valid_and_an_invalid_vector() -> None:
    assert {vector["tag"] for vector in FRAME_VECTORS} == set(FRAMES)
    classes = {vector["field"].partition(".")[0] for vector in INVALID}
    assert classes >= {cls.__name__ for cls in FRAMES.values()}


@pytest.mark.parametrize("vector", named(INVALID))
def test_an_invalid_frame_is_refused_by_field_and_offset(vector: dict[str, Any]) -> None:
    with pytest.raises(FrameError) as caught:
        decode(bytes.fromhex(vector["hex"]))
    error = caught.value
    assert (error.code, error.field, error.offset) == (
        vector["code"],
        vector["field"],
        vector["offset"],
    )


@pytest.mark.parametrize("vector", named([v for v in STREAMS if "error" not in v]))
def test_a_connection_is_cut_into_whole_frames(vector: dict[str, Any]) -> None:
    splitter = Splitter()
    frames = [raw for chunk in vector["chunks"] for raw in splitter.feed(bytes.fromhex(chunk))]
    assert [raw.hex() for raw in frames] == vector["frames"]
    assert splitter.pending == vector["pending"]


@pytest.mark.parametrize("vector", named([v for v in STREAMS if "error" in v]))
def test_a_bad_header_ends_a_connection(vector: dict[str, Any]) -> None:
    with pytest.raises(FrameError) as caught:
        Splitter().feed(bytes.fromhex("".join(vector["chunks"])))
    error = caught.value
    assert {"code": error.code, "field": error.field, "offset": error.offset} == vector["error"]
