"""An origin over real loopback sockets that keeps streams of numbered words in memory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import Self

from tailrace.edge.origins.origin_pool import OriginPool
from tailrace.ledger.errors import BeyondEnd, NotFound, Overloaded, TailraceError
from tailrace.ledger.flow.backoff import Backoff
from tailrace.ledger.flow.credit_window import Window
from tailrace.ledger.frame import (
    SCHEMA_HASH,
    Answer,
    Body,
    BodyEnd,
    Call,
    Cancel,
    Credit,
    Detach,
    FinishReason,
    Frame,
    Heartbeat,
    Hello,
    Logged,
    ModelTier,
    Open,
    Opened,
    Resume,
    Sibling,
    Splitter,
    Status,
    Steer,
    StreamEnd,
    StreamState,
    Token,
    decode,
    encode,
    error_frame,
)
from tailrace.ledger.links.cached_tokens import CACHED_TOKENS

STREAM = bytes(range(16))
TOKEN = "v1.token"
PROMPT_TOKENS = 3


class ScriptedOrigin:
    """Has one stream of `words` tokens, which an Open with the prompt "hold" leaves running.

    `received` has every frame that came after Hello but Heartbeats. A `silent` one answers none.
    `answers` is what every Call gets, its Body frames (`bodies_sent`) within the credit.
    """

    def __init__(self, words: int) -> None:
        self.frames: list[Logged] = [Token(f" w{n}", n) for n in range(words)]
        self.frames.append(StreamEnd(words, FinishReason.LENGTH, words, PROMPT_TOKENS))
        self.released = words + 1
        self.times_ms: Sequence[int] = ()  # the time of each frame, for `since`
        self.siblings: tuple[Sibling, ...] = ()  # streams of the same frames
        self.silent = False
        self.allowed: int | None = None  # Opens until the queue is full
        self.patience_ms = 0
        self.tiers: tuple[ModelTier, ...] = ()
        self.ready = True
        self.models: tuple[str, ...] = ("demo",)
        self.ledger = ""
        self.refusal: TailraceError | None = None  # answer to every Open and Resume
        self.answers: Sequence[Frame] = ()
        self.cached_tokens: int | None = 0  # None if it does not know this Call
        self.bodies_sent = 0
        self.sent: dict[int, int] = {}  # the next index of each corr that has had frames
        self.received: list[Frame] = []
        self.port = 0
        self._server: asyncio.Server
        self._news = asyncio.Condition()
        self._writers: set[asyncio.StreamWriter] = set()
        self._connections: set[_Connection] = set()

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[OriginPool]:
        """Listen, and give a link to here that is up."""
        async with self.listening(), linked(self, backoff=Backoff(0, 0)) as link:
            yield link

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[Self]:
        """Accept links until the block ends, or until `stop`."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        try:
            yield self
        finally:
            self.stop()

    def stop(self) -> None:
        """Be gone, as a killed origin is: nothing listens, and every link is lost."""
        self._server.close()
        self.drop_links()

    def answers_to(self, call: Call) -> Sequence[Frame]:
        """Return what this Call gets."""
        if call.object == CACHED_TOKENS:
            if self.cached_tokens is None:
                return (error_frame(NotFound("no objects of this class")),)
            return Answer(200), Body(b"%d" % self.cached_tokens), BodyEnd()
        return self.answers

    def first_of(self, request: Open | Resume) -> int:
        """Return the index of the first frame for a reader."""
        if isinstance(request, Resume) and request.tail is not None:
            return max(0, self.released - request.tail)
        if isinstance(request, Resume) and request.since_ms is not None:
            return sum(at_ms < request.since_ms for at_ms in self.times_ms)
        return request.start

    def heartbeat(self) -> Heartbeat:
        devices = ("cpu torch",)
        told = Heartbeat(
            1, self.ready, (), self.models, devices, self.patience_ms, ledger=self.ledger
        )
        return replace(told, tiers=self.tiers)

    def say(self) -> None:
        """Tell the edges how it is now."""
        for writer in self._writers:
            writer.write(encode(self.heartbeat()))

    def release(self, next_index: int) -> None:
        """Send the frames before this index to their readers."""
        self.released = next_index
        for connection in self._connections:
            connection.feed_all()

    def drop_links(self) -> None:
        for writer in self._writers:
            writer.close()

    async def has_received(self, count: int) -> None:
        """Wait until `count` frames have been received."""
        async with self._news:
            await self._news.wait_for(lambda: len(self.received) >= count)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        with suppress(ConnectionError):  # how an edge leaves a link
            await self._answer_all(reader, writer)
        self._writers.discard(writer)
        self._connections = {each for each in self._connections if each.writer is not writer}
        writer.close()

    async def _answer_all(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = _Connection(self, writer)
        self._connections.add(connection)
        writer.write(encode(Hello(SCHEMA_HASH, "scripted")))
        writer.write(encode(self.heartbeat()))
        splitter = Splitter()
        while data := await reader.read(65_536):
            for raw in splitter.feed(data):
                corr, frame = decode(raw)
                if not isinstance(frame, Hello | Heartbeat):
                    async with self._news:
                        self.received.append(frame)
                        self._news.notify_all()
                if not self.silent:
                    connection.answer(corr, frame)


@asynccontextmanager
async def linked(
    *origins: ScriptedOrigin, backoff: Backoff, up: int | None = None
) -> AsyncIterator[OriginPool]:
    """Yield a link to these, with `up` of them connected, or all."""
    link = OriginPool(*(("127.0.0.1", origin.port) for origin in origins), backoff=backoff)
    async with link.running():
        await until(lambda: sum(o.usable for o in link.origins) >= (up or len(origins)))
        yield link


async def until(told: Callable[[], bool]) -> None:
    """Wait until `told()` is true, for what an edge does without announcing it."""
    while not told():  # noqa: ASYNC110
        await asyncio.sleep(0.005)


async def is_up(link: OriginPool) -> None:
    """Wait for the first heartbeat, which follows the Hello."""
    await until(lambda: link.up)


class _Connection:
    """A link: what was sent last on each channel, and what may be sent."""

    def __init__(self, origin: ScriptedOrigin, writer: asyncio.StreamWriter) -> None:
        self._origin = origin
        self.writer = writer
        self._windows: dict[int, Window] = {}
        self._calls: dict[int, tuple[list[Frame], int]] = {}  # frames left, and credit used

    def answer(self, corr: int, frame: Frame) -> None:
        if isinstance(frame, Call):
            self._calls[corr] = (list(self._origin.answers_to(frame)), 0)
            self._pour(corr, frame.credit)
            return
        if isinstance(frame, Credit) and corr in self._calls:
            self._pour(corr, frame.limit)
            return
        try:
            if self._origin.refusal is not None and isinstance(frame, Open | Resume):
                raise self._origin.refusal
            if isinstance(frame, Open) and self._origin.allowed is not None:
                self._origin.allowed -= 1
                if self._origin.allowed < 0:
                    raise Overloaded("the queue is full")
            self._answer(corr, frame)
        except TailraceError as error:
            self._send(corr, error_frame(error))

    def _answer(self, corr: int, frame: Frame) -> None:
        origin = self._origin
        if isinstance(frame, Open):
            self._check_open(frame)
            if frame.prompt == "hold":
                origin.released = 1
            self._begin(corr, frame, origin.siblings)
        elif isinstance(frame, Resume):
            start = origin.first_of(frame)
            if frame.stream not in (STREAM, *(sibling.stream for sibling in origin.siblings)):
                raise NotFound("no such stream", code="unknown_stream")
            if start > origin.released:
                raise BeyondEnd("beyond the end")
            self._begin(corr, frame)
            if not frame.follow or start == len(origin.frames):
                self._close(corr)
        elif isinstance(frame, Credit) and corr in self._windows:
            self._windows[corr].grant(frame.limit, frame.bytes)
            self._feed(corr)
        elif isinstance(frame, Detach):
            self._windows.pop(corr, None)
            self._calls.pop(corr, None)
        elif isinstance(frame, Steer):
            self._send(corr, Status(frame.stream, StreamState.RUNNING, len(origin.frames)))
        elif isinstance(frame, Cancel):
            self._send(corr, Status(frame.stream, StreamState.ENDED, len(origin.frames)))

    def _check_open(self, frame: Open) -> None:
        branch = frame.branch
        if branch is None and frame.model != "demo":
            raise NotFound("no such model", code="unknown_model", field="model")
        if branch is not None and branch.stream != STREAM:
            raise NotFound("no such stream", code="unknown_stream")
        if branch is not None and branch.index >= len(self._origin.frames):
            raise BeyondEnd("beyond the end", field="index")

    def _pour(self, corr: int, limit: int) -> None:
        left, used = self._calls[corr]
        while left and (used < limit or not isinstance(left[0], Body)):
            if isinstance(left[0], Body):
                used += 1
                self._origin.bodies_sent += 1
            self._send(corr, left.pop(0))
        self._calls[corr] = (left, used)

    def _begin(self, corr: int, frame: Open | Resume, siblings: tuple[Sibling, ...] = ()) -> None:
        released = self._origin.released
        first = self._origin.first_of(frame)
        opened = Opened(STREAM, released, TOKEN, "demo", PROMPT_TOKENS, siblings, first=first)
        self._send(corr, opened)
        self._windows[corr] = Window.starting(first, frame.credit, credit_bytes=frame.credit_bytes)
        self._feed(corr)

    def feed_all(self) -> None:
        """Send every reader the frames that it has credit for."""
        for corr in self._windows:
            self._feed(corr)

    def _feed(self, corr: int) -> None:
        window = self._windows[corr]
        while count := window.wanted(self._origin.released):
            frames = self._origin.frames[window.next : window.next + count]
            self.writer.write(b"".join(window.passing([encode(frame, corr) for frame in frames])))
        self._origin.sent[corr] = window.next

    def _close(self, corr: int) -> None:
        """Send a status to a reader that does not follow, once it has the frames that there are."""
        released, whole = self._origin.released, len(self._origin.frames)
        state = StreamState.ENDED if released == whole else StreamState.RUNNING
        if state is StreamState.RUNNING or self._windows[corr].next == whole:
            self._send(corr, Status(STREAM, state, released))

    def _send(self, corr: int, frame: Frame) -> None:
        self.writer.write(encode(frame, corr))
