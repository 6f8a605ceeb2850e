"""Sends a request to an origin for one HTTP request, and receives its answer and frames."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Self, TypeVar

from tailrace.edge.origins.origin_pool import OriginPool
from tailrace.edge.origins.sink import Sink, with_corr_bytes
from tailrace.edge.telemetry.request_metrics import current, note_error, note_stream, traced
from tailrace.ledger.errors import CallerError, TooLarge
from tailrace.ledger.flow.credit_window import Window
from tailrace.ledger.frame import (
    LINK_CODEC,
    MAX_CALL_HEAD_BYTES,
    Answer,
    Body,
    BodyEnd,
    Call,
    Cancel,
    Credit,
    Frame,
    Input,
    InputStored,
    Open,
    Opened,
    Resume,
    Status,
    Steer,
    StreamError,
    SwitchStages,
    decode,
    tag_of,
    to_error,
)

WINDOW_FRAMES = 128
"""Maximum number of frames in flight for one response."""
WINDOW_BYTES = 8 << 10
"""Maximum bytes of frames in flight for one response. A single frame may exceed it."""
WINDOW_BODIES = 16
"""Maximum number of Body frames in flight for one response, each of at most 16 KiB."""
WINDOW_BODY_BYTES = 128 << 10
"""Maximum bytes of Body frames in flight for one response."""
MAX_WHOLE_BYTES = 8 << 20
"""Maximum bytes of an object's answer that `whole_answer` collects."""
CORR = 0
"""Correlation id (corr) of the request of every `Reader`: each has only this one request."""

A = TypeVar("A", bound=Frame)
R = TypeVar("R", bound=Open | Resume)


def credited(request: R, frames: int = WINDOW_FRAMES) -> R:
    """Return the request with credit for the frames that a response may have in flight."""
    return replace(request, credit=frames, credit_bytes=WINDOW_BYTES)


class Reader:
    """A `Sink` for one request; `close` it when the client has its answer or has left.

    `take` returns all queued frames. The next call of `take` means that those frames have been
    written to the client, so it renews the credit. For a client that stalls, the edge therefore
    holds at most one window of frames, and the origin waits.
    """

    def __init__(self, link: OriginPool, only: str | None = None) -> None:
        """Begin without a request; `only` is the address of the one origin to ask."""
        self.link = link
        self._only = only
        metrics = current.get()
        self.protocol = "other" if metrics is None else metrics.protocol
        self.address = "" if metrics is None else metrics.address
        self._queue: list[bytes] = []
        self._filled = asyncio.Event()
        self._window = Window(0, 0)
        self._most_bytes = 0

    def deliver(self, raw: bytes) -> None:
        self._queue.append(raw)
        self._filled.set()

    def deliver_run(self, run: list[bytes], corr: bytes) -> None:
        for raw in with_corr_bytes(run, corr):
            self.deliver(raw)

    def close(self) -> None:
        """Detach from a stream that has not ended; it runs on without this reader."""
        self.link.forget(self)

    def __enter__(self) -> Self:
        """Return this reader, which is closed when the context ends."""
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def hand_over(self, sink: Sink) -> tuple[list[bytes], Window]:
        """Pass further frames to another sink; return the queued frames and the credit window."""
        self.link.transfer(self, sink)
        frames, self._queue = self._queue, []
        return frames, self._window

    # ---- requests: each waits for its answer, and raises the error of a StreamError ----

    async def open(self, request: Open | Resume, frames: int = WINDOW_FRAMES) -> Opened:
        """Open or resume a stream, with credit for the first `frames` frames."""
        request = credited(self.link.unread.applied(request), frames)
        self._window = Window.starting(
            request.start, request.credit, WINDOW_FRAMES, request.credit_bytes
        )
        self._most_bytes = WINDOW_BYTES
        opened = await self._ask(traced(request), Opened)
        self._window.begin_at(opened.first)
        return opened

    async def ask(self, request: Cancel | Steer | SwitchStages) -> Status:
        """Cancel or steer a stream, or switch its stages."""
        return await self._ask(request, Status)

    async def send_input(self, request: Input) -> InputStored:
        """Send bytes for a stream's input; return when they are durable."""
        return await self._ask(request, InputStored)

    async def call(self, call: Call) -> Answer:
        """Send a request to an object; `take_piece` returns the body of its answer."""
        call = replace(call, credit=WINDOW_BODIES, credit_bytes=WINDOW_BODY_BYTES)
        if len(LINK_CODEC.encode(replace(call, body=b""))) > MAX_CALL_HEAD_BYTES:
            raise CallerError(
                "the request's headers are too large",
                code="headers_too_large",
                status=431,
                hint=f"headers and URL may have at most {MAX_CALL_HEAD_BYTES} bytes together",
            )
        self._window = Window.starting(0, call.credit, WINDOW_BODIES, call.credit_bytes)
        self._most_bytes = WINDOW_BODY_BYTES
        return await self._ask(call, Answer)

    async def _ask(self, request: Frame, kind: type[A]) -> A:
        self.link.ask(self, CORR, request, self._only)
        await self._filled.wait()
        _, answer = decode(self._queue.pop(0))
        self._settle()
        if isinstance(answer, StreamError):
            raise to_error(answer)
        assert isinstance(answer, kind), answer
        if isinstance(answer, Opened | Status | InputStored):
            note_stream(answer.stream)
        return answer

    # ---- frames that follow the answer ----

    async def wait(self, timeout_s: float) -> bool:
        """Wait for frames; return False if none arrives within `timeout_s` seconds."""
        if not self._queue:
            try:
                async with asyncio.timeout(timeout_s):
                    await self._filled.wait()
            except TimeoutError:
                return False
        return True

    async def take(self, timeout_s: float | None = None) -> list[bytes]:
        """Return all queued frames of a stream; [] if none arrives within `timeout_s` seconds."""
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
        # A closing frame needs no credit. Counting it is harmless, because the stream has ended.
        self._window.passed(len(frames), sum(map(len, frames)))
        return frames

    async def take_piece(self) -> tuple[bytes, bool]:
        """Return the queued pieces of an answer's body, and True if the body has ended.

        Waits for a piece. Raises the error of a StreamError.
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
                break  # return the pieces first, and raise the error in the next call
            else:
                assert isinstance(frame, StreamError), frame
                raise to_error(frame)
            del self._queue[0]
        self._settle()
        return b"".join(parts), False

    def _renew_credit(self) -> None:
        if self._window.renew(self._most_bytes):
            credit = Credit(self._window.limit, self._window.limit_bytes)
            self.link.credit(self, CORR, credit)

    def _settle(self) -> None:
        if not self._queue:
            self._filled.clear()


async def whole_answer(link: OriginPool, call: Call, only: str | None = None) -> tuple[int, bytes]:
    """Return the status and the whole body of an object's answer. Raises the origin's error."""
    body, ended = bytearray(), False
    with Reader(link, only) as reader:
        answer = await reader.call(call)
        while not ended:
            data, ended = await reader.take_piece()
            body += data
            if len(body) > MAX_WHOLE_BYTES:
                raise TooLarge(f"the origin's answer has more than {MAX_WHOLE_BYTES} bytes")
    return answer.status, bytes(body)
