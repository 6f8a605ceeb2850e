"""The bodies of readers that stay: event streams, and the ledger's frames as they are."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

from ledger.errors import NotFound
from ledger.frame import Heartbeat, Tag, encode, tag_of
from ledger.streams.offset import Offset
from ledger.streams.page import Page
from ledger.streams.reader import StreamReader
from ledger.streams.sse import SILENCE, SseEncoder, control_event, data_event

PIECE_BYTES = 256 * 1024
"""What a reader of frames is given at a time, about; so much it holds while it is slow."""
LEAST_FRAMES, MOST_FRAMES = 4, 256
"""Frames in one such piece: few while they are large (64 KiB at most)."""
SILENCE_S = 15.0
"""After so long without data a body gets a sign of life, so that no proxy drops it."""


async def event_stream(
    reader: StreamReader, page: Page, encoder: SseEncoder, cursor: Callable[[], int], sse_s: float
) -> AsyncIterator[bytes]:
    """Server-sent events from `page` on, for `sse_s`, or until the stream ends or is deleted.

    Events leave together with the control event that says where the reader is after them.
    """
    clock = asyncio.get_running_loop().time
    ends = clock() + sse_s
    said: tuple[Offset, bool, bool] | None = None
    while True:
        text, place = encoder.text(page), (encoder.offset(page), page.up_to_date, page.closed)
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
    """The frames from `index` on as they are in the ledger, up to and with the StreamEnd."""
    limit = LEAST_FRAMES
    while True:
        try:
            frames = await reader.wait_frames(index, limit, SILENCE_S)
        except NotFound:
            return
        index += len(frames)
        ended = bool(frames) and tag_of(frames[-1]) == Tag.STREAM_END
        piece = b"".join(frames) or encode(Heartbeat(now_ms(), True, (), ()))
        small = len(piece) * 2 <= PIECE_BYTES
        limit = min(limit * 2, MOST_FRAMES) if small else max(limit // 2, LEAST_FRAMES)
        del frames  # a reader may take its time: what it holds meanwhile is one piece
        yield piece
        if ended:
            return
