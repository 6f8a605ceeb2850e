"""Another implementation's BARE (pybare), set up from the text of a schema file."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from enum import IntEnum
from typing import Any

import bare

from tests.schema_text import Schema


class Data(bare.Data):  # type: ignore[misc]
    """pybare's own `validate` refuses an instance of the type, as a list of structs needs."""

    @classmethod
    def validate(cls, value: object) -> bool:
        return isinstance(value, (bytes, cls))


_PRIMITIVES: dict[str, Any] = {
    "uint": bare.UInt,
    "u16": bare.U16,
    "u32": bare.U32,
    "u64": bare.U64,
    "f32": bare.F32,
    "f64": bare.F64,
    "bool": bare.Bool,
    "str": bare.Str,
    "data": Data,
}
_MADE_OF = re.compile(r"(optional|list)<(.+)>|data\[(\d+)\]")


class Oracle:
    """Packs our values with pybare's types, which know nothing of our classes."""

    def __init__(self, schema: Schema) -> None:
        self._schema = schema
        self._types: dict[str, Any] = dict(_PRIMITIVES)

    def pack(self, value: object) -> bytes:
        """Return the payload of a struct."""
        name = type(value).__name__
        if not self._schema.structs[name]:
            return b""  # void
        return bytes(self._convert(self.type_of(name), value).pack())

    def unpack(self, name: str, raw: bytes) -> Any:
        """Pybare's own view of a payload, which it must read to the end."""
        file = io.BytesIO(raw)
        value = self.type_of(name).unpack(file)
        assert not file.read()
        return value

    def type_of(self, name: str) -> Any:
        if name not in self._types:
            self._types[name] = self._make(name)
        return self._types[name]

    def _make(self, name: str) -> Any:
        if name in self._schema.aliases:
            return self.type_of(self._schema.aliases[name])
        if name in self._schema.enums:
            return bare.Enum(name, self._schema.enums[name])
        if name in self._schema.structs:
            columns = self._schema.structs[name].items()
            members = {key: bare.Field(self.type_of(of)) for key, of in columns}
            return type(name, (bare.Struct,), members)
        found = _MADE_OF.fullmatch(name)
        assert found, name
        if found[3]:
            return type(f"Data{found[3]}", (Data,), {"_size": int(found[3])})
        make: Callable[[Any], Any] = bare.optional if found[1] == "optional" else bare.array
        return make(self.type_of(found[2]))

    def _convert(self, of: Any, value: Any) -> Any:
        """Our value as an instance of pybare's type `of`."""
        if getattr(of, "_optional", False) or issubclass(of, bare.Union):
            inner = next(t for t in of._variants.values() if t is not bare.Void)
            return of(None if value is None else self._convert(inner, value))
        if is_dataclass(value):
            names = [field.name for field in fields(value)]
            return of(**{n: self._convert(of._fields[n], getattr(value, n)) for n in names})
        if isinstance(value, tuple):
            return of([self._convert(of._type, item) for item in value])
        if isinstance(value, IntEnum):
            return of(int(value))
        return of(value)
