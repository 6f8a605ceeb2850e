"""Encoders turn a stream's frames into a response's body; `stream_headers` makes its headers."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Awaitable, Mapping
from random import Random, SystemRandom
from types import MappingProxyType
from typing import TYPE_CHECKING, Protocol

from starlette.responses import Response

from tailrace.edge.errors import error_response
from tailrace.edge.generate.params import View
from tailrace.edge.sse import PING, events, retry
from tailrace.ledger.errors import TailraceError
from tailrace.ledger.frame import (
    FRAMES_TYPE,
    SCHEMA_HASH,
    Heartbeat,
    Opened,
    Sibling,
    encode,
)

if TYPE_CHECKING:
    from tailrace.edge.origins.origin_pool import OriginPool

KEEPALIVE_INTERVAL_S = 4.0
"""Time without a frame after which the edge writes a keepalive into the body, in seconds. Clients
consider a connection lost if they receive nothing for 10 s."""
KEEPALIVE_FRAME = encode(Heartbeat(0, ready=True))
"""The keepalive of a response that consists of frames. It is encoded once, because thousands of
idle readers get it."""
UNBUFFERED = {
    "X-Accel-Buffering": "no",  # understood by nginx
    "Incremental": "?1",  # a header to be standardized: draft-ietf-httpbis-incremental
}
"""Headers that ask proxies to forward a body piece by piece, without buffering it."""
NO_TRANSFORM = "no-transform"
"""The directive of Cache-Control that keeps proxies from compressing a body, and so delaying it."""
LIVE_HEADERS = {"Cache-Control": f"no-store, {NO_TRANSFORM}"} | UNBUFFERED
"""Headers of every response whose body is sent while the stream runs, in every API."""


TIP_TIMEOUT_S = 1.0
"""How long a response to a client that has every frame so far is held back, in seconds. If the
origin reports in this time that the stream has ended, the response is an empty 204. Otherwise its
body begins."""

SCHEMA_ID = SCHEMA_HASH.hex()
"""Hash of the wire schema, for the header `Tailrace-Schema` of every response with a stream."""
HEADERS = {
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",  # the URL may contain a resume token
    "X-Content-Type-Options": "nosniff",
}


class Encoder(Protocol):
    """Turns one stream into one response: its media type, its body, or an error."""

    __slots__ = ()
    media_type: str = View.SSE.value
    ends_by_204: bool = False
    """True if a client that has every frame of an ended stream gets 204 instead of a body."""
    headers: Mapping[str, str] = MappingProxyType({})
    """Headers of a 200 response with this body, besides its media type. Read after `opened`."""
    shows_corr: bool = False
    """True if the body contains the correlation ids of frames. The edge then replaces the ids that
    its link to the origin uses by those that the client knows."""

    hold_s: float | None = None
    """Maximum time for which `frames` holds text back, in seconds; None if it holds back none."""

    def opened(self, opened: Opened) -> None:
        """Note that the stream was opened. Called once, before every other method."""

    def refusal(self, error: TailraceError) -> Response:
        """Return the response to send if the origin refuses the request."""

    def frames(self, frames: list[bytes]) -> bytes:
        """Encode these raw frames, in order.

        The first call may be without frames. It then returns the bytes that begin the body, if any.
        """

    @property
    def first_held(self) -> int | None:
        """The index of the oldest frame that `frames` holds back; None if it holds back none."""
        return None

    def release(self) -> bytes:
        """Encode all text that is held back. Called when its first frame has waited `hold_s`."""
        return b""

    def keepalive(self) -> bytes:
        """Return a keepalive: bytes that carry no frame of the stream."""
        return PING

    def before_end(self, link: OriginPool) -> Awaitable[None] | None:
        """Return what must have completed before the StreamEnd is encoded; None for nothing."""
        return None


class WrappedEncoder(Encoder):
    """Base class of encoders around another encoder, `inner`, which does all that they do not."""

    __slots__ = ("_inner", "ends_by_204", "hold_s", "media_type", "shows_corr")

    def __init__(self, inner: Encoder) -> None:
        self._inner = inner
        self.media_type = inner.media_type
        self.ends_by_204 = inner.ends_by_204
        self.shows_corr = inner.shows_corr
        self.hold_s = inner.hold_s

    def opened(self, opened: Opened) -> None:
        """Note that the stream was opened."""
        self._inner.opened(opened)

    def refusal(self, error: TailraceError) -> Response:
        """Return the response to send if the origin refuses the request."""
        return self._inner.refusal(error)

    @property
    def first_held(self) -> int | None:
        """The index of the oldest frame that `inner` holds back; None if it holds back none."""
        return self._inner.first_held

    def release(self) -> bytes:
        """Return the encoded text that `inner` holds back."""
        return self._inner.release()

    def keepalive(self) -> bytes:
        """Return the keepalive of `inner`."""
        return self._inner.keepalive()

    def before_end(self, link: OriginPool) -> Awaitable[None] | None:
        """Return what must have completed before `inner` can encode the StreamEnd."""
        return self._inner.before_end(link)


class NativeEncoder(Encoder):
    """Base class of the encoders of `/v1/generate`, which encode each frame separately."""

    __slots__ = ()
    ends_by_204 = True  # after a 204, a browser's EventSource does not reconnect again

    def opened(self, opened: Opened) -> None:
        """Do nothing, because these encoders use no field of Opened."""

    def refusal(self, error: TailraceError) -> Response:
        return error_response(error)


JITTER = SystemRandom()
"""Random source for the delays in `retry:`. It has no state, so forked processes do not draw the
same numbers."""


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
    """Sends the frames of a stream unchanged."""

    __slots__ = ()
    media_type = View.FRAMES.value
    shows_corr = True

    def frames(self, frames: list[bytes]) -> bytes:
        return b"".join(frames)

    def keepalive(self) -> bytes:
        return KEEPALIVE_FRAME


def stream_headers(opened: Opened, media_type: str = "") -> dict[str, str]:
    """Return the headers of a response that shows a stream in this media type."""
    headers = HEADERS | {"Tailrace-Stream": opened.stream.hex(), "Tailrace-Schema": SCHEMA_ID}
    if media_type == FRAMES_TYPE:
        headers["Tailrace-Opened"] = b64encode(encode(opened)).decode()
    if opened.token:
        headers["Tailrace-Token"] = opened.token
    if opened.siblings:
        headers["Tailrace-Siblings"] = ", ".join(map(_named, opened.siblings))
    return headers


def _named(sibling: Sibling) -> str:
    """Return another choice's stream as an item of `Tailrace-Siblings`: the stream's id and token.

    The token is a parameter of the item (RFC 9110, 5.6.1 and 5.6.6).
    """
    stream = sibling.stream.hex()
    return f"{stream};token={sibling.token}" if sibling.token else stream
