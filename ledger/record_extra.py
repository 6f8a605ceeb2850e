"""What a producer stores beside a record and no client is sent: the `extra` of a `Record`.

A ledger stores these bytes and never reads them. They are the BARE encoding of a `RecordExtra`;
most records have none. Any change of these structs needs a new version of the ledger's layout.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple, Self

from tailrace.ledger.errors import Damaged, FrameError
from tailrace.ledger.interface import Record
from tailrace.ledger.wire.bare import U64_MAX, Uint, struct_of


class StreamLife(NamedTuple):
    """How a stream fared, stored with its StreamEnd.

    Times are in ms since the stream came to the origin that ended it; None: not known there.
    New numbers are added at the end, so that releases can read each other's.
    """

    queue_ms: int | None = None
    """Until a worker had it."""
    first_ms: int | None = None
    """Until its first frame was durable that is no notice."""
    whole_ms: int | None = None
    """Until its end was written."""
    gap_p50_ms: int | None = None
    """Between two frames, takeovers included; the same for the next two."""
    gap_p95_ms: int | None = None
    gap_p99_ms: int | None = None
    resumes: int | None = None
    """Times that a client read it anew."""
    takeovers: int | None = None
    """Workers that went on with it."""

    @classmethod
    def of_numbers(cls, numbers: Iterable[int | None]) -> Self:
        """Return the life that these numbers tell; ignores numbers of a newer release."""
        return cls(*tuple(numbers)[: len(cls._fields)])

    @classmethod
    def of(cls, record: Record) -> Self | None:
        """Return what the record of a StreamEnd tells; None where it tells nothing."""
        numbers = RecordExtra.of(record).life
        return cls.of_numbers(numbers) if numbers else None


@dataclass(frozen=True, slots=True)
class IdSpan:
    """Consecutive token ids: `count` of them from place `start` on."""

    start: Uint
    count: Uint


@dataclass(frozen=True, slots=True)
class RecordExtra:
    """What a record's frame and token ids do not say.

    `steered` are the spans of the record's ids that came from Steer orders, one for each order.
    `engine` is the fingerprint of the engine that makes the stream, stored with the first record
    that it makes where the recipe could not say it. `life` are the numbers of a `StreamLife`.
    """

    steered: tuple[IdSpan, ...] = ()
    engine: str | None = None
    life: tuple[Uint | None, ...] = ()

    @classmethod
    def of(cls, record: Record) -> RecordExtra:
        """Return what is stored beside a record; `Damaged` if that is no RecordExtra."""
        return unpack_extra(record.extra) if record.extra else NO_EXTRA

    def pack(self) -> bytes:
        """Return the bytes to store; none where there is nothing to say."""
        if self == NO_EXTRA:
            return b""
        out = bytearray()
        _TYPE.encode(out, self)
        return bytes(out)


_TYPE = struct_of(RecordExtra)
NO_EXTRA = RecordExtra()


def life_numbers(life: StreamLife) -> tuple[int | None, ...]:
    """Return the numbers as they are stored: none below 0 or beyond 64 bits."""
    return tuple(None if each is None else min(max(0, each), U64_MAX) for each in life)


def unpack_extra(packed: bytes) -> RecordExtra:
    """Return the RecordExtra of these bytes; `Damaged` if they are none."""
    try:
        extra, end = _TYPE.decode(packed, 0)
    except FrameError as error:
        raise Damaged(f"what is stored beside a record cannot be read: {error}") from error
    if end != len(packed):
        raise Damaged(f"what is stored beside a record has {len(packed) - end} bytes too many")
    assert isinstance(extra, RecordExtra)
    return extra
