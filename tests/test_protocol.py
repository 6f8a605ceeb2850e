"""PROTOCOL.md is held to the code: its bytes, its tables, its schema identity."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tailrace.ledger import errors
from tailrace.ledger.errors import FrameError, TailraceError
from tailrace.ledger.frame import FRAMES, MAX_FRAME_BYTES, SAMPLING, SCHEMA_HASH, decode, encode
from tailrace.ledger.wire.bare_schema import schema_shape
from tests import generate_schemas
from tests.schema_text import CLIENT_SCHEMA, ROOT, read_schema, schema_hash
from tests.vectors.generate import to_json
from tests.web import generate as web

TEXT = (ROOT / "PROTOCOL.md").read_text(encoding="utf-8")
SCHEMA = read_schema(CLIENT_SCHEMA)


def blocks(language: str) -> list[tuple[bytes, str]]:
    """Return the bytes and the second line of each fenced block of a language."""
    found = re.findall(rf"^```{language}\n(.*)\n(.*)\n```$", TEXT, re.MULTILINE)
    return [(bytes.fromhex(hexes), says) for hexes, says in found]


def rows(columns: int) -> Iterator[list[str]]:
    """Yield the cells of every table row with `columns` columns."""
    for line in TEXT.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("|") and len(cells) == columns:
            yield cells


@pytest.mark.parametrize(("raw", "says"), blocks("frame"))
def test_an_example_frame_is_what_it_says(raw: bytes, says: str) -> None:
    corr, frame = decode(raw)
    found = re.fullmatch(r"corr (\d+): (\w+) (\{.*\})", says)
    assert found
    assert (corr, type(frame).__name__) == (int(found[1]), found[2])
    assert to_json(frame) == json.loads(found[3])
    assert encode(frame, corr) == raw


@pytest.mark.parametrize(("raw", "says"), blocks("refused"))
def test_an_example_of_a_refusal_is_refused_for_what_it_says(raw: bytes, says: str) -> None:
    with pytest.raises(FrameError) as caught:
        decode(raw)
    error = caught.value
    assert f"{error.code}: {error.field} at byte {error.offset}" == says


def test_there_are_examples_of_both_kinds() -> None:
    assert len(blocks("frame")) >= 8
    assert len(blocks("refused")) >= 3


@pytest.mark.parametrize("path", generate_schemas.written(), ids=lambda path: str(path.name))
def test_the_text_of_a_schema_is_that_of_its_classes(path: Path) -> None:
    """If this fails, run `make schemas`."""
    assert path.read_text("utf-8") == generate_schemas.written()[path]


@pytest.mark.parametrize("path", web.written(), ids=lambda path: str(path.name))
def test_the_browsers_table_is_the_schema(path: Path) -> None:
    """If this fails, run `make schemas`."""
    assert path.read_text("utf-8") == web.written()[path]


def test_the_list_of_payloads_is_the_schema() -> None:
    entries = re.findall(r"^- (\d+) `(\w+)`:((?:.|\n(?=  ))*)", TEXT, re.MULTILINE)
    listed = {
        name: (int(tag), dict(re.findall(r"`(\w+): (\S+)`", fields)))
        for tag, name, fields in entries
    }
    tags = {cls.__name__: tag for tag, cls in FRAMES.items()}
    assert listed == {name: (tag, SCHEMA.structs[name]) for name, tag in tags.items()}


def test_every_setting_of_sampling_is_told_with_its_range() -> None:
    [fields] = re.findall(r"^- `Sampling` is ((?:.|\n(?=  ))*)\.$", TEXT, re.MULTILINE)
    assert dict(re.findall(r"`(\w+): (\S+)`", fields)) == SCHEMA.structs["Sampling"]
    ranges = {name for row in rows(3) for name in re.findall(r"`(\w+)`", row[0])}
    assert {*SAMPLING} == {*SCHEMA.structs["Sampling"]}
    assert {*SAMPLING} - {"seed"} <= ranges


def test_the_table_of_enums_is_the_schema() -> None:
    told = {
        row[0].strip("`"): {name: int(n) for name, n in re.findall(r"`([A-Z_]+)` (\d+)", row[1])}
        for row in rows(2)
    }
    assert {name: told.get(name) for name in SCHEMA.enums} == SCHEMA.enums


def test_the_schema_identity_is_told() -> None:
    assert f"`{SCHEMA_HASH.hex()}`" in TEXT
    assert schema_hash(CLIENT_SCHEMA.read_text(encoding="utf-8")) == SCHEMA_HASH


def test_the_lines_of_the_shape_are_the_schema() -> None:
    told = re.findall(r"^\d+ \{.*\}$", TEXT, re.MULTILINE)
    assert len(told) == 3
    assert {*told} <= {*schema_shape(FRAMES).splitlines()}


def test_every_class_of_the_error_tree_is_in_the_table_of_codes() -> None:
    told = {row[0].strip("`"): (row[1], row[2]) for row in rows(4) if row[1].isdigit()}
    for cls in vars(errors).values():
        if isinstance(cls, type) and issubclass(cls, TailraceError):
            assert told[cls.code] == (str(cls.status), "yes" if cls.retryable else "no")


def test_the_limit_of_a_frame_is_told() -> None:
    assert f"Length field of a frame: {MAX_FRAME_BYTES:,} bytes" in TEXT
