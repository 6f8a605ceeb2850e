"""Encodes frames as JSON lines: one JSON object in each line, with the frame's index.

`type` is the name of the frame's event, or `token` for text. The other fields are those of the
event's data, so a reader of events and a reader of lines parse the same objects.
"""

from __future__ import annotations

from typing import Any

from tailrace.edge.generate.encoders import NativeEncoder
from tailrace.edge.sse import EVENTS, compact, event_fields, short_token
from tailrace.ledger.frame import StreamError, decode, tag_of

TEXT = "token"
"""The `type` of frames that extend the text, whose events have no name."""
PING = b'{"type":"ping"}\n'
"""The keepalive: a line without an index. An empty line would be an error to some parsers."""


class JsonLinesEncoder(NativeEncoder):
    """Encodes a stream as JSON lines."""

    __slots__ = ("media_type",)

    def __init__(self, media_type: str) -> None:
        self.media_type = media_type

    def frames(self, frames: list[bytes]) -> bytes:
        return b"".join(map(line, frames))

    def keepalive(self) -> bytes:
        return PING


def line(raw: bytes) -> bytes:
    """Return the line for an encoded frame; empty if the frame is of a type that is not sent."""
    token = short_token(raw)
    if token is not None:
        return b'{"type":"token","text":"%b","index":%d}\n' % token
    if tag_of(raw) not in EVENTS:
        return b""
    frame = decode(raw)[1]
    name, fields = event_fields(frame)
    typed: dict[str, Any] = {"type": name or TEXT, **fields}
    assert isinstance(frame, StreamError) or "index" in typed
    return compact(typed) + b"\n"
