"""A stream as the body of an HTTP response: raw frames, or server-sent events."""

from __future__ import annotations

from typing import Protocol

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from edge import sse
from edge.accept import View
from edge.attend import attended
from edge.subscriber import Subscriber
from ledger.frame import CLOSING, Heartbeat, Tag, decode, encode, tag_of

SILENCE_S = 15.0
"""After so long without a frame the body gets a sign of life, so that no proxy drops it."""


class Encoder(Protocol):
    """How frames become bytes of the body."""

    def frames(self, frames: list[bytes]) -> bytes:
        """The bytes of these raw frames, in order."""

    def sign_of_life(self, heartbeat: Heartbeat) -> bytes:
        """Bytes that carry no frame of the stream."""


class SseEncoder:
    def frames(self, frames: list[bytes]) -> bytes:
        return b"".join(self._event(raw) for raw in frames if tag_of(raw) != Tag.STATUS)

    def sign_of_life(self, heartbeat: Heartbeat) -> bytes:
        return sse.PING

    @staticmethod
    def _event(raw: bytes) -> bytes:
        _, frame = decode(raw)
        return sse.event(frame, tag_of(raw))


class FrameEncoder:
    def frames(self, frames: list[bytes]) -> bytes:
        return b"".join(frames)

    def sign_of_life(self, heartbeat: Heartbeat) -> bytes:
        return encode(heartbeat)


ENCODERS: dict[View, type[Encoder]] = {View.SSE: SseEncoder, View.FRAMES: FrameEncoder}


class StreamBody(Response):
    """Sends a subscriber's frames until one of them ends the stream or the client goes.

    Frames that are queued together leave as one write; the next are taken, and credit for
    them given, when that write has drained.
    """

    def __init__(self, subscriber: Subscriber, view: View, headers: dict[str, str]) -> None:
        self.subscriber = subscriber
        self.encoder = ENCODERS[view]()
        self.status_code = 200
        self.background = None
        self.init_headers(headers | {"Content-Type": view.value})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await attended(receive, self._send(send))
        except ClientDisconnect:
            pass  # it detaches, and resumes when it likes
        finally:
            self.subscriber.close()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        more = True
        while more:
            frames = await self.subscriber.take(SILENCE_S)
            if frames:
                data = self.encoder.frames(frames)
                more = tag_of(frames[-1]) not in CLOSING
            else:
                data = self.encoder.sign_of_life(self.subscriber.heartbeat)
            await send({"type": "http.response.body", "body": data, "more_body": more})
