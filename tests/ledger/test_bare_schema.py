"""The text of a schema that is written from classes."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Annotated

from tailrace.ledger.wire.bare import STR, Uint, fixed_data, list_of, struct_of
from tailrace.ledger.wire.bare_schema import schema_identity, schema_text
from tests.schema_text import schema_hash

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


def test_the_identity_ignores_comments_and_layout() -> None:
    identity = schema_identity(TEXT)
    assert schema_identity("# a schema\n" + TEXT.replace("\n", "\n\n  ")) == identity
    assert schema_identity(TEXT.replace("uint", "u32")) != identity
    assert identity == schema_hash(TEXT)
