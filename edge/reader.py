"""One HTTP request's end of a corr: a queue that the credit it grants keeps short.

The response takes all frames that are queued, sends them as one write, and takes again
when that write has drained; only then is credit renewed. A client that stalls therefore
costs at most a window of frames here, and the origin parks it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextlib import closing
from dataclasses import replace
from typing import Any, TypeVar, cast

from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive

from edge.origins.link import Link
from edge.origins.relay import under
from edge.telemetry.exchange import current, note_error, note_stream, traced
from ledger.errors import CallerError, TooLarge
from ledger.frame import (
    LINK_CODEC,
    MAX_CALL_HEAD_BYTES,
    Answer,
    Body,
    BodyEnd,
    Call,
    Cancel,
    Credit,
    Frame,
    Heartbeat,
    Open,
    Opened,
    Resume,
    Status,
    Steer,
    StreamError,
    decode,
    encode,
    tag_of,
    to_error,
)
from ledger.tasks import first_of
from ledger.window import Window

WINDOW_FRAMES = 128
"""Frames in flight per response."""
WINDOW_BYTES = 8 << 10
"""Bytes of frames in flight per response. One frame may exceed them."""
WINDOW_BODIES = 16
"""Body frames in flight per response, of at most 16 KiB each."""
WINDOW_BODY_BYTES = 128 << 10
"""Bytes of them."""
MAX_WHOLE_BYTES = 8 << 20
"""Of an object's answer that is taken whole."""
CORR = 0
"""One HTTP request, one corr: nothing else rides on this sink."""

A = TypeVar("A", bound=Frame)
R = TypeVar("R", bound=Open | Resume)


def credited(request: R, frames: int = WINDOW_FRAMES) -> R:
    """The request, with credit for what a response may have in flight."""
    return replace(request, credit=frames, credit_bytes=WINDOW_BYTES)


def link_of(request: Request) -> Link:
    """The way to the origins of the edge that a request came to."""
    link: Link = request.app.state.link
    return link


class Reader:
    """A `Sink` for one request; `close` it when the client has its answer or has gone.

    With `only`, the origin of this address is asked, and no other.
    """

    def __init__(self, link: Link, only: str | None = None) -> None:
        self.link = link
        self._only = only
        exchange = current()
        self.protocol = "other" if exchange is None else exchange.protocol
        self._queue: list[bytes] = []
        self._filled = asyncio.Event()
        self._window = Window(0, 0)
        self._most_bytes = 0

    def deliver(self, raw: bytes) -> None:
        self._queue.append(raw)
        self._filled.set()

    def deliver_run(self, run: list[bytes], corr: bytes) -> None:
        for raw in under(run, corr):
            self.deliver(raw)

    @property
    def heartbeat(self) -> Heartbeat:
        """The origin's last word on its readiness."""
        return self.link.heartbeat

    def close(self) -> None:
        """Detach, if the answer is not whole: a stream runs on without this reader."""
        self.link.forget(self)

    # ---- requests: each waits for its answer, and raises what a StreamError says ----

    async def open(self, request: Open | Resume, frames: int = WINDOW_FRAMES) -> Opened:
        """The stream's frames follow, at first at most so many."""
        request = credited(request, frames)
        self._window = Window.starting(
            request.start, request.credit, WINDOW_FRAMES, request.credit_bytes
        )
        self._most_bytes = WINDOW_BYTES
        return await self._ask(encode(traced(request), CORR), Opened)

    async def ask(self, request: Cancel | Steer) -> Status:
        return await self._ask(encode(request, CORR), Status)

    async def call(self, call: Call) -> Answer:
        """The pieces of its body follow."""
        call = replace(call, credit=WINDOW_BODIES, credit_bytes=WINDOW_BODY_BYTES)
        raw = LINK_CODEC.encode(call, CORR)
        if len(raw) - len(call.body) > MAX_CALL_HEAD_BYTES:
            raise CallerError(
                "the request's headers are too large",
                code="headers_too_large",
                status=431,
                hint=f"at most {MAX_CALL_HEAD_BYTES} bytes with the URL",
            )
        self._window = Window.starting(0, call.credit, WINDOW_BODIES, call.credit_bytes)
        self._most_bytes = WINDOW_BODY_BYTES
        return await self._ask(raw, Answer)

    async def _ask(self, raw: bytes, kind: type[A]) -> A:
        self.link.submit(self, raw, self._only)
        await self._filled.wait()
        _, answer = decode(self._queue.pop(0))
        self._settle()
        if isinstance(answer, StreamError):
            raise to_error(answer)
        assert isinstance(answer, kind), answer
        if isinstance(answer, Opened | Status):
            note_stream(answer.stream)
        return answer

    # ---- what follows: taking again says that what was taken last is with the client ----

    async def wait(self, timeout_s: float) -> bool:
        """Whether there are frames to take, after at most `timeout_s` seconds."""
        if not self._queue:
            try:
                async with asyncio.timeout(timeout_s):
                    await self._filled.wait()
            except TimeoutError:
                return False
        return True

    def peek(self) -> bytes:
        """The next frame, which stays queued; call it when `wait` has said that there is one."""
        return self._queue[0]

    async def take(self, timeout_s: float | None = None) -> list[bytes]:
        """All queued frames of a stream, at least one; [] when `timeout_s` seconds bring none."""
        self._renew_credit()
        if timeout_s is None:
            await self._filled.wait()
        elif not await self.wait(timeout_s):
            return []
        frames, self._queue = self._queue, []
        self._settle()
        if tag_of(frames[-1]) == StreamError.tag:
            _, error = decode(frames[-1])
            assert isinstance(error, StreamError)
            note_error(error.code)
        # All of them are logged, but for one that closes the stream: no credit follows it.
        self._window.passed(len(frames), sum(map(len, frames)))
        return frames

    async def take_piece(self) -> tuple[bytes, bool]:
        """What has come of an answer's body, at least a frame, and whether that was its end.

        Raises what a StreamError says.
        """
        self._renew_credit()
        await self._filled.wait()
        parts: list[bytes] = []
        while self._queue:
            _, frame = decode(self._queue[0])
            if isinstance(frame, Body):
                parts.append(frame.data)
                self._window.passed(1, len(self._queue[0]))
            elif isinstance(frame, BodyEnd):
                return b"".join(parts), True
            elif parts:
                break  # what came before the error is the client's
            else:
                assert isinstance(frame, StreamError), frame
                raise to_error(frame)
            del self._queue[0]
        self._settle()
        return b"".join(parts), False

    def _renew_credit(self) -> None:
        if self._window.renew(self._most_bytes):
            credit = Credit(self._window.limit, self._window.limit_bytes)
            self.link.submit(self, encode(credit, CORR))

    def _settle(self) -> None:
        if not self._queue:
            self._filled.clear()


async def whole_answer(link: Link, call: Call, only: str | None = None) -> tuple[int, bytes]:
    """The status and the body of an object's answer; raises what is said instead of one."""
    body, ended = bytearray(), False
    with closing(Reader(link, only)) as reader:
        answer = await reader.call(call)
        while not ended:
            data, ended = await reader.take_piece()
            body += data
            if len(body) > MAX_WHOLE_BYTES:
                raise TooLarge("the origin's answer is too large")
    return answer.status, bytes(body)


T = TypeVar("T")


async def attended(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`; it is cancelled, and ClientDisconnect raised, if the client goes.

    The request's body must have been read: what `receive` still gives is thrown away.
    """
    return cast(T, await first_of(work, _disconnect(receive)))


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    raise ClientDisconnect
