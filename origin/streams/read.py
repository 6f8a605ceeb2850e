"""Reads of a stream, beside its object: from what is stored, wherever the object lives.

Nobody's write waits for a reader, and a reader on another origin takes no stream away from
who writes it. Only a stream whose life a read prolongs, or that is at its end, has its object
asked first: whether it is still there is the object's to say.
"""

from __future__ import annotations

from dataclasses import dataclass

from ledger.errors import CallerError, NotFound
from ledger.frame import FRAMES_TYPE
from ledger.interface import Ledger, StreamKind
from ledger.objects.object import ObjectContext, ObjectRequest, ObjectResponse, ReadContext
from origin.streams.answer import SECURITY, at_the_end, described, error_answer, nothing_new, shown
from origin.streams.config import Create, Part, StreamConfig, StreamSettings
from origin.streams.live import BASE64, event_stream, events_of, frame_stream
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
    is_json,
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


@dataclass(frozen=True, slots=True)
class Source:
    """What can be read: the stream of an object, or a generation."""

    stream: bytes
    content_type: str
    parts: tuple[Part, ...] = ()

    @classmethod
    def of(cls, config: StreamConfig) -> Source:
        return cls(config.stream, config.content_type, config.parts)

    @classmethod
    def of_generation(cls, stream: bytes) -> Source:
        return cls(stream, GENERATION_TYPE)

    def reader(self, context: ObjectContext | ReadContext) -> StreamReader:
        json = is_json(self.content_type)
        return StreamReader(context.ledger, self.stream, self.parts, json=json)


async def get(
    context: ReadContext, source: Source, read: Read, settings: StreamSettings
) -> ObjectResponse:
    """Answer a GET. CallerError if its offset is no position, NotFound if the stream is gone."""
    reader = source.reader(context)
    if read.live is Live.SSE:
        return await _events(context, source, reader, read, settings)
    if read.live is Live.FRAMES:
        return await _frames(context, reader, read)
    if read.live is Live.LONG_POLL:
        page = await reader.wait_page(read.offset, settings.long_poll_s)
        cursor = next_cursor(context.now_ms(), read.cursor, context.random)
        if page or not page.up_to_date:
            return shown(page, source.content_type, source.stream, read.if_none_match, cursor)
        return nothing_new(page, cursor)
    if read.offset is None:
        return at_the_end(source.content_type, await reader.tip())
    page = await reader.page(read.offset)
    return shown(page, source.content_type, source.stream, read.if_none_match, None)


async def _events(
    context: ReadContext,
    source: Source,
    reader: StreamReader,
    read: Read,
    settings: StreamSettings,
) -> ObjectResponse:
    # The first page is read before the answer begins, so that a wrong offset is a 400.
    page = await reader.page(read.offset)
    headers = (*SECURITY, (CONTENT_TYPE, SSE_TYPE), NO_CACHE)
    if not is_text(source.content_type):
        headers += ((DATA_ENCODING, BASE64),)

    def cursor() -> int:
        return next_cursor(context.now_ms(), read.cursor, context.random)

    encoder = events_of(source.content_type)
    body = event_stream(reader, page, encoder, cursor, settings.sse_s)
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
    config = await _config(context)
    if config is None:
        return await get(context, await _generation(context), read, settings)
    if _asks_its_object(config, context.now_ms()):
        used = await context.ask(ObjectRequest(USE, ""))
        if used.status != 204:
            return used
    return await get(context, Source.of(config), read, settings)


async def _head(context: ReadContext, request: ObjectRequest) -> ObjectResponse:
    config = await _config(context)
    if config is None:
        source = await _generation(context)
        config = StreamConfig(source.stream, source.content_type, Create())
    elif _asks_its_object(config, context.now_ms()):
        return await context.ask(request)
    return described(config, await Source.of(config).reader(context).tip())


async def _config(context: ReadContext) -> StreamConfig | None:
    """The stream that has been put there; CallerError (410) if only its forks may still see it."""
    found = await context.ledger.objects.get(context.key, (CONFIG,))
    config = StreamConfig.unpack(found[CONFIG]) if found else None
    if config is not None and config.deleted:
        raise gone()
    return config


async def _generation(context: ReadContext) -> Source:
    source = await generation(context.ledger, context.key.name)
    if source is None:
        raise NotFound("no such stream")
    return source


async def generation(ledger: Ledger, name: str) -> Source | None:
    """The generation that a name is the id of."""
    stream = generation_id(name)
    if stream is None:
        return None
    try:
        info = await ledger.info(stream)
    except NotFound:
        return None
    return Source.of_generation(stream) if info.kind is StreamKind.GENERATION else None


def gone() -> CallerError:
    return CallerError("the stream was deleted", code="gone", status=410)


def _asks_its_object(config: StreamConfig, now_ms: int) -> bool:
    expiry = config.expiry
    return expiry.ttl_s is not None or (expiry.at_ms is not None and now_ms >= expiry.at_ms)
