"""What a stream was created with, when it ends, and what an origin's owner decides about all.

A stream's config is stored once, in one value of its object. It ends its life by itself at a
moment, or some time after its last use.

The rule of the sliding window, `Stream-TTL`: every write and every read renews it, HEAD does
not, and a stream is gone in the ms in which its window has passed. A write stores the moment
with what it writes. A read stores it only when the last stored moment is more than a
`UNWRITTEN_SHARE` of the window old, else it stays in memory. What reads were not stored is
lost with the memory, so an object that comes back grants what they can have granted: it never
expires early for that reason, and late by that share of its window at most.
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
from tailrace.origin.streams.page import BEGINNING, Offset, parse_offset
from tailrace.origin.streams.protocol import EXPIRES_AT, TTL

MAX_TTL_S = 100 * 365 * 24 * 3600
UNWRITTEN_SHARE = 10
"""The tenth part of a window may pass between a read and the next one that is stored."""

_TTL = re.compile("0|[1-9][0-9]{0,9}")
_RFC3339 = re.compile(
    r"[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}(\.[0-9]{1,9})?(Z|[+-][0-9]{2}:[0-9]{2})"
)
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)

FORMAT = 1
"""Number of the stored form, for a later one to tell them apart."""


@dataclass(frozen=True, slots=True)
class Expiry:
    """`ttl_s` after the last use, or `at_ms` (Unix ms); neither is never."""

    ttl_s: int | None = None
    at_ms: int | None = None

    def deadline_ms(self, used_ms: int) -> int | None:
        """When a stream last used at `used_ms` is gone."""
        if self.ttl_s is not None:
            return used_ms + self.ttl_s * 1000
        return self.at_ms

    @property
    def unwritten_ms(self) -> int:
        """How long a use may stay in memory only."""
        return (self.ttl_s or 0) * 1000 // UNWRITTEN_SHARE

    def headers(self) -> tuple[tuple[str, str], ...]:
        """What HEAD says of it: the window, not what is left of it."""
        if self.ttl_s is not None:
            return ((TTL, str(self.ttl_s)),)
        if self.at_ms is not None:
            return ((EXPIRES_AT, format_rfc3339(self.at_ms)),)
        return ()


NEVER = Expiry()


@dataclass(slots=True)
class LastUse:
    """The moment that counts, and the one that is stored; both in Unix ms."""

    known_ms: int
    stored_ms: int

    @classmethod
    def restored(cls, stored_ms: int, expiry: Expiry, now_ms: int) -> LastUse:
        """After a restart: there may have been uses since, which were not stored."""
        unstored = min(stored_ms + expiry.unwritten_ms, now_ms)
        return cls(max(stored_ms, unstored), stored_ms)

    def touch(self, expiry: Expiry, now_ms: int) -> bool:
        """Return the stream is used now; whether this must be stored."""
        self.known_ms = max(self.known_ms, now_ms)
        return expiry.ttl_s is not None and self.known_ms - self.stored_ms > expiry.unwritten_ms


def parse_expiry(ttl: str | None, expires_at: str | None) -> Expiry:
    """Return the expiry that a client asks for; CallerError if it is malformed or asked for twice."""
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
        pass  # a month 13, say, or a year 10000: no moment either
    raise CallerError(
        "not a moment in time", field=EXPIRES_AT, hint="as RFC 3339 has it: 2031-01-31T23:59:59Z"
    )


@dataclass(frozen=True, slots=True)
class Part:
    """What a fork inherits of one ledger stream: up to the index `end`, counted in the fork.

    It begins where the part before it ends, or at 0.
    """

    stream: bytes
    end: int


@dataclass(frozen=True, slots=True)
class ForkOrder:
    """A fork as a client asks for it; without an offset at the source's end."""

    source: str
    offset: Offset | None = None
    sub_offset: int = 0


@dataclass(frozen=True, slots=True)
class Create:
    """A stream as a client asks for it."""

    content_type: str | None = None
    expiry: Expiry = NEVER
    closed: bool = False
    fork: ForkOrder | None = None


@dataclass(frozen=True, slots=True)
class StreamConfig:
    """A stream as it is. `stream` is its own ledger stream, `parts` what it has inherited.

    `asked` is what it was created for, which an equal request only confirms. A deleted
    stream whose forks live is `deleted`: its frames stay, and nobody else sees it.
    """

    stream: bytes
    content_type: str
    asked: Create
    expiry: Expiry = NEVER
    parts: tuple[Part, ...] = field(default=())
    deleted: bool = False

    @property
    def base(self) -> int:
        """The index, as the stream's readers count, of the first frame of its own."""
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
    """As JSON: each class of these as the list of its fields."""
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
    CREATED = "created"
    APPENDED = "appended"
    """Data, the end, or both."""
    DELETED = "deleted"


@dataclass(frozen=True, slots=True)
class StreamEvent:
    """A change that is durable; `path` is the stream's name, `tail_offset` where it ends now.

    `since_offset` is where it ended before; `BEGINNING` of one that was not there.
    """

    kind: Change
    path: str
    tail_offset: str
    since_offset: str = BEGINNING


@dataclass(frozen=True, slots=True)
class StreamSettings:
    """`on_event` is told of every change of a stream, each once, those of one in order."""

    long_poll_s: float = 20.0
    """Longest a long poll waits."""
    sse_s: float = 60.0
    """An event stream ends after so long, for the caches that many readers may share."""
    max_body_bytes: int = 8 * 1024 * 1024
    """Most that one PUT or POST may append."""
    durability: Durability = Durability.PROCESS
    on_event: Callable[[StreamEvent], None] | None = None
