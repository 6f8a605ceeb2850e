"""Reads the protocols that a TLS client offers (ALPN), and refuses clients without a common one.

RFC 7301, 3.2: a server that speaks none of the offered protocols ends the handshake with
`no_application_protocol`, so that bytes of one protocol are never read as another's (the ALPACA
attack). Python's ssl continues without a protocol instead, and does not report the offered ones. So
the ClientHello is parsed here before OpenSSL gets it.
"""

from __future__ import annotations

import asyncio
from typing import cast

ALPN = (b"h2", b"http/1.1")
"""The protocols that the edge speaks over TLS."""
NO_APPLICATION_PROTOCOL = b"\x15\x03\x03\x00\x02\x02\x78"
"""A TLS record with the fatal alert 120, no_application_protocol."""
MAX_HELLO_BYTES = 64 << 10
"""Maximum length of a ClientHello; the connection of a longer one is aborted."""
_HANDSHAKE, _CLIENT_HELLO, _ALPN = 22, 1, 16


class NotWhole(Exception):
    """The ClientHello is not complete yet."""


class _Fields:
    """Reads the fields of a TLS message; raises IndexError if the message is too short."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    @property
    def left(self) -> bool:
        return self._at < len(self._data)

    def take(self, size: int) -> bytes:
        if self._at + size > len(self._data):
            raise IndexError
        self._at += size
        return self._data[self._at - size : self._at]

    def number(self, size: int) -> int:
        return int.from_bytes(self.take(size), "big")

    def vector(self, size: int) -> bytes:
        """Return a field that follows its length, which is a number of `size` bytes."""
        return self.take(self.number(size))


def offered_protocols(data: bytes) -> list[bytes] | None:
    """Return the protocols that a ClientHello offers; None if it offers none, or is not valid.

    Raises NotWhole until it is complete.
    """
    hello, records = b"", _Fields(data)
    try:
        while len(hello) < 4 or len(hello) < 4 + int.from_bytes(hello[1:4], "big"):
            if records.number(1) != _HANDSHAKE:
                return None  # OpenSSL reports the error
            records.take(2)
            hello += records.vector(2)
    except IndexError:
        raise NotWhole from None
    try:
        return _offered(_Fields(hello))
    except IndexError:
        return None


def _offered(hello: _Fields) -> list[bytes] | None:
    if hello.number(1) != _CLIENT_HELLO:
        return None
    hello.take(3 + 2 + 32)  # the message's length, version and random
    hello.vector(1)  # session id
    hello.vector(2)  # cipher suites
    hello.vector(1)  # compression methods
    extensions = _Fields(hello.vector(2))
    while extensions.left:
        kind, content = extensions.number(2), _Fields(extensions.vector(2))
        if kind == _ALPN:
            names = _Fields(content.vector(2))
            offered = []
            while names.left:
                offered.append(names.vector(1))
            return offered
    return None


class AlpnCheck(asyncio.BufferedProtocol):
    """Protocol in front of a transport's TLS protocol, until the ClientHello has been checked."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._inner = cast(asyncio.BufferedProtocol, transport.get_protocol())
        self._buffer = memoryview(b"")
        self._hello = b""

    def get_buffer(self, sizehint: int) -> memoryview:
        self._buffer = memoryview(self._inner.get_buffer(sizehint))
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        self._hello += bytes(self._buffer[:nbytes])
        try:
            offered = offered_protocols(self._hello)
        except NotWhole:
            if len(self._hello) > MAX_HELLO_BYTES:
                self._transport.abort()
            else:
                self._inner.buffer_updated(nbytes)
            return
        if offered is not None and not set(offered) & set(ALPN):
            self._transport.write(NO_APPLICATION_PROTOCOL)
            self._transport.close()
            return
        self._transport.set_protocol(self._inner)
        self._inner.buffer_updated(nbytes)

    def eof_received(self) -> bool | None:
        return self._inner.eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        self._inner.connection_lost(exc)

    def pause_writing(self) -> None:
        self._inner.pause_writing()

    def resume_writing(self) -> None:
        self._inner.resume_writing()
