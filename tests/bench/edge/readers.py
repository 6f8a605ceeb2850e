"""Clients that count what comes, and look at the time that some of it says."""

from __future__ import annotations

import asyncio
import re
import socket
from functools import partial
from time import monotonic
from typing import cast

from ledger.frame import SCHEMA_HASH, Credit, Hello, Resume, encode

SSE, FRAMES, WS = "sse", "frames", "ws"
CREDIT = 1024
LOOKED_AT = 7  # of so many reads one has its latency taken
_TEXT = re.compile(rb"[0-9]{6}(?=\"|[\x80-\xff][\x01-\x7f])")
_HANDSHAKE = (
    b"GET /v1/ws HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
    b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
)
_ACCEPT = {SSE: b"text/event-stream", FRAMES: b"application/vnd.tailrace.frames"}


def stream_id(kind: int, number: int) -> bytes:
    return bytes([kind, *number.to_bytes(15, "big")])


def message(payload: bytes) -> bytes:
    """A client's binary message (RFC 6455): masked, with a mask that changes nothing."""
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
            self._transport.write(_HANDSHAKE + message(asked))
        elif self._stream is not None:
            path = b"/v1/generate/" + self._stream.hex().encode()
            head = b"GET %b HTTP/1.1\r\nHost: localhost\r\nAccept: %b\r\n\r\n"
            self._transport.write(head % (path, _ACCEPT[self.view]))

    def data_received(self, data: bytes) -> None:
        came = data.count(b"data: ") if self.view == SSE else len(_TEXT.findall(data))
        if not came:
            return
        if self.first_s is None:
            self.first_s = monotonic() - self._asked_at
            self.begun.set()
        self.frames += came
        self._reads += 1
        if self._reads % LOOKED_AT == 0 and (found := _TEXT.search(data)) is not None:
            late = (int(monotonic() * 1e5) - int(found[0])) % 1_000_000
            self.latencies_s.append(late / 1e5)
        if self.view == WS and self._granted - self.frames < CREDIT // 2:
            self._granted = self.frames + CREDIT
            self._transport.write(message(encode(Credit(self._granted), 1)))

    def close(self) -> None:
        self._transport.abort()


async def connect(
    port: int, view: str, kind: int | None, count: int, first: int = 0
) -> list[Reader]:
    """So many readers of streams of their own, asked for one after another."""
    loop = asyncio.get_running_loop()
    readers: list[Reader] = []
    for n in range(first, first + count):
        stream = None if kind is None else stream_id(kind, n)
        _, reader = await loop.create_connection(partial(Reader, view, stream), "127.0.0.1", port)
        readers.append(reader)
    return readers


def stalled(port: int, view: str, kind: int, number: int, accepts: bytes) -> socket.socket:
    """A client that asks, and reads nothing."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    client.connect(("127.0.0.1", port))
    if view == WS:
        asked = encode(Hello(SCHEMA_HASH, "bench"))
        asked += encode(Resume(stream_id(kind, number), credit=CREDIT), 1)
        client.sendall(_HANDSHAKE + message(asked))
    else:
        path = f"/v1/generate/{stream_id(kind, number).hex()}".encode()
        client.sendall(
            b"GET %b HTTP/1.1\r\nHost: localhost\r\nAccept: %b\r\n\r\n" % (path, accepts)
        )
    return client
