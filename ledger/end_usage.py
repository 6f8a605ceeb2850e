"""Makes the usage row of a stream from the record of its StreamEnd."""

from __future__ import annotations

import structlog

from tailrace.ledger.errors import TailraceError
from tailrace.ledger.frame import StreamEnd, decode
from tailrace.ledger.interface import Record
from tailrace.ledger.record_extra import RecordExtra
from tailrace.ledger.usage import Usage

log = structlog.get_logger("ledger")


def usage_of(stream: bytes, end: Record) -> Usage | None:
    """Return the usage of a stream from the record of its StreamEnd.

    The result is None for a stream of an object, and for a StreamEnd that an older release has
    written, because its record does not name the caller.
    """
    try:
        extra = RecordExtra.of(end).usage
        if extra is None:
            return None
        _, frame = decode(end.frame)
    except TailraceError as error:  # a commit must not fail because of a malformed record
        log.error("usage.unreadable", stream=stream.hex(), error=str(error))
        return None
    assert isinstance(frame, StreamEnd), frame
    output = frame.total_tokens
    return Usage(
        stream=stream,
        ended_ms=extra.ended_ms,
        tenant=extra.tenant,
        key=extra.key,
        model=extra.model,
        priority=extra.priority,
        finish=frame.finish_reason.word,
        prompt_tokens=frame.prompt_tokens,
        cached_tokens=min(extra.cached_tokens, frame.prompt_tokens),
        output_tokens=output,
        reasoning_tokens=min(extra.reasoning_tokens, output),
        delivered_tokens=min(extra.delivered_tokens, output),
    )
