"""Content types: what a stream's bytes are, and so how they are cut, joined and shown."""

from __future__ import annotations

import re

from ledger.errors import CallerError
from ledger.streams.header import CONTENT_TYPE
from ledger.streams.json import JSON_TYPE

DEFAULT_TYPE = "application/octet-stream"
GENERATION_TYPE = "text/plain; charset=utf-8"
SSE_TYPE = "text/event-stream"
MAX_TYPE_CHARS = 256

_TOKEN = r"[!#$%&'*+.^_`|~0-9A-Za-z-]+"
_TYPE = re.compile(rf"{_TOKEN}/{_TOKEN}\s*(;[\x20-\x7e]*)?")


def parse_type(text: str | None) -> str | None:
    """A media type as the client wrote it (RFC 9110, 8.3.1); CallerError if it is none."""
    if text is None or not text.strip():
        return None
    text = text.strip()
    if len(text) > MAX_TYPE_CHARS or not _TYPE.fullmatch(text):
        raise CallerError("not a media type", field=CONTENT_TYPE, hint=f"say {DEFAULT_TYPE}")
    return text


def essence(content_type: str) -> str:
    """The type without its parameters, in lower case: what must match on an append."""
    return content_type.partition(";")[0].strip().lower()


def is_json(content_type: str) -> bool:
    return essence(content_type) == JSON_TYPE


def is_text(content_type: str) -> bool:
    """Whether server-sent events can carry it as it is; base64 carries the rest."""
    return essence(content_type).startswith("text/") or is_json(content_type)
