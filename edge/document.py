"""A stream as one JSON document: its text and how it ended, or how far it has got."""

from __future__ import annotations

from dataclasses import dataclass

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


@dataclass(frozen=True, slots=True)
class Collected:
    """What was read of a stream: its text, and the frame that closed it."""

    text: str
    closing: StreamEnd | Status


async def collect(subscriber: Subscriber) -> Collected:
    """All frames until one closes the stream; raises what a StreamError says."""
    texts: list[str] = []
    while True:
        for raw in await subscriber.take():
            _, frame = decode(raw)
            if isinstance(frame, Token):
                texts.append(frame.text)
            elif isinstance(frame, StreamEnd | Status):
                return Collected("".join(texts), frame)
            elif isinstance(frame, StreamError):
                raise to_error(frame)


def answer_document(opened: Opened, collected: Collected) -> dict[str, object]:
    """The answer to the request that started the stream."""
    return {
        "id": opened.stream.hex(),
        "model": opened.model,
        "text": collected.text,
        **_end_fields(collected.closing),
        "prompt_tokens": opened.prompt_tokens,
    }


def state_document(opened: Opened, collected: Collected) -> dict[str, object]:
    """A stream as a later reader finds it, running or ended."""
    closing = collected.closing
    if isinstance(closing, Status):
        state, next_index = closing.state, closing.next_index
    else:
        state, next_index = StreamState.ENDED, closing.index + 1
    return {
        "id": opened.stream.hex(),
        "model": opened.model,
        "state": state.word,
        "next_index": next_index,
        "text": collected.text,
        **_end_fields(closing),
        "prompt_tokens": opened.prompt_tokens,
    }


def _end_fields(closing: StreamEnd | Status) -> dict[str, object]:
    if not isinstance(closing, StreamEnd):
        return {}
    fields: dict[str, object] = {
        "finish_reason": closing.finish_reason.word,
        "total_tokens": closing.total_tokens,
    }
    if closing.message is not None:
        fields["message"] = closing.message
    return fields
