"""Readers of the simulation: real feeds, with a link and a client that are not real."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from tailrace.ledger.errors import NotFound
from tailrace.ledger.flow.credit_window import Window
from tailrace.ledger.frame import (
    Splitter,
    Status,
    StreamEnd,
    StreamError,
    StreamState,
    decode,
    tag_of,
    with_corr,
)
from tailrace.origin.edges.feed import Feed
from tailrace.origin.generations.presence import Readers
from tests.ledger.simulation.simulated_life import Life
from tests.ledger.simulation.simulated_world import Reader, require

CORR = 7


class Client:
    """A client that reads one stream, over as many connections as it takes."""

    def __init__(self, life: Life, reader: Reader) -> None:
        self._life, self._reader = life, reader

    async def read(self) -> None:
        """Connect, read, go away, come back where it was."""
        while not self._reader.done:
            await self._life.pause()
            stream = self._reader.expected.id
            if stream is None:
                continue
            try:
                info = await self._life.ledger.info(stream)
            except NotFound:
                self._life.world.gone(self._reader.expected)
                self._reader.done = True
                return
            if self._reader.next <= info.next_index:
                await Connection(self._life, self._reader).serve(stream, info.next_index)


class Connection:
    """The outlet of one feed: what a link and an edge do, with the client at its end."""

    def __init__(self, life: Life, reader: Reader) -> None:
        self.congested = False
        self._life, self._reader = life, reader
        self._random, self._loop = life.random, life.loop
        self._over: asyncio.Future[None] = self._loop.create_future()
        self._splitter = Splitter()
        self._credit = self._random.choice((1, 2, 50))
        follow = self._random.random() < 0.8
        window = Window.starting(reader.next, self._credit)
        self._feed = Feed(self, CORR, window, life.ledger, Readers(), follow=follow)

    async def serve(self, stream: bytes, released: int) -> None:
        """Until the feed closes it, or patience ends."""
        self._feed.attach(stream, released)
        if not self._life.calm and self._random.random() < 0.5:
            self._loop.call_later(self._random.random() * 4, self.closed, CORR)
        await self._over
        self._feed.detach()

    def relay(self, frames: Sequence[bytes], corr: int) -> None:
        self.send(b"".join(with_corr(frame, corr) for frame in frames))

    def send(self, data: bytes) -> None:
        for raw in self._splitter.feed(data):
            self._take(bytes(raw))
        if self._random.random() < 0.2:
            self.congested = True
            self._loop.call_later(self._random.random(), self._drained)
        limit = self._reader.next + self._credit
        self._loop.call_later(self._random.random() * 0.5, self._feed.grant, limit, None)

    def _take(self, raw: bytes) -> None:
        _, frame = decode(raw)
        if isinstance(frame, StreamError):
            if frame.code == "unknown_stream":
                self._life.world.gone(self._reader.expected)
                self._reader.done = True
            else:
                misread = frame.code == "ledger_failed" and not self._life.calm
                require(misread, f"a reader was told {frame}")
        elif isinstance(frame, Status):
            if frame.state is StreamState.ENDED:
                require(self._reader.next == frame.next_index, "a reader was told a wrong end")
                self._reader.done = True
        else:
            require(not self._over.done(), "a reader that has gone was sent a frame")
            self._life.world.receive(self._reader, raw)
            self._reader.done = tag_of(raw) == StreamEnd.tag

    def _drained(self) -> None:
        self.congested = False
        if not self._over.done():
            self._feed.pump()

    def closed(self, corr: int) -> None:
        if not self._over.done():
            self._over.set_result(None)
