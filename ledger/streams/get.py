"""GET: one answer with what is there, one that waits for more, or a body that stays open."""

from __future__ import annotations

from dataclasses import dataclass

from ledger.frame import FRAMES_TYPE
from ledger.objects.object import ObjectContext, ObjectResponse
from ledger.streams.answer import SECURITY, at_the_end, nothing_new, shown
from ledger.streams.config import Config, Part
from ledger.streams.content import GENERATION_TYPE, SSE_TYPE, is_json, is_text
from ledger.streams.cursor import next_cursor
from ledger.streams.header import CACHE_CONTROL, CONTENT_TYPE, DATA_ENCODING
from ledger.streams.live import event_stream, frame_stream
from ledger.streams.page import no_such_offset
from ledger.streams.reader import StreamReader
from ledger.streams.request import Live, Read
from ledger.streams.settings import StreamSettings
from ledger.streams.sse import BASE64, events_of

NO_CACHE = (CACHE_CONTROL, "no-cache")


@dataclass(frozen=True, slots=True)
class Source:
    """What can be read: the stream of an object, or a generation."""

    stream: bytes
    content_type: str
    parts: tuple[Part, ...] = ()

    @classmethod
    def of(cls, config: Config) -> Source:
        return cls(config.stream, config.content_type, config.parts)

    @classmethod
    def of_generation(cls, stream: bytes) -> Source:
        return cls(stream, GENERATION_TYPE)

    def reader(self, context: ObjectContext) -> StreamReader:
        json = is_json(self.content_type)
        return StreamReader(context.ledger, self.stream, self.parts, json=json)


async def get(
    context: ObjectContext, source: Source, read: Read, settings: StreamSettings
) -> ObjectResponse:
    """Answer a GET. CallerError if its offset is no position, NotFound if the stream is gone."""
    reader = source.reader(context)
    if read.live is Live.SSE:
        return await _events(context, source, reader, read, settings)
    if read.live is Live.FRAMES:
        return await _frames(context, reader, read)
    if read.live is Live.LONG_POLL:
        page = await context.outside(reader.wait_page(read.offset, settings.long_poll_s))
        cursor = next_cursor(context.now_ms(), read.cursor, context.random)
        if page or not page.up_to_date:
            return shown(page, source.content_type, source.stream, read.if_none_match, cursor)
        return nothing_new(page, cursor)
    if read.offset is None:
        return at_the_end(source.content_type, await context.outside(reader.tip()))
    page = await context.outside(reader.page(read.offset))
    return shown(page, source.content_type, source.stream, read.if_none_match, None)


async def _events(
    context: ObjectContext,
    source: Source,
    reader: StreamReader,
    read: Read,
    settings: StreamSettings,
) -> ObjectResponse:
    # The first page is read before the answer begins, so that a wrong offset is a 400.
    page = await context.outside(reader.page(read.offset))
    headers = (*SECURITY, (CONTENT_TYPE, SSE_TYPE), NO_CACHE)
    if not is_text(source.content_type):
        headers += ((DATA_ENCODING, BASE64),)

    def cursor() -> int:
        return next_cursor(context.now_ms(), read.cursor, context.random)

    encoder = events_of(source.content_type)
    body = event_stream(reader, page, encoder, cursor, settings.sse_s)
    return ObjectResponse(200, headers, body)


async def _frames(context: ObjectContext, reader: StreamReader, read: Read) -> ObjectResponse:
    tip = await context.outside(reader.tip())
    offset = tip.offset if read.offset is None else read.offset
    if offset.index > tip.index or offset.byte:
        raise no_such_offset(offset, "no frame begins there")
    body = frame_stream(reader, offset.index, context.now_ms)
    return ObjectResponse(200, (*SECURITY, (CONTENT_TYPE, FRAMES_TYPE), NO_CACHE), body)
