"""One origin as this edge sees it: its connection, made again whenever it is lost, and its routes.

The thin asyncio shell around a `Relay`: it moves bytes and keeps time, and decides nothing about
streams.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import asdict
from typing import cast

import structlog

from tailrace.edge.flush import FlushBatch
from tailrace.edge.origins.breaker import origin_breaker
from tailrace.edge.origins.load_balancing import Candidate
from tailrace.edge.origins.open_requests import OpenRequests
from tailrace.edge.origins.relay import LinkState, Relay
from tailrace.ledger.errors import OriginUnreachable, TailraceError
from tailrace.ledger.flow.backoff import Backoff
from tailrace.ledger.flow.circuit_breaker import CircuitState
from tailrace.ledger.flow.idle_timer import Silence
from tailrace.ledger.frame import Splitter
from tailrace.ledger.links.transport import Credentials, LinkAddress, dial

LINK_RECONNECT_MIN_S = 0.1
LINK_RECONNECT_MAX_S = 2.0
LINK_CONNECT_TIMEOUT_S = 5.0
"""For connecting, and then for the origin's first word; from there on it says itself, in its
Heartbeats, after how long a silence it is to be taken for dead."""
LINK_SETTLED_S = 1.0
"""A link that was up for so long was sound: when it is lost, it is made again at once."""
WARM_TIERS = ("compiled", "hot")
"""Of a model that can be asked at once."""

log = structlog.get_logger("tailrace.edge")


class Connection(asyncio.Protocol):
    """One connection to the origin; `lost` is done when it ends, and says why."""

    def __init__(self, origin: Origin) -> None:
        loop = asyncio.get_running_loop()
        self.origin = origin
        self.lost: asyncio.Future[Exception | None] = loop.create_future()
        self.silence = Silence(loop.time())
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
        """Nothing where the connection is ending: uvloop's transports raise then."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(data)

    def close(self, reason: Exception | None) -> None:
        self._done(reason)
        if self._transport is not None:
            self._transport.abort()

    def _done(self, reason: Exception | None) -> None:
        """The origin learns of it in this very turn: what is submitted in the next one must wait
        for another connection, and not be written to this one."""
        if not self.lost.done():
            self.lost.set_result(reason)
            self.origin.on_lost(self)


class Origin:
    """`changed` is called whenever the relay has something to be carried out; what else the link
    has brought is in `batch`, which is flushed."""

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
        self.ledger = ""  # as it was told last
        self.is_news = False  # what is known of it has changed
        self.opened = 0  # new streams since its last Heartbeat, which it does not tell of yet
        self.address, self._address = str(address), address
        self._changed = changed
        self._backoff = backoff or Backoff(LINK_RECONNECT_MIN_S, LINK_RECONNECT_MAX_S)
        self._connection: Connection | None = None
        self._up_at: float | None = None  # since when this connection is up
        self._is_told = False  # that it is down

    @property
    def is_up(self) -> bool:
        return self.relay.state is LinkState.UP

    @property
    def usable(self) -> bool:
        """Whether it is connected, and has told how it is."""
        return self.is_up and self.relay.heartbeat is not None

    @property
    def unsent_bytes(self) -> int:
        return 0 if self._connection is None else self._connection.unsent_bytes

    def candidate(self, now: float) -> Candidate:
        """What is known of it now."""
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
            streams=heartbeat.streams + self.opened,
            room=heartbeat.room,
        )

    def described(self) -> dict[str, object]:
        """For an operator."""
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

    def send(self) -> None:
        """What the relay has for the origin, in one write."""
        frames = self.relay.frames_to_send()
        if frames and self._connection is not None:
            self._connection.write(b"".join(frames))

    # ---- for the connection ----

    def on_connected(self, connection: Connection) -> None:
        self._connection = connection
        self.relay.connected()
        self._changed()

    def on_lost(self, connection: Connection) -> None:
        """Routes are asked for again on the next connection, or of another origin, or end here."""
        if connection is self._connection:
            self._connection = None
            self.relay.disconnected(now())
            self.is_news = True
            self._changed()

    def on_frames(self, frames: list[bytes]) -> None:
        relay = self.relay
        before = relay.heartbeat
        try:
            relay.receive(frames)
        finally:
            heartbeat = relay.heartbeat
            if heartbeat is not None and heartbeat is not before:
                self.ledger, self.opened, self.is_news = heartbeat.ledger, 0, True
            if relay.is_idle and not self.is_news:  # it was tokens, which clients wait for
                self.batch.flush()
            else:
                for worked in relay.outcomes():
                    self.breaker.succeeded() if worked else self.breaker.failed(now())
                self._changed()
        if self._up_at is None and self.is_up:
            self._backoff.reset()
            self._up_at, self._is_told = now(), False
            log.info("origin link up", origin=self.address, streams=self.relay.route_count)

    # ---- its life ----

    async def connect_forever(self) -> None:
        try:
            while True:
                self._up_at = None
                reason = await self._connect_once()
                # One line per outage: the failures that follow say nothing new.
                if not self._is_told:
                    log.warning("origin link down", origin=self.address, reason=str(reason))
                self._is_told = True
                if not self._was_sound():
                    await asyncio.sleep(self._backoff.next_delay_s())
        finally:
            self.close(None)

    def _was_sound(self) -> bool:
        return self._up_at is not None and now() - self._up_at >= LINK_SETTLED_S

    async def _connect_once(self) -> Exception:
        """One connection from its beginning to its end; gives the reason of the end."""
        try:
            async with asyncio.timeout(LINK_CONNECT_TIMEOUT_S):
                _, connection = await dial(
                    lambda: Connection(self), self._address, self._credentials
                )
        except OSError as error:  # TimeoutError is one
            self.close(error)
            return error
        reason = await connection.lost
        return reason or OriginUnreachable("the origin closed the link")

    def close(self, reason: Exception | None) -> None:
        if self._connection is not None:
            self._connection.close(reason)

    def look(self, at: float) -> None:
        """Leave an origin that has been silent for as long as it has told."""
        connection, heartbeat = self._connection, self.relay.heartbeat
        patience_s = LINK_CONNECT_TIMEOUT_S
        if heartbeat is not None and heartbeat.patience_ms:
            patience_s = heartbeat.patience_ms / 1000
        if connection is not None and connection.silence.seconds(at) > patience_s:
            connection.close(OriginUnreachable(f"the origin was silent for {patience_s:g} s"))


def now() -> float:
    return asyncio.get_running_loop().time()
