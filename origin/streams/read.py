"""Reads of a stream, beside its object: from what is stored, wherever the object lives.

Nobody's write waits for a reader, and a reader on another origin takes no stream away from
who writes it. Only a stream whose life a read prolongs, or that is at its end, has its object
asked first: whether it is still there is the object's to say.
"""

from __future__ import annotations

from ledger.errors import CallerError, NotFound
from ledger.frame import FRAMES_TYPE
from ledger.interface import Ledger, StreamKind
from ledger.objects.object import ObjectRequest, ObjectResponse, ReadContext
from origin.streams.answer import SECURITY, at_the_end, described, error_answer, nothing_new, shown
from origin.streams.config import Create, StreamConfig, StreamSettings
from origin.streams.live import BASE64, EventTexts, event_stream, frame_stream
from origin.streams.offset import next_cursor
from origin.streams.page import no_such_offset
from origin.streams.protocol import (
    CACHE_CONTROL,
    CONTENT_TYPE,
    DATA_ENCODING,
    GENERATION_TYPE,
    SSE_TYPE,
    check_name,
    generation_id,
    is_text,
    parted,
)
from origin.streams.reader import StreamReader
from origin.streams.request import Live, Read, parse_read
from origin.streams.state import CONFIG

NO_CACHE = (CACHE_CONTROL, "no-cache")

USE = "USE"
"""The method by which a read tells the object that it is used now."""
READS = frozenset(("GET", "HEAD"))


async def get(
    context: ReadContext, config: StreamConfig, read: Read, settings: StreamSettings
) -> ObjectResponse:
    """Answer a GET. CallerError if its offset is no position, NotFound if the stream is gone."""
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


async def _events(
    context: ReadContext,
    config: StreamConfig,
    reader: StreamReader,
    read: Read,
    settings: StreamSettings,
) -> ObjectResponse:
    # The first page is read before the answer begins, so that a wrong offset is a 400.
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
    """Answer a GET or a HEAD."""
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
        used = await context.ask(ObjectRequest(USE, ""))
        if used.status != 204:
            return used
    return await get(context, config, read, settings)


async def _head(context: ReadContext, request: ObjectRequest) -> ObjectResponse:
    config = await _found(context)
    if _asks_its_object(config, context.now_ms()):
        return await context.ask(request)
    return described(config, await StreamReader(context.ledger, config).tip())


async def _found(context: ReadContext) -> StreamConfig:
    """What has been put there, or the generation of that id.

    NotFound if there is neither; CallerError (410) if only forks of the stream may still see it.
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
    """The generation that a name is the id of, as a stream that was put there would be."""
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
