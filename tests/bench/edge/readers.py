"""Clients that count what comes, and look at the time that some of it says."""

from __future__ import annotations

import asyncio
import re
import socket
import ssl
from functools import partial
from time import monotonic
from typing import cast

from tailrace.ledger.frame import SCHEMA_HASH, Credit, Hello, Resume, encode

SSE, FRAMES, WS, H2 = "sse", "frames", "ws", "h2"
CREDIT = 1024
LOOKED_AT = 7  # one read in this many has its latency taken
_TEXT = re.compile(rb"[0-9a-f]{6}(?=\"|[\x80-\xff][\x01-\x7f])")
_CLOCK_US = 1 << 24
WS_HANDSHAKE = (
    b"GET /v1/ws HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
    b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
)
_OPEN = 2**31 - 1
H2_PREFACE = (
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
    + b"\x00\x00\x06\x04\x00\x00\x00\x00\x00\x00\x04"
    + _OPEN.to_bytes(4)
    + b"\x00\x00\x04\x08\x00\x00\x00\x00\x00"
    + (_OPEN - 65_535).to_bytes(4)
)
"""The beginning of HTTP/2 (RFC 9113) with windows that are wide open: the client never has to
open them again."""
_ACCEPT = {SSE: b"text/event-stream", FRAMES: b"application/vnd.tailrace.frames"}


def clock() -> int:
    """Microseconds, in six hexadecimal digits."""
    return int(monotonic() * 1e6) % _CLOCK_US


def stream_id(kind: int, number: int) -> bytes:
    return bytes([kind, *number.to_bytes(15, "big")])


def h2_request(path: bytes, accept: bytes) -> bytes:
    """Return a client preface and a first request, in plain HPACK (RFC 7541)."""
    fields = ((b"\x04", path), (b"\x01", b"localhost"), (b"\x0f\x04", accept))
    block = b"\x82\x86" + b"".join(name + bytes((len(value),)) + value for name, value in fields)
    return H2_PREFACE + len(block).to_bytes(3) + b"\x01\x05\x00\x00\x00\x01" + block


def message(payload: bytes) -> bytes:
    """Return a client's binary message (RFC 6455): masked, with a mask that changes nothing."""
    size = len(payload)
    head = bytes((0x82, 0x80 | size)) if size < 126 else b"\x82\xfe" + size.to_bytes(2)
    return head + bytes(4) + payload


class Reader(asyncio.Protocol):
    """One connection with one stream."""

    def __init__(self, view: str, stream: bytes | None) -> None:
        self.view = view
        self.frames = 0
        self.latencies_s: list[float] = []
        self.first_s: float | None = None
        self.begun = asyncio.Event()
        self._stream = stream
        self._asked_at = 0.0
        self._reads = 0
        self._granted = CREDIT

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._asked_at = monotonic()
        self.ask()

    def ask(self) -> None:
        if self.view == WS:
            asked = encode(Hello(SCHEMA_HASH, "bench"))
            if self._stream is not None:
                asked += encode(Resume(self._stream, credit=CREDIT), 1)
            self._transport.write(WS_HANDSHAKE + message(asked))
        elif self._stream is not None:
            path = b"/v1/generate/" + self._stream.hex().encode()
            if self.view == H2:
                self._transport.write(h2_request(path, _ACCEPT[SSE]))
                return
            head = b"GET %b HTTP/1.1\r\nHost: localhost\r\nAccept: %b\r\n\r\n"
            self._transport.write(head % (path, _ACCEPT[self.view]))

    def data_received(self, data: bytes) -> None:
        came = data.count(b"data: ") if self.view in (SSE, H2) else len(_TEXT.findall(data))
        if not came:
            return
        if self.first_s is None:
            self.first_s = monotonic() - self._asked_at
            self.begun.set()
        self.frames += came
        self._reads += 1
        if self._reads % LOOKED_AT == 0 and (found := _TEXT.search(data)) is not None:
            self.latencies_s.append((clock() - int(found[0], 16)) % _CLOCK_US / 1e6)
        if self.view == WS and self._granted - self.frames < CREDIT // 2:
            self._granted = self.frames + CREDIT
            self._transport.write(message(encode(Credit(self._granted), 1)))

    def close(self) -> None:
        self._transport.abort()


async def connect(
    port: int,
    view: str,
    kind: int | None,
    count: int,
    first: int = 0,
    tls: ssl.SSLContext | None = None,
) -> list[Reader]:
    """Connect `count` readers, one after another, each of a stream of its own."""
    loop = asyncio.get_running_loop()
    readers: list[Reader] = []
    for n in range(first, first + count):
        stream = None if kind is None else stream_id(kind, n)
        make = partial(Reader, view, stream)
        _, reader = await loop.create_connection(make, "127.0.0.1", port, ssl=tls)
        readers.append(reader)
    return readers


def trusting() -> ssl.SSLContext:
    """Return a TLS context for our own server, whose certificate has no authority."""
    tls = ssl.create_default_context()
    tls.check_hostname, tls.verify_mode = False, ssl.CERT_NONE
    return tls


def stalled(
    port: int,
    view: str,
    kind: int,
    number: int,
    accepts: bytes,
    *,
    tls: ssl.SSLContext | None = None,
) -> socket.socket:
    """Return a client that asks, and reads nothing."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    client.connect(("127.0.0.1", port))
    if tls is not None:
        client = tls.wrap_socket(client)
    if view == WS:
        asked = encode(Hello(SCHEMA_HASH, "bench"))
        asked += encode(Resume(stream_id(kind, number), credit=CREDIT), 1)
        client.sendall(WS_HANDSHAKE + message(asked))
    else:
        path = f"/v1/generate/{stream_id(kind, number).hex()}".encode()
        client.sendall(
            b"GET %b HTTP/1.1\r\nHost: localhost\r\nAccept: %b\r\n\r\n" % (path, accepts)
        )
    return client
