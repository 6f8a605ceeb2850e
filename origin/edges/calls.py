"""One Call on a link: passes the request to its object, and sends the answer as credit allows."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Generic, Protocol, TypeVar

from tailrace.ledger.flow.credit_window import Window
from tailrace.ledger.frame import SAFE_METHODS, Answer, Body, BodyEnd, Call, Header, encode
from tailrace.ledger.objects.object import ObjectResponse
from tailrace.origin.edges.feed import Outlet
from tailrace.origin.edges.peer_frame import ObjectCall

MAX_PIECE_BYTES = 16 << 10
"""Maximum bytes of data in one Body frame; tokens on the same link wait while it is sent."""
MAX_CREDIT_BODIES = 1024
"""Maximum number of Body frames in flight, whatever credit an edge grants."""
NO_CONTENT = (204, 304)
"""Statuses of answers that have no content and no Content-Length (RFC 9110, 8.6)."""

C = TypeVar("C", bound=Call | ObjectCall)


class CallOutlet(Outlet, Protocol):
    """The part of a link that an answer is written to."""

    @property
    def bulk_congested(self) -> bool: ...

    def send_bulk(self, data: bytes) -> None:
        """Send bytes after everything else that the link has to send."""

    def release(self, size: int) -> None:
        """Subtract the `size` bytes of a Call's body from the memory in use; called once per Call.

        A link refuses further Calls while the bodies of its unanswered Calls take too much memory.
        """


class CallRun(Generic[C]):
    """One Call in progress. The body of a streamed answer is read in parts, as credit allows."""

    def __init__(self, outlet: CallOutlet, corr: int, call: C) -> None:
        self._outlet = outlet
        self._corr = corr
        self._call: C | None = call  # None once the object has answered, to free the request's body
        self._safe = call.method in SAFE_METHODS
        self._head = call.method == "HEAD"
        # counts Body frames: those sent so far, and those that the edge's credit allows
        self._window = Window.starting(0, call.credit, MAX_CREDIT_BODIES, call.credit_bytes)
        self._may_send = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._detached = False

    async def run(self, handle: Callable[[C], Awaitable[ObjectResponse]]) -> None:
        """Carry out the Call and send its answer.

        Raises the errors of `handle`, and errors while the body of the answer is read.
        """
        self._task = asyncio.current_task()
        call = self._call
        assert call is not None, "a Call runs once"
        try:
            if self._detached and self._safe:
                return  # the edge detached before the Call began
            response = await handle(call)
        finally:
            self._call = None
            self._outlet.release(len(call.body))
        async with AsyncExitStack() as at_the_end:
            close = getattr(response.body, "aclose", None)
            if close is not None:
                at_the_end.push_async_callback(close)
            if not self._detached:
                await self._answer(response)

    def detach(self) -> None:
        """Stop sending, because the edge no longer wants the answer.

        A request that only reads is cancelled. A request that may change something is completed,
        because a half-finished change would be worse.
        """
        self._detached = True
        may_stop = self._safe or self._call is None
        if may_stop and self._task not in (None, asyncio.current_task()):
            self._task.cancel()

    def grant(self, limit: int, limit_bytes: int | None) -> None:
        self._window.grant(limit, limit_bytes)
        self._may_send.set()

    def pump(self) -> None:
        """Continue sending, since the link has drained."""
        self._may_send.set()

    async def _answer(self, response: ObjectResponse) -> None:
        headers = tuple(Header(name, value) for name, value in response.headers)
        if isinstance(response.body, bytes):
            headers += self._length(response, len(response.body))
        self._outlet.send_bulk(encode(Answer(response.status, headers), self._corr))
        if isinstance(response.body, bytes):
            await self._send(response.body)
        else:
            async for part in response.body:
                await self._send(part)
        self._outlet.send_bulk(encode(BodyEnd(), self._corr))
        self._outlet.closed(self._corr)

    def _length(self, response: ObjectResponse, length: int) -> tuple[Header, ...]:
        """Return a Content-Length header, or no header if it is already set or not allowed."""
        if response.header("content-length") is not None:
            return ()
        if response.status in NO_CONTENT or (self._head and not length):
            return ()
        return (Header("content-length", str(length)),)

    async def _send(self, part: bytes) -> None:
        for start in range(0, len(part), MAX_PIECE_BYTES):
            while not self._window.open or self._outlet.bulk_congested:
                self._may_send.clear()
                await self._may_send.wait()
            body = encode(Body(part[start : start + MAX_PIECE_BYTES]), self._corr)
            self._window.passing([body])
            self._outlet.send_bulk(body)
