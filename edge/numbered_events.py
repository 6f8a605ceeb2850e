"""Answers that are derived from all of a stream's log: read whole, or resumed after an event.

Their events are numbered in the order of the log. A frame of the log may be several events, or
none. So the log is read from its start until the event is found after which the client resumes.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from tailrace.edge.generate.encoders import stream_headers
from tailrace.edge.generate.routes import MAX_DOCUMENT_BYTES
from tailrace.edge.numbered_encoder import NumberedEncoder
from tailrace.edge.origins.reader import Reader
from tailrace.edge.starlette_helpers import link_of, unless_disconnected
from tailrace.edge.stream_answer import StreamAnswer
from tailrace.ledger.errors import BeyondEnd, TooLarge
from tailrace.ledger.frame import (
    CLOSING,
    Frame,
    Logged,
    Opened,
    Resume,
    StreamEnd,
    StreamError,
    decode,
    tag_of,
    to_error,
)


async def read_frames(
    reader: Reader, take: Callable[[Frame], object], most: int = MAX_DOCUMENT_BYTES
) -> int:
    """Call `take` with each frame until one closes the stream; return the size of all frames.

    Raises TooLarge if this size exceeds `most` bytes. Raises the error of a StreamError.
    """
    size, ended = 0, False
    while not ended:
        for raw in await reader.take():
            size += len(raw)
            if size > most:
                raise TooLarge(f"the answer exceeds {most} bytes", hint="read it with stream=true")
            _, frame = decode(raw)
            if isinstance(frame, StreamError):
                raise to_error(frame)
            take(frame)
            ended = tag_of(raw) in CLOSING
    return size


async def resumed(
    request: Request,
    asked: Resume,
    encoder: NumberedEncoder[Any],
    after: int,
    more_headers: dict[str, str] | None = None,
) -> Response:
    """Return the response with the events after number `after`.

    Args:
        request: The client's request.
        asked: The Resume frame that requests the stream from its start.
        encoder: Encodes the stream, without the events up to number `after`.
        after: The number of the last event that the client has.
        more_headers: Headers beside those that every stream has.

    Raises:
        BeyondEnd: There is no event with this number yet.
    """
    more = more_headers or {}
    with ExitStack() as unless_handed_on:
        reader = unless_handed_on.enter_context(Reader(link_of(request)))
        opened = await unless_disconnected(request, reader.open(asked))
        encoder.opened(opened)
        replay = _replayed(reader, encoder, opened, after)
        begin, ended = await unless_disconnected(request, replay)
        if not ended:
            unless_handed_on.pop_all()
            return StreamAnswer.reading(reader, opened, encoder, more, begin)
        headers = {**stream_headers(opened), **more}
        if not begin and encoder.ends_by_204:
            return Response(status_code=204, headers=headers)
        return Response(begin, headers={**headers, "Content-Type": encoder.media_type})


async def _replayed(
    reader: Reader, encoder: NumberedEncoder[Any], opened: Opened, after: int
) -> tuple[bytes, bool]:
    """Return the logged events after event number `after`, and True if the stream has ended.

    Raises BeyondEnd if the log does not contain that event yet.
    """
    told, next_index, ended = [encoder.frames([])], 0, False
    while encoder.last < after and next_index < opened.next_index:
        for raw in await reader.take():
            _, frame = decode(raw)
            if isinstance(frame, StreamError):
                raise to_error(frame)
            assert isinstance(frame, Logged), frame
            next_index, ended = frame.index + 1, isinstance(frame, StreamEnd)
            if ended and (work := encoder.before_end(reader.link)) is not None:
                await work
            told.append(encoder.frames([raw]))
    if after > encoder.last:
        raise BeyondEnd(
            f"The answer has no event {after} yet: its last one is {encoder.last}.",
            field="starting_after",
        )
    return b"".join(told), ended
