"""One stream as its reader sees it: frames in order, whatever happens to connections."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from typing import Any, Self

import httpx

from ledger.errors import CallerError, TailraceError, Unavailable
from ledger.frame import FRAMES_TYPE, Logged, Status, StreamEnd
from tailrace.edges import Attempts, Edges, http_error, token_header
from tailrace.position import Position


class Stream:
    """The frames of one stream, each once and in order, over as many connections as it takes.

    Iterate over it. `id` and `token` are known from the first frame on; `next_index` is
    the index of the frame that comes next; `resumes` counts the connections after the
    first. Raises TailraceError when the stream cannot be read on.
    """

    def __init__(
        self,
        edges: Edges,
        *,
        body: dict[str, Any] | None = None,
        idempotency_key: str = "",
        stream: str | None = None,
        after: int | None = None,
        token: str | None = None,
    ) -> None:
        self.id = stream
        self.token = token
        self.resumes = 0
        self.end: StreamEnd | None = None
        self._edges = edges
        self._body = body
        self._idempotency_key = idempotency_key
        self._position = Position(after)
        self.next_index = self._position.next_index
        self._attempts = Attempts(edges)
        self._unread: deque[Logged] = deque()
        self._response: httpx.Response | None = None
        self._chunks: AsyncIterator[bytes] | None = None
        self._opened = False
        self._cut = False
        self._reading: asyncio.Timeout | None = None

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Logged:
        while not self._unread:
            if self._position.ended:
                await self.aclose()
                raise StopAsyncIteration
            await self._advance()
        frame = self._unread.popleft()
        self.next_index = frame.index + 1
        if isinstance(frame, StreamEnd):
            self.end = frame
            self._edges.tell("ended", frame.finish_reason.word)
        return frame

    async def cancel(self) -> Status:
        """End the stream for all its readers."""
        if self.id is None:
            raise CallerError("the stream has not begun", hint="read its first frame before")
        return await self._edges.cancel(self.id, self.token)

    async def steer(self, text: str) -> Status:
        """Have the stream go on with `text`, for all its readers."""
        if self.id is None:
            raise CallerError("the stream has not begun", hint="read its first frame before")
        return await self._edges.steer(self.id, text, self.token)

    def cut(self) -> None:
        """Drop the connection now, as if the network had; the next read resumes."""
        if self.end is not None:
            return
        self._cut = self._response is not None
        self._unread.clear()
        self._position.rewind(self.next_index)
        if self._reading is not None:
            self._reading.reschedule(asyncio.get_running_loop().time())

    async def aclose(self) -> None:
        """Stop reading; the stream itself runs on."""
        response, self._response, self._chunks = self._response, None, None
        if response is not None:
            await response.aclose()

    # ---- connections ----

    async def _advance(self) -> None:
        """One step towards the next frame: connect, or read, or wait to try again."""
        try:
            if self._position.fault is not None:
                raise self._position.fault
            if self._chunks is None:
                await self._connect()
            else:
                await self._read(self._chunks)
        except (httpx.TransportError, TailraceError) as error:
            await self.aclose()
            self._position.reconnect()
            await self._attempts.failed(error)

    async def _connect(self) -> None:
        self._edges.tell("connecting", self._attempts.url)
        response = await self._edges.http.send(self._request(), stream=True)
        if response.status_code == 204:
            await response.aclose()
            self._position.ended = True
            self._edges.tell("ended", "nothing is left to read")
            return
        if response.status_code != 200:
            body = await response.aread()
            raise http_error(response.status_code, response.headers, body)
        self.id = response.headers.get("Tailrace-Stream", self.id)
        self.token = response.headers.get("Tailrace-Token", self.token)
        self._response, self._chunks = response, response.aiter_bytes()
        self.resumes += self._opened
        where = f"{self._attempts.url}, from index {self.next_index}"
        self._edges.tell("resumed" if self._opened else "open", where)
        self._opened = True

    def _request(self) -> httpx.Request:
        url, http = self._attempts.url, self._edges.http
        headers = {"Accept": FRAMES_TYPE}
        if self.id is None:
            # The key makes it safe to send again when the answer was lost.
            headers["Idempotency-Key"] = self._idempotency_key
            return http.build_request(
                "POST", f"{url}/v1/generate", headers=headers, json=self._body
            )
        after = self._position.after
        return http.build_request(
            "GET",
            f"{url}/v1/generate/{self.id}",
            headers=headers | token_header(self.token),
            params={} if after is None else {"after": after},
        )

    async def _read(self, chunks: AsyncIterator[bytes]) -> None:
        """Read once, unless or until the connection is cut."""
        try:
            # Its deadline is set by `cut` alone; httpx has its own.
            async with asyncio.timeout(None) as self._reading:
                data = None if self._cut else await anext(chunks, b"")
        except TimeoutError:
            data = None
        finally:
            self._reading = None
        if data is None:
            self._cut = False
            await self.aclose()
            self._position.reconnect()
            self._attempts.next_edge()
            return
        if not data:
            raise Unavailable("the edge ended the body before the stream", code="cut_short")
        self._unread.extend(self._position.feed(data))
        if self._position.fault is None:
            self._attempts.worked()
