"""Inputs of pipelines: the bytes that a client sends to a stream while it runs.

The input of a stream is an object whose name is the stream's id. It keeps the bytes in a ledger
stream of its own, so a pipeline whose worker was killed reads them again from the beginning. The
object is deleted soon after its stream has ended.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import suppress

from tailrace.ledger.errors import CallerError, Conflict, NotFound, TooLarge
from tailrace.ledger.frame import STREAM_ID_BYTES, Chunk, Durability, decode, tag_of
from tailrace.ledger.interface import Ledger
from tailrace.ledger.objects.object import (
    ObjectRequest,
    ObjectResponse,
    ReadableClass,
    ReadContext,
)
from tailrace.origin.streams.config import Create, StreamConfig
from tailrace.origin.streams.state import CONFIG, StoredStream
from tailrace.origin.streams.stored_object import StoredStreamObject

INPUT = "input"
"""Class of the objects that store inputs; an object's name is the id of its stream, in hex."""
INPUT_TYPE = "application/octet-stream"
OFFSET, LAST, LIMIT = "input-offset", "input-last", "input-limit"
"""Headers of a POST: the number of bytes before the body, `1` if the body completes the input, and
the maximum number of bytes of the whole input."""
STORED = "stored"
"""Key of the number of bytes of the input."""
CHECK_MS = 300_000
"""Time in ms after which an object looks again if its stream has ended."""
MAX_READ_FRAMES = 32
"""Maximum number of frames of an input, of up to 64 KiB each, that are read at once."""


class InputObject(StoredStreamObject):
    """The input of one stream."""

    async def fetch(self, request: ObjectRequest) -> ObjectResponse:
        """Handle PUT: create the object, and POST: append bytes.

        The answer is JSON: `bytes` is the size of the input, and `complete` is true if it has its
        last byte.

        Raises:
            Conflict: The bytes do not follow those that are stored, or the input is complete.
            TooLarge: The input would exceed its limit.
        """
        if request.method not in ("PUT", "POST"):
            raise CallerError(
                "an input does not support this method", code="method_not_allowed", status=405
            )
        await self._load()
        state = self._state or await self._create()
        size = int(await self.context.storage.get(STORED) or b"0")
        if request.method == "POST":
            size = await self._append(state, request, size)
        answer = {"bytes": size, "complete": state.tip.closed}
        return ObjectResponse(200, body=json.dumps(answer).encode())

    async def alarm(self, retries: int) -> None:
        """Delete the input if its stream has ended or was deleted; otherwise look again later."""
        await self._load()
        if not await self.context.outside(self._has_ended()):
            self.context.storage.set_alarm(self.context.now_ms() + CHECK_MS)
            return
        async with self.context.storage.transaction():
            self.context.storage.delete_all()
            if self._state is not None:
                self.context.storage.drop_stream(self._state.config.stream)
        self._state = None

    async def _has_ended(self) -> bool:
        try:
            return (await self.context.ledger.info(bytes.fromhex(self.context.key.name))).ended
        except NotFound:
            return True

    async def _create(self) -> StoredStream:
        storage, now_ms = self.context.storage, self.context.now_ms()
        config = StreamConfig(self.context.random(STREAM_ID_BYTES), INPUT_TYPE, Create())
        async with storage.transaction():
            self._state = StoredStream.create(storage, config, now_ms, Durability.PROCESS)
            storage.set_alarm(now_ms + CHECK_MS)
        return self._state

    async def _append(self, state: StoredStream, request: ObjectRequest, size: int) -> int:
        """Append the bytes of a POST that are not stored yet, and return the size of the input."""
        offset, limit = int(request.header(OFFSET) or 0), int(request.header(LIMIT) or 0)
        if offset > size:
            raise Conflict(
                f"byte {offset} does not follow the stored input, which has {size} bytes",
                code="input_gap",
                field="offset",
                hint=f"send the bytes from {size} on",
            )
        new = request.body[size - offset :]
        closes = request.header(LAST) == "1" and not state.tip.closed
        if state.tip.closed and new:
            raise Conflict(
                f"the input was completed after {size} bytes",
                code="input_complete",
                field="data",
                hint="send no more bytes after `last`",
            )
        if size + len(new) > limit:
            raise TooLarge(
                f"the input would have {size + len(new)} bytes",
                code="input_too_large",
                field="data",
                hint=f"at most {limit} bytes: `max_input_mib` of the pipeline",
            )
        if new or closes:
            size += len(new)
            async with state.change():
                state.append([new] if new else [], closes=closes)
                self.context.storage.put(STORED, str(size).encode())
        return size


async def read_input(context: ReadContext, request: ObjectRequest) -> ObjectResponse:
    """Answer a GET: the bytes of the input as they are stored, until the input is complete.

    Raises:
        NotFound: The object was not created, or was deleted.
    """
    stored = await context.ledger.objects.get(context.key, (CONFIG,))
    if CONFIG not in stored:
        raise NotFound("the stream has no input")
    stream = StreamConfig.unpack(stored[CONFIG]).stream
    return ObjectResponse(200, body=_follow(context.ledger, stream))


async def _follow(ledger: Ledger, stream: bytes) -> AsyncGenerator[bytes, None]:
    """Yield the bytes of an input from its beginning on, as soon as they are durable.

    Raises:
        NotFound: The input was deleted while it was read.
    """
    woken, first = asyncio.Event(), 0
    await ledger.info(stream)  # a stream must be loaded before it can be watched
    ledger.watch(stream, woken.set)
    try:
        tail = ledger.tail(stream)
        while not tail.gone:
            woken.clear()
            while first < tail.released:
                frames = await ledger.frames(stream, first, MAX_READ_FRAMES)
                first += len(frames)
                if data := b"".join(map(_data, frames)):
                    yield data
                if frames and tag_of(frames[-1]) != Chunk.tag:
                    return
            with suppress(TimeoutError):
                async with asyncio.timeout(CHECK_MS / 1000):
                    await woken.wait()
        raise NotFound("the input was deleted")
    finally:
        ledger.unwatch(stream, woken.set)


def _data(raw: bytes) -> bytes:
    _, frame = decode(raw)
    return frame.data if isinstance(frame, Chunk) else b""


INPUT_CLASS = ReadableClass(make=InputObject, read=read_input, reads=frozenset(("GET",)))
"""The class of all inputs."""
