"""Questions to a compactor's process and its answers, as bytes in a pipe.

    message    magic u32 · size of the rest u32 · kind u8 · numbers u16 · blobs u16
               · number u64 […] · size of blob u32 […] · blob […]

All little-endian. There is no checksum: segments and dictionaries each have their own, which
who takes them checks. The magic is that of this layout, so that a process that was started
from files of another release is found out.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

from ledger.sqlite.cold import MAX_PAYLOAD_BYTES
from ledger.sqlite.storage import SegmentRow

MAX_MESSAGE_BYTES = MAX_PAYLOAD_BYTES + 64 * 1024
"""A run that is as large as may be, and what is said about it."""

HEADER = struct.Struct("<II")
_MAGIC = 0x31_43_52_54  # "TRC1"
_COUNTS = struct.Struct("<BHH")
_ROW = 4
"""Numbers of a segment: sid, first, length, coding."""


class Kind(IntEnum):
    # asked
    KNOW = 1
    BEGIN = 2
    SAMPLE = 3
    LEARN = 4
    PACK = 5
    # answered
    DONE = 16
    PACKED = 17
    DAMAGED = 18


class Message(NamedTuple):
    kind: Kind
    numbers: tuple[int, ...] = ()
    blobs: tuple[bytes, ...] = ()


def encode(message: Message) -> bytes:
    """One message, header and all."""
    kind, numbers, blobs = message
    body = [
        _COUNTS.pack(kind, len(numbers), len(blobs)),
        struct.pack(f"<{len(numbers)}Q{len(blobs)}I", *numbers, *map(len, blobs)),
        *blobs,
    ]
    return b"".join((HEADER.pack(_MAGIC, sum(map(len, body))), *body))


def body_size(header: bytes) -> int:
    """Bytes that follow a header; `ValueError` if it is none."""
    magic, size = HEADER.unpack(header)
    if magic != _MAGIC or not _COUNTS.size <= size <= MAX_MESSAGE_BYTES:
        raise ValueError(f"{header.hex()} begins no message")
    return int(size)


def decode(body: bytes) -> Message:
    """The message of a body; `ValueError` if it is none."""
    kind, numbers, blobs = _COUNTS.unpack_from(body)
    layout = struct.Struct(f"<{numbers}Q{blobs}I")
    at = _COUNTS.size + layout.size
    if at > len(body):
        raise ValueError(f"{numbers} numbers and {blobs} blobs are more than {len(body)} bytes")
    values = layout.unpack_from(body, _COUNTS.size)
    found: list[bytes] = []
    for size in values[numbers:]:
        found.append(body[at : at + size])
        at += size
    if at != len(body):
        raise ValueError(f"{at} bytes were announced, not {len(body)}")
    return Message(Kind(kind), values[:numbers], tuple(found))


def with_rows(kind: Kind, rows: Sequence[SegmentRow], *numbers: int) -> Message:
    """A message about segments."""
    places = (n for row in rows for n in (row.sid, row.first, row.length, row.coding))
    return Message(kind, (*places, *numbers), tuple(row.records for row in rows))


def rows_of(message: Message) -> list[SegmentRow]:
    """The segments that it is about; `ValueError` where they are not all there."""
    numbers, blobs = message.numbers, message.blobs
    if not blobs or len(numbers) < _ROW * len(blobs):
        raise ValueError(f"{len(numbers)} numbers for {len(blobs)} segments")
    places = (numbers[at : at + _ROW] for at in range(0, _ROW * len(blobs), _ROW))
    pairs = zip(places, blobs, strict=True)
    return [SegmentRow(sid, first, length, coding, b) for (sid, first, length, coding), b in pairs]
