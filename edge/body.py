"""Bodies of HTTP responses that are sent as they come: a stream's frames, an object's answer."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import ExitStack
from random import Random, SystemRandom
from typing import Protocol

import structlog
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from tailrace.edge import sse
from tailrace.edge.errors import error_response
from tailrace.edge.origins.link import Reader
from tailrace.edge.parameters import View
from tailrace.ledger.errors import TailraceError
from tailrace.ledger.frame import CLOSING, Heartbeat, Opened, encode, tag_of

log = structlog.get_logger("tailrace.edge")

SILENCE_S = 4.0
"""After this long without a frame the body gets a keepalive. Clients that hear nothing for 10 s
consider the connection lost."""
ALIVE = encode(Heartbeat(0, ready=True))
"""The sign of life among frames: encoded once, because thousands of idle readers get it."""
UNBUFFERED = {
    "X-Accel-Buffering": "no",  # nginx
    "Incremental": "?1",  # draft-ietf-httpbis-incremental
}
"""Headers that ask proxies to pass a body on as it comes, instead of when it is whole."""
NO_TRANSFORM = "no-transform"
"""The directive of Cache-Control that keeps proxies from compressing a body, which holds it up."""
LIVE_HEADERS = {"Cache-Control": f"no-store, {NO_TRANSFORM}"} | UNBUFFERED
"""Headers of every answer whose body is sent while it is made, whatever the dialect."""


class Encoder(Protocol):
    """How one stream becomes one response: its type, its body, or its refusal."""

    __slots__ = ()
    media_type: str = View.SSE.value
    ends_by_204: bool = False
    """Whether that answers who has all of a stream that has ended; else it gets a Status frame."""

    def opened(self, opened: Opened) -> None:
        """The stream is there; called once, before all that follows."""

    def refusal(self, error: TailraceError) -> Response:
        """The answer where there is no stream to show."""

    def frames(self, frames: list[bytes]) -> bytes:
        """The bytes of these raw frames, in order; of none, those that wait for no frame."""

    def sign_of_life(self) -> bytes:
        """Return bytes that carry no frame of the stream."""
        return sse.PING


class NativeEncoder(Encoder):
    """What the views of `/v1/generate` have in common."""

    __slots__ = ()
    ends_by_204 = True  # an EventSource stops then

    def opened(self, opened: Opened) -> None:
        """A frame says all that there is to say."""

    def refusal(self, error: TailraceError) -> Response:
        return error_response(error)


JITTER = SystemRandom()
"""Source of the times in `retry:`. It has no state, which processes that are forked would share."""


class SseEncoder(NativeEncoder):
    """The view of a stream as events."""

    __slots__ = ("_begun", "_random")

    def __init__(self, random: Random = JITTER) -> None:
        self._begun = False
        self._random = random

    def frames(self, frames: list[bytes]) -> bytes:
        events = sse.events(frames)
        if self._begun:
            return events
        self._begun = True
        return sse.retry(self._random) + events


class FrameEncoder(NativeEncoder):
    __slots__ = ()
    media_type = View.FRAMES.value

    def frames(self, frames: list[bytes]) -> bytes:
        return b"".join(frames)

    def sign_of_life(self) -> bytes:
        return ALIVE


ENCODERS: dict[View, Callable[[], Encoder]] = {View.SSE: SseEncoder, View.FRAMES: FrameEncoder}


class StreamedBody(StreamingResponse):
    """Sends `pieces`, and calls `close` when they end or the client goes.

    The next piece is asked for when the last has drained; so credit is given for what has left.
    """

    def __init__(
        self,
        close: Callable[[], object],
        pieces: AsyncGenerator[bytes],
        status: int = 200,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(pieces, status, {**(headers or {}), **LIVE_HEADERS})
        self._close, self._pieces = close, pieces

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            if scope["method"] == "HEAD":  # its head alone: how long the body will be nobody knows
                await self._pieces.aclose()
            await super().__call__(scope, receive, send)
        except TailraceError as error:
            log.warning("stream.cut", url=scope["path"], error=str(error))
            # It is not ended: the server breaks it off, and the client can see that.
        finally:
            self._close()


def stream_body(
    source: ExitStack,
    reader: Reader,
    encoder: Encoder,
    headers: Mapping[str, str],
    begin: bytes = b"",
) -> StreamedBody:
    """The answer that shows a stream, `begin` before all else; what `source` holds is its now."""
    typed = {**headers, "Content-Type": encoder.media_type}
    return StreamedBody(source.pop_all().close, frames_of(reader, encoder, begin), headers=typed)


async def frames_of(reader: Reader, encoder: Encoder, begin: bytes = b"") -> AsyncGenerator[bytes]:
    """A stream, until a frame ends it; frames that are queued together are one piece.

    `begin` and what can be told before a frame has come are the first one.
    """
    if begin := begin + encoder.frames([]):
        yield begin
    more = True
    while more:
        frames = await reader.take(SILENCE_S)
        if frames:
            more = tag_of(frames[-1]) not in CLOSING
            yield encoder.frames(frames)
        else:
            yield encoder.sign_of_life()


async def answer_of(reader: Reader) -> AsyncGenerator[bytes]:
    """An answer's body, until it is whole."""
    ended = False
    while not ended:
        data, ended = await reader.take_piece()
        yield data
