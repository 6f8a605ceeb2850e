"""The prefix of frames, the codec for a table of tags, and the splitter of a byte stream.

A frame is a 4-byte little-endian header (bits 0-23 the length of what follows, 24-27 the
version, 28-31 flags), a 1-byte tag, a 4-byte little-endian corr, and the BARE payload of
the struct that the tag names. PROTOCOL.md is the specification.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import Field, dataclass
from typing import Any, ClassVar, Generic, TypeVar, cast

from tailrace.ledger.errors import FrameError
from tailrace.ledger.wire.bare import Type, struct_of

VERSION = 1
HEADER_BYTES = 4
PREFIX_BYTES = 9  # the header (4 bytes), the tag (1) and the corr (4)
MIN_LENGTH_BYTES = PREFIX_BYTES - HEADER_BYTES
MAX_FRAME_BYTES = 1 << 20  # default limit of the header's length field
LENGTH_BITS = 24
LENGTH_MASK = (1 << LENGTH_BITS) - 1
VERSION_BITS = VERSION << LENGTH_BITS
FLAG_ZSTD = 0x1

TAG_OFFSET = HEADER_BYTES
CORR_OFFSET = HEADER_BYTES + 1
_PREFIX = struct.Struct("<IBI")
_U32 = struct.Struct("<I")  # format of a header, and of a corr
_HEAD = struct.Struct("<IB")  # format of a header and the tag after it
tag_and_corr_of = struct.Struct(f"<{TAG_OFFSET}xBI").unpack_from
"""Return the tag and the corr of an encoded frame, in a single C call.

Relays need both for every frame.
"""

Raw = bytes | bytearray | memoryview
F = TypeVar("F", bound="Tagged")


def length_of(header: int, max_frame_bytes: int = MAX_FRAME_BYTES) -> int:
    """Return the length in a header after checking the header."""
    length = header & LENGTH_MASK
    if header == VERSION_BITS | length and MIN_LENGTH_BYTES <= length <= max_frame_bytes:
        return length  # a valid header, which is the common case
    version = header >> LENGTH_BITS & 0xF
    if version != VERSION:
        error = FrameError(
            f"frame version {version} is not supported",
            field="header.version",
            offset=3,
            hint=f"this side speaks version {VERSION}",
        )
        error.code, error.status = "bad_version", 426
        raise error
    flags = header >> 28
    if flags & ~FLAG_ZSTD:
        raise FrameError(f"unknown flags {flags:#x}", field="header.flags", offset=3)
    if length < MIN_LENGTH_BYTES:
        raise bad_length(f"length {length} cannot hold a tag and a corr")
    if length > max_frame_bytes:
        raise bad_length(f"length {length} exceeds the limit of {max_frame_bytes}")
    return length


def bad_length(message: str) -> FrameError:
    return FrameError(message, field="header.length", offset=0)


def check_tag(tag: int, tags: Container[int], known: Container[int] = ()) -> None:
    """Check that a tag is allowed.

    `known` has all tags of the schema. A tag that is in `known`, but not in `tags`, may only be
    sent in the other direction.

    Raises:
        FrameError: The tag is not allowed.
    """
    if tag not in tags:
        fault = f"tag {tag} is not this side's to send" if tag in known else f"unknown tag {tag}"
        raise FrameError(fault, field="tag", offset=TAG_OFFSET)


def tag_of(raw: Raw) -> int:
    """Return the tag of an encoded frame that a splitter has checked."""
    if len(raw) < PREFIX_BYTES:
        raise _truncated(len(raw))
    return raw[TAG_OFFSET]


def corr_of(raw: Raw) -> int:
    """Return the channel of an encoded frame."""
    if len(raw) < PREFIX_BYTES:
        raise _truncated(len(raw))
    corr: int = _U32.unpack_from(raw, CORR_OFFSET)[0]
    return corr


def with_corr(raw: Raw, corr: int) -> bytes:
    """Return a copy of an encoded frame on another channel."""
    if len(raw) < PREFIX_BYTES:
        raise _truncated(len(raw))
    try:
        return b"".join((raw[:CORR_OFFSET], _U32.pack(corr), raw[PREFIX_BYTES:]))
    except struct.error:
        raise _bad_corr(corr) from None


def patch_corrs(buf: bytearray, places: Iterable[tuple[int, int]]) -> None:
    """Change the channels of frames inside `buf`; a place has a frame's offset and new channel."""
    pack_into, offset, corr = _U32.pack_into, 0, 0
    try:
        for offset, corr in places:
            pack_into(buf, offset + CORR_OFFSET, corr)
    except struct.error:
        if offset < 0 or len(buf) - offset < PREFIX_BYTES:
            raise _truncated(len(buf) - offset) from None
        raise _bad_corr(corr) from None


def _truncated(size: int) -> FrameError:
    return FrameError(
        f"frame ends after {size} bytes, before its payload", field="header", offset=0
    )


def _bad_corr(corr: object) -> FrameError:
    return FrameError(f"{corr!r} is not a u32", field="corr", offset=CORR_OFFSET)


class Tagged:
    """Base class of frames, each with its `tag`."""

    __slots__ = ()
    tag: ClassVar[int]
    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]


def framed(table: dict[int, type[Any]], tag: int) -> Callable[[type[F]], type[F]]:
    """Return a decorator for a frame: a frozen dataclass, entered into `table` under `tag`."""

    def register(cls: type[F]) -> type[F]:
        assert tag not in table, f"{cls.__name__} and {table[tag].__name__} have one tag"
        cls.tag = tag
        made = table[tag] = dataclass(frozen=True, slots=True)(cls)
        return made

    return register


class Codec(Generic[F]):
    """Encodes and decodes the frames of a table of classes by tag."""

    def __init__(
        self, frames: Mapping[int, type[F]], max_frame_bytes: int = MAX_FRAME_BYTES
    ) -> None:
        self.max_frame_bytes = max_frame_bytes
        self._types: dict[int, Type] = {tag: struct_of(cls) for tag, cls in frames.items()}
        self._tags: dict[type, int] = {cls: tag for tag, cls in frames.items()}

    def encode(self, frame: F, corr: int = 0) -> bytes:
        """Encode a frame.

        Raises:
            FrameError: A value does not fit its type.
        """
        tag = self._tags.get(type(frame))
        if tag is None:
            name = type(frame).__name__
            raise FrameError(f"{name} is not a frame of this schema", field=name, offset=0)
        of = self._types[tag]
        out = bytearray(PREFIX_BYTES)
        try:
            of.encode(out, frame)
        except FrameError as error:
            error.field = f"{of.name}{error.field}"
            raise
        length, limit = len(out) - HEADER_BYTES, min(self.max_frame_bytes, LENGTH_MASK)
        if length > limit:
            raise bad_length(f"length {length} exceeds the limit of {limit}")
        try:
            _PREFIX.pack_into(out, 0, VERSION_BITS | length, tag, corr)
        except struct.error:
            raise _bad_corr(corr) from None
        return bytes(out)

    def decode(self, raw: Raw) -> tuple[int, F]:
        """Decode exactly one whole frame; return its channel (corr) and the frame.

        Invalid bytes raise FrameError, never another exception.
        """
        raw = bytes(raw)
        if len(raw) < HEADER_BYTES:
            raise _truncated(len(raw))
        header = int.from_bytes(raw[:HEADER_BYTES], "little")
        length = length_of(header, self.max_frame_bytes)
        have = len(raw) - HEADER_BYTES
        if have != length:
            kind = "truncated frame" if have < length else "bytes after the frame"
            raise bad_length(f"{kind}: the header says {length} bytes, but {have} follow it")
        tag, corr = raw[TAG_OFFSET], corr_of(raw)
        check_tag(tag, self._types)
        if header >> 28 & FLAG_ZSTD:
            raise FrameError(
                "compressed frame, and this side has no zstd",
                field="header.flags",
                offset=3,
                hint="send frames without the zstd flag",
            )
        return corr, self._payload(self._types[tag], raw)

    def _payload(self, of: Type, raw: bytes) -> F:
        try:
            frame, end = of.decode(raw, PREFIX_BYTES)
        except FrameError as error:
            error.field = f"{of.name}{error.field}"
            raise
        if end != len(raw):
            raise FrameError(f"{len(raw) - end} bytes too many", field=of.name, offset=end)
        return cast(F, frame)


class FrameSplitter:
    """Splits a byte stream into whole frames; buffers at most one incomplete frame.

    Version, flags, length and tag of a frame are checked as soon as they arrive, before the payload
    has arrived. After a FrameError the start of the next frame is unknown, so every later `feed`
    raises the same error, and the caller must close the connection.
    """

    def __init__(
        self,
        tags: Container[int],
        max_frame_bytes: int = MAX_FRAME_BYTES,
        known: Container[int] = (),
    ) -> None:
        self.max_frame_bytes = max_frame_bytes
        """Maximum value of the length field; a new value applies to frames that arrive later."""
        self.tags = tags
        """Tags that the peer may send. A changed set applies to frames that arrive later."""
        self._known = known  # all tags of the schema, to tell forbidden tags from unknown ones
        self._rest = bytearray()
        self._needed = HEADER_BYTES  # number of bytes that `_rest` must have for the next check
        self._error: FrameError | None = None

    @property
    def pending(self) -> int:
        """Number of buffered bytes of an incomplete frame."""
        return len(self._rest)

    def feed(self, data: Raw) -> list[bytes]:
        """Return the frames that `data` completes.

        Raises:
            FrameError: A header is invalid.
        """
        if self._error is not None:
            raise self._error
        if self._rest:
            # Extend the buffer in place, so that a large frame in small pieces is copied only once.
            self._rest += data
            if len(self._rest) < self._needed:
                return []
            data = self._rest
        try:
            frames, end = self._cut(bytes(data))
        except FrameError as error:
            self._error = error
            self._rest.clear()
            raise
        self._rest = bytearray(data[end:])
        return frames

    def feed_one(self, data: Raw) -> bytes | None:
        """Return one frame once `data` completes it, and keep later bytes for `feed`.

        So the caller can change the limit or the tags before `feed` checks the later frames.
        """
        self._rest += data
        if len(self._rest) <= HEADER_BYTES:
            return None
        (header,) = _U32.unpack_from(self._rest)
        frame_bytes = HEADER_BYTES + length_of(header, self.max_frame_bytes)
        check_tag(self._rest[HEADER_BYTES], self.tags, self._known)
        if len(self._rest) < frame_bytes:
            return None
        frame = bytes(self._rest[:frame_bytes])
        del self._rest[:frame_bytes]
        return frame

    def _cut(self, data: bytes) -> tuple[list[bytes], int]:
        """Return the complete frames in `data`, and the offset of the incomplete one."""
        frames: list[bytes] = []
        start, size = 0, len(data)
        tags, most = self.tags, self.max_frame_bytes
        head_of, add = _HEAD.unpack_from, frames.append
        while size - start > HEADER_BYTES:
            header, tag = head_of(data, start)
            length = header - VERSION_BITS
            end = start + HEADER_BYTES + length
            # This is also true for a header with flags, because its flags make `length` larger
            # than `most`.
            if not (MIN_LENGTH_BYTES <= length <= most and tag in tags):
                end = start + HEADER_BYTES + length_of(header, most)
                check_tag(tag, tags, self._known)
            if end > size:
                self._needed = end - start
                return frames, start
            add(data[start:end])
            start = end
        self._needed = HEADER_BYTES
        if size - start == HEADER_BYTES:
            length_of(_U32.unpack_from(data, start)[0], most)
            self._needed = _HEAD.size
        return frames, start
