"""Configuration of a stream, which is stored once, in one value of its object."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, fields
from typing import Any

from tailrace.origin.streams.expiry import NEVER, Expiry
from tailrace.origin.streams.offsets import Offset, parse_offset

FORMAT = 1
"""Version of the JSON in which configurations are stored."""


@dataclass(frozen=True, slots=True)
class Part:
    """The part of a ledger stream that a fork inherits: up to index `end`, counted in the fork.

    The part starts where the fork's previous part ends, or at 0.
    """

    stream: bytes
    end: int


@dataclass(frozen=True, slots=True)
class ForkOrder:
    """A client's request for a fork; without an offset, the fork begins at the source's end."""

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

    `asked` is the request that created the stream; an equal request only confirms it. A deleted
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
        """Index of the first frame that is not inherited, as readers of the stream count frames."""
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
    """Return the value as JSON, in which an object of a class becomes the list of its fields."""
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
