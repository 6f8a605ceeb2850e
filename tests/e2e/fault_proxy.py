"""A TCP proxy that breaks what passes, as a network does: behind an edge, or before it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

PIECE_BYTES = 65_536


class FaultProxy:
    """Passes bytes both ways. `delay_s` holds each piece back, `hole` keeps all of them."""

    def __init__(self, target: int) -> None:
        self.port = 0
        self.cuts = 0
        self.delay_s = 0.0
        self._target = target
        self._open = asyncio.Event()
        self._open.set()
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def link(self) -> str:
        return f"127.0.0.1:{self.port}"

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        try:
            yield
        finally:
            server.close()
            self.cut()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def cut(self) -> None:
        """Reset every connection."""
        self.cuts += 1
        for writer in self._writers:
            writer.transport.abort()

    def swallow(self) -> None:
        """From now on nothing passes, and no connection ends: a black hole."""
        self._open.clear()

    def give_way(self) -> None:
        self._open.set()

    def abandon(self) -> None:
        """Nothing ever passes again on the connections there are; new ones are whole."""
        self._open.clear()
        self._open = asyncio.Event()
        self._open.set()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there, back = await asyncio.open_connection("127.0.0.1", self._target)
        except OSError:  # the server is down at the moment
            writer.transport.abort()
            return
        for one in (writer, back):
            self._writers.add(one)
        for source, sink in ((reader, back), (there, writer)):
            task = asyncio.create_task(self._pass(source, sink, (writer, back)))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _pass(
        self,
        source: asyncio.StreamReader,
        sink: asyncio.StreamWriter,
        both: tuple[asyncio.StreamWriter, ...],
    ) -> None:
        way = self._open
        try:
            while data := await source.read(PIECE_BYTES):
                await asyncio.sleep(self.delay_s)
                await way.wait()
                await self._let_pass(data, sink)
        except OSError:
            pass  # the connection was cut
        finally:
            for writer in both:
                writer.transport.abort()
                self._writers.discard(writer)

    async def _let_pass(self, data: bytes, sink: asyncio.StreamWriter) -> None:
        sink.write(data)
        await sink.drain()
