"""A stream as one JSON document: its text and how it ended, or how far it has got."""

from __future__ import annotations

from dataclasses import dataclass, field

from edge.subscriber import Subscriber
from ledger.frame import (
    Opened,
    Status,
    StreamEnd,
    StreamError,
    StreamState,
    Token,
    decode,
    to_error,
)


@dataclass(slots=True)
class Collected:
    """What was read of a stream: its texts, and the frame that closed it."""

    texts: list[str] = field(default_factory=list)
    closing: StreamEnd | Status | None = None


async def collect(subscriber: Subscriber) -> Collected:
    """All frames until one closes the stream; raises what a StreamError says."""
    collected = Collected()
    while collected.closing is None:
        for raw in await subscriber.take():
            _, frame = decode(raw)
            if isinstance(frame, Token):
                collected.texts.append(frame.text)
            elif isinstance(frame, StreamEnd | Status):
                collected.closing = frame
            elif isinstance(frame, StreamError):
                raise to_error(frame)
    return collected


def answer_document(opened: Opened, collected: Collected) -> dict[str, object]:
    """The answer to the request that started the stream."""
    return {
        "id": opened.stream.hex(),
        "model": opened.model,
        "text": "".join(collected.texts),
        **_end_fields(collected.closing),
        "prompt_tokens": opened.prompt_tokens,
    }


def state_document(opened: Opened, collected: Collected) -> dict[str, object]:
    """A stream as a later reader finds it, running or ended."""
    closing = collected.closing
    if isinstance(closing, Status):
        state, next_index = closing.state, closing.next_index
    else:
        state = StreamState.RUNNING if closing is None else StreamState.ENDED
        next_index = opened.next_index if closing is None else closing.index + 1
    return {
        "id": opened.stream.hex(),
        "model": opened.model,
        "state": state.word,
        "next_index": next_index,
        "text": "".join(collected.texts),
        **_end_fields(closing),
        "prompt_tokens": opened.prompt_tokens,
    }


def _end_fields(closing: StreamEnd | Status | None) -> dict[str, object]:
    if not isinstance(closing, StreamEnd):
        return {}
    fields: dict[str, object] = {
        "finish_reason": closing.finish_reason.word,
        "total_tokens": closing.total_tokens,
    }
    if closing.message is not None:
        fields["message"] = closing.message
    return fields
