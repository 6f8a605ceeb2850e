"""The endpoint of the input of a stream: `POST /v1/generate/{id}/input`."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

from starlette.requests import Request
from starlette.responses import JSONResponse

from tailrace.edge.access.middleware import caller_of
from tailrace.edge.generate.encoders import HEADERS
from tailrace.edge.generate.params import parse_flag, parse_offset, parse_stream_id
from tailrace.edge.origins.reader import Reader
from tailrace.edge.starlette_helpers import link_of
from tailrace.ledger.frame import Input, InputStored

PIECE_BYTES = 32 << 10
"""Maximum number of bytes of a body that are sent to the origin in one frame."""


async def send_input(request: Request) -> JSONResponse:
    """Handle POST /v1/generate/{id}/input: store the bytes of the body for a pipeline.

    The body is passed on while it arrives, one piece at a time: the next piece is read when the
    origin has stored the one before. So the body needs no memory, and if the client is cut off, the
    pieces that were passed on are kept.
    """
    query = request.query_params
    stream = parse_stream_id(request.path_params["id"])
    offset = parse_offset(query.getlist("offset"))
    last = parse_flag(query.getlist("last"), "last")
    token = request.headers.get("Tailrace-Token")
    caller = caller_of(request)
    link = link_of(request)

    async def store(data: bytes, last: bool) -> InputStored:
        with Reader(link) as reader:
            return await reader.send_input(Input(stream, token, offset, data, last, caller))

    async with aclosing(_pieces(request)) as pieces:
        async for piece in pieces:
            await store(piece, last=False)
            offset += len(piece)
    stored = await store(b"", last)
    fields = {"id": stream.hex(), "bytes": stored.bytes, "complete": stored.complete}
    return JSONResponse(fields, headers=HEADERS)


async def _pieces(request: Request) -> AsyncGenerator[bytes, None]:
    """Yield the body as it arrives, in pieces of at most PIECE_BYTES."""
    async for chunk in request.stream():
        for at in range(0, len(chunk), PIECE_BYTES):
            yield chunk[at : at + PIECE_BYTES]
