"""Reads of a stream: directly from storage, without its object, on any origin.

No writer waits for a reader, and a reader on another origin does not move a stream away from its
writer. The object is asked first only if the read prolongs the stream's life, or is at the stream's
end, because only the object knows if the stream still exists.

Readers that stay connected get server-sent events, or the ledger's frames. In events (WHATWG HTML,
9.2.6) each batch of data is followed by the reader's position. A client that collects data up to a
`control` event, and resumes at the offset in it, misses nothing and gets nothing twice.
"""

from __future__ import annotations

import asyncio
import base64
import codecs
import hashlib
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from typing import TypeVar

from tailrace.ledger.errors import CallerError, NotFound
from tailrace.ledger.frame import FRAMES_TYPE, Heartbeat, StreamEnd, encode, tag_of
from tailrace.ledger.interface import Ledger, StreamKind
from tailrace.ledger.objects.object import ObjectRequest, ObjectResponse, ReadContext
from tailrace.origin.streams.chunks import renumbered
from tailrace.origin.streams.config import Create, ForkOrder, StreamConfig
from tailrace.origin.streams.cursors import next_cursor
from tailrace.origin.streams.fork import Cut, Cutter
from tailrace.origin.streams.json_messages import Steps, join_json
from tailrace.origin.streams.offsets import Offset, no_such_offset
from tailrace.origin.streams.page import FIRST_FRAMES, Page, PageBuilder, Tip
from tailrace.origin.streams.protocol import (
    CACHE_CONTROL,
    CONTENT_TYPE,
    CURSOR,
    DATA_ENCODING,
    ETAG,
    GENERATION_TYPE,
    NO_CACHE,
    NO_STORE,
    SECURITY,
    SSE_TYPE,
    TRUE,
    UP_TO_DATE,
    answer,
    check_name,
    error_answer,
    generation_id,
    is_json,
    is_text,
    parted,
    position,
    tip_headers,
)
from tailrace.origin.streams.request import Live, Read, parse_read
from tailrace.origin.streams.settings import StreamSettings
from tailrace.origin.streams.state import CONFIG

SLICE_STEPS = 64
"""Number of steps of parsing JSON, which take 1 to 3 ms, after which other tasks may run."""

T = TypeVar("T")

SILENCE = b": still here\n\n"
"""A comment that clients ignore; it keeps proxies from closing the connection."""
BASE64 = "base64"

_LINE_END = re.compile("\r\n|\r|\n")

PIECE_BYTES = 256 * 1024
"""Target bytes of a piece of frames; one piece is held in memory for each slow reader."""
LEAST_FRAMES, MOST_FRAMES = 4, 256
"""Minimum and maximum frames in a piece. A piece of large frames (up to 64 KiB each) has few."""
SILENCE_S = 4.0
"""Seconds without data after which a keep-alive is sent. Clients consider a connection lost if they
receive nothing for 10 s."""

CHANGELESS = (CACHE_CONTROL, "private, max-age=60, stale-while-revalidate=300")
"""Header for content that never changes; private, because a stream may hold someone's conversation.
"""
USE = "use"
"""Internal method by which a read tells the object that the stream is in use."""
READS = frozenset(("GET", "HEAD"))


async def in_slices(steps: Steps[T]) -> T:
    """Run work in slices, letting other tasks run in between."""
    while True:
        try:
            for _ in range(SLICE_STEPS):
                next(steps)
        except StopIteration as done:
            result: T = done.value
            return result
        await asyncio.sleep(0)


class StreamReader:
    """Reads a stream as configured: the frames it has inherited, then its own.

    A StreamReader holds nothing between two calls, so a client that does not come back costs
    nothing. Methods raise NotFound once the stream has been deleted.
    """

    def __init__(self, ledger: Ledger, config: StreamConfig) -> None:
        self._ledger, self._stream = ledger, config.stream
        self._parts, self._base = config.parts, config.base
        self._json = is_json(config.content_type)

    async def tip(self) -> Tip:
        info = await self._ledger.info(self._stream)
        return Tip(self._base + info.next_index - info.ended, info.ended)

    async def page(self, start: Offset | None) -> Page:
        """Return the page that begins at `start`, or at the stream's end if `start` is None.

        Raises CallerError if `start` is no position of the stream.
        """
        tip = await self.tip()
        builder = PageBuilder(tip.offset if start is None else start, tip, json=self._json)
        index = builder.first_index
        while not builder.full:
            frames = await self._frames(index, builder.wants)
            builder.feed(frames)
            index += len(frames)
        return builder.page()

    async def wait_page(self, start: Offset | None, timeout_s: float) -> Page:
        """Return a page with data, or of a closed stream; after the timeout, an empty page."""
        page = await self.page(start)

        async def ready() -> bool:
            nonlocal page
            page = await self.page(page.next)
            return bool(page) or page.closed

        if not page and not page.closed:
            await self._until(ready, timeout_s)
        return page

    async def wait_frames(self, index: int, limit: int, timeout_s: float) -> list[bytes]:
        """Return at most `limit` frames from `index` on, StreamEnd included.

        If there are none, wait for them; the result is empty after the timeout.
        """
        frames: list[bytes] = []

        async def ready() -> bool:
            nonlocal frames
            tip = await self.tip()
            room = min(tip.index + tip.closed - index, limit)
            frames = await self._frames(index, room) if room > 0 else []
            if self._parts:
                frames = [renumbered(raw, at) for at, raw in enumerate(frames, index)]
            return bool(frames)

        if not await ready():
            await self._until(ready, timeout_s)
        return frames

    async def cut(self, order: ForkOrder) -> Cut:
        """Return the place where a fork leaves this stream. Raises CallerError if there is none."""
        tip = await self.tip()
        cutter = Cutter(order, tip, json=self._json)
        index = cutter.first_index
        while cutter.cut is None:
            room = min(tip.index - index, FIRST_FRAMES)
            frames = await self._frames(index, room) if room > 0 else []
            await in_slices(cutter.feed(frames))
            index += len(frames)
        return cutter.cut

    async def _frames(self, index: int, limit: int) -> list[bytes]:
        """Return frames from `index` on: at least one, at most `limit`."""
        stream, begin, room = self._stream, 0, limit
        for part in self._parts:
            if index < part.end:
                stream, room = part.stream, min(limit, part.end - index)
                break
            begin = part.end
        frames = await self._ledger.frames(stream, index - begin, room)
        if not frames:
            raise NotFound("the stream was deleted")
        return frames

    async def _until(self, ready: Callable[[], Awaitable[bool]], timeout_s: float) -> None:
        """Call `ready` now and after each release of frames, until it returns True.

        Give up after `timeout_s`.
        """
        woken = asyncio.Event()
        await self._ledger.info(self._stream)  # a stream must be loaded before it can be watched
        self._ledger.watch(self._stream, woken.set)
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    while not await ready():
                        await woken.wait()
                        woken.clear()
        finally:
            self._ledger.unwatch(self._stream, woken.set)


def data_event(text: str) -> bytes:
    """Return the server-sent event of a batch of data; line ends in `text` do not end the event."""
    # Clients remove one space after the colon, so add one before text that begins with a space.
    lines = (f"data: {x}" if x[:1] == " " else f"data:{x}" for x in _LINE_END.split(text))
    return ("event: data\n" + "\n".join(lines) + "\n\n").encode()


def control_event(offset: Offset, cursor: int, *, up_to_date: bool, closed: bool) -> bytes:
    """Return the control event that follows a batch of data.

    It has no cursor if the stream is closed, since clients do not resume a closed stream.
    """
    fields: dict[str, object] = {"streamNextOffset": str(offset)}
    if not closed:
        fields["streamCursor"] = str(cursor)
    if up_to_date:
        fields["upToDate"] = True
    if closed:
        fields["streamClosed"] = True
    return f"event: control\ndata:{json.dumps(fields, separators=(',', ':'))}\n\n".encode()


class EventTexts:
    """Converts pages of a stream to the text of server-sent events.

    JSON and text are sent as they are, and data of any other content type in base64.

    For UTF-8 text, a character that is incomplete is held back until its end arrives.
    """

    def __init__(self, content_type: str) -> None:
        self._is_json, self._is_text = is_json(content_type), is_text(content_type)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held: Offset | None = None

    def text(self, page: Page) -> str:
        """Return the text of the page's data event; empty if there is none."""
        if self._is_json:
            return join_json(page.data).decode() if page.data else ""
        data = b"".join(page.data)
        if not self._is_text:
            return base64.b64encode(data).decode()
        text = self._decoder.decode(data, final=page.closed)
        held = len(self._decoder.getstate()[0])
        # If the incomplete character began in an earlier page, its position stays as it was.
        self._held = (page.back(held) or self._held or page.start) if held else None
        return text

    def offset(self, page: Page) -> Offset:
        """Return the position of a reader that has received all events up to this page."""
        return self._held or page.next


async def event_stream(
    reader: StreamReader, page: Page, texts: EventTexts, cursor: Callable[[], int], sse_s: float
) -> AsyncIterator[bytes]:
    """Yield server-sent events from `page` on, for `sse_s`, or until the stream ends or is deleted.

    Data events are sent together with the control event that gives the position after them.
    """
    clock = asyncio.get_running_loop().time
    ends = clock() + sse_s
    said: tuple[Offset, bool, bool] | None = None
    while True:
        text, place = texts.text(page), (texts.offset(page), page.up_to_date, page.closed)
        if text or place != said:
            offset, up_to_date, closed = said = place
            control = control_event(offset, cursor(), up_to_date=up_to_date, closed=closed)
            yield (data_event(text) if text else b"") + control
        else:
            yield SILENCE
        left_s = ends - clock()
        if page.closed or left_s <= 0:
            return
        try:
            page = await reader.wait_page(page.next, min(SILENCE_S, left_s))
        except NotFound:
            return


async def frame_stream(
    reader: StreamReader, index: int, now_ms: Callable[[], int]
) -> AsyncIterator[bytes]:
    """Yield the frames from `index` on as they are in the ledger, up to and including StreamEnd."""
    limit = LEAST_FRAMES
    while True:
        try:
            frames = await reader.wait_frames(index, limit, SILENCE_S)
        except NotFound:
            return
        index += len(frames)
        ended = bool(frames) and tag_of(frames[-1]) == StreamEnd.tag
        piece = b"".join(frames) or encode(Heartbeat(now_ms(), True, (), ()))
        small = len(piece) * 2 <= PIECE_BYTES
        limit = min(limit * 2, MOST_FRAMES) if small else max(limit // 2, LEAST_FRAMES)
        del frames  # while a slow reader takes `piece`, the frames must not be in memory, too
        yield piece
        if ended:
            return


async def _events(
    context: ReadContext,
    config: StreamConfig,
    reader: StreamReader,
    read: Read,
    settings: StreamSettings,
) -> ObjectResponse:
    # Read the first page before the answer begins, so that a wrong offset is answered with 400.
    page = await reader.page(read.offset)
    headers = (*SECURITY, (CONTENT_TYPE, SSE_TYPE), NO_CACHE)
    if not is_text(config.content_type):
        headers += ((DATA_ENCODING, BASE64),)

    def cursor() -> int:
        return next_cursor(context.now_ms(), read.cursor, context.random)

    texts = EventTexts(config.content_type)
    body = event_stream(reader, page, texts, cursor, settings.sse_s)
    return ObjectResponse(200, headers, body)


async def _frames(context: ReadContext, reader: StreamReader, read: Read) -> ObjectResponse:
    tip = await reader.tip()
    offset = tip.offset if read.offset is None else read.offset
    if offset.index > tip.index or offset.byte:
        raise no_such_offset(offset, "no frame begins there")
    body = frame_stream(reader, offset.index, context.now_ms)
    return ObjectResponse(200, (*SECURITY, (CONTENT_TYPE, FRAMES_TYPE), NO_CACHE), body)


async def read_stream(
    context: ReadContext, request: ObjectRequest, settings: StreamSettings
) -> ObjectResponse:
    try:
        check_name(parted(context.key.name)[1])
        if request.method == "HEAD":
            return await _head(context, request)
        return await _get(context, request, settings)
    except CallerError as error:
        return error_answer(error)


async def _get(
    context: ReadContext, request: ObjectRequest, settings: StreamSettings
) -> ObjectResponse:
    read = parse_read(request)
    config = await _found(context)
    if _asks_its_object(config, context.now_ms()):
        used = await context.ask(ObjectRequest.internal(USE))
        if used.status != 204:
            return used
    reader = StreamReader(context.ledger, config)
    if read.live is Live.SSE:
        return await _events(context, config, reader, read, settings)
    if read.live is Live.FRAMES:
        return await _frames(context, reader, read)
    if read.live is Live.LONG_POLL:
        page = await reader.wait_page(read.offset, settings.long_poll_s)
        cursor = next_cursor(context.now_ms(), read.cursor, context.random)
        if page or not page.up_to_date:
            return shown(page, config, read.if_none_match, cursor)
        return nothing_new(page, cursor)
    if read.offset is None:
        return at_the_end(config.content_type, await reader.tip())
    return shown(await reader.page(read.offset), config, read.if_none_match, None)


async def _head(context: ReadContext, request: ObjectRequest) -> ObjectResponse:
    config = await _found(context)
    if _asks_its_object(config, context.now_ms()):
        return await context.ask(request)
    return described(config, await StreamReader(context.ledger, config).tip())


async def _found(context: ReadContext) -> StreamConfig:
    """Return the stream created at a name, or the generation with that id.

    Raises NotFound if there is neither, and CallerError (410) if only forks of the stream may see
    it.
    """
    stored = await context.ledger.objects.get(context.key, (CONFIG,))
    if not stored:
        config = await generation(context.ledger, context.key.name)
    else:
        config = StreamConfig.unpack(stored[CONFIG])
    if config is None:
        raise NotFound("no such stream")
    if config.deleted:
        raise gone()
    return config


async def generation(ledger: Ledger, name: str) -> StreamConfig | None:
    """Return the configuration of the generation whose id is `name`; None if there is none."""
    stream = generation_id(name)
    if stream is None:
        return None
    try:
        info = await ledger.info(stream)
    except NotFound:
        return None
    is_one = info.kind is StreamKind.GENERATION
    return StreamConfig(stream, GENERATION_TYPE, Create()) if is_one else None


def gone() -> CallerError:
    return CallerError("the stream was deleted", code="gone", status=410)


def _asks_its_object(config: StreamConfig, now_ms: int) -> bool:
    expiry = config.expiry
    return expiry.ttl_s is not None or (expiry.at_ms is not None and now_ms >= expiry.at_ms)


def described(config: StreamConfig, tip: Tip) -> ObjectResponse:
    """Return the answer to a HEAD request for a stream that ends at `tip`."""
    headers = (*tip_headers(tip), *config.expiry.headers())
    return answer(200, (CONTENT_TYPE, config.content_type), NO_STORE, *headers)


def at_the_end(content_type: str, tip: Tip) -> ObjectResponse:
    """Return the answer to a read of `offset=now` that does not wait: no data, and the tail."""
    body = join_json(()) if is_json(content_type) else b""
    headers = (*tip_headers(tip), (UP_TO_DATE, TRUE))
    return answer(200, (CONTENT_TYPE, content_type), NO_STORE, *headers, body=body)


def nothing_new(page: Page, cursor: int) -> ObjectResponse:
    """Return the answer to a reader whose wait timed out, or that waits on a closed stream."""
    headers = ((UP_TO_DATE, TRUE), (CURSOR, str(cursor)), NO_STORE)
    return answer(204, *position(page.next, closed=page.closed), *headers)


def shown(
    page: Page, config: StreamConfig, if_none_match: str | None, cursor: int | None
) -> ObjectResponse:
    """Return the answer to a read: the page, or 304 if the reader has it already."""
    # Use a hash of the ledger stream's id, because a client that knows the id itself can do more
    # than read.
    version = hashlib.blake2b(config.stream, digest_size=8).hexdigest()
    etag = f'"{version}:{page.start}:{page.next}{":closed" if page.closed else ""}"'
    # The answer to a long poll may be cached: the client's next request has a new cursor, and so
    # another URL.
    settled = page.closed or not page.up_to_date or cursor is not None
    headers = [
        *position(page.next, closed=page.closed),
        (ETAG, etag),
        CHANGELESS if settled else NO_CACHE,
    ]
    headers += [(UP_TO_DATE, TRUE)] if page.up_to_date else []
    headers += [(CURSOR, str(cursor))] if cursor is not None else []
    if if_none_match is not None and _matches(if_none_match, etag):
        return answer(304, *headers)
    body = join_json(page.data) if is_json(config.content_type) else b"".join(page.data)
    return answer(200, (CONTENT_TYPE, config.content_type), *headers, body=body)


def _matches(if_none_match: str, etag: str) -> bool:
    """Return True if an If-None-Match header matches (RFC 9110, 13.1.2): `*`, or a list."""
    tags = [tag.strip().removeprefix("W/") for tag in if_none_match.split(",")]
    return "*" in tags or etag in tags
