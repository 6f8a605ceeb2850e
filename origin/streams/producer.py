"""Idempotent producers: each request of a producer is taken once, whatever is sent twice.

A producer numbers its requests from 0 on within an epoch, and begins a higher epoch when it
starts anew, which shuts out what an older self of it may still send.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto

from ledger.errors import CallerError
from ledger.objects.object import ObjectRequest
from origin.streams.protocol import PRODUCER_EPOCH, PRODUCER_ID, PRODUCER_SEQ

MAX_NUMBER = (1 << 53) - 1
"""The largest epoch and seq: what every JavaScript number holds exactly."""
MAX_ID_CHARS = 256
MAX_PRODUCERS = 4_096
"""Producers of one stream whose places are kept; then the quarter of them that has appended
nothing for longest is forgotten."""

_NUMBER = re.compile("[0-9]{1,16}")


@dataclass(frozen=True, slots=True)
class Place:
    """A request's place in what a producer sends."""

    epoch: int
    seq: int

    def pack(self, index: int = 0) -> bytes:
        """With the index at which the request was taken, by which places are forgotten."""
        return f"{self.epoch} {self.seq} {index}".encode()

    @classmethod
    def unpack(cls, value: bytes) -> Place:
        epoch, seq, *_ = value.split()
        return cls(int(epoch), int(seq))


@dataclass(frozen=True, slots=True)
class Sender:
    """Who sends a request, and which of its requests it is."""

    name: str
    place: Place


def stalest(places: Mapping[str, bytes]) -> list[str]:
    """The names of those packed places that are to be forgotten."""

    def index(name: str) -> int:
        return int([*places[name].split(), b"0"][2])

    return sorted(places, key=index)[: max(1, len(places) // 4)]


class Decision(Enum):
    TAKE = auto()
    DUPLICATE = auto()
    STALE = auto()
    """The producer has begun a higher epoch."""
    GAP = auto()
    """A request before this one has not arrived."""
    NOT_FROM_ZERO = auto()
    """A new epoch that does not begin with seq 0."""


def due_seq(last: Place | None, epoch: int) -> int:
    """The seq that is due next in `epoch`."""
    return last.seq + 1 if last is not None and last.epoch == epoch else 0


def decide(last: Place | None, place: Place) -> Decision:
    """What to do with a request, if `last` was the last one taken of its producer."""
    if last is not None and place.epoch < last.epoch:
        return Decision.STALE
    due = due_seq(last, place.epoch)
    if place.seq <= due:
        return Decision.TAKE if place.seq == due else Decision.DUPLICATE
    begins_epoch = last is not None and place.epoch > last.epoch
    return Decision.NOT_FROM_ZERO if begins_epoch else Decision.GAP


def parse_producer(request: ObjectRequest) -> Sender | None:
    """The producer that a request names, if any; CallerError unless all of its fields are right."""
    fields = [request.header(name) for name in (PRODUCER_ID, PRODUCER_EPOCH, PRODUCER_SEQ)]
    if all(field is None for field in fields):
        return None
    name, epoch, seq = fields
    if name is None or epoch is None or seq is None:
        raise CallerError(
            "a producer names itself whole or not at all",
            field=PRODUCER_ID,
            hint=f"send {PRODUCER_ID}, {PRODUCER_EPOCH} and {PRODUCER_SEQ} together",
        )
    if not 0 < len(name) <= MAX_ID_CHARS:
        raise CallerError(
            "not a producer's id", field=PRODUCER_ID, hint=f"1 to {MAX_ID_CHARS} characters"
        )
    return Sender(name, Place(_number(epoch, PRODUCER_EPOCH), _number(seq, PRODUCER_SEQ)))


def _number(text: str, field: str) -> int:
    if not _NUMBER.fullmatch(text) or int(text) > MAX_NUMBER:
        raise CallerError("not a number", field=field, hint=f"digits only, 0 to {MAX_NUMBER}")
    return int(text)
