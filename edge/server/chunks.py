"""A strict decoder of chunked request bodies (RFC 9112, 7.1).

h11 also accepts spaces after a chunk size, sizes of 20 digits, and a bare CR in a chunk extension.
A server in front of this one may read such a body differently, so it is refused here.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from tailrace.edge.errors import refusal
from tailrace.edge.server.flood import EMPTY_POINTS, SMALL_PIECE_BYTES
from tailrace.ledger.errors import CallerError

MAX_CHUNK_LINE_BYTES = 4096
"""Maximum length of the line with a chunk's size and extensions, in bytes."""
MAX_TRAILER_BYTES = 16 << 10
"""Maximum total length of a body's trailer lines, in bytes."""

_SIZE = re.compile(rb"([0-9A-Fa-f]{1,15})(?:;[\t\x20-\x7e\x80-\xff]*)?\r\n")
_TRAILER = re.compile(rb"[\t\x20-\x7e\x80-\xff]*\r\n")


class ChunkedBody:
    """Decoder of one body; `ended` is set once its last line has been read.

    `spend` charges points of the client's flood budget; it returns False if there are none left.
    """

    def __init__(self, spend: Callable[[float], bool]) -> None:
        self.ended = False
        self._spend = spend
        self._was_small = False  # the chunk before the next one was small
        self._data_bytes = 0  # bytes of the current chunk that have not arrived
        self._line = b""  # the part of a line that has arrived
        self._in_trailers = False
        self._after_data = False  # the next line is the line break after a chunk's data
        self._trailer_bytes = 0

    def feed(self, data: bytes) -> tuple[int, bytes]:
        """Decode input; return how many of its bytes belong to the body, and the decoded data.

        Raises CallerError if the chunked coding is not valid, or too many chunks are small.
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
        """Handle a complete line: the line break after a chunk, a chunk size, or a trailer."""
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
            # The last chunk may be small, because any body may end with less than a whole piece.
            if self._was_small and self._data_bytes and not self._spend(EMPTY_POINTS):
                raise _too_many_small()
            self._was_small = self._data_bytes < SMALL_PIECE_BYTES


def _too_many_small() -> CallerError:
    return CallerError(
        "too many small chunks in the body",
        code="bad_request",
        hint=f"send chunks of at least {SMALL_PIECE_BYTES} bytes",
    )
