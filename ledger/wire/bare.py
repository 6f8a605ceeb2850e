"""BARE encoding (draft-devault-bare): primitive types, and structs compiled from classes.

`compile_type` turns the annotations of a class into a `Type` (encoder, decoder and name in the
schema) once, at import. Encoders append to a bytearray. Decoders take the whole frame and the
position of a value, and return the value and the next position, so that errors can name the offset.

Every fault is a `FrameError` with the offset of the first byte of the faulty value.
"""

from __future__ import annotations

import struct
import sys
import types
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, is_dataclass
from enum import IntEnum
from functools import cache
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

from tailrace.ledger.errors import FrameError

U64_MAX = 2**64 - 1
UINT_MAX_BYTES = 10
SCHEMA_ID_BYTES = 8


@dataclass(frozen=True, slots=True)
class Type:
    """A BARE type: its name, its encoder and decoder, and its minimum size in bytes."""

    name: str
    encode: Callable[[bytearray, Any], None]
    decode: Callable[[bytes, int], tuple[Any, int]]
    min_bytes: int


def fault(message: str, offset: int) -> FrameError:
    """Return the error for a faulty value; each enclosing struct or list extends its `field`."""
    return FrameError(message, field="", offset=offset)


# ---- primitives ----


def encode_uint(out: bytearray, value: int) -> None:
    if not isinstance(value, int):
        raise fault(f"expected an integer, got {type(value).__name__}", len(out))
    if not 0 <= value <= U64_MAX:
        raise fault("integer out of range 0..2^64-1", len(out))
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)


def decode_uint(raw: bytes, pos: int) -> tuple[int, int]:
    try:
        byte = raw[pos]
        if byte < 0x80:
            return byte, pos + 1
        value = byte & 0x7F
        for nth in range(1, UINT_MAX_BYTES):
            byte = raw[pos + nth]
            value |= (byte & 0x7F) << 7 * nth
            if byte < 0x80:
                if byte == 0:
                    raise fault("varint is not in its shortest form", pos)
                if value > U64_MAX:
                    break
                return value, pos + nth + 1
    except IndexError:
        raise fault("truncated varint", pos) from None
    raise fault("varint exceeds 64 bits", pos)


def _fixed(name: str, code: str) -> Type:
    """Return the type of a little-endian number of fixed width."""
    layout = struct.Struct(f"<{code}")

    def encode(out: bytearray, value: float) -> None:
        try:
            out += layout.pack(value)
        except (struct.error, OverflowError):
            raise fault(f"{value!r} is not a {name}", len(out)) from None

    def decode(raw: bytes, pos: int) -> tuple[float, int]:
        try:
            return layout.unpack_from(raw, pos)[0], pos + layout.size
        except struct.error:
            raise fault(f"truncated {name}", pos) from None

    return Type(name, encode, decode, layout.size)


def _encode_bool(out: bytearray, value: bool) -> None:
    if value is not True and value is not False:
        raise fault(f"expected a bool, got {type(value).__name__}", len(out))
    out.append(value)


def _decode_bool(raw: bytes, pos: int) -> tuple[bool, int]:
    if pos >= len(raw):
        raise fault("truncated bool", pos)
    if raw[pos] > 1:
        raise fault(f"byte {raw[pos]:#04x} is neither 0 nor 1", pos)
    return raw[pos] == 1, pos + 1


def _decode_sized(raw: bytes, pos: int) -> tuple[bytes, int]:
    """Return the bytes that follow their length; check the length before copying any of them."""
    size, start = decode_uint(raw, pos)
    end = start + size
    if end > len(raw):
        raise fault(f"length {size} exceeds the {len(raw) - start} bytes left", pos)
    return raw[start:end], end


def _encode_str(out: bytearray, value: str) -> None:
    if not isinstance(value, str):
        raise fault(f"expected text, got {type(value).__name__}", len(out))
    try:
        data = value.encode()
    except UnicodeEncodeError:
        raise fault("text holds a lone surrogate", len(out)) from None
    encode_uint(out, len(data))
    out += data


def _decode_str(raw: bytes, pos: int) -> tuple[str, int]:
    data, end = _decode_sized(raw, pos)
    try:
        return data.decode(), end
    except UnicodeDecodeError:
        raise fault("text is not valid UTF-8", pos) from None


def _encode_data(out: bytearray, value: bytes) -> None:
    if not isinstance(value, bytes):
        raise fault(f"expected bytes, got {type(value).__name__}", len(out))
    encode_uint(out, len(value))
    out += value


UINT = Type("uint", encode_uint, decode_uint, 1)
U16 = _fixed("u16", "H")
U32 = _fixed("u32", "I")
U64 = _fixed("u64", "Q")
F32 = _fixed("f32", "f")
F64 = _fixed("f64", "d")
BOOL = Type("bool", _encode_bool, _decode_bool, 1)
STR = Type("str", _encode_str, _decode_str, 1)
DATA = Type("data", _encode_data, _decode_sized, 1)


# ---- types made of types ----


def fixed_data(size: int, name: str | None = None) -> Type:
    """Return the type `data[size]`: exactly `size` bytes without a length."""

    def encode(out: bytearray, value: bytes) -> None:
        if not isinstance(value, bytes) or len(value) != size:
            raise fault(f"expected exactly {size} bytes", len(out))
        out += value

    def decode(raw: bytes, pos: int) -> tuple[bytes, int]:
        if pos + size > len(raw):
            raise fault(f"truncated data: {len(raw) - pos} of {size} bytes", pos)
        return raw[pos : pos + size], pos + size

    return Type(name or f"data[{size}]", encode, decode, size)


def optional(of: Type) -> Type:
    def encode(out: bytearray, value: object) -> None:
        if value is None:
            out.append(0)
        else:
            out.append(1)
            of.encode(out, value)

    def decode(raw: bytes, pos: int) -> tuple[object, int]:
        present, pos = _decode_bool(raw, pos)
        return of.decode(raw, pos) if present else (None, pos)

    return Type(f"optional<{of.name}>", encode, decode, 1)


def list_of(of: Type, most: int | None = None) -> Type:
    """Return the type `list<of>`, a tuple in Python, with at most `most` items."""

    def encode(out: bytearray, value: tuple[object, ...]) -> None:
        if not isinstance(value, tuple):
            raise fault(f"expected a tuple, got {type(value).__name__}", len(out))
        encode_uint(out, len(value))
        for nth, item in enumerate(value):
            try:
                of.encode(out, item)
            except FrameError as error:
                error.field = f"[{nth}]{error.field}"
                raise

    def decode(raw: bytes, pos: int) -> tuple[tuple[object, ...], int]:
        count, at = decode_uint(raw, pos)
        # Check the count before decoding any item, so that a false count costs no memory or time.
        if most is not None and count > most:
            raise fault(f"{count} items, of {most} at most", pos)
        if count * of.min_bytes > len(raw) - at:
            raise fault(f"{count} items cannot fit in the {len(raw) - at} bytes left", pos)
        items = []
        for nth in range(count):
            try:
                item, at = of.decode(raw, at)
            except FrameError as error:
                error.field = f"[{nth}]{error.field}"
                raise
            items.append(item)
        return tuple(items), at

    return Type(f"list<{of.name}>", encode, decode, 1)


# ---- many numbers: an array is encoded a hundred times as quickly as single numbers ----


def pack_u32s(numbers: Iterable[int]) -> bytes:
    """Encode numbers like a `list<u32>` without its length.

    Raises:
        OverflowError: A number is not a u32.
    """
    if isinstance(numbers, memoryview) and numbers.format == "I":
        return _swapped(numbers.tobytes())
    return _swapped(array("I", numbers).tobytes())


def view_u32s(data: bytes) -> memoryview:
    """Return a view of the numbers that `pack_u32s` encoded, without decoding them.

    Raises:
        ValueError: The bytes end inside a number.
    """
    if len(data) % U32.min_bytes:
        raise ValueError(f"{len(data)} bytes end inside a number")
    return memoryview(_swapped(data)).cast("I")


def _swapped(data: bytes) -> bytes:
    """Convert numbers of 4 bytes from this machine's byte order to little-endian, or back."""
    if sys.byteorder == "little":
        return data
    numbers = array("I", data)
    numbers.byteswap()
    return numbers.tobytes()


def _encode_u32s(out: bytearray, value: Sequence[int]) -> None:
    try:
        data = pack_u32s(value)
    except (OverflowError, TypeError):
        raise fault("expected integers of 0..2^32-1", len(out)) from None
    encode_uint(out, len(value))
    out += data


def _decode_u32s(raw: bytes, pos: int) -> tuple[tuple[int, ...], int]:
    count, start = decode_uint(raw, pos)
    end = start + count * U32.min_bytes
    if end > len(raw):
        raise fault(f"{count} items cannot fit in the {len(raw) - start} bytes left", pos)
    return tuple(view_u32s(raw[start:end])), end


U32S = Type("list<u32>", _encode_u32s, _decode_u32s, 1)


def enum_of(cls: type[IntEnum]) -> Type:
    members = {member.value: member for member in cls}

    def encode(out: bytearray, value: IntEnum) -> None:
        if not isinstance(value, cls):
            raise fault(f"expected a {cls.__name__}, got {value!r}", len(out))
        encode_uint(out, value)

    def decode(raw: bytes, pos: int) -> tuple[IntEnum, int]:
        value, end = decode_uint(raw, pos)
        if value not in members:
            raise fault(f"{value} is not a {cls.__name__}", pos)
        return members[value], end

    return Type(cls.__name__, encode, decode, 1)


def struct_of(cls: type) -> Type:
    """Return the type of a dataclass: its fields in order, without padding."""
    columns = tuple(field_types(cls).items())

    def encode(out: bytearray, value: object) -> None:
        if type(value) is not cls:
            raise fault(f"expected a {cls.__name__}, got {type(value).__name__}", len(out))
        for name, of in columns:
            try:
                of.encode(out, getattr(value, name))
            except FrameError as error:
                error.field = f".{name}{error.field}"
                raise

    def decode(raw: bytes, pos: int) -> tuple[object, int]:
        values = []
        for name, of in columns:
            try:
                value, pos = of.decode(raw, pos)
            except FrameError as error:
                error.field = f".{name}{error.field}"
                raise
            values.append(value)
        return cls(*values), pos

    return Type(cls.__name__, encode, decode, sum(of.min_bytes for _, of in columns))


# ---- classes to types ----

Uint = Annotated[int, UINT]
U16Int = Annotated[int, U16]
U32Int = Annotated[int, U32]
U32Ints = Annotated[Sequence[int], U32S]
"""A list of u32 numbers, which is decoded as a tuple."""
U64Int = Annotated[int, U64]
Float32 = Annotated[float, F32]
Float64 = Annotated[float, F64]

_PLAIN = {str: STR, bool: BOOL, bytes: DATA}


def compile_type(hint: Any) -> Type:
    """Return the BARE type of a field's annotation.

    Raises:
        TypeError: The annotation has no BARE type.
    """
    origin, args = get_origin(hint), get_args(hint)
    if origin is Annotated and isinstance(args[1], Type):
        return args[1]
    if hint in _PLAIN:
        return _PLAIN[hint]
    if origin in (Union, types.UnionType) and len(args) == 2 and args[1] is types.NoneType:
        return optional(compile_type(args[0]))
    if origin is tuple and len(args) == 2 and args[1] is Ellipsis:
        return list_of(compile_type(args[0]))
    if isinstance(hint, type) and issubclass(hint, IntEnum):
        return enum_of(hint)
    if isinstance(hint, type) and is_dataclass(hint):
        return struct_of(hint)
    raise TypeError(f"{hint!r} has no BARE type")


@cache
def field_hints(cls: type) -> dict[str, Any]:
    """Return the annotation of each field of a dataclass, in order."""
    hints = get_type_hints(cls, include_extras=True)
    return {field.name: hints[field.name] for field in fields(cls)}


def field_types(cls: type) -> dict[str, Type]:
    """Return the BARE type of each field of a dataclass, in order."""
    return {name: compile_type(hint) for name, hint in field_hints(cls).items()}
