"""The text of a BARE schema, written from the classes of its frames.

The classes are the only place where a frame is defined. `python -m tests.generate_schemas` writes
the text into the `.bare` files, for readers and for implementations in other languages.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, is_dataclass
from enum import IntEnum
from typing import Annotated, Any, get_args, get_origin

from tailrace.ledger.wire.bare import SCHEMA_ID_BYTES, Type, field_hints, field_types

_NAME = re.compile(r"\b[A-Z]\w*")
"""Matches the name of an alias, enum or struct; the names of BARE's own types are in lower case."""


def schema_text(frames: Mapping[int, type], names: Mapping[str, object]) -> str:
    """Return the definitions of all frames and of the types that they use.

    Args:
        frames: The classes of the frames by tag.
        names: The names of a module, in the order of the definitions. A type without a name there
            is written before the first type that uses it.
    """
    found = _Definitions()
    for cls in frames.values():
        found.reach(cls)
    for value in (*names.values(), *frames.values()):
        if isinstance(value, type) and value in found.reached:
            found.define(value)
    union = "\n  | ".join(f"{frames[tag].__name__} = {tag}" for tag in sorted(frames))
    parts = ["\n".join(found.aliases.values()), "\n".join(found.enums.values())]
    parts += [*found.structs.values(), f"type Frame union {{\n  {union}\n}}"]
    return "\n\n".join(part for part in parts if part) + "\n"


def schema_identity(frames: Mapping[int, type]) -> bytes:
    """Return the identity of a schema, which both sides of a connection send in their Hello.

    It is the first 8 bytes of SHA-256 over `schema_shape`, so it does not depend on names.
    """
    return hashlib.sha256(schema_shape(frames).encode()).digest()[:SCHEMA_ID_BYTES]


def schema_shape(frames: Mapping[int, type]) -> str:
    """Return everything that decides how frames are encoded: tags, types and their order.

    The result has a line `tag type` for each frame, in the order of tags. Types are written without
    names: a struct as `{type,type}`, an enum as `<value,value>`, an alias as the type that it
    stands for.
    """
    found = _Definitions()
    for cls in frames.values():
        found.reach(cls)
        found.define(cls)
    return "".join(f"{tag} {found.shapes[frames[tag].__name__]}\n" for tag in sorted(frames))


@dataclass(slots=True)
class _Definitions:
    """The definitions of aliases, enums and structs of a schema, by name."""

    reached: dict[type, list[type]] = field(default_factory=dict)
    """Maps each class that frames use to the classes of its fields."""
    aliases: dict[str, str] = field(default_factory=dict)
    enums: dict[str, str] = field(default_factory=dict)
    structs: dict[str, str] = field(default_factory=dict)
    shapes: dict[str, str] = field(default_factory=dict)
    """Maps the name of each alias, enum and struct to its type in the form that `schema_shape`
    describes: without the names of fields, of the values of enums, and of other types."""

    def reach(self, cls: type) -> None:
        """Add a class and all classes that it uses to `reached`."""
        if cls in self.reached:
            return
        used = self.reached[cls] = []
        if not is_dataclass(cls):
            return
        for hint in field_hints(cls).values():
            for part in _parts(hint):
                if isinstance(part, Type):
                    self._alias(part)
                elif isinstance(part, type) and (is_dataclass(part) or issubclass(part, IntEnum)):
                    used.append(part)
                    self.reach(part)

    def _alias(self, of: Type) -> None:
        """Define an alias if `of` is a fixed number of bytes and has a name of its own."""
        if of.name.isidentifier() and of.name[0].isupper():
            self.shapes[of.name] = f"data[{of.min_bytes}]"
            self.aliases[of.name] = f"type {of.name} {self.shapes[of.name]}"

    def define(self, cls: type) -> None:
        """Write the definition of a class, after the definitions of the classes that it uses."""
        name = cls.__name__
        if issubclass(cls, IntEnum):
            members = " ".join(f"{member.name} = {member.value}" for member in cls)
            self.enums[name] = f"type {name} enum {{ {members} }}"
            self.shapes[name] = f"<{','.join(str(member.value) for member in cls)}>"
        elif name not in self.structs:
            for used in self.reached[cls]:
                self.define(used)
            types = field_types(cls)
            fields = [f"  {each}: {of.name}\n" for each, of in types.items()]
            body = f"struct {{\n{''.join(fields)}}}" if fields else "void"
            self.structs[name] = f"type {name} {body}"
            self.shapes[name] = f"{{{','.join(self._shape(of.name) for of in types.values())}}}"

    def _shape(self, of: str) -> str:
        """Return a field's type, such as `optional<StreamId>`, without names."""
        return _NAME.sub(lambda found: self.shapes[found[0]], of)


def _parts(hint: Any) -> Iterator[object]:
    """Yield the classes and BARE types inside an annotation, at any depth."""
    if get_origin(hint) is None:
        yield hint
        return
    args = get_args(hint)
    if get_origin(hint) is Annotated:
        yield from (each for each in args[1:] if isinstance(each, Type))
    for each in args:
        yield from _parts(each)
