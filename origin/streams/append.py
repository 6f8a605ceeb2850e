"""Decides if an append is accepted: the rules for a POST, in the protocol's order.

The order of the rules matters. A request that a producer repeats was accepted already, so it gets
the same answer, whatever has happened since. A closed stream accepts nothing else. Next the content
type must match. Then the producer's sequence numbers are checked, and then `Stream-Seq`, with which
a writer orders its appends. The body is checked last, because that takes longest.

Each request of an idempotent producer is accepted once, however often it is sent. A producer
numbers its requests from 0 within an epoch, and starts a higher epoch when it restarts. From then
on late requests of earlier epochs are refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

from tailrace.ledger.errors import CallerError, Conflict, Forbidden, TailraceError
from tailrace.ledger.objects.object import Headers
from tailrace.origin.streams.json_messages import Steps, split_json
from tailrace.origin.streams.page import Tip
from tailrace.origin.streams.protocol import (
    CONTENT_TYPE,
    PRODUCER_EPOCH,
    PRODUCER_EXPECTED_SEQ,
    PRODUCER_RECEIVED_SEQ,
    PRODUCER_SEQ,
    SEQ,
    essence,
    is_json,
    tip_headers,
)
from tailrace.origin.streams.request import AppendRequest, Place


class Decision(Enum):
    """The decision about a request of an idempotent producer, by its epoch and sequence number."""

    TAKE = auto()
    """The request is the one that is expected next."""
    DUPLICATE = auto()
    """The request was accepted before."""
    STALE = auto()
    """The producer has started a higher epoch since."""
    GAP = auto()
    """An earlier request of the producer has not arrived."""
    NOT_FROM_ZERO = auto()
    """A new epoch that does not start with seq 0."""


def due_seq(last: Place | None, epoch: int) -> int:
    return last.seq + 1 if last is not None and last.epoch == epoch else 0


def decide(last: Place | None, place: Place) -> Decision:
    """Return what to do with a request; `last` is its producer's last accepted request."""
    if last is not None and place.epoch < last.epoch:
        return Decision.STALE
    due = due_seq(last, place.epoch)
    if place.seq <= due:
        return Decision.TAKE if place.seq == due else Decision.DUPLICATE
    begins_epoch = last is not None and place.epoch > last.epoch
    return Decision.NOT_FROM_ZERO if begins_epoch else Decision.GAP


@dataclass(frozen=True, slots=True)
class AppendContext:
    """The state from which an append is accepted or refused.

    It is the state of the stream, and the producer's last accepted request.
    """

    content_type: str
    tip: Tip
    seq: str | None
    last: Place | None


@dataclass(frozen=True, slots=True)
class Taken:
    """The append is accepted if its body is valid, too; the answer then has this `status`."""

    status: int


@dataclass(frozen=True, slots=True)
class Repeated:
    """The append was accepted before; nothing needs to be done."""


@dataclass(frozen=True, slots=True)
class Refused:
    """The append is refused; the answer has this error and these headers."""

    error: TailraceError
    headers: Headers = ()


def judge(append: AppendRequest, standing: AppendContext) -> Taken | Repeated | Refused:
    verdict = decide(standing.last, append.producer.place) if append.producer else Decision.TAKE
    if verdict is Decision.DUPLICATE:
        return Repeated()
    if verdict is Decision.STALE:
        return _stale(standing)
    if standing.tip.closed:
        closes_only = append.closes and not append.body and append.producer is None
        return Repeated() if closes_only else _closed(standing)
    if append.body and not _same_type(append, standing):
        return _other_type(standing)
    if verdict is not Decision.TAKE:
        return _out_of_order(append, standing, verdict)
    if append.seq is not None and standing.seq is not None and append.seq <= standing.seq:
        return _behind(append.seq, standing.seq)
    return Taken(200 if append.producer and append.body else 204)


def messages_of(content_type: str, body: bytes) -> Steps[list[bytes]]:
    """Return the messages in a body.

    Raises CallerError if JSON is required and the body is not JSON.
    """
    if not body or not is_json(content_type):
        return [body] if body else []
    return (yield from split_json(body))


def place_headers(place: Place | None) -> Headers:
    """Return the headers that report a producer's last accepted request."""
    if place is None:
        return ()
    return ((PRODUCER_EPOCH, str(place.epoch)), (PRODUCER_SEQ, str(place.seq)))


def _same_type(append: AppendRequest, standing: AppendContext) -> bool:
    return essence(append.content_type or "") == essence(standing.content_type)


def _stale(standing: AppendContext) -> Refused:
    assert standing.last is not None
    error = Forbidden(
        "the producer has begun a higher epoch",
        code="stale_epoch",
        field=PRODUCER_EPOCH,
        hint=f"the producer's current epoch is {standing.last.epoch}",
    )
    return Refused(error, ((PRODUCER_EPOCH, str(standing.last.epoch)),))


def _closed(standing: AppendContext) -> Refused:
    error = Conflict(
        "the stream is closed",
        code="stream_closed",
        hint="append to another stream; a closed stream accepts no more data",
    )
    return Refused(error, tip_headers(standing.tip))


def _other_type(standing: AppendContext) -> Refused:
    return Refused(
        Conflict(
            "the request's content type differs from the stream's",
            code="content_type_mismatch",
            field=CONTENT_TYPE,
            hint=f"the stream's content type is {standing.content_type}",
        )
    )


def _out_of_order(append: AppendRequest, standing: AppendContext, verdict: Decision) -> Refused:
    assert append.producer is not None
    place = append.producer.place
    if verdict is Decision.NOT_FROM_ZERO:
        error = CallerError(
            f"epoch {place.epoch} cannot begin with {place.seq}",
            code="bad_producer_seq",
            field=PRODUCER_SEQ,
            hint="a new epoch begins with sequence number 0",
        )
        return Refused(error)
    due = due_seq(standing.last, place.epoch)
    gap = Conflict(
        "a request of this producer is missing",
        code="producer_gap",
        field=PRODUCER_SEQ,
        hint=f"send the request with sequence number {due} first",
    )
    expected = (PRODUCER_EXPECTED_SEQ, str(due))
    return Refused(gap, (expected, (PRODUCER_RECEIVED_SEQ, str(place.seq))))


def _behind(seq: str, last: str) -> Refused:
    error = Conflict(
        f"{seq!r} is not greater than the last accepted value {last!r}",
        code="stream_seq_behind",
        field=SEQ,
        hint="send a greater value; values are compared byte by byte",
    )
    return Refused(error)
