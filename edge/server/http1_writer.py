"""The writer of one HTTP/1.1 response, whose body is chunked if its length is not known."""

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
    """The methods of a connection that the writer of its response calls."""

    def closes_behind(self, status: int) -> bool:
        """Return True if the connection must close after the response that begins now."""

    def ended(self, closes: bool) -> None:
        """Handle the end of a response; close the connection if `closes`."""


class Http1Writer:
    """The writer of one response, which is chunked unless it has a `Content-Length`.

    HTTP/1.0 has no chunks: the end of the connection then marks the end of the response.
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
        self._head = b""  # the response's head, until it is sent with the first body data
        self._is_head = method == "HEAD"
        self._chunked = True
        self._closes = False
        self._open = True

    @property
    def started(self) -> bool:
        """True once `start` has been called."""
        return self._connection is None

    def go_on(self) -> None:
        """Send the interim response `100 Continue`, which asks for the body."""
        if self._open and self._connection is not None:
            interim = h11.InformationalResponse(status_code=100, headers=[])
            self._transport.write(self._connection.send(interim) or b"")

    def start(self, status: int, headers: Headers) -> None:
        """Send the head, together with body data that is written in the same callback."""
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
        """Send the head alone, if no body data was written in this callback."""
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
        """Close the connection after the written data; the client sees that the end is missing."""
        if self._open:
            self._open = False
            if self._head:
                self._transport.write(self._head)
            self._http1.ended(True)

    def close(self) -> None:
        """Drop all further output, because the connection is lost."""
        self._open = False
        self._connection = None
