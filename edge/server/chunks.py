"""Chunked request bodies (RFC 9112, 7.1), by the letter of the grammar.

h11 accepts more: spaces behind a size, 20 digits, a bare CR in an extension. Another server in
front of this one may read such a body differently, so it is refused here.
"""

from __future__ import annotations

import re

from tailrace.edge.errors import refusal

MAX_CHUNK_LINE_BYTES = 4096
"""Maximum length of the line before a chunk, with its extensions."""
MAX_TRAILER_BYTES = 16 << 10
"""Maximum length of all trailer lines together."""

_SIZE = re.compile(rb"([0-9A-Fa-f]{1,15})(?:;[\t\x20-\x7e\x80-\xff]*)?\r\n")
_TRAILER = re.compile(rb"[\t\x20-\x7e\x80-\xff]*\r\n")


class ChunkedBody:
    """Decodes one body. Feed it what comes; `ended` is set behind the last line."""

    def __init__(self) -> None:
        self.ended = False
        self._data_bytes = 0  # still to come of a chunk
        self._line = b""  # what has come of a line
        self._in_trailers = False
        self._after_data = False  # the line break behind a chunk is due
        self._trailer_bytes = 0

    def feed(self, data: bytes) -> tuple[int, bytes]:
        """Return how many of these bytes are the body's, and what they carry.

        Raises CallerError for a bad framing.
        """
        at, pieces = 0, list[bytes]()
        while at < len(data) and not self.ended:
            if self._data_bytes:
                size = min(self._data_bytes, len(data) - at)
                self._data_bytes -= size
                self._after_data = not self._data_bytes
                pieces.append(data[at : at + size])
                at += size
                continue
            end = data.find(b"\n", at) + 1
            self._line += data[at : end or len(data)]
            if len(self._line) > MAX_CHUNK_LINE_BYTES:
                raise refusal(431 if self._in_trailers else 400)
            at = end or len(data)
            if not end:
                break
            line, self._line = self._line, b""
            self._take(line)
        return at, b"".join(pieces)

    def _take(self, line: bytes) -> None:
        """Take a whole line: the break behind a chunk, a size, or a trailer."""
        if self._after_data:
            self._after_data = False
            if line != b"\r\n":
                raise refusal(400)
        elif self._in_trailers:
            self._trailer_bytes += len(line)
            if self._trailer_bytes > MAX_TRAILER_BYTES:
                raise refusal(431)
            if _TRAILER.fullmatch(line) is None:
                raise refusal(400)
            self.ended = line == b"\r\n"
        else:
            found = _SIZE.fullmatch(line)
            if found is None:
                raise refusal(400)
            self._data_bytes = int(found[1], 16)
            self._in_trailers = not self._data_bytes
