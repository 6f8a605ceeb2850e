"""An origin over real loopback sockets that keeps streams of numbered words in memory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from edge.backoff import Backoff
from edge.link import Link
from ledger.errors import BeyondEnd, CallerError, NotFound
from ledger.frame import (
    SCHEMA_HASH,
    Cancel,
    Credit,
    Detach,
    FinishReason,
    Frame,
    Heartbeat,
    Hello,
    Open,
    Opened,
    Resume,
    Splitter,
    Status,
    StreamEnd,
    StreamState,
    Token,
    decode,
    encode,
    error_frame,
)

STREAM = bytes(range(16))
TOKEN = "v1.token"
PROMPT_TOKENS = 3


class ScriptedOrigin:
    """Has one stream of `words` tokens, which an Open with the prompt "hold" leaves running.

    `received` has every frame that came after Hello; `sent` counts the logged frames.
    """

    def __init__(self, words: int) -> None:
        self.frames: list[Token | StreamEnd] = [Token(f" w{n}", n) for n in range(words)]
        self.frames.append(StreamEnd(words, FinishReason.LENGTH, words, PROMPT_TOKENS))
        self.released = words + 1
        self.received: list[Frame] = []
        self.port = 0
        self._news = asyncio.Condition()
        self._writers: set[asyncio.StreamWriter] = set()

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[Link]:
        """Listen, and give a link to here that is up."""
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        link = Link("127.0.0.1", self.port, Backoff(0, 0))
        async with link.running():
            await _is_up(link)
            yield link
        server.close()
        self.drop_links()

    def drop_links(self) -> None:
        for writer in self._writers:
            writer.close()

    async def has_received(self, count: int) -> None:
        """Wait until there have been so many frames."""
        async with self._news:
            await self._news.wait_for(lambda: len(self.received) >= count)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        connection = _Connection(self, writer)
        writer.write(encode(Hello(SCHEMA_HASH, "scripted")))
        writer.write(encode(Heartbeat(1, ready=True, models=("demo",))))
        splitter = Splitter()
        while data := await reader.read(65_536):
            for raw in splitter.feed(data):
                corr, frame = decode(raw)
                if not isinstance(frame, Hello):
                    async with self._news:
                        self.received.append(frame)
                        self._news.notify_all()
                connection.answer(corr, frame)
        self._writers.discard(writer)


async def _is_up(link: Link) -> None:
    """Wait for the first heartbeat, which follows the Hello."""

    class Watcher:
        heard = asyncio.Event()

        def deliver(self, _raw: bytes) -> None:
            self.heard.set()

    watcher = Watcher()
    link.watch(watcher)
    await watcher.heard.wait()
    link.forget(watcher)


class _Connection:
    """One link: what each corr was sent last, and may be sent."""

    def __init__(self, origin: ScriptedOrigin, writer: asyncio.StreamWriter) -> None:
        self._origin = origin
        self._writer = writer
        self._next: dict[int, int] = {}

    def answer(self, corr: int, frame: Frame) -> None:
        try:
            self._answer(corr, frame)
        except CallerError as error:
            self._send(corr, error_frame(error))

    def _answer(self, corr: int, frame: Frame) -> None:
        origin = self._origin
        if isinstance(frame, Open):
            if frame.model != "demo":
                raise NotFound("no such model", code="unknown_model", field="model")
            if frame.prompt == "hold":
                origin.released = 1
            self._begin(corr, 0, frame.credit)
        elif isinstance(frame, Resume):
            start = 0 if frame.after is None else frame.after + 1
            if frame.stream != STREAM:
                raise NotFound("no such stream", code="unknown_stream")
            if start > origin.released:
                raise BeyondEnd("beyond the end")
            self._begin(corr, start, start + frame.credit)
            if not frame.follow or start == len(origin.frames):
                self._close(corr)
        elif isinstance(frame, Credit) and corr in self._next:
            self._feed(corr, frame.limit)
        elif isinstance(frame, Detach):
            self._next.pop(corr, None)
        elif isinstance(frame, Cancel):
            self._send(corr, Status(frame.stream, StreamState.ENDED, len(origin.frames)))

    def _begin(self, corr: int, start: int, limit: int) -> None:
        self._send(corr, Opened(STREAM, self._origin.released, TOKEN, "demo", PROMPT_TOKENS))
        self._next[corr] = start
        self._feed(corr, limit)

    def _feed(self, corr: int, limit: int) -> None:
        end = min(limit, self._origin.released)
        for frame in self._origin.frames[self._next[corr] : end]:
            self._send(corr, frame)
        self._next[corr] = max(self._next[corr], end)

    def _close(self, corr: int) -> None:
        """What a reader that does not follow gets after the frames that there are."""
        released, whole = self._origin.released, len(self._origin.frames)
        state = StreamState.ENDED if released == whole else StreamState.RUNNING
        if state is StreamState.RUNNING or self._next[corr] == whole:
            self._send(corr, Status(STREAM, state, released))

    def _send(self, corr: int, frame: Frame) -> None:
        self._writer.write(encode(frame, corr))
