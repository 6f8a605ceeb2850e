"""One client's subscription of a chat: reads its turns and their streams.

One task reads the chat's turns and presence, and another one the streams of the turns in order.
A turn that begins while another still runs is shown after it, so that the events have one order.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from dataclasses import dataclass

from tailrace.edge.chats.calls import Fields, chat_call
from tailrace.edge.chats.events import ChatEncoder, Position
from tailrace.edge.generate.encoders import KEEPALIVE_INTERVAL_S, Encoder
from tailrace.edge.generate.snapshot_encoder import SnapshotEncoder
from tailrace.edge.origins.origin_pool import OriginPool
from tailrace.edge.origins.reader import Reader
from tailrace.ledger.errors import TailraceError
from tailrace.ledger.frame import (
    CLOSING,
    Caller,
    Opened,
    Resume,
    StreamError,
    decode,
    tag_of,
    to_error,
)

MAX_QUEUED_PIECES = 4
"""Maximum number of encoded pieces that wait for the client. A piece has the frames that one read
of a stream returned, so it has at most the frames that one response may have in flight."""
MAX_QUEUED_TURNS = 256
"""Maximum number of turns that wait until the turns before them have been shown."""


@dataclass(frozen=True, slots=True)
class Wish:
    """A client's request to follow a chat."""

    chat: str
    after: Position | None = None
    tail: int | None = None
    turns_only: bool = False
    snapshot: bool = False
    """True if the text that a turn already has is sent as one frame."""
    caller: Caller | None = None
    token: str | None = None

    @property
    def query(self) -> str:
        """The parameters of the request to the chat's object."""
        if self.tail is not None:
            return f"follow=1&tail={self.tail}"
        if self.after is None:
            return "follow=1"
        # `at` begins with the turn of the position, `after` with the next one. A client that reads
        # the frames of turns, too, begins with its last turn, because it may lack frames of it.
        return f"follow=1&{'after' if self.turns_only else 'at'}={self.after.turn}"


class ChatSubscription:
    """Reads a chat, and yields its encoded events. `open` it, read `body`, and `close` it."""

    def __init__(self, link: OriginPool, wish: Wish, encoder: ChatEncoder) -> None:
        self._link = link
        self._wish = wish
        self._encoder = encoder
        self._chat = Reader(link)
        self._lines = _lines(self._chat)
        # The turn of which the client has a part, the reader of its stream, and the answer to the
        # reader's request.
        self._begun: tuple[Fields, Reader, Opened | TailraceError] | None = None
        self._turns: asyncio.Queue[Fields] = asyncio.Queue(MAX_QUEUED_TURNS)
        self._pieces: list[bytes] = []
        self._news = asyncio.Event()  # a piece was added, or a task has ended
        self._room = asyncio.Event()  # `body` has taken pieces, so there is room for more
        self._tasks: list[asyncio.Task[None]] = []

    async def open(self) -> None:
        """Send the request to the origin.

        Raises:
            NotFound: There is no such chat.
            BeyondEnd: The position is beyond the chat's last turn, or the turn's last frame.
        """
        wish = self._wish
        await self._chat.call(chat_call(wish.chat, "GET", wish.caller, wish.query))
        if wish.after is not None and not wish.turns_only:
            turn = await anext(self._lines)
            reader = Reader(self._link)
            try:
                opened: Opened | TailraceError = await self._open_stream(
                    reader, turn, wish.after.index
                )
            except BaseException:
                reader.close()
                raise
            self._begun = turn, reader, opened

    def close(self) -> None:
        """Stop reading; the streams run on."""
        for task in self._tasks:
            task.cancel()
        self._chat.close()
        if self._begun is not None:
            self._begun[1].close()

    async def body(self) -> AsyncGenerator[bytes, None]:
        """Yield the encoded events, and keepalives, until the origin has forgotten the chat."""
        yield self._encoder.begin()
        for work in (self._listen(), self._show()):
            task = asyncio.create_task(work)
            task.add_done_callback(lambda _: self._news.set())
            self._tasks.append(task)
        while True:
            if self._pieces:
                pieces = b"".join(self._pieces)
                self._pieces.clear()
                self._room.set()
                yield pieces
            elif ended := [task for task in self._tasks if task.done()]:
                ended[0].result()  # raises the error of a task that failed
                return
            elif not await self._has_news():
                yield self._encoder.ping

    async def _has_news(self) -> bool:
        """Wait for a piece or the end of a task; return False if neither comes for some time."""
        self._news.clear()
        try:
            async with asyncio.timeout(KEEPALIVE_INTERVAL_S):
                await self._news.wait()
        except TimeoutError:
            return False
        return True

    async def _put(self, piece: bytes) -> None:
        """Give `body` an encoded piece, when there is room for it."""
        while len(self._pieces) >= MAX_QUEUED_PIECES:
            self._room.clear()
            await self._room.wait()
        self._pieces.append(piece)
        self._news.set()

    async def _listen(self) -> None:
        """Read the lines of the chat until the origin has forgotten the chat."""
        async for line in self._lines:
            if "readers" in line:
                await self._put(self._encoder.readers(line["readers"]))
            elif self._wish.turns_only:
                await self._put(self._encoder.turn(line))
            else:
                await self._turns.put(line)

    async def _show(self) -> None:
        """Read the streams of the turns, one after the other."""
        if self._begun is not None:
            turn, reader, opened = self._begun
            with reader:
                await self._show_stream(turn["turn"], reader, opened)
            self._begun = None
        while True:
            turn = await self._turns.get()
            await self._put(self._encoder.turn(turn))
            with Reader(self._link) as reader:
                opened = await self._open_stream(reader, turn, None)
                await self._show_stream(turn["turn"], reader, opened)

    async def _open_stream(
        self, reader: Reader, turn: Fields, after: int | None
    ) -> Opened | TailraceError:
        """Open the stream of a turn.

        Returns the origin's error if it concerns only this stream: the client may not read it, or
        the stream does not exist any more. Raises BeyondEnd if `after` is past the stream's end.
        Raises retryable errors, because they would prevent reading any other stream, too.
        """
        wish = self._wish
        try:
            return await reader.open(
                Resume(
                    bytes.fromhex(turn["stream"]),
                    after=after,
                    token=wish.token,
                    caller=wish.caller,
                    snapshot=wish.snapshot,
                )
            )
        except TailraceError as error:
            if error.retryable or error.code == "beyond_end":
                raise
            return error

    async def _show_stream(self, turn: int, reader: Reader, opened: Opened | TailraceError) -> None:
        if isinstance(opened, TailraceError):
            await self._put(self._encoder.error(turn, opened))
            return
        encoder: Encoder = self._encoder.frames_of(turn)
        if self._wish.snapshot:
            encoder = SnapshotEncoder(encoder)
        encoder.opened(opened)
        tag = None
        while tag not in CLOSING:
            frames = await reader.take()
            tag = tag_of(frames[-1])
            error = _error(frames.pop()) if tag == StreamError.tag else None
            if frames and (piece := encoder.frames(frames)):
                await self._put(piece)
            if error is not None and error.retryable:
                raise error
            if error is not None:
                await self._put(self._encoder.error(turn, error))


def _error(raw: bytes) -> TailraceError:
    _, frame = decode(raw)
    assert isinstance(frame, StreamError), frame
    return to_error(frame)


async def _lines(reader: Reader) -> AsyncGenerator[Fields, None]:
    """Yield the JSON objects in the lines of an object's answer, as they arrive."""
    rest, ended = b"", False
    while not ended:
        data, ended = await reader.take_piece()
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            yield json.loads(line)
