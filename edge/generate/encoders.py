"""Encoders, which turn the frames of one stream into the bytes of one response, and its headers."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Callable
from random import Random, SystemRandom
from typing import Protocol

from starlette.responses import Response

from tailrace.edge.errors import error_response
from tailrace.edge.generate.params import View
from tailrace.edge.sse import PING, events, retry
from tailrace.ledger.errors import TailraceError
from tailrace.ledger.frame import FRAMES_TYPE, Heartbeat, Opened, Sibling, encode

KEEPALIVE_INTERVAL_S = 4.0
"""Time without a frame, in seconds, after which the body gets a keepalive. Clients that receive
nothing for 10 s consider the connection lost."""
KEEPALIVE_FRAME = encode(Heartbeat(0, ready=True))
"""The keepalive in a body of frames; encoded once, because thousands of idle readers get it."""
UNBUFFERED = {
    "X-Accel-Buffering": "no",  # nginx
    "Incremental": "?1",  # draft-ietf-httpbis-incremental
}
"""Headers that ask proxies to forward a body piece by piece, without buffering it."""
NO_TRANSFORM = "no-transform"
"""The directive of Cache-Control that keeps proxies from compressing a body, which delays it."""
LIVE_HEADERS = {"Cache-Control": f"no-store, {NO_TRANSFORM}"} | UNBUFFERED
"""Headers of every response whose body is sent while the stream runs, in any dialect."""


TIP_TIMEOUT_S = 1.0
"""Time that a reader who has every frame so far waits for the news that the stream has ended, in
seconds, before its response begins. If it has ended, the response is an empty one (204)."""

HEADERS = {
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",  # the URL may have a token
    "X-Content-Type-Options": "nosniff",
}


class Encoder(Protocol):
    """Turns one stream into one response: its media type, its body, or an error."""

    __slots__ = ()
    media_type: str = View.SSE.value
    ends_by_204: bool = False
    """True if a client that has every frame of an ended stream gets 204, instead of a body."""
    shows_corr: bool = False
    """True if the client sees the correlation ids of frames, which must then be its own."""

    def opened(self, opened: Opened) -> None:
        """Note that the stream was opened. Called once, before every other method."""

    def refusal(self, error: TailraceError) -> Response:
        """Return the response to send if the origin refuses the request."""

    def frames(self, frames: list[bytes]) -> bytes:
        """Encode these raw frames, in order.

        Without frames it returns the bytes with which the body begins, if there are any.
        """

    def keepalive(self) -> bytes:
        """Return a keepalive: bytes that carry no frame of the stream."""
        return PING


class NativeEncoder(Encoder):
    """Base of the encoders of `/v1/generate`, which write each frame in one view."""

    __slots__ = ()
    ends_by_204 = True  # an EventSource stops then

    def opened(self, opened: Opened) -> None:
        """Do nothing, because these encoders need no facts about the stream."""

    def refusal(self, error: TailraceError) -> Response:
        return error_response(error)


JITTER = SystemRandom()
"""Source of the times in `retry:`. It has no state that forked processes would share."""


class SseEncoder(NativeEncoder):
    """Encodes a stream as server-sent events."""

    __slots__ = ("_begun", "_random")

    def __init__(self, random: Random = JITTER) -> None:
        self._begun = False
        self._random = random

    def frames(self, frames: list[bytes]) -> bytes:
        encoded = events(frames)
        if self._begun:
            return encoded
        self._begun = True
        return retry(self._random) + encoded


class FrameEncoder(NativeEncoder):
    """Passes on the frames of a stream as they are."""

    __slots__ = ()
    media_type = View.FRAMES.value
    shows_corr = True

    def frames(self, frames: list[bytes]) -> bytes:
        return b"".join(frames)

    def keepalive(self) -> bytes:
        return KEEPALIVE_FRAME


ENCODERS: dict[View, Callable[[], Encoder]] = {View.SSE: SseEncoder, View.FRAMES: FrameEncoder}


def stream_headers(opened: Opened, media_type: str = "") -> dict[str, str]:
    """Return the headers of a response that shows a stream in this media type."""
    headers = HEADERS | {"Tailrace-Stream": opened.stream.hex()}
    if media_type == FRAMES_TYPE:
        headers["Tailrace-Opened"] = b64encode(encode(opened)).decode()
    if opened.token:
        headers["Tailrace-Token"] = opened.token
    if opened.siblings:
        headers["Tailrace-Siblings"] = ", ".join(map(_named, opened.siblings))
    return headers


def _named(sibling: Sibling) -> str:
    """Return a sibling as a list item with a parameter (RFC 9110, 5.6.1 and 5.6.6)."""
    stream = sibling.stream.hex()
    return f"{stream};token={sibling.token}" if sibling.token else stream
