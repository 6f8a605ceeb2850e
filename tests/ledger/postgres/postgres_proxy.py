"""A proxy between a ledger and its server that loses connections at chosen moments."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from enum import Enum
from pathlib import Path

SOCKET = ".s.PGSQL.5432"
CHUNK_BYTES = 1 << 16


class Cut(Enum):
    """When the next connection that sends something is lost."""

    NEVER = 0
    BEFORE = 1  # before the server hears it
    AFTER = 2  # after the server has done it, before its answer arrives


class Proxy:
    """Forwards every connection; `cut_next` loses one that sends `marked` bytes."""

    def __init__(self, server: Path) -> None:
        self._server = server
        self._folder = tempfile.TemporaryDirectory(prefix="tailrace-px-")
        self.folder = Path(self._folder.name)
        self._cut = Cut.NEVER
        self._mark = b""
        self.cuts = 0
        self.was_cut = asyncio.Event()
        self.is_open = asyncio.Event()
        """New connections wait until it is set."""
        self.is_open.set()
        self._closes = False
        self._tasks: set[asyncio.Task[None]] = set()

    def cut_next(self, when: Cut, mark: bytes, *, closes: bool = False) -> None:
        """Lose the next connection whose client sends `mark`; `closes`: accept no other then."""
        self._cut, self._mark, self._closes = when, mark, closes

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        server = await asyncio.start_unix_server(self._accept, self.folder / SOCKET)
        try:
            yield
        finally:
            server.close()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            self._folder.cleanup()

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._serve(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self.is_open.wait()
        up_reader, up_writer = await asyncio.open_unix_connection(self._server / SOCKET)
        silent = asyncio.Event()
        back = asyncio.create_task(self._answers(up_reader, writer, silent))
        try:
            while data := await reader.read(CHUNK_BYTES):
                if self._cut is not Cut.NEVER and self._mark in data:
                    when, self._cut = self._cut, Cut.NEVER
                    self.cuts += 1
                    if self._closes:
                        self.is_open.clear()
                    self.was_cut.set()
                    if when is Cut.AFTER:
                        silent.set()
                        up_writer.write(data)
                        await back  # the server has answered, but the client is gone
                    return
                up_writer.write(data)
                await up_writer.drain()
        except ConnectionError:
            return
        finally:
            back.cancel()
            for end in (writer, up_writer):
                end.close()

    async def _answers(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, silent: asyncio.Event
    ) -> None:
        """Forward what the server says; once `silent`, end with its first answer instead."""
        while data := await reader.read(CHUNK_BYTES):
            if silent.is_set():
                return
            writer.write(data)
            await writer.drain()
