"""Configuration and expiry of a stream, and the settings of all streams of an origin.

A stream's config is stored once, in one value of its object. A stream may expire at a fixed time,
or some time after its last use.

`Stream-TTL` is a sliding window: every write and every read renews it, HEAD does not, and the
stream is gone in the ms in which the window ends. A write stores the time of use with its data. A
read stores it only if the last stored time is more than `UNWRITTEN_SHARE` of the window old, and
otherwise keeps it in memory. Reads that were not stored are lost with the memory, so a restored
object assumes the latest read that can have happened: it never expires too early, and too late by
at most that share of its window.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from datetime import UTC, datetime, timedelta
from enum import Enum
from typing import Any

from tailrace.ledger.errors import CallerError
from tailrace.ledger.wire.schema import Durability
from tailrace.origin.streams.offsets import BEGINNING, Offset, parse_offset
from tailrace.origin.streams.protocol import EXPIRES_AT, TTL

MAX_TTL_S = 100 * 365 * 24 * 3600
UNWRITTEN_SHARE = 10
"""Share of a window, one in this many parts, that may pass before a read is stored again."""

_TTL = re.compile("0|[1-9][0-9]{0,9}")
_RFC3339 = re.compile(
    r"[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}(\.[0-9]{1,9})?(Z|[+-][0-9]{2}:[0-9]{2})"
)
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)

FORMAT = 1
"""Version of the stored form."""


@dataclass(frozen=True, slots=True)
class Expiry:
    """Expiry `ttl_s` after the last use, or at `at_ms` (Unix ms); never if both are None."""

    ttl_s: int | None = None
    at_ms: int | None = None

    def deadline_ms(self, used_ms: int) -> int | None:
        """Return the time of expiry of a stream that was last used at `used_ms`."""
        if self.ttl_s is not None:
            return used_ms + self.ttl_s * 1000
        return self.at_ms

    @property
    def unwritten_ms(self) -> int:
        """Milliseconds for which a use may stay in memory only."""
        return (self.ttl_s or 0) * 1000 // UNWRITTEN_SHARE

    def headers(self) -> tuple[tuple[str, str], ...]:
        """Return the headers for HEAD: the window, not the time that is left."""
        if self.ttl_s is not None:
            return ((TTL, str(self.ttl_s)),)
        if self.at_ms is not None:
            return ((EXPIRES_AT, format_rfc3339(self.at_ms)),)
        return ()


NEVER = Expiry()


@dataclass(slots=True)
class LastUse:
    """The effective time of last use, and the stored one; both in Unix ms."""

    known_ms: int
    stored_ms: int

    @classmethod
    def restored(cls, stored_ms: int, expiry: Expiry, now_ms: int) -> LastUse:
        """Return the last use after a restart, assuming reads that were not stored."""
        unstored = min(stored_ms + expiry.unwritten_ms, now_ms)
        return cls(max(stored_ms, unstored), stored_ms)

    def touch(self, expiry: Expiry, now_ms: int) -> bool:
        """Set the time of use to now; return True if it must be stored."""
        self.known_ms = max(self.known_ms, now_ms)
        return expiry.ttl_s is not None and self.known_ms - self.stored_ms > expiry.unwritten_ms


def parse_expiry(ttl: str | None, expires_at: str | None) -> Expiry:
    """Return the expiry that a client requests.

    Raises CallerError if it is malformed or given twice.
    """
    if ttl is not None and expires_at is not None:
        raise CallerError(
            "a stream has a TTL or a moment to expire at, not both",
            field=EXPIRES_AT,
            hint=f"send {TTL} or {EXPIRES_AT}",
        )
    if ttl is not None:
        if not _TTL.fullmatch(ttl) or int(ttl) > MAX_TTL_S:
            raise CallerError("not a TTL", field=TTL, hint=f"whole seconds, 0 to {MAX_TTL_S}")
        return Expiry(ttl_s=int(ttl))
    return NEVER if expires_at is None else Expiry(at_ms=_parse_rfc3339(expires_at))


def format_rfc3339(at_ms: int) -> str:
    moment = _EPOCH + timedelta(milliseconds=at_ms)
    return moment.isoformat(timespec="milliseconds").removesuffix("+00:00") + "Z"


def _parse_rfc3339(text: str) -> int:
    text = text.upper()
    try:
        if _RFC3339.fullmatch(text):
            moment = datetime.fromisoformat(text).astimezone(UTC)
            return (moment - _EPOCH) // timedelta(milliseconds=1)
    except (ValueError, OverflowError):
        pass  # no valid time, such as month 13 or year 10000
    raise CallerError(
        "not a valid time", field=EXPIRES_AT, hint="RFC 3339, such as 2031-01-31T23:59:59Z"
    )


@dataclass(frozen=True, slots=True)
class Part:
    """The part of a ledger stream that a fork inherits: up to index `end`, counted in the fork.

    It starts where the previous part ends, or at 0.
    """

    stream: bytes
    end: int


@dataclass(frozen=True, slots=True)
class ForkOrder:
    """A client's request for a fork; without an offset it is at the source's end."""

    source: str
    offset: Offset | None = None
    sub_offset: int = 0


@dataclass(frozen=True, slots=True)
class Create:
    """A client's request to create a stream."""

    content_type: str | None = None
    expiry: Expiry = NEVER
    closed: bool = False
    fork: ForkOrder | None = None


@dataclass(frozen=True, slots=True)
class StreamConfig:
    """A stream's configuration: its own ledger stream, `stream`, and the `parts` it has inherited.

    `asked` is the request that created it; an equal request only confirms the stream. A deleted
    stream whose forks still exist is marked `deleted`: its frames stay, and only the forks see it.
    """

    stream: bytes
    content_type: str
    asked: Create
    expiry: Expiry = NEVER
    parts: tuple[Part, ...] = field(default=())
    deleted: bool = False

    @property
    def base(self) -> int:
        """The index of the first frame of its own, as readers of the stream count."""
        return self.parts[-1].end if self.parts else 0

    def pack(self) -> bytes:
        return packed(
            {
                "format": FORMAT,
                "stream": self.stream,
                "type": self.content_type,
                "asked": self.asked,
                "expiry": self.expiry,
                "parts": self.parts,
                "deleted": self.deleted,
            }
        )

    @classmethod
    def unpack(cls, value: bytes) -> StreamConfig:
        document = json.loads(value)
        return cls(
            bytes.fromhex(document["stream"]),
            document["type"],
            _unpack_create(document["asked"]),
            Expiry(*document["expiry"]),
            unpack_parts(document["parts"]),
            document["deleted"],
        )


def packed(value: object) -> bytes:
    """Return the value as JSON, with each of these classes as the list of its fields."""
    return json.dumps(value, default=_plain, separators=(",", ":")).encode()


def _plain(value: Any) -> str | list[Any]:
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, Offset):
        return str(value)
    return [getattr(value, one.name) for one in fields(value)]


def unpack_parts(listed: list[Any]) -> tuple[Part, ...]:
    return tuple(Part(bytes.fromhex(stream), end) for stream, end in listed)


def unpack_order(listed: list[Any]) -> ForkOrder:
    source, offset, sub_offset = listed
    return ForkOrder(source, offset and parse_offset(offset), sub_offset)


def _unpack_create(listed: list[Any]) -> Create:
    content_type, expiry, closed, fork = listed
    return Create(content_type, Expiry(*expiry), closed, fork and unpack_order(fork))


class Change(Enum):
    """Kind of a change of a stream."""

    CREATED = "created"
    APPENDED = "appended"
    """Data, the end, or both."""
    DELETED = "deleted"


@dataclass(frozen=True, slots=True)
class StreamEvent:
    """A durable change of the stream named `path`, which now ends at `tail_offset`.

    `since_offset` is where it ended before; `BEGINNING` for a stream that did not exist.
    """

    kind: Change
    path: str
    tail_offset: str
    since_offset: str = BEGINNING


@dataclass(frozen=True, slots=True)
class StreamSettings:
    """Settings of all streams.

    `on_event` is called once for each change, in order within a stream.
    """

    long_poll_s: float = 20.0
    """Maximum seconds that a long poll waits."""
    sse_s: float = 60.0
    """Maximum seconds of an event stream, so that caches can share it among readers."""
    max_body_bytes: int = 8 * 1024 * 1024
    """Maximum bytes that one PUT or POST may append."""
    durability: Durability = Durability.PROCESS
    on_event: Callable[[StreamEvent], None] | None = None
