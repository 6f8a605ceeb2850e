"""The origin link: one TCP connection to an origin, made again whenever it is lost.

Where several origins share a ledger any of them serves any stream, so the next one is asked
for the rest of what a lost one was sending. The thin asyncio shell around `Relay`: it moves
bytes and keeps time, and decides nothing about streams.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from random import Random
from typing import cast

import structlog

from edge.origins.relay import RETRY_AFTER_MS, LinkState, Relay, Sink, spread
from ledger.backoff import Backoff, spread_ms
from ledger.errors import OriginUnreachable, Overloaded, TailraceError
from ledger.frame import Credit, Detach, Heartbeat, Splitter, corr_of, encode, error_frame, tag_of
from ledger.silence import Silence

LINK_RECONNECT_MIN_S = 0.1
LINK_RECONNECT_MAX_S = 2.0
LINK_CONNECT_TIMEOUT_S = 5.0
"""For connecting, and then for the origin's first word; from there on it says itself, in its
Heartbeats, after how long a silence it is to be taken for dead."""
LINK_SETTLED_S = 1.0
"""A link that was up for so long was sound: when it is lost, the next origin is tried at once."""
LINK_TICK_S = 0.05
"""How late a deadline may be noticed, and how finely the heartbeats of clients are spread."""
MAX_LINK_BUFFER_BYTES = 8 << 20
"""Requests are refused while the origin leaves this much unread."""
MAX_HELD_BYTES = 64 << 20
"""Requests are refused while so many bytes of others wait for an answer, or for a link."""

log = structlog.get_logger("tailrace.edge")


class Connection(asyncio.Protocol):
    """One TCP connection to the origin; `lost` is done when it ends, and says why."""

    def __init__(self, link: Link) -> None:
        loop = asyncio.get_running_loop()
        self.link = link
        self.lost: asyncio.Future[Exception | None] = loop.create_future()
        self.silence = Silence(loop.time())
        self._splitter = Splitter()
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # A cast: uvloop's transports have the interface, but not the base class.
        self._transport = cast(asyncio.Transport, transport)
        self.link.on_connected(self)

    def data_received(self, data: bytes) -> None:
        self.silence.broken()
        try:
            self.link.on_frames(self._splitter.feed(data))
        except TailraceError as error:
            self.close(error)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._done(exc)

    @property
    def unsent_bytes(self) -> int:
        return self._transport.get_write_buffer_size() if self._transport else 0

    def write(self, data: bytes) -> None:
        """Nothing where the connection is ending: uvloop's transports raise then."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(data)

    def close(self, reason: Exception | None) -> None:
        self._done(reason)
        if self._transport is not None:
            self._transport.abort()

    def _done(self, reason: Exception | None) -> None:
        """The link learns of it in this very turn: what is submitted in the next one must wait
        for another connection, and not be written to this one."""
        if not self.lost.done():
            self.lost.set_result(reason)
            self.link.on_lost(self)


class Link:
    """The way to an origin for everything that the edge serves.

    `addresses` are (host, port) of origins that share a ledger, at least one. They are tried
    in turn; only when all have failed in a row does the `backoff` make it wait.
    """

    def __init__(self, *addresses: tuple[str, int], backoff: Backoff | None = None) -> None:
        self._addresses = addresses
        self._turn = 0  # the address in use, or to be tried next
        self._misses = 0  # connections in a row that did not come up and settle
        self._up_at: float | None = None  # since when this connection is up
        self._relay = Relay()
        self._random = Random()
        self._backoff = backoff or Backoff(LINK_RECONNECT_MIN_S, LINK_RECONNECT_MAX_S)
        self._connection: Connection | None = None
        self._closing: TailraceError | None = None

    @property
    def address(self) -> str:
        """Of the origin that is connected, or to be tried next."""
        return _spell(self._addresses[self._turn])

    @property
    def up(self) -> bool:
        return self._relay.state is LinkState.UP

    @property
    def heartbeat(self) -> Heartbeat:
        """The origin's last word on its readiness; without a link it is not ready."""
        if self._relay.heartbeat is not None:
            return self._relay.heartbeat
        places = ", ".join(_spell(address) for address in self._addresses)
        return Heartbeat(0, ready=False, reasons=(f"no link to the origin at {places}",))

    @property
    def _patience_s(self) -> float:
        heartbeat = self._relay.heartbeat
        if heartbeat is None or heartbeat.patience_ms == 0:
            return LINK_CONNECT_TIMEOUT_S
        return heartbeat.patience_ms / 1000

    @staticmethod
    def now() -> float:
        return asyncio.get_running_loop().time()

    # ---- for views and sessions ----

    def submit(self, sink: Sink, raw: bytes) -> None:
        """Send one client frame; every answer, a refusal too, comes through `deliver`."""
        refusal = self._refusal(tag_of(raw))
        if refusal is not None:
            sink.deliver(encode(error_frame(refusal), corr_of(raw)))
            return
        self._relay.submit(sink, raw, self.now())
        self._flush()

    def watch(self, sink: Sink) -> None:
        """Deliver the origin's heartbeats to this sink too, and a StreamError at shutdown."""
        self._relay.watch(sink)
        self._flush()

    def forget(self, sink: Sink) -> None:
        """The client has gone: detach its streams, which run on."""
        self._relay.forget(sink)
        self._flush()

    @property
    def route_count(self) -> int:
        """Requests that are under way."""
        return self._relay.route_count

    def refuse_new(self, error: TailraceError) -> None:
        """Refuse what is asked from now on; what is under way goes on."""
        self._closing = error

    def refuse_all(self, error: TailraceError) -> None:
        """End every stream here with `error`, and refuse new ones with it."""
        self._closing = error
        self._relay.refuse_all(error)
        self._flush()

    def _refusal(self, tag: int) -> TailraceError | None:
        if tag in (Credit.tag, Detach.tag):
            return None
        if self._closing is not None:
            return spread(self._closing, self._random)
        if self._connection is not None and self._connection.unsent_bytes > MAX_LINK_BUFFER_BYTES:
            return self._overloaded("the link to the origin is full")
        if self._relay.is_full:
            return self._overloaded("too many streams are open at the origin")
        if self._relay.held_bytes > MAX_HELD_BYTES:
            return self._overloaded("too many requests wait for the origin")
        return None

    def _overloaded(self, message: str) -> Overloaded:
        return Overloaded(message, retry_after_ms=spread_ms(RETRY_AFTER_MS, self._random))

    # ---- for the connection ----

    def on_connected(self, connection: Connection) -> None:
        self._connection = connection
        self._relay.connected()
        self._flush()

    def on_lost(self, connection: Connection) -> None:
        """Routes are asked for again on the next connection, or end here."""
        if connection is self._connection:
            self._connection = None
            self._relay.disconnected(self.now())
            self._flush()

    def on_frames(self, frames: list[bytes]) -> None:
        was_up = self.up
        try:
            self._relay.receive(frames)
        finally:
            self._flush()
        if self.up and not was_up:
            self._backoff.reset()
            self._up_at = self.now()
            log.info("origin link up", origin=self.address, streams=self._relay.route_count)

    def _flush(self) -> None:
        """Carry out what the relay has decided, all of it in one write."""
        to_send = self._relay.frames_to_send()
        if to_send and self._connection is not None:
            self._connection.write(b"".join(to_send))
        for sink, raw in self._relay.frames_to_deliver():
            sink.deliver(raw)

    # ---- its life ----

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Keep the link up, as far as the origin lets it, while the block runs."""
        tasks = [asyncio.create_task(self._connect_forever()), asyncio.create_task(self._tick())]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            if self._connection is not None:
                self._connection.close(None)

    async def _connect_forever(self) -> None:
        while True:
            self._up_at = None
            reason = await self._connect_once(*self._addresses[self._turn])
            self._missed(reason)
            if self._misses % len(self._addresses) == 0:
                await asyncio.sleep(self._backoff.next_delay_s())

    def _missed(self, reason: Exception) -> None:
        """The connection is over: it is the next origin's turn."""
        if self._up_at is not None and self.now() - self._up_at >= LINK_SETTLED_S:
            self._misses = 0
        # One line per outage and origin: the failures that follow say nothing new.
        if self._up_at is not None or self._misses < len(self._addresses):
            log.warning("origin link down", origin=self.address, reason=str(reason))
        self._turn = (self._turn + 1) % len(self._addresses)
        self._misses += 1

    async def _connect_once(self, host: str, port: int) -> Exception:
        """One connection from its beginning to its end; gives the reason of the end."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(LINK_CONNECT_TIMEOUT_S):
                _, connection = await loop.create_connection(lambda: Connection(self), host, port)
        except OSError as error:  # TimeoutError is one
            return error
        reason = await connection.lost
        return reason or OriginUnreachable("the origin closed the link")

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(LINK_TICK_S)
            now = self.now()
            self._relay.expire(now)
            self._relay.beat(now)
            self._flush()
            connection = self._connection
            if connection is not None and connection.silence.seconds(now) > self._patience_s:
                connection.close(
                    OriginUnreachable(f"the origin was silent for {self._patience_s:g} s")
                )


def _spell(address: tuple[str, int]) -> str:
    return f"{address[0]}:{address[1]}"
