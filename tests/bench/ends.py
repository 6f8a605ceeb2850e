"""Shared parts of the benches' sources: a minimal origin, and the upstream of a peer."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from typing import Protocol, cast

from tailrace.ledger.frame import (
    SCHEMA_HASH,
    Credit,
    Detach,
    Heartbeat,
    Hello,
    Opened,
    Resume,
    Splitter,
    decode,
    encode,
)

HEARTBEAT_S = 2.0


class Source(Protocol):
    """A stream to one peer; it ends when it is `over`."""

    over: bool
    floods: bool
    """True if it writes as much as is taken."""

    def grant(self, limit: int, limit_bytes: int | None) -> None:
        """Set the credit that the edge has given on a link."""

    def write_some(self) -> None:
        """To a peer that has room."""


LinkSource = Callable[[asyncio.Transport, Resume, int], Source]
"""Begins the stream of a Resume under a corr."""
HttpSource = Callable[[asyncio.Transport, str], Source]
"""Begins the stream of a request's target, with the head of its answer."""


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


class LinkEnd(asyncio.Protocol):
    """`next_index` is what Opened says."""

    def __init__(self, begin: LinkSource, next_index: int) -> None:
        self._begin = begin
        self._next_index = next_index
        self._splitter = Splitter()
        self._streams: dict[int, Source] = {}

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.write(encode(Hello(SCHEMA_HASH, "bench")))
        self._beat()

    def _beat(self) -> None:
        if not self._transport.is_closing():
            self._transport.write(encode(Heartbeat(1, True, (), ("demo",), ("none",), 30_000)))
            asyncio.get_running_loop().call_later(HEARTBEAT_S, self._beat)

    def data_received(self, data: bytes) -> None:
        for raw in self._splitter.feed(data):
            corr, asked = decode(raw)
            if isinstance(asked, Resume):
                opened = Opened(asked.stream, self._next_index, "", "demo", 0)
                self._transport.write(encode(opened, corr))
                stream = self._streams[corr] = self._begin(self._transport, asked, corr)
                if stream.floods:
                    stream.grant(asked.start + asked.credit, asked.credit_bytes)
            elif isinstance(asked, Credit) and corr in self._streams:
                if self._streams[corr].floods:
                    self._streams[corr].grant(asked.limit, asked.bytes)
            elif isinstance(asked, Detach) and corr in self._streams:
                self._streams.pop(corr).over = True

    def connection_lost(self, exc: Exception | None) -> None:
        for stream in self._streams.values():
            stream.over = True


class HttpEnd(asyncio.Protocol):
    """An HTTP server with one request per connection."""

    def __init__(self, begin: HttpSource) -> None:
        self._begin = begin
        self._head = b""
        self._stream: Source | None = None
        self._has_room = True

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._head += data
        if b"\r\n\r\n" not in self._head:
            return
        target = self._head.split(b" ", 2)[1].decode()
        self._head = b""
        self._stream = self._begin(self._transport, target)
        self._flood()

    def _flood(self) -> None:
        stream = self._stream
        if stream is None or not stream.floods or not self._has_room:
            return
        if not self._transport.is_closing():
            stream.write_some()
            asyncio.get_running_loop().call_soon(self._flood)

    def pause_writing(self) -> None:
        self._has_room = False

    def resume_writing(self) -> None:
        self._has_room = True
        self._flood()

    def connection_lost(self, exc: Exception | None) -> None:
        self._has_room = False
        if self._stream is not None:
            self._stream.over = True


async def serve(link: LinkSource, http: HttpSource, next_index: int) -> None:
    """At the two ports that the command line names, until stdin ends."""
    link_port, http_port = map(int, sys.argv[1:])
    loop = asyncio.get_running_loop()
    await loop.create_server(
        lambda: LinkEnd(link, next_index), "127.0.0.1", link_port, backlog=2048
    )
    await loop.create_server(lambda: HttpEnd(http), "127.0.0.1", http_port, backlog=2048)
    print("ready", flush=True)
    await loop.run_in_executor(None, sys.stdin.read)
