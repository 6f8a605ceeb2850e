"""What a stream was created with; stored once, in one value of its object."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from ledger.streams.expiry import NEVER, Expiry
from ledger.streams.offset import Offset, parse_offset

FORMAT = 1
"""Number of the stored form, for a later one to tell them apart."""


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
class Config:
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
        document = {
            "format": FORMAT,
            "stream": self.stream.hex(),
            "type": self.content_type,
            "asked": _pack_create(self.asked),
            "expiry": _pack_expiry(self.expiry),
            "parts": pack_parts(self.parts),
            "deleted": self.deleted,
        }
        return json.dumps(document, separators=(",", ":")).encode()

    @classmethod
    def unpack(cls, value: bytes) -> Config:
        document = json.loads(value)
        return cls(
            bytes.fromhex(document["stream"]),
            document["type"],
            _unpack_create(document["asked"]),
            _unpack_expiry(document["expiry"]),
            unpack_parts(document["parts"]),
            document["deleted"],
        )


def pack_parts(parts: tuple[Part, ...]) -> list[Any]:
    return [[part.stream.hex(), part.end] for part in parts]


def unpack_parts(packed: list[Any]) -> tuple[Part, ...]:
    return tuple(Part(bytes.fromhex(stream), end) for stream, end in packed)


def _pack_expiry(expiry: Expiry) -> list[Any]:
    return [expiry.ttl_s, expiry.at_ms]


def _unpack_expiry(packed: list[Any]) -> Expiry:
    return Expiry(*packed)


def _pack_create(create: Create) -> list[Any]:
    fork = create.fork
    packed = fork and [fork.source, fork.offset and str(fork.offset), fork.sub_offset]
    return [create.content_type, _pack_expiry(create.expiry), create.closed, packed]


def _unpack_create(packed: list[Any]) -> Create:
    content_type, expiry, closed, fork = packed
    order = None
    if fork is not None:
        source, offset, sub_offset = fork
        order = ForkOrder(source, offset and parse_offset(offset), sub_offset)
    return Create(content_type, _unpack_expiry(expiry), closed, order)
