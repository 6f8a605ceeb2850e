"""Conversion of frames to JSON and back, for people who inspect or write frames.

Clients never get this JSON: over HTTP each API has a JSON format of its own (`edge/`).
"""

from __future__ import annotations

import math
import types
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from typing import Annotated, Any, Union, get_args, get_origin

from tailrace.ledger.errors import CallerError
from tailrace.ledger.frame import Frame
from tailrace.ledger.wire.bare import field_hints
from tailrace.ledger.wire.words import Word

_EXPECTED = {
    int: "an integer",
    float: "a number",
    bool: "true or false",
    str: "a string",
    bytes: "a string of hex digits, two for each byte",
}
"""Describes, in errors, the JSON value that a field of each plain type must have."""


def frame_fields(frame: Frame, *, brief: bool = False) -> dict[str, Any]:
    """Return the fields of a frame as JSON values.

    Bytes are in hex, members of enums are their words, and a number that is not finite is null.
    With `brief`, bytes and lists are replaced by their lengths.
    """
    return {each.name: _plain(getattr(frame, each.name), brief=brief) for each in fields(frame)}


def _plain(value: object, *, brief: bool) -> object:
    if isinstance(value, Word):
        return value.word
    if isinstance(value, bytes | tuple) and brief:
        return len(value)
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, tuple):
        return [_plain(item, brief=False) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if is_dataclass(value):
        return {each.name: _plain(getattr(value, each.name), brief=False) for each in fields(value)}
    return value


def from_fields(cls: type, given: Mapping[str, object], path: str) -> Any:
    """Return the frame or struct whose fields are `given`, in the JSON form of `frame_fields`.

    A field that has a default may be left out. Errors call the struct `path`.

    Raises:
        CallerError: A field is missing, unknown, or has a value of another type. The error's
            `field` is the path of that field.
    """
    hints = field_hints(cls)
    if unknown := given.keys() - hints.keys():
        name = min(unknown)
        known = ", ".join(hints) or "none"
        raise _invalid(f"{path}.{name}", f"{path} has no field {name}", f"its fields are: {known}")
    needed = {each.name for each in fields(cls) if each.default is MISSING}
    if missing := sorted(needed - given.keys()):
        raise _invalid(f"{path}.{missing[0]}", f"{path} needs the field {missing[0]}", "")
    values = {
        name: _value(hint, given[name], f"{path}.{name}")
        for name, hint in hints.items()
        if name in given
    }
    return cls(**values)


def _value(hint: Any, value: object, path: str) -> object:
    """Convert a JSON value to the type of the annotation `hint`."""
    origin, args = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return _value(args[0], value, path)
    if origin in (Union, types.UnionType):  # an optional value
        return None if value is None else _value(args[0], value, path)
    if origin is tuple:
        if isinstance(value, list):
            return tuple(_value(args[0], item, f"{path}[{n}]") for n, item in enumerate(value))
        raise _not_a("a list", value, path)
    if isinstance(hint, type) and issubclass(hint, Word):
        return _member(hint, value, path)
    if isinstance(hint, type) and is_dataclass(hint):
        if isinstance(value, Mapping):
            return from_fields(hint, value, path)
        raise _not_a("an object", value, path)
    return _scalar(hint, value, path)


def _scalar(hint: type, value: object, path: str) -> object:
    if hint is bytes and isinstance(value, str):
        try:
            return bytes.fromhex(value)
        except ValueError:
            raise _not_a(_EXPECTED[bytes], value, path) from None
    # A bool is an int in Python, but not in JSON.
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if hint is float and is_number:
        return float(value)  # type: ignore[arg-type]
    if type(value) is hint:
        return value
    raise _not_a(_EXPECTED[hint], value, path)


def _member(hint: type[Word], value: object, path: str) -> Word:
    for member in hint:
        if member.word == value:
            return member
    raise _not_a("one of " + ", ".join(member.word for member in hint), value, path)


def _not_a(expected: str, value: object, path: str) -> CallerError:
    return _invalid(path, f"{value!r:.100} is not valid", f"send {expected}")


def _invalid(path: str, message: str, hint: str) -> CallerError:
    return CallerError(message, code="bad_frame", field=path, hint=hint or None)
