"""The `extra` of a Record: data of the producer that clients never receive.

They are the BARE encoding of a `RecordExtra`; most records have none. A ledger stores these bytes,
and reads only the `usage` of an end. Any change of these structs needs a new version of the
ledger's layout.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple, Self

from tailrace.ledger.errors import Damaged, FrameError
from tailrace.ledger.interface import Record
from tailrace.ledger.wire.bare import U64_MAX, Uint, struct_of


class StreamLife(NamedTuple):
    """Statistics of a stream, stored with its StreamEnd.

    Times are in ms since the stream came to the origin that ended it; None is unknown. New numbers
    are added at the end, so that different releases can read each other's.
    """

    queue_ms: int | None = None
    """Time until a worker had the stream."""
    first_ms: int | None = None
    """Time until the first frame other than a notice was durable."""
    whole_ms: int | None = None
    """Time until the end was written."""
    gap_p50_ms: int | None = None
    """Median gap between two frames. Gaps that a takeover caused count, too."""
    gap_p95_ms: int | None = None
    gap_p99_ms: int | None = None
    resumes: int | None = None
    """Number of times that a client resumed the stream."""
    takeovers: int | None = None
    """Number of takeovers by another worker."""

    @classmethod
    def of_numbers(cls, numbers: Iterable[int | None]) -> Self:
        """Return the statistics of these numbers; ignore additional ones of newer releases."""
        return cls(*tuple(numbers)[: len(cls._fields)])

    @classmethod
    def of(cls, record: Record) -> Self | None:
        """Return the statistics in the record of a StreamEnd, or None if it has none."""
        numbers = RecordExtra.of(record).life
        return cls.of_numbers(numbers) if numbers else None


@dataclass(frozen=True, slots=True)
class IdSpan:
    """Consecutive token ids: `count` ids from position `start` on."""

    start: Uint
    count: Uint


@dataclass(frozen=True, slots=True)
class EndUsage:
    """The caller and the model of a generation, and the counts that its StreamEnd does not have.

    It is stored with the StreamEnd; `tailrace.ledger.end_usage` makes the stream's row from both.
    `ended_ms` is the Unix time of the end. `key` is the id of the API key; it and `tenant` are
    empty if the edge has no keys. `priority` is the word of a `Priority`.
    """

    ended_ms: Uint
    tenant: str
    key: str
    model: str
    priority: str
    cached_tokens: Uint = 0
    reasoning_tokens: Uint = 0
    delivered_tokens: Uint = 0


@dataclass(frozen=True, slots=True)
class RecordExtra:
    """Data besides a record's frame and token ids.

    `steered` are the spans of the record's ids that came from Steer orders, one per order. `engine`
    is the fingerprint of the stream's engine, stored with its first record if the recipe does not
    have it. `life` are the numbers of a `StreamLife`. `at_ms` is the Unix time at which the record
    was given to the ledger; most records have none, see `frame_times` in the origin. Only the
    record of a StreamEnd has `usage`.
    """

    steered: tuple[IdSpan, ...] = ()
    engine: str | None = None
    life: tuple[Uint | None, ...] = ()
    at_ms: Uint | None = None
    usage: EndUsage | None = None

    @classmethod
    def of(cls, record: Record) -> RecordExtra:
        """Return the extra data of a record.

        Raises:
            Damaged: The bytes are not a RecordExtra.
        """
        return unpack_extra(record.extra) if record.extra else NO_EXTRA

    def pack(self) -> bytes:
        """Return the bytes to store; empty if there is no data."""
        if self == NO_EXTRA:
            return b""
        out = bytearray()
        _TYPE.encode(out, self)
        return bytes(out[: len(out) - _left_out(self)])


_TYPE = struct_of(RecordExtra)
_ABSENT = b"\0\0"
"""The encodings of an absent `at_ms` and `usage`.

They are left out at the end of a record's extra: earlier records do not have these fields.
"""


def _left_out(extra: RecordExtra) -> int:
    """Return how many bytes of `_ABSENT` are not stored."""
    if extra.usage is not None:
        return 0
    return 1 if extra.at_ms is not None else 2


NO_EXTRA = RecordExtra()


def life_numbers(life: StreamLife) -> tuple[int | None, ...]:
    """Return the statistics as numbers to store, each limited to the range from 0 to 2^64-1."""
    return tuple(None if each is None else min(max(0, each), U64_MAX) for each in life)


def unpack_extra(packed: bytes) -> RecordExtra:
    """Decode a RecordExtra.

    Raises:
        Damaged: The bytes are not a RecordExtra.
    """
    try:
        extra, end = _TYPE.decode(packed + _ABSENT, 0)
    except FrameError as error:
        raise Damaged(f"the extra data of a record is malformed: {error}") from error
    assert isinstance(extra, RecordExtra)
    size = len(packed) + _left_out(extra)
    if end != size:
        raise Damaged(f"the extra data of a record has {size - end} bytes too many")
    return extra
