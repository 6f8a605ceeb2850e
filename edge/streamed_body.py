"""Responses to Calls of objects, whose bodies are sent by ASGI messages piece by piece."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping

import structlog
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from tailrace.edge.generate.encoders import LIVE_HEADERS
from tailrace.edge.origins.reader import Reader
from tailrace.ledger.errors import TailraceError

log = structlog.get_logger("tailrace.edge")


class StreamedBody(StreamingResponse):
    """Sends `pieces`, and calls `close` when they end or the client leaves.

    The next piece is requested when the server has taken the last one. So the origin gets credit
    only for pieces that were sent.
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
            if scope["method"] == "HEAD":  # only the head is sent; the body's length is not known
                await self._pieces.aclose()
            await super().__call__(scope, receive, send)
        except TailraceError as error:
            log.warning("stream.cut", url=scope["path"], error=str(error))
            # Without a last message the server breaks the response off, and the client sees that.
        finally:
            self._close()


async def answer_of(reader: Reader) -> AsyncGenerator[bytes]:
    """Yield the pieces of an answer's body."""
    ended = False
    while not ended:
        data, ended = await reader.take_piece()
        yield data
