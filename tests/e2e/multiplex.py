"""Many streams on one WebSocket connection, as a client of PROTOCOL.md would do it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from websockets.asyncio.client import ClientConnection, connect

from tailrace.ledger.frame import (
    SCHEMA_HASH,
    Credit,
    Frame,
    Heartbeat,
    Hello,
    Logged,
    Open,
    Opened,
    Resume,
    StreamEnd,
    Token,
    decode,
    encode,
    split,
)


@dataclass
class Stream:
    """One stream as this client has received it."""

    id: bytes = b""
    token: str = ""
    frames: list[Frame] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(frame.text for frame in self.frames if isinstance(frame, Token))

    @property
    def ended(self) -> bool:
        return bool(self.frames) and isinstance(self.frames[-1], StreamEnd)


class Multiplex:
    """A connection with many streams; stream n is on channel n + 1."""

    def __init__(self, socket: ClientConnection, streams: list[Stream]) -> None:
        self._socket = socket
        self.streams = streams

    async def open(self, requests: list[Open]) -> None:
        await self._send([encode(request, n + 1) for n, request in enumerate(requests)])

    async def resume(self, credit: int) -> None:
        """Ask for the rest of every stream that has not ended."""
        frames = []
        for n, stream in enumerate(self.streams):
            if not stream.ended:
                after = len(stream.frames) - 1 if stream.frames else None
                wanted = Resume(stream.id, after=after, token=stream.token, credit=credit)
                frames.append(encode(wanted, n + 1))
        await self._send(frames)

    async def grant(self, number: int, limit: int) -> None:
        await self._send([encode(Credit(limit), number + 1)])

    async def read(self) -> AsyncIterator[tuple[int, Frame]]:
        """(stream number, logged frame) in order of arrival.

        All frames of a message are kept in their streams before the first is yielded: whoever
        stops reading in the middle of a message has lost none of it.
        """
        async for message in self._socket:
            assert isinstance(message, bytes)
            for arrived in [self._keep(*decode(raw)) for raw in split(message)]:
                if arrived is not None:
                    yield arrived

    def _keep(self, corr: int, frame: Frame) -> tuple[int, Frame] | None:
        if corr == 0:
            assert isinstance(frame, Hello | Heartbeat), frame
            return None
        stream = self.streams[corr - 1]
        if isinstance(frame, Opened):
            stream.id, stream.token = frame.stream, frame.token
            return None
        assert isinstance(frame, Logged), frame
        assert frame.index == len(stream.frames), "a gap or a double"
        stream.frames.append(frame)
        return corr - 1, frame

    async def opened(self) -> None:
        """Read until every stream has an id."""
        while not all(stream.id for stream in self.streams):
            for raw in split(await self._socket.recv(decode=False)):
                self._keep(*decode(raw))

    async def drain(self) -> None:
        """Read until every stream has ended."""
        if all(stream.ended for stream in self.streams):
            return
        async for _ in self.read():
            if all(stream.ended for stream in self.streams):
                return

    async def _send(self, frames: list[bytes]) -> None:
        if frames:
            await self._socket.send(b"".join(frames))


@asynccontextmanager
async def connected(url: str, streams: list[Stream]) -> AsyncIterator[Multiplex]:
    """Yield a greeted connection to the edge at `url`."""
    async with connect(url.replace("http", "ws", 1) + "/v1/ws", compression=None) as socket:
        await socket.send(encode(Hello(SCHEMA_HASH, "test")))
        yield Multiplex(socket, streams)
