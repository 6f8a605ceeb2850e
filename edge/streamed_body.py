"""The HTTP response of one of the origin's objects, whose body is sent in pieces as they arrive."""

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
    """A response that sends `pieces`, and calls `close` when the pieces end or the client leaves.

    The next piece is requested when the server's `send` has returned for the previous one. So the
    origin gets new credit only for pieces that were sent.
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
            if scope["method"] == "HEAD":  # send the head only
                await self._pieces.aclose()
            await super().__call__(scope, receive, send)
        except TailraceError as error:
            log.warning("object response broken off", url=scope["path"], error=str(error))
            # No last ASGI message is sent, so the server breaks off the response, and the client
            # sees that it is incomplete.
        finally:
            self._close()


async def answer_of(reader: Reader) -> AsyncGenerator[bytes]:
    """Yield the pieces of an object's answer as they arrive from the origin."""
    ended = False
    while not ended:
        data, ended = await reader.take_piece()
        yield data
