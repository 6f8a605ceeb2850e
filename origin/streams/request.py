"""Requests of clients to a stream: headers and query, checked and parsed."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum
from urllib.parse import parse_qsl, urlsplit

from tailrace.ledger.errors import CallerError, TooLarge
from tailrace.ledger.objects.object import ObjectRequest
from tailrace.origin.streams.config import Create, ForkOrder
from tailrace.origin.streams.cursors import parse_cursor
from tailrace.origin.streams.expiry import parse_expiry
from tailrace.origin.streams.offsets import START, Offset, parse_offset
from tailrace.origin.streams.protocol import (
    CLOSED,
    CONTENT_TYPE,
    EXPIRES_AT,
    FORK_OFFSET,
    FORK_SUB_OFFSET,
    FORKED_FROM,
    IF_NONE_MATCH,
    PRODUCER_EPOCH,
    PRODUCER_ID,
    PRODUCER_SEQ,
    SEQ,
    TRUE,
    TTL,
    named_by,
    parse_type,
)

MAX_SEQ_CHARS = 1024
MAX_QUERY_FIELDS = 32

MAX_NUMBER = (1 << 53) - 1
"""Maximum epoch and seq of a producer: the integers that JavaScript numbers hold exactly."""
MAX_ID_CHARS = 256

_SUB_OFFSET = re.compile("0|[1-9][0-9]{0,15}")
_NUMBER = re.compile("[0-9]{1,16}")


class Live(Enum):
    """Ways in which a reader waits for new data; values of the parameter `live`."""

    LONG_POLL = "long-poll"
    SSE = "sse"
    FRAMES = "frames"


@dataclass(frozen=True, slots=True)
class Place:
    """The place of a request in its producer's order: its epoch and its sequence number."""

    epoch: int
    seq: int

    def pack(self, index: int = 0) -> bytes:
        """Return the place in its stored form, with the stream's index at the time of the request.

        The index tells which of the stored places are the oldest.
        """
        return f"{self.epoch} {self.seq} {index}".encode()

    @classmethod
    def unpack(cls, value: bytes) -> Place:
        epoch, seq, *_ = value.split()
        return cls(int(epoch), int(seq))


@dataclass(frozen=True, slots=True)
class Sender:
    """The producer of a request, and the request's place in its order."""

    name: str
    place: Place


@dataclass(frozen=True, slots=True)
class AppendRequest:
    """A POST: bytes to append, the stream's end, or both."""

    body: bytes
    content_type: str | None
    closes: bool
    seq: str | None
    producer: Sender | None


@dataclass(frozen=True, slots=True)
class Read:
    """A GET from `offset` on; None is the current end."""

    offset: Offset | None
    live: Live | None = None
    cursor: int | None = None
    if_none_match: str | None = None


def parse_create(request: ObjectRequest, max_body_bytes: int) -> Create:
    """Return a PUT as a request to create; its body is the stream's first bytes."""
    _check_body(request.body, max_body_bytes)
    return Create(
        parse_type(request.header(CONTENT_TYPE)),
        parse_expiry(request.header(TTL), request.header(EXPIRES_AT)),
        _closes(request),
        _parse_fork(request),
    )


def parse_append(request: ObjectRequest, max_body_bytes: int) -> AppendRequest:
    """Return a POST as a request to append.

    A POST without a body can only close the stream, and its content type is ignored.
    """
    _check_body(request.body, max_body_bytes)
    closes, content_type = _closes(request), None
    if request.body:
        content_type = parse_type(request.header(CONTENT_TYPE))
        if content_type is None:
            raise CallerError(
                "a request that appends data needs a content type",
                field=CONTENT_TYPE,
                hint="send the content type of the stream",
            )
    elif not closes:
        raise CallerError(
            "the request has nothing to append",
            field="body",
            hint=f"send a body, or {CLOSED}: {TRUE} to close the stream",
        )
    seq = request.header(SEQ)
    if seq is not None and not 0 < len(seq) <= MAX_SEQ_CHARS:
        raise CallerError(
            f"the value has {len(seq)} characters",
            field=SEQ,
            hint=f"send 1 to {MAX_SEQ_CHARS} characters",
        )
    return AppendRequest(request.body, content_type, closes, seq, parse_producer(request))


def parse_producer(request: ObjectRequest) -> Sender | None:
    """Return the producer that a request names, if any.

    Raises CallerError unless all of its fields are valid.
    """
    fields = [request.header(name) for name in (PRODUCER_ID, PRODUCER_EPOCH, PRODUCER_SEQ)]
    if all(field is None for field in fields):
        return None
    name, epoch, seq = fields
    if name is None or epoch is None or seq is None:
        raise CallerError(
            "some of the producer's headers are missing",
            field=PRODUCER_ID,
            hint=f"send {PRODUCER_ID}, {PRODUCER_EPOCH} and {PRODUCER_SEQ} together",
        )
    if not 0 < len(name) <= MAX_ID_CHARS:
        raise CallerError(
            f"the producer's id has {len(name)} characters",
            field=PRODUCER_ID,
            hint=f"send 1 to {MAX_ID_CHARS} characters",
        )
    return Sender(name, Place(_number(epoch, PRODUCER_EPOCH), _number(seq, PRODUCER_SEQ)))


def _number(text: str, field: str) -> int:
    if not _NUMBER.fullmatch(text) or int(text) > MAX_NUMBER:
        raise CallerError(
            f"{text!r} is not a valid number",
            field=field,
            hint=f"send decimal digits, from 0 to {MAX_NUMBER}",
        )
    return int(text)


def parse_read(request: ObjectRequest) -> Read:
    """Return a GET as a read. A reader that waits must give an offset."""
    query = _query(request.url)
    live = _parse_live(_one(query, "live"))
    offset = _one(query, "offset")
    if offset is None and live is not None:
        raise CallerError(
            "a live read needs an offset",
            field="offset",
            hint="send offset=-1 to read from the beginning",
        )
    return Read(
        START if offset is None else parse_offset(offset),
        live,
        parse_cursor(_one(query, "cursor")),
        request.header(IF_NONE_MATCH),
    )


def _check_body(body: bytes, max_body_bytes: int) -> None:
    if len(body) > max_body_bytes:
        raise TooLarge(
            f"the body has {len(body)} bytes",
            field="body",
            hint=f"send at most {max_body_bytes} bytes per request",
        )


def _closes(request: ObjectRequest) -> bool:
    return (request.header(CLOSED) or "").lower() == TRUE


def _parse_fork(request: ObjectRequest) -> ForkOrder | None:
    source = request.header(FORKED_FROM)
    offset, sub_offset = request.header(FORK_OFFSET), request.header(FORK_SUB_OFFSET)
    if source is None:
        if offset is not None or sub_offset is not None:
            raise CallerError(
                "the offset of a fork is given without its source",
                field=FORKED_FROM,
                hint="send the path of the stream to fork",
            )
        return None
    if sub_offset is not None and not _SUB_OFFSET.fullmatch(sub_offset):
        raise CallerError(
            f"{sub_offset!r} is not a valid number",
            field=FORK_SUB_OFFSET,
            hint="send decimal digits without a leading 0",
        )
    return ForkOrder(
        named_by(source),
        None if offset is None else parse_offset(offset, FORK_OFFSET),
        int(sub_offset or 0),
    )


def _query(url: str) -> list[tuple[str, str]]:
    try:
        return parse_qsl(
            urlsplit(url).query, keep_blank_values=True, max_num_fields=MAX_QUERY_FIELDS
        )
    except ValueError as error:
        raise CallerError(
            f"the query has too many parameters: {error}",
            field="query",
            hint=f"send at most {MAX_QUERY_FIELDS} parameters",
        ) from error


def _one(query: list[tuple[str, str]], name: str) -> str | None:
    values = [value for key, value in query if key == name]
    if len(values) > 1:
        raise CallerError(f"the parameter {name} is given more than once", field=name)
    return values[0] if values else None


def _parse_live(text: str | None) -> Live | None:
    try:
        return None if text is None else Live(text)
    except ValueError:
        words = ", ".join(live.value for live in Live)
        raise CallerError("unknown live mode", field="live", hint=f"one of {words}") from None
