"""One Call's end of an HTTP request: the head of its answer, then the pieces of its body.

The response takes all pieces that have come, sends them as one write, and takes again when
that write has drained; only then is credit renewed. A client that stalls costs at most
`WINDOW_BODIES` pieces here, and the origin holds none for it.
"""

from __future__ import annotations

import asyncio
from typing import NamedTuple

from edge.link import Link
from ledger.errors import CallerError
from ledger.frame import (
    LINK_CODEC,
    MAX_CALL_HEAD_BYTES,
    Answer,
    Body,
    BodyEnd,
    Call,
    Credit,
    StreamError,
    decode,
    encode,
    to_error,
)

WINDOW_BODIES = 16
"""Body frames in flight per response, of at most 64 KiB each; the credit of its Call."""
CORR = 0
"""One request, one Call: nothing else rides on this sink."""


class Piece(NamedTuple):
    """What has come of a body since the last one; `ended` says that it is whole."""

    data: bytes
    ended: bool


class Caller:
    """A `Sink` for one Call; `close` it when the client has its answer or has gone."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._queue: list[bytes] = []
        self._filled = asyncio.Event()
        self._taken = 0  # Body frames
        self._limit = WINDOW_BODIES

    def deliver(self, raw: bytes) -> None:
        self._queue.append(raw)
        self._filled.set()

    def close(self) -> None:
        """Detach, if the answer is not whole: the origin stops sending it."""
        self._link.forget(self)

    async def call(self, call: Call) -> Answer:
        """Send the Call and wait for its Answer; raises what a StreamError says."""
        raw = LINK_CODEC.encode(call, CORR)
        if len(raw) - len(call.body) > MAX_CALL_HEAD_BYTES:
            raise CallerError(
                "the request's headers are too large",
                code="headers_too_large",
                status=431,
                hint=f"at most {MAX_CALL_HEAD_BYTES} bytes with the URL",
            )
        self._link.submit(self, raw)
        await self._filled.wait()
        _, answer = decode(self._queue.pop(0))
        self._settle()
        if isinstance(answer, StreamError):
            raise to_error(answer)
        assert isinstance(answer, Answer), answer
        return answer

    async def take(self) -> Piece:
        """All that has come, at least one frame; raises what a StreamError says.

        Calling it again says that the last piece is with the client.
        """
        self._renew_credit()
        await self._filled.wait()
        parts: list[bytes] = []
        while self._queue:
            _, frame = decode(self._queue[0])
            if isinstance(frame, Body):
                parts.append(frame.data)
                self._taken += 1
            elif isinstance(frame, BodyEnd):
                return Piece(b"".join(parts), ended=True)
            elif parts:
                break  # what came before the error is the client's
            else:
                assert isinstance(frame, StreamError), frame
                raise to_error(frame)
            del self._queue[0]
        self._settle()
        return Piece(b"".join(parts), ended=False)

    def _renew_credit(self) -> None:
        if self._limit - self._taken <= WINDOW_BODIES // 2:
            self._limit = self._taken + WINDOW_BODIES
            self._link.submit(self, encode(Credit(self._limit), CORR))

    def _settle(self) -> None:
        if not self._queue:
            self._filled.clear()
