"""Bodies that are sent by ASGI messages as they come: an object's answer, several streams."""

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
    """Sends `pieces`, and calls `close` when they end or the client goes.

    The next piece is asked for when the last has drained; so credit is given for what has left.
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
            if scope["method"] == "HEAD":  # its head alone: how long the body will be nobody knows
                await self._pieces.aclose()
            await super().__call__(scope, receive, send)
        except TailraceError as error:
            log.warning("stream.cut", url=scope["path"], error=str(error))
            # It is not ended: the server breaks it off, and the client can see that.
        finally:
            self._close()


async def answer_of(reader: Reader) -> AsyncGenerator[bytes]:
    """An answer's body, until it is whole."""
    ended = False
    while not ended:
        data, ended = await reader.take_piece()
        yield data
