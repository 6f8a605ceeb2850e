"""The text of a schema that is written from classes."""

from __future__ import annotations

from dataclasses import dataclass, make_dataclass
from enum import IntEnum
from typing import Annotated

from tailrace.ledger.frame import FRAMES, SCHEMA_HASH, Notice, StreamEnd
from tailrace.ledger.wire.bare import (
    STR,
    U64Int,
    Uint,
    field_hints,
    fixed_data,
    list_of,
    struct_of,
)
from tailrace.ledger.wire.bare_schema import schema_identity, schema_shape, schema_text
from tests.schema_text import CLIENT_SCHEMA, schema_hash

Id = Annotated[bytes, fixed_data(4, "Id")]
Mac = Annotated[bytes, fixed_data(32)]


class Colour(IntEnum):
    """An enum with numbers that do not follow each other."""

    RED = 0
    DARK_BLUE = 3


@dataclass
class Unused:
    """A struct that no frame refers to."""

    text: str


@dataclass
class Point:
    """A struct with an optional field."""

    x: Uint
    colour: Colour | None


@dataclass
class Line:
    """A struct with lists and an optional alias."""

    id: Id
    points: Annotated[tuple[Point, ...], list_of(struct_of(Point), 9)]
    names: Annotated[tuple[str, ...], list_of(STR, 9)] = ()
    mac: Mac | None = None


@dataclass
class Nothing:
    """A struct without fields."""


TEXT = """\
type Id data[4]

type Colour enum { RED = 0 DARK_BLUE = 3 }

type Nothing void

type Point struct {
  x: uint
  colour: optional<Colour>
}

type Line struct {
  id: Id
  points: list<Point>
  names: list<str>
  mac: optional<data[32]>
}

type Frame union {
  Nothing = 1
  | Line = 7
}
"""


def test_the_text_has_what_frames_use_each_type_before_its_use() -> None:
    frames = {7: Line, 1: Nothing}
    names = {"Unused": Unused, "Nothing": Nothing, "Line": Line, "Point": Point}
    assert schema_text(frames, names) == TEXT


def test_the_order_of_names_is_the_order_of_definitions() -> None:
    text = schema_text({7: Line}, {"Point": Point, "Line": Line})
    assert text.index("type Point") < text.index("type Line")
    assert "Nothing" not in text


def test_the_shape_has_tags_and_types_in_order_and_no_names() -> None:
    point = "{uint,optional<<0,3>>}"
    line = f"{{data[4],list<{point}>,list<str>,optional<data[32]>}}"
    assert schema_shape({7: Line, 1: Nothing}) == f"1 {{}}\n7 {line}\n"
    assert schema_identity({7: Line, 1: Nothing}) == schema_hash(TEXT)


def changed(cls: type, renamed: str = "", to: str = "", **types: object) -> type:
    """Return a copy of a frame's class with one field renamed, or with other types of fields."""
    hints = {name: types.get(name, hint) for name, hint in field_hints(cls).items()}
    fields = [(to if name == renamed else name, hint) for name, hint in hints.items()]
    return make_dataclass(f"New{cls.__name__}", fields)


def test_a_renamed_field_keeps_the_identity_of_the_schema() -> None:
    frames: dict[int, type] = {**FRAMES}
    for tag, cls in frames.items():
        for name in field_hints(cls):
            copy = FRAMES | {tag: changed(cls, name, "renamed")}
            assert schema_identity(copy) == SCHEMA_HASH, f"{cls.__name__}.{name}"


def test_another_type_tag_or_order_changes_the_identity_of_the_schema() -> None:
    moved = FRAMES | {99: FRAMES[Notice.tag]}
    del moved[Notice.tag]
    last_first = dict(reversed(field_hints(Notice).items()))
    copies = {
        "type": FRAMES | {StreamEnd.tag: changed(StreamEnd, total_tokens=U64Int)},
        "optional": FRAMES | {StreamEnd.tag: changed(StreamEnd, retryable=bool | None)},
        "enum": FRAMES | {StreamEnd.tag: changed(StreamEnd, finish_reason=Colour)},
        "fewer frames": {tag: cls for tag, cls in FRAMES.items() if tag != Notice.tag},
        "tag": moved,
        "order": FRAMES | {Notice.tag: make_dataclass("Turned", last_first.items())},
    }
    identities = {name: schema_identity(copy) for name, copy in copies.items()}
    assert SCHEMA_HASH not in identities.values()
    assert len({*identities.values()}) == len(copies)


def test_names_of_types_and_of_values_keep_the_identity_of_a_text() -> None:
    text = CLIENT_SCHEMA.read_text(encoding="utf-8")
    renamed = text.replace("finish_reason:", "why:").replace("FinishReason", "Why")
    renamed = renamed.replace("ORIGIN_LOST", "GONE").replace("StreamEnd", "Finish")
    assert renamed != text
    assert schema_hash(renamed) == schema_hash(text) == SCHEMA_HASH
    assert schema_hash(text.replace("total_tokens: uint", "total_tokens: u64")) != SCHEMA_HASH
