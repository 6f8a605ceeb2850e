"""The text of a BARE schema, written from the classes of its frames.

The classes are the only place where a frame is defined. `python -m tests.generate_schemas` writes
the text into the `.bare` files, for readers and for implementations in other languages.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, is_dataclass
from enum import IntEnum
from typing import Annotated, Any, get_args, get_origin

from tailrace.ledger.wire.bare import SCHEMA_ID_BYTES, Type, field_hints, field_types


def schema_text(frames: Mapping[int, type], names: Mapping[str, object]) -> str:
    """Return the definitions of all frames and of the types that they use.

    Args:
        frames: The classes of the frames by tag.
        names: A module's names. Their order is the order of the definitions; types that are not
            among them are written before the first type that uses them.
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


def schema_identity(text: str) -> bytes:
    """Return the identity of a schema, which both sides of a connection send in their Hello.

    It is the first 8 bytes of SHA-256 over the text without comments, in which each run of white
    space is one space.
    """
    lines = (line.partition("#")[0] for line in text.splitlines())
    canonical = " ".join(" ".join(lines).split())
    return hashlib.sha256(canonical.encode()).digest()[:SCHEMA_ID_BYTES]


@dataclass(slots=True)
class _Definitions:
    """The definitions of aliases, enums and structs of a schema, by name."""

    reached: dict[type, list[type]] = field(default_factory=dict)
    """Maps each class that frames use to the classes of its fields."""
    aliases: dict[str, str] = field(default_factory=dict)
    enums: dict[str, str] = field(default_factory=dict)
    structs: dict[str, str] = field(default_factory=dict)

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
        """Define an alias if `of` is bytes of a fixed length with a name of its own."""
        if of.name.isidentifier() and of.name[0].isupper():
            self.aliases[of.name] = f"type {of.name} data[{of.min_bytes}]"

    def define(self, cls: type) -> None:
        """Write the definition of a class behind those of the classes that it uses."""
        name = cls.__name__
        if issubclass(cls, IntEnum):
            members = " ".join(f"{member.name} = {member.value}" for member in cls)
            self.enums[name] = f"type {name} enum {{ {members} }}"
        elif name not in self.structs:
            for used in self.reached[cls]:
                self.define(used)
            fields = [f"  {each}: {of.name}\n" for each, of in field_types(cls).items()]
            body = f"struct {{\n{''.join(fields)}}}" if fields else "void"
            self.structs[name] = f"type {name} {body}"


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
