"""The writer of one HTTP/1.1 response, whose body is in chunks if its length is not known."""

from __future__ import annotations

from typing import Protocol

import h11

from tailrace.edge.server.context import TcpContext
from tailrace.edge.server.interfaces import Headers, Transport

WITHOUT_BODY = frozenset((204, 304))
"""Statuses of responses without a body (RFC 9110, 6.4.1)."""
LAST_CHUNK = b"0\r\n\r\n"
CLOSE = (b"connection", b"close")
"""The header of a response after which the connection is closed."""


class Http1Connection(Protocol):
    """The connection of a response, as its writer uses it."""

    def closes_behind(self, status: int) -> bool:
        """Return True if the connection ends with a response of this status that begins now."""

    def ended(self, closes: bool) -> None:
        """Go on behind a response that is complete or broken off; `closes`: by closing."""


class Http1Writer:
    """One response, in chunks unless its length is declared.

    To a client of HTTP/1.0, which knows no chunks, it ends with the connection.
    """

    __slots__ = (
        "_chunked",
        "_closes",
        "_connection",
        "_context",
        "_head",
        "_http1",
        "_is_head",
        "_open",
        "_transport",
        "writable_bytes",
    )

    def __init__(
        self,
        http1: Http1Connection,
        transport: Transport,
        context: TcpContext,
        connection: h11.Connection,
        method: str,
    ) -> None:
        """Prepare the response to the request that `connection` has parsed."""
        self._http1 = http1
        self._transport = transport
        self.writable_bytes = transport.writable_bytes
        self._context = context
        self._connection: h11.Connection | None = connection
        self._head = b""  # until it leaves with what comes first
        self._is_head = method == "HEAD"
        self._chunked = True
        self._closes = False
        self._open = True

    @property
    def started(self) -> bool:
        """True once the head has been given."""
        return self._connection is None

    def go_on(self) -> None:
        """Send the interim response that asks for the body."""
        if self._open and self._connection is not None:
            interim = h11.InformationalResponse(status_code=100, headers=[])
            self._transport.write(self._connection.send(interim) or b"")

    def start(self, status: int, headers: Headers) -> None:
        """Send the head, with what follows it in the same callback."""
        if not self._open or self._connection is None:
            return
        connection, self._connection = self._connection, None
        fields = [*headers, *self._context.headers()]
        if self._http1.closes_behind(status):
            fields.append(CLOSE)
        response = h11.Response(status_code=status, headers=fields)
        self._head = connection.send(response) or b""
        self._chunked = not (
            connection.their_http_version == b"1.0"
            or self._is_head
            or status in WITHOUT_BODY
            or any(name == b"content-length" for name, _ in headers)
        )
        self._closes = b"\r\nconnection: close\r\n" in self._head.lower()
        self._context.batch.mark_dirty(self)

    def flush(self) -> None:
        """Send the head alone, if nothing of the body has come in this callback."""
        if self._open and self._head:
            head, self._head = self._head, b""
            self._transport.write(head)

    def write(self, data: bytes) -> None:
        """Send a piece of the body."""
        if not (self._open and data):
            return
        if self._chunked:
            data = b"%x\r\n%b\r\n" % (len(data), data)
        if self._head:
            data, self._head = self._head + data, b""
        self._transport.write(data)

    def end(self) -> None:
        """End the response."""
        if self._open:
            self._open = False
            self._transport.write(self._head + (LAST_CHUNK if self._chunked else b""))
            self._http1.ended(self._closes)

    def reset(self) -> None:
        """Close the connection behind what was written: the last chunk is missing."""
        if self._open:
            self._open = False
            if self._head:
                self._transport.write(self._head)
            self._http1.ended(True)

    def close(self) -> None:
        """Drop all further output, because the connection is lost."""
        self._open = False
        self._connection = None
