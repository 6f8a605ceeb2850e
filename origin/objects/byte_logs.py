"""Byte logs of streams: the input that a client sends to a pipeline, and what stages have done.

A byte log is an object that keeps bytes in a ledger stream of its own, so a pipeline whose worker
was killed reads them again from the beginning. It is deleted soon after its stream has ended. Its
name is the id of the stream, for the input, or the id, a colon and the name of a stage, for the
outputs of this stage. Two further logs, of the names in `pipelines.switches`, say which stages are
on.
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
from tailrace.origin.admin.query import Query
from tailrace.origin.pipelines.switches import CHANGES, REQUESTS
from tailrace.origin.streams.config import Create, StreamConfig
from tailrace.origin.streams.state import CONFIG, StoredStream
from tailrace.origin.streams.stored_object import StoredStreamObject

BYTE_LOG = "byte-log"
"""Class of the objects that store byte logs."""
BYTES_TYPE = "application/octet-stream"
OFFSET, LAST, LIMIT = "log-offset", "log-last", "log-limit"
"""Headers of a POST: the number of bytes before the body, `1` if the body completes the log, and
the maximum number of bytes of the whole log. Without the first, the body is appended."""
STORED = "stored"
"""Key of the number of bytes of the log."""
MAX_PIECES = 1 << 18
"""Maximum number of pieces of a log, each of which takes a row of the ledger."""
CHECK_MS = 300_000
"""Time in ms after which an object looks again if its stream has ended."""
MAX_READ_FRAMES = 32
"""Maximum number of frames of a log, of up to 64 KiB each, that are read at once."""


_CONTENTS = {
    REQUESTS: "the requests to switch stages",
    CHANGES: "the changes of switched stages",
}


class ByteLog(StoredStreamObject):
    """A byte log of one stream."""

    @property
    def _suffix(self) -> str:
        """The part of the name that tells the logs of a stream apart; empty for its input."""
        return self.context.key.name.partition(":")[2]

    @property
    def _contents(self) -> str:
        """A description of the bytes in the log, for messages."""
        if not self._suffix:
            return "the input"
        return _CONTENTS.get(self._suffix) or f"the outputs of the stage {self._suffix}"

    async def fetch(self, request: ObjectRequest) -> ObjectResponse:
        """Handle PUT: create the object, and POST: append bytes.

        The answer is JSON: `bytes` is the size of the log, and `complete` is true if it has its
        last byte.

        Raises:
            Conflict: The bytes do not follow those that are stored, or the log is complete.
            TooLarge: The log would exceed its limit.
        """
        if request.method not in ("PUT", "POST"):
            raise CallerError(
                "a byte log does not support this method", code="method_not_allowed", status=405
            )
        await self._load()
        state = self._state or await self._create()
        size = int(await self.context.storage.get(STORED) or b"0")
        if request.method == "POST":
            size = await self._append(state, request, size)
        answer = {"bytes": size, "complete": state.tip.closed}
        return ObjectResponse(200, body=json.dumps(answer).encode())

    async def alarm(self, retries: int) -> None:
        """Delete the log if its stream has ended or was deleted; otherwise look again later."""
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
        stream = bytes.fromhex(self.context.key.name.partition(":")[0])
        try:
            return (await self.context.ledger.info(stream)).ended
        except NotFound:
            return True

    async def _create(self) -> StoredStream:
        storage, now_ms = self.context.storage, self.context.now_ms()
        config = StreamConfig(self.context.random(STREAM_ID_BYTES), BYTES_TYPE, Create())
        async with storage.transaction():
            self._state = StoredStream.create(storage, config, now_ms, Durability.PROCESS)
            storage.set_alarm(now_ms + CHECK_MS)
        return self._state

    async def _append(self, state: StoredStream, request: ObjectRequest, size: int) -> int:
        """Append the bytes of a POST that are not stored yet, and return the size of the log."""
        offset, limit = int(request.header(OFFSET) or size), int(request.header(LIMIT) or 0)
        if self._suffix and offset != size:
            raise Conflict(
                f"{self._contents} have {size} bytes, not {offset}: another worker runs the stages"
            )
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
            if self._suffix:
                is_request = self._suffix == REQUESTS
                raise TooLarge(
                    f"{self._contents} would have more than {limit} bytes",
                    code="too_many_switches" if is_request else None,
                    hint="open a new stream" if is_request else None,
                )
            raise TooLarge(
                f"the input would have {size + len(new)} bytes",
                code="input_too_large",
                field="data",
                hint=f"at most {limit} bytes: `max_input_mib` of the pipeline",
            )
        if new and state.tip.index >= MAX_PIECES:
            raise TooLarge(
                f"{self._contents} would have more than {MAX_PIECES} pieces",
                code="input_too_large",
                field="data",
                hint="send larger pieces",
            )
        if new or closes:
            size += len(new)
            async with state.change():
                state.append([new] if new else [], closes=closes)
                self.context.storage.put(STORED, str(size).encode())
        return size


async def read_log(context: ReadContext, request: ObjectRequest) -> ObjectResponse:
    """Answer a GET with the bytes of the log: those that are stored, or with `?follow` all to come.

    A following reader gets bytes as soon as they are durable, until the log is complete.

    Raises:
        NotFound: The object was not created, or was deleted.
    """
    follows = Query(request.url).flag("follow")
    stored = await context.ledger.objects.get(context.key, (CONFIG,))
    if CONFIG not in stored:
        raise NotFound("the stream has no such bytes")
    stream = StreamConfig.unpack(stored[CONFIG]).stream
    return ObjectResponse(200, body=_bytes(context.ledger, stream, follows=follows))


async def _bytes(ledger: Ledger, stream: bytes, *, follows: bool) -> AsyncGenerator[bytes, None]:
    """Yield the bytes of a log from its beginning on.

    Raises:
        NotFound: The log was deleted while it was read.
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
            if not follows:
                return
            with suppress(TimeoutError):
                async with asyncio.timeout(CHECK_MS / 1000):
                    await woken.wait()
        raise NotFound("the bytes were deleted")
    finally:
        ledger.unwatch(stream, woken.set)


def _data(raw: bytes) -> bytes:
    _, frame = decode(raw)
    return frame.data if isinstance(frame, Chunk) else b""


BYTE_LOGS = ReadableClass(make=ByteLog, read=read_log, reads=frozenset(("GET",)))
"""The class of all byte logs."""
