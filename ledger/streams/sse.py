"""A stream as server-sent events: each batch of data, and after it where the reader is.

(WHATWG HTML, 9.2.6.) A reader that collects data up to a `control` event and comes back to
the offset in it misses nothing and gets nothing twice.
"""

from __future__ import annotations

import base64
import codecs
import json
import re
from abc import ABC, abstractmethod

from ledger.streams.content import is_json, is_text
from ledger.streams.json import join_json
from ledger.streams.offset import Offset
from ledger.streams.page import Page

SILENCE = b": still here\n\n"
"""A comment, of which clients see nothing; it keeps proxies from closing the connection."""
BASE64 = "base64"

_LINE_END = re.compile("\r\n|\r|\n")


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


class SseEncoder(ABC):
    """Makes data events of pages; base class of the three ways to do so."""

    @abstractmethod
    def text(self, page: Page) -> str:
        """What the page's data event says; empty for none."""

    def offset(self, page: Page) -> Offset:
        """Where a reader of all events so far is."""
        return page.next


class JsonEvents(SseEncoder):
    def text(self, page: Page) -> str:
        return join_json(page.data).decode() if page.data else ""


class Base64Events(SseEncoder):
    def text(self, page: Page) -> str:
        return base64.b64encode(b"".join(page.data)).decode()


class TextEvents(SseEncoder):
    """Text in UTF-8: a character whose end is yet to come is held back until it comes."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held: Offset | None = None

    def text(self, page: Page) -> str:
        text = self._decoder.decode(b"".join(page.data), final=page.closed)
        held = len(self._decoder.getstate()[0])
        # What was held back before, and still is, began before this page.
        self._held = (page.back(held) or self._held or page.start) if held else None
        return text

    def offset(self, page: Page) -> Offset:
        return self._held or page.next


def events_of(content_type: str) -> SseEncoder:
    if is_json(content_type):
        return JsonEvents()
    return TextEvents() if is_text(content_type) else Base64Events()
