"""The `extra` of a Record: data that the producer stores and clients never receive.

An `extra` is the BARE encoding of a `RecordExtra`; most records have none. A ledger stores its
bytes, and reads only the `usage` of a StreamEnd. Any change of the structs in this file needs a
new version of the ledger's layout.
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

    Times are in ms since the stream came to the origin that ended it; None is unknown. New fields
    are added at the end, so that older and newer releases can read each other's statistics.
    """

    queue_ms: int | None = None
    """Time until a worker was given the stream."""
    first_ms: int | None = None
    """Time until the first frame other than a notice was durable."""
    whole_ms: int | None = None
    """Time until the StreamEnd was written."""
    gap_p50_ms: int | None = None
    """Median time between two consecutive frames, including gaps that a takeover caused."""
    gap_p95_ms: int | None = None
    gap_p99_ms: int | None = None
    resumes: int | None = None
    """Number of times that a client resumed the stream."""
    takeovers: int | None = None
    """Number of takeovers by another worker."""

    @classmethod
    def of_numbers(cls, numbers: Iterable[int | None]) -> Self:
        """Return the statistics in `numbers`; ignore additional numbers from a newer release."""
        return cls(*tuple(numbers)[: len(cls._fields)])

    @classmethod
    def of(cls, record: Record) -> Self | None:
        """Return the statistics in the record of a StreamEnd; None if that record has none."""
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

    It is stored with the StreamEnd; `tailrace.ledger.end_usage` makes the stream's usage row from
    both. `ended_ms` is the Unix time of the end. `key` is the id of the API key; `key` and `tenant`
    are empty if the edge has no keys. `priority` is the word of a `Priority`.
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
    """Data that a record has besides its frame and token ids.

    `steered` are the spans of the record's ids that came from Steer orders (texts that a caller
    inserted), one per order. `engine` is the fingerprint of the stream's engine, stored with the
    first record of a stream whose recipe lacks it. `life` are the numbers of a `StreamLife`.
    `at_ms` is the Unix time at which the record was given to the ledger; most records have none
    (see `frame_times` in the origin). Only the record of a StreamEnd has `usage`.
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
"""The encodings of an absent `at_ms` and an absent `usage`, which are the last two fields.

`pack` leaves them out, and `unpack_extra` adds them, because older records lack these fields.
"""


def _left_out(extra: RecordExtra) -> int:
    """Return how many bytes of `_ABSENT` `pack` leaves out."""
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
