"""The bodies of readers that stay: server-sent events, and the ledger's frames as they are.

In events (WHATWG HTML, 9.2.6) each batch of data is followed by where the reader is. One that
collects data up to a `control` event and comes back to the offset in it misses nothing and
gets nothing twice.
"""

from __future__ import annotations

import asyncio
import base64
import codecs
import json
import re
from collections.abc import AsyncIterator, Callable

from ledger.errors import NotFound
from ledger.frame import Heartbeat, StreamEnd, encode, tag_of
from origin.streams.json import join_json
from origin.streams.offset import Offset
from origin.streams.page import Page
from origin.streams.protocol import is_json, is_text
from origin.streams.reader import StreamReader

SILENCE = b": still here\n\n"
"""A comment, of which clients see nothing; it keeps proxies from closing the connection."""
BASE64 = "base64"

_LINE_END = re.compile("\r\n|\r|\n")

PIECE_BYTES = 256 * 1024
"""What a reader of frames is given at a time, about; so much it holds while it is slow."""
LEAST_FRAMES, MOST_FRAMES = 4, 256
"""Frames in one such piece: few while they are large (64 KiB at most)."""
SILENCE_S = 15.0
"""After so long without data a body gets a sign of life, so that no proxy drops it."""


def data_event(text: str) -> bytes:
    """The event of a batch; whatever is in `text`, it stays within this event's lines."""
    # One space after the colon is the form's; it is only written where it must be.
    lines = (f"data: {x}" if x[:1] == " " else f"data:{x}" for x in _LINE_END.split(text))
    return ("event: data\n" + "\n".join(lines) + "\n\n").encode()


def control_event(offset: Offset, cursor: int, *, up_to_date: bool, closed: bool) -> bytes:
    """The event after a batch; nobody comes back to a closed stream, so it has no cursor."""
    fields: dict[str, object] = {"streamNextOffset": str(offset)}
    if not closed:
        fields["streamCursor"] = str(cursor)
    if up_to_date:
        fields["upToDate"] = True
    if closed:
        fields["streamClosed"] = True
    return f"event: control\ndata:{json.dumps(fields, separators=(',', ':'))}\n\n".encode()


class EventTexts:
    """What events say of pages: JSON and text as they are, all else in base64.

    Of text in UTF-8, a character whose end is yet to come is held back until it comes.
    """

    def __init__(self, content_type: str) -> None:
        self._is_json, self._is_text = is_json(content_type), is_text(content_type)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held: Offset | None = None

    def text(self, page: Page) -> str:
        """What the page's data event says; empty for none."""
        if self._is_json:
            return join_json(page.data).decode() if page.data else ""
        data = b"".join(page.data)
        if not self._is_text:
            return base64.b64encode(data).decode()
        text = self._decoder.decode(data, final=page.closed)
        held = len(self._decoder.getstate()[0])
        # What was held back before, and still is, began before this page.
        self._held = (page.back(held) or self._held or page.start) if held else None
        return text

    def offset(self, page: Page) -> Offset:
        """Where a reader of all events so far is."""
        return self._held or page.next


async def event_stream(
    reader: StreamReader, page: Page, texts: EventTexts, cursor: Callable[[], int], sse_s: float
) -> AsyncIterator[bytes]:
    """Server-sent events from `page` on, for `sse_s`, or until the stream ends or is deleted.

    Events leave together with the control event that says where the reader is after them.
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
    """The frames from `index` on as they are in the ledger, up to and with the StreamEnd."""
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
        del frames  # a reader may take its time: what it holds meanwhile is one piece
        yield piece
        if ended:
            return
