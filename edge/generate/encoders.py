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


TIP_PATIENCE_S = 1.0
"""How long a reader that resumes at the tip waits to learn that the stream has ended."""

HEADERS = {
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",  # the URL may have a token
    "X-Content-Type-Options": "nosniff",
}


class Encoder(Protocol):
    """How one stream becomes one response: its type, its body, or its refusal."""

    __slots__ = ()
    media_type: str = View.SSE.value
    ends_by_204: bool = False
    """True: a client that has every frame of an ended stream gets 204. False: a Status frame."""

    def opened(self, opened: Opened) -> None:
        """Note that the stream was opened. Called once, before every other method."""

    def refusal(self, error: TailraceError) -> Response:
        """Return the response to send if there is no stream."""

    def frames(self, frames: list[bytes]) -> bytes:
        """The bytes of these raw frames, in order; of none, those that wait for no frame."""

    def sign_of_life(self) -> bytes:
        """Return bytes that carry no frame of the stream."""
        return PING


class NativeEncoder(Encoder):
    """Base of the encoders of `/v1/generate`, which write each frame in one view."""

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
        encoded = events(frames)
        if self._begun:
            return encoded
        self._begun = True
        return retry(self._random) + encoded


class FrameEncoder(NativeEncoder):
    __slots__ = ()
    media_type = View.FRAMES.value

    def frames(self, frames: list[bytes]) -> bytes:
        return b"".join(frames)

    def sign_of_life(self) -> bytes:
        return ALIVE


ENCODERS: dict[View, Callable[[], Encoder]] = {View.SSE: SseEncoder, View.FRAMES: FrameEncoder}


def stream_headers(opened: Opened, media_type: str = "") -> dict[str, str]:
    headers = HEADERS | {"Tailrace-Stream": opened.stream.hex()}
    if media_type == FRAMES_TYPE:
        headers["Tailrace-Opened"] = b64encode(encode(opened)).decode()
    if opened.token:
        headers["Tailrace-Token"] = opened.token
    if opened.siblings:
        headers["Tailrace-Siblings"] = ", ".join(map(_named, opened.siblings))
    return headers


def _named(sibling: Sibling) -> str:
    """One of a list of items with a parameter (RFC 9110, 5.6.1 and 5.6.6)."""
    stream = sibling.stream.hex()
    return f"{stream};token={sibling.token}" if sibling.token else stream
