"""Server-sent events as bytes come in (WHATWG HTML, 9.2.5 and 9.2.6), strictly and bounded.

A plain object without I/O. What the standard tells a browser to forgive is forgiven (comments,
unknown fields, any of the three line ends, a byte order mark); bytes that are not UTF-8, and
lines or events over their limit, are not: this reader feeds a ledger, not a page.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ledger.errors import Unavailable

MAX_LINE_BYTES = 1 << 20
MAX_EVENT_BYTES = 1 << 20
"""Of an event's data lines together."""
BYTE_ORDER_MARK = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class ServerEvent:
    """`name` is `message` where the server gave none."""

    name: str
    data: str


class EventReader:
    """Fed bytes in any pieces, gives whole events; one that is cut off is never given."""

    def __init__(self) -> None:
        self._rest = bytearray()
        self._searched = 0  # bytes of `_rest` that hold no line end
        self._after_cr = False  # an LF now belongs to the line end before it
        self._at_start = True
        self._name = ""
        self._data: list[str] = []
        self._data_bytes = 0

    def feed(self, data: bytes) -> Iterator[ServerEvent]:
        """The events that `data` completes; then Unavailable where it is no event stream.

        To be read to its end before more is fed.
        """
        self._rest += data
        while (line := self._next_line()) is not None:
            if (event := self._take(line)) is not None:
                yield event
        if len(self._rest) > MAX_LINE_BYTES:
            raise rubbish(f"a line of more than {MAX_LINE_BYTES} bytes")

    def _next_line(self) -> bytes | None:
        """A line without its end: CRLF, LF or CR. A CR ends its line without waiting for an LF."""
        if self._after_cr and self._rest:
            self._after_cr = False
            if self._rest[0] == 0x0A:
                del self._rest[0]
        at = _line_end(self._rest, self._searched)
        if at < 0:
            self._searched = len(self._rest)
            return None
        line = bytes(self._rest[:at])
        self._after_cr = self._rest[at] == 0x0D
        del self._rest[: at + 1]
        self._searched = 0
        if self._at_start:
            self._at_start = False
            line = line.removeprefix(BYTE_ORDER_MARK)
        return line

    def _take(self, line: bytes) -> ServerEvent | None:
        if not line:
            return self._dispatch()
        try:
            field, _, value = line.decode().partition(":")
        except UnicodeDecodeError as error:
            raise rubbish("bytes that are not UTF-8") from error
        value = value.removeprefix(" ")
        if field == "data":
            self._data_bytes += len(line)
            if self._data_bytes > MAX_EVENT_BYTES:
                raise rubbish(f"an event of more than {MAX_EVENT_BYTES} bytes")
            self._data.append(value)
        elif field == "event":
            self._name = value
        return None  # a comment's field is empty; id and retry are about reconnecting

    def _dispatch(self) -> ServerEvent | None:
        event = ServerEvent(self._name or "message", "\n".join(self._data)) if self._data else None
        self._name, self._data, self._data_bytes = "", [], 0
        return event


def _line_end(data: bytearray, start: int) -> int:
    """The first CR or LF from `start` on, or -1."""
    lf = data.find(b"\n", start)
    cr = data.find(b"\r", start, lf if lf >= 0 else len(data))
    return cr if cr >= 0 else lf


def rubbish(what: str) -> Unavailable:
    return Unavailable(f"the upstream server sent {what}", code="upstream_rubbish")
