"""The connection over which a pipeline's worker reads inputs and other streams of its own origin.

It speaks the protocol of the link between an edge and an origin (PROTOCOL.md, "Links"), over a Unix
socket in a folder that only the origin's user can enter.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from dataclasses import replace
from pathlib import Path

from tailrace.ledger.errors import NotFound, TailraceError, Unavailable
from tailrace.ledger.flow.credit_window import Window
from tailrace.ledger.frame import (
    CLOSING,
    LINK_CODEC,
    SCHEMA_HASH,
    Body,
    Call,
    Caller,
    Cancel,
    Credit,
    Detach,
    Frame,
    Header,
    Hello,
    Logged,
    Open,
    Pass,
    Splitter,
    StreamError,
    encode,
    to_error,
)
from tailrace.origin.objects.byte_logs import BYTE_LOG, LIMIT, OFFSET

SOFTWARE = "tailrace-pipeline"
WINDOW_FRAMES = 128
"""Maximum number of frames of one stream that are in flight or wait in this process."""
WINDOW_BYTES = 64 << 10
"""Maximum size in bytes of these frames. A single frame may exceed it."""
RECEIVE_BYTES = 1 << 16


class _Reading:
    """One stream that the client reads."""

    def __init__(self) -> None:
        self.frames: asyncio.Queue[tuple[Frame, int]] = asyncio.Queue()  # bounded by the credit


class OriginClient:
    """A client of the origin at a Unix socket; it connects when the first stream is read."""

    def __init__(self, path: Path) -> None:
        """Remember the path of the socket."""
        self._path = path
        self._writer: asyncio.StreamWriter | None = None
        self._receiving: asyncio.Task[None] | None = None
        self._connecting = asyncio.Lock()
        self._readings: dict[int, _Reading] = {}
        self._last_corr = 0

    async def read(self, request: Open) -> AsyncGenerator[Frame, None]:
        """Open a stream and yield its Opened, and then its logged frames up to its StreamEnd.

        If the generator is closed earlier, the client detaches from the stream. What the origin
        then does with the stream depends on the `unread` policy of the request.

        Raises:
            TailraceError: The origin refuses the request, or cannot be reached.
        """
        async with aclosing(self._frames(request)) as frames:
            async for frame in frames:
                yield frame

    async def follow_log(self, name: str, caller: Caller) -> AsyncGenerator[bytes, None]:
        """Yield the bytes of a byte log as soon as they are stored, until it is complete.

        The log is created if it does not exist.

        Raises:
            TailraceError: The origin refuses the request, or cannot be reached.
        """
        await self._done(Call(BYTE_LOG, name, "PUT", "", caller=caller))
        call = Call(BYTE_LOG, name, "GET", "?follow=1", caller=caller)
        async with aclosing(self._call(call)) as pieces:
            async for data in pieces:
                yield data

    async def read_log(self, name: str, caller: Caller) -> bytes:
        """Return the bytes of a byte log, none if it does not exist.

        Raises:
            TailraceError: The origin refuses the request, or cannot be reached.
        """
        try:
            return await self._done(Call(BYTE_LOG, name, "GET", "", caller=caller))
        except NotFound:
            return b""

    async def append_log(
        self, name: str, caller: Caller, offset: int, data: bytes, limit: int
    ) -> None:
        """Append to a byte log; return when the bytes are durable.

        Args:
            name: the name of the log.
            caller: the caller of the pipeline's streams.
            offset: the number of bytes that the log has.
            data: the bytes.
            limit: the maximum size of the log in bytes.

        Raises:
            Conflict: The log has another size, because another worker runs the stage.
            TailraceError: The origin refuses the request, or cannot be reached.
        """
        headers = (Header(OFFSET, str(offset)), Header(LIMIT, str(limit)))
        await self._done(Call(BYTE_LOG, name, "POST", "", headers, data, caller=caller))

    async def _done(self, call: Call) -> bytes:
        """Call an object of the origin, and return the whole body of its answer."""
        return b"".join([data async for data in self._call(call)])

    async def _call(self, call: Call) -> AsyncGenerator[bytes, None]:
        """Call an object of the origin, and yield the pieces of its answer's body."""
        async with aclosing(self._frames(call)) as frames:
            async for frame in frames:
                if isinstance(frame, Body):
                    yield frame.data

    async def _frames(self, request: Open | Call) -> AsyncGenerator[Frame, None]:
        """Send a request, and yield the frames that answer it, up to the one that closes it.

        The origin gets credit for further frames as they are taken.

        Raises:
            TailraceError: The origin refuses the request, or cannot be reached.
        """
        writer = await self._connected()
        corr = self._free_corr()
        reading = self._readings[corr] = _Reading()
        request = replace(request, credit=WINDOW_FRAMES, credit_bytes=WINDOW_BYTES)
        window = Window.starting(0, WINDOW_FRAMES, WINDOW_FRAMES, WINDOW_BYTES)
        writer.write(LINK_CODEC.encode(request, corr))
        is_over = False
        try:
            while not is_over:
                frame, size = await reading.frames.get()
                is_over = frame.tag in CLOSING
                if isinstance(frame, StreamError):
                    raise to_error(frame)
                if not isinstance(frame, Pass):
                    yield frame
                if isinstance(frame, Logged | Body):
                    window.passed(1, size)
                    if not is_over and window.renew(WINDOW_BYTES):
                        writer.write(encode(Credit(window.limit, window.limit_bytes), corr))
        finally:
            del self._readings[corr]
            if not is_over:
                writer.write(encode(Detach(), corr))

    async def close(self) -> None:
        """Close the connection; streams that are being read fail."""
        if self._receiving is not None:
            self._receiving.cancel()
            await asyncio.gather(self._receiving, return_exceptions=True)
        if self._writer is not None:
            self._writer.close()
            with suppress(OSError):
                await self._writer.wait_closed()

    def cancel(self, stream: bytes, caller: Caller) -> None:
        """Ask the origin to cancel a stream that is not needed any more; ignore its answer."""
        if self._writer is not None:
            self._writer.write(LINK_CODEC.encode(Cancel(stream, caller=caller), self._free_corr()))

    async def _connected(self) -> asyncio.StreamWriter:
        async with self._connecting:
            if self._writer is None or self._writer.is_closing():
                try:
                    reader, writer = await asyncio.open_unix_connection(self._path)
                except OSError as error:
                    raise Unavailable(f"the origin cannot be reached: {error}") from error
                writer.write(encode(Hello(SCHEMA_HASH, SOFTWARE)))
                self._writer = writer
                self._receiving = asyncio.create_task(self._receive(reader, writer))
            return self._writer

    def _free_corr(self) -> int:
        """Return a correlation id that no open request uses; 0 stands for the connection itself."""
        self._last_corr = self._last_corr % 0xFFFF_FFFF + 1
        while self._last_corr in self._readings:
            self._last_corr = self._last_corr % 0xFFFF_FFFF + 1
        return self._last_corr

    async def _receive(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        splitter = Splitter()
        lost: TailraceError = Unavailable("the connection to the origin was lost")
        try:
            while data := await reader.read(RECEIVE_BYTES):
                for raw in splitter.feed(data):
                    corr, frame = LINK_CODEC.decode(raw)
                    if corr == 0 and isinstance(frame, StreamError):
                        lost = to_error(frame)
                    elif (reading := self._readings.get(corr)) is not None:
                        reading.frames.put_nowait((frame, len(raw)))
        except (OSError, TailraceError) as error:
            lost = Unavailable(f"the connection to the origin failed: {error}")
        finally:
            writer.close()
            for reading in self._readings.values():
                reading.frames.put_nowait((_failure(lost), 0))


def _failure(error: TailraceError) -> StreamError:
    return StreamError(error.code, error.message, error.retryable, error.status)
