"""One origin: its relay, and its connection, which is made again whenever it is lost.

This is the asyncio shell around a `Relay`. It moves bytes and keeps time, and makes no decisions
about streams.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import asdict
from typing import cast

import structlog

from tailrace.edge.flush import FlushBatch
from tailrace.edge.origins.breaker import origin_breaker
from tailrace.edge.origins.link_protocol import LinkState
from tailrace.edge.origins.load_balancing import Candidate
from tailrace.edge.origins.open_requests import OpenRequests
from tailrace.edge.origins.relay import Relay
from tailrace.edge.origins.route import Route
from tailrace.ledger.errors import OriginUnreachable, TailraceError
from tailrace.ledger.flow.backoff import Backoff
from tailrace.ledger.flow.circuit_breaker import CircuitState
from tailrace.ledger.flow.idle_timer import IdleTimer
from tailrace.ledger.frame import Splitter
from tailrace.ledger.links.transport import Credentials, LinkAddress, dial

LINK_RECONNECT_MIN_S = 0.1
"""Minimum delay before a link is connected again, in seconds."""
LINK_RECONNECT_MAX_S = 2.0
"""Maximum delay before a link is connected again, in seconds."""
LINK_CONNECT_TIMEOUT_S = 5.0
"""Timeout for connecting, and then for the origin's first frame, in seconds. Afterwards Heartbeats
of the origin set the idle timeout."""
LINK_SETTLED_S = 1.0
"""Minimum uptime, in seconds, after which a lost link is connected again without delay."""
WARM_TIERS = ("compiled", "hot")
"""Tiers of models that can serve a request at once."""

log = structlog.get_logger("tailrace.edge")


class Connection(asyncio.Protocol):
    """One connection to an origin; the future `lost` gets the reason when the connection ends."""

    def __init__(self, origin: Origin) -> None:
        loop = asyncio.get_running_loop()
        self.origin = origin
        self.lost: asyncio.Future[Exception | None] = loop.create_future()
        self.silence = IdleTimer(loop.time())
        self._splitter = Splitter()
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # A cast: uvloop's transports have the interface, but not the base class.
        self._transport = cast(asyncio.Transport, transport)
        self.origin.on_connected(self)

    def data_received(self, data: bytes) -> None:
        self.silence.broken()
        self.origin.batch.begin()
        try:
            self.origin.on_frames(self._splitter.feed(data))
        except TailraceError as error:
            self.close(error)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._done(exc)

    @property
    def unsent_bytes(self) -> int:
        return self._transport.get_write_buffer_size() if self._transport else 0

    def write(self, data: bytes) -> None:
        """Write, unless the connection is closing: uvloop's transports would raise."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(data)

    def close(self, reason: Exception | None) -> None:
        self._done(reason)
        if self._transport is not None:
            self._transport.abort()

    def _done(self, reason: Exception | None) -> None:
        """Report the end at once, so that later requests wait for the next connection."""
        if not self.lost.done():
            self.lost.set_result(reason)
            self.origin.on_lost(self)


class Origin:
    """An origin's connection and relay.

    `changed` is called when the relay has pending work. After a read that brought only tokens,
    `batch` is flushed instead.
    """

    def __init__(
        self,
        address: LinkAddress,
        changed: Callable[[], None],
        credentials: Credentials,
        batch: FlushBatch,
        backoff: Backoff | None = None,
        open_requests: OpenRequests | None = None,
    ) -> None:
        self.relay = Relay(secret=credentials.secret, open_requests=open_requests)
        self.batch = batch
        self._credentials = credentials
        self.breaker = origin_breaker()
        self.ledger = ""  # name of the ledger in the last Heartbeat
        self.is_news = False  # the origin's readiness may have changed
        self._opened = 0  # number of streams opened since the last Heartbeat
        self.address, self._address = str(address), address
        self._changed = changed
        self._backoff = backoff or Backoff(LINK_RECONNECT_MIN_S, LINK_RECONNECT_MAX_S)
        self._connection: Connection | None = None
        self._up_at: float | None = None  # when the current link came up, in seconds (`now`)
        self._is_reported = False  # the link has been logged as down

    @property
    def is_up(self) -> bool:
        """True while the link is up."""
        return self.relay.state is LinkState.UP

    @property
    def usable(self) -> bool:
        """True if the origin is connected and has sent a Heartbeat."""
        return self.is_up and self.relay.heartbeat is not None

    @property
    def unsent_bytes(self) -> int:
        """Number of bytes that wait to be sent, because the origin does not read them."""
        return 0 if self._connection is None else self._connection.unsent_bytes

    def candidate(self, now: float) -> Candidate:
        """Return what load balancing needs to know of the origin."""
        heartbeat = self.relay.heartbeat
        if not self.usable or heartbeat is None:
            return Candidate(self.address, up=False, ledger=self.ledger)
        return Candidate(
            self.address,
            ready=heartbeat.ready,
            allowed=self.breaker.allows(now) and not self.relay.is_full,
            models=heartbeat.models,
            cold=frozenset(t.model for t in heartbeat.tiers if t.tier not in WARM_TIERS),
            ledger=heartbeat.ledger,
            streams=heartbeat.streams + self._opened,
            room=heartbeat.room,
        )

    def described(self) -> dict[str, object]:
        """Return the origin's state for operators."""
        heartbeat = self.relay.heartbeat
        if not self.usable or heartbeat is None:
            return {"origin": self.address, "up": False, "ready": False}
        fields: dict[str, object] = {
            "origin": self.address,
            "up": True,
            "ready": heartbeat.ready,
            "reasons": list(heartbeat.reasons),
            "models": list(heartbeat.models),
            "streams": heartbeat.streams,
            "room": heartbeat.room,
        }
        if heartbeat.tiers:
            fields["tiers"] = [asdict(tier) for tier in heartbeat.tiers]
        if self.breaker.state is not CircuitState.CLOSED:
            fields["breaker"] = self.breaker.state.value
        return fields

    def ask(self, route: Route) -> None:
        """Send a new request, or one that another origin could not serve."""
        self.relay.adopt(route)
        self.breaker.sent(now())
        if route.needs.spreads:
            self._opened += 1

    def send(self) -> None:
        """Send the relay's frames in one write."""
        frames = self.relay.frames_to_send()
        if frames and self._connection is not None:
            self._connection.write(b"".join(frames))

    # ---- for the connection ----

    def on_connected(self, connection: Connection) -> None:
        """Handle a new connection."""
        self._connection = connection
        self.relay.connected()
        self._changed()

    def on_lost(self, connection: Connection) -> None:
        """Handle the loss of a connection: its requests wait, move to another origin, or end."""
        if connection is self._connection:
            self._connection = None
            self.relay.disconnected(now())
            self.is_news = True
            self._changed()

    def on_frames(self, frames: list[bytes]) -> None:
        """Handle the frames of one read."""
        relay = self.relay
        before = relay.heartbeat
        try:
            relay.receive(frames)
        finally:
            heartbeat = relay.heartbeat
            if heartbeat is not None and heartbeat is not before:
                self.ledger, self._opened, self.is_news = heartbeat.ledger, 0, True
            if relay.is_idle and not self.is_news:  # the read brought only tokens
                self.batch.flush()
            else:
                for worked in relay.outcomes():
                    self.breaker.succeeded() if worked else self.breaker.failed(now())
                self._changed()
        if self._up_at is None and self.is_up:
            self._backoff.reset()
            self._up_at, self._is_reported = now(), False
            log.info("origin link up", origin=self.address, streams=self.relay.route_count)

    # ---- connecting ----

    async def connect_forever(self) -> None:
        """Connect, and connect again whenever the connection is lost."""
        try:
            while True:
                self._up_at = None
                reason = await self._connect_once()
                # Log one line per outage.
                if not self._is_reported:
                    log.warning("origin link down", origin=self.address, reason=str(reason))
                self._is_reported = True
                if not self._was_sound():
                    await asyncio.sleep(self._backoff.next_delay_s())
        finally:
            self.close(None)

    def _was_sound(self) -> bool:
        return self._up_at is not None and now() - self._up_at >= LINK_SETTLED_S

    async def _connect_once(self) -> Exception:
        """Connect, wait for the end of the connection, and return its reason."""
        try:
            async with asyncio.timeout(LINK_CONNECT_TIMEOUT_S):
                _, connection = await dial(
                    lambda: Connection(self), self._address, self._credentials
                )
        except OSError as error:  # TimeoutError is an OSError
            self.close(error)
            return error
        reason = await connection.lost
        return reason or OriginUnreachable("the origin closed the link")

    def close(self, reason: Exception | None) -> None:
        """Close the connection."""
        if self._connection is not None:
            self._connection.close(reason)

    def look(self, at: float) -> None:
        """Close a connection that has been silent for longer than the origin's idle timeout."""
        connection, heartbeat = self._connection, self.relay.heartbeat
        timeout_s = LINK_CONNECT_TIMEOUT_S
        if heartbeat is not None and heartbeat.patience_ms:
            timeout_s = heartbeat.patience_ms / 1000
        if connection is not None and connection.silence.seconds(at) > timeout_s:
            connection.close(OriginUnreachable(f"the origin was silent for {timeout_s:g} s"))


def now() -> float:
    """Return the time of the event loop, in seconds."""
    return asyncio.get_running_loop().time()
