"""Sends requests to objects that other origins run, over a link like that of an edge.

Each object on a shared ledger has one origin that runs it. If that origin cannot be reached, the
request is retried until the origin's lease has expired, and then this origin takes the object over.
The unreachable origin may still be alive and renew its lease, behind a wrong address or a network
partition. Then this origin takes over each object that is requested, after PEER_OUTAGE_S. Fencing
rejects late writes of the other origin, so a takeover may fail a request, but loses no data.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import cast

import structlog

from tailrace.ledger.errors import HeldElsewhere, OriginUnreachable, TailraceError
from tailrace.ledger.flow.credit_window import Window
from tailrace.ledger.frame import (
    Answer,
    Body,
    BodyEnd,
    Challenge,
    Credit,
    Detach,
    Frame,
    Header,
    Heartbeat,
    Hello,
    Proof,
    Splitter,
    StreamError,
    decode,
    encode,
    to_error,
)
from tailrace.ledger.interface import ObjectKey
from tailrace.ledger.links.transport import TCP, Credentials, LinkAddress, dial
from tailrace.ledger.objects.object import ObjectRequest, ObjectResponse
from tailrace.ledger.process.settings import parse_address
from tailrace.ledger.wire.handshake import PEER, Handshake, Side
from tailrace.ledger.wire.schema import MAC_BYTES
from tailrace.origin.edges.calls import NO_CONTENT
from tailrace.origin.edges.peer_frame import ANSWERING, PEER_CODEC, PEER_SCHEMA_HASH, ObjectCall

SOFTWARE = "tailrace-origin"
"""Software name of an origin in its Hello. It is informational and gives no rights."""
PEER_CONNECT_S = 2.0
PEER_SILENCE_S = 16.0
"""Seconds of silence after which a link counts as lost, until a Heartbeat announces another
timeout."""
PEER_RETRY_S = 0.1
WINDOW_BODIES = 64
"""Maximum number of Body frames in flight for one answer of another origin."""
WINDOW_BODY_BYTES = 1 << 20
"""Maximum bytes of Body frames in flight for one answer. An answer's body of known length up to
this is read as a whole before it is passed on."""
PEER_OUTAGE_S = 6.0
"""Seconds for which an origin may be unreachable before its objects are taken from it; usually
longer than its lease."""

ALIVE = encode(Heartbeat(0, ready=True, patience_ms=round(PEER_SILENCE_S * 1000)))
"""The encoded Heartbeat that answers each Heartbeat of the other origin."""

log = structlog.get_logger("origin")


@dataclass(frozen=True, slots=True)
class PeerTransport:
    """Transport by which the origins of one ledger reach each other; all of them use the same one.

    With `secrets` an origin proves that it belongs to the ledger (`TokenKeys.peer_secrets`).
    """

    scheme: str
    credentials: Credentials
    secrets: tuple[bytes, ...]


ALONE = PeerTransport(TCP, Credentials("origin.link"), (secrets.token_bytes(MAC_BYTES),))
"""Transport of an origin that shares its ledger with no other origin, so it is never used."""


class Outages:
    """Measures how long each address has been unreachable. `now` is a time in seconds by one clock.

    Failures further apart than `PEER_OUTAGE_S` count as two outages, because the address may have
    been reachable between them.
    """

    def __init__(self) -> None:
        # address -> times of the first and the last failure of the current outage
        self._failed: dict[str, tuple[float, float]] = {}

    def failed(self, address: str, now: float) -> float:
        """Record a failure, and return how long this outage has lasted."""
        first_s, last_s = self._failed.get(address, (now, now))
        if now - last_s > PEER_OUTAGE_S:
            first_s = now
        self._failed[address] = first_s, now
        return now - first_s

    def over(self, address: str) -> None:
        """Record that the address has answered."""
        self._failed.pop(address, None)


class Peers:
    """The other origins of a ledger. `seize` takes an object from the origin that runs it."""

    def __init__(
        self,
        seize: Callable[[ObjectKey], Awaitable[None]],
        here: frozenset[str] = frozenset(),
        transport: PeerTransport = ALONE,
    ) -> None:
        """Create the peers, without connections.

        `here` has the operations for which this origin takes an object over and runs it itself.
        """
        self._transport = transport
        self._seize = seize
        self._here = here
        self._links: dict[str, PeerLink] = {}
        self._outages = Outages()
        # address -> connection attempt in progress, which concurrent requests share
        self._attempts: dict[str, asyncio.Task[PeerLink | None]] = {}

    async def ask(
        self, held: HeldElsewhere, key: ObjectKey, request: ObjectRequest
    ) -> ObjectResponse | None:
        """Return the answer of the origin that runs the object.

        The result is None if the caller must look the object up again, because the object may run
        at this origin by now.
        """
        if request.operation in self._here:
            await self._seize(key)
            return None
        address = held.address or ""
        link = await self._link(address)
        if link is not None:
            try:
                response = await link.call(key, request)
            except TailraceError as error:
                if error.code != HeldElsewhere.code:
                    raise
            else:
                self._outages.over(address)
                return response
        # The origin is unreachable, or no longer runs the object.
        await self._wait_for(address, key)
        return None

    async def close(self) -> None:
        for attempt in self._attempts.values():
            attempt.cancel()
        for link in self._links.values():
            link.close()

    async def _link(self, address: str) -> PeerLink | None:
        """Return a link to an origin, which may be new; None if the origin cannot be reached."""
        link = self._links.get(address)
        if link is not None and not link.closed:
            return link
        attempt = self._attempts.get(address)
        if attempt is None:
            attempt = self._attempts[address] = asyncio.create_task(
                connect(address, self._transport)
            )
            attempt.add_done_callback(lambda _: self._attempts.pop(address))
        link = await asyncio.shield(attempt)
        if link is None or link.closed:
            return None
        self._links[address] = link
        return link

    async def _wait_for(self, address: str, key: ObjectKey) -> None:
        """Wait before a retry; take the object over if its origin is unreachable for too long."""
        now = asyncio.get_running_loop().time()
        if self._outages.failed(address, now) < PEER_OUTAGE_S:
            await asyncio.sleep(PEER_RETRY_S)
            return
        log.warning("object.seized", kind=key.kind, name=key.name, unreachable=address)
        await self._seize(key)


async def connect(address: str, transport: PeerTransport) -> PeerLink | None:
    """Return a link to the origin at HOST:PORT; None if no origin completes the greeting there."""
    link = PeerLink(transport.secrets)
    try:
        async with asyncio.timeout(PEER_CONNECT_S):
            place = LinkAddress(*parse_address(address), transport.scheme)
            await dial(lambda: link, place, transport.credentials)
            await link.greeted.wait()
    except (OSError, ValueError):  # TimeoutError is an OSError; ValueError: not HOST:PORT
        link.close()
        return None
    return None if link.closed else link


class PeerLink(asyncio.Protocol):
    """One connection to another origin, shared by many Calls."""

    def __init__(self, shown: tuple[bytes, ...]) -> None:
        """Create a link without a connection. `shown` has the `secrets` of `PeerTransport`."""
        self._handshake = Handshake(Side.EDGE, *shown, shared=PEER)
        self._is_hello_heard = False
        self.greeted = asyncio.Event()
        self._transport: asyncio.Transport | None = None
        self._splitter = Splitter(tags=ANSWERING)
        self._heard_at = 0.0  # time of the last data, on the event loop's clock
        self._silence_timeout_s = PEER_SILENCE_S
        self._corrs = itertools.count(1)
        self._calls: dict[int, PeerCall] = {}

    @property
    def closed(self) -> bool:
        """True if nothing can be sent, so that new requests need another link."""
        return self._transport is None or self._transport.is_closing()

    async def call(self, key: ObjectKey, request: ObjectRequest) -> ObjectResponse:
        """Send a request and return its answer; raises the error of a StreamError.

        A small body of known length is returned as bytes. Any other body is an iterator over its
        parts as they arrive; the caller must read it to its end or close it.
        """
        corr = next(self._corrs)
        call = self._calls[corr] = PeerCall(self, corr)
        is_passed_on = False
        try:
            self._send(key, request, corr)
            answer = await call.head()
            headers = tuple((header.name, header.value) for header in answer.headers)
            response = ObjectResponse(answer.status, headers, call)
            if _is_small(request, response):
                return replace(response, body=b"".join([part async for part in call]))
            is_passed_on = True
            return response
        finally:
            if not is_passed_on:
                await call.aclose()

    def _send(self, key: ObjectKey, request: ObjectRequest, corr: int) -> None:
        headers = tuple(Header(name, value) for name, value in request.headers)
        sent = ObjectCall(
            *key,
            request.operation,
            request.method,
            request.url,
            headers,
            request.body,
            WINDOW_BODIES,
            WINDOW_BODY_BYTES,
        )
        if self._transport is None or self.closed:
            raise outcome_unknown()
        self._transport.write(PEER_CODEC.encode(sent, corr))

    async def wait(self, news: asyncio.Event) -> None:
        """Wait for `news`; raises OriginUnreachable if the other origin is silent for too long."""
        left_s = self._heard_at + self._silence_timeout_s - asyncio.get_running_loop().time()
        if left_s <= 0:
            self.close()
            raise outcome_unknown()
        with suppress(TimeoutError):
            async with asyncio.timeout(left_s):
                await news.wait()

    def grant(self, corr: int, window: Window) -> None:
        """Let the other origin send more of an answer's body."""
        self._write(encode(Credit(window.limit, window.limit_bytes), corr))

    def leave(self, corr: int, *, has_ended: bool) -> None:
        """Forget a Call; if it has not ended, detach it, so that the other origin frees it."""
        if self._calls.pop(corr, None) is not None and not has_ended:
            self._write(encode(Detach(), corr))

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    # ---- the transport ----

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # A cast, because uvloop's transports are not instances of asyncio.Transport.
        self._transport = cast(asyncio.Transport, transport)
        self._transport.write(encode(Hello(PEER_SCHEMA_HASH, SOFTWARE)))
        if (challenge := self._handshake.challenge) is not None:
            self._transport.write(encode(challenge))

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self.greeted.set()
        for call in self._calls.values():
            call.fail(call.lost())

    def data_received(self, data: bytes) -> None:
        self._heard_at = asyncio.get_running_loop().time()
        try:
            for raw in self._splitter.feed(data):
                self._take(*decode(raw), len(raw))
        except TailraceError as error:
            log.warning("peer.refused", error=str(error))
            self.close()

    def _take(self, corr: int, frame: Frame, size: int) -> None:
        if not self._is_hello_heard and not isinstance(frame, StreamError):
            # An origin first sends the edge schema's Hello and a Challenge, because it does not yet
            # know that this side is an origin. Both are ignored.
            if isinstance(frame, Hello) and frame.schema == PEER_SCHEMA_HASH:
                self._is_hello_heard = True
        elif isinstance(frame, Challenge):
            self._write(encode(self._handshake.answer(frame)))
        elif isinstance(frame, Proof):
            self._handshake.check(frame)
            self.greeted.set()
        elif isinstance(frame, Heartbeat):
            self._silence_timeout_s = frame.patience_ms / 1000 or PEER_SILENCE_S
            self._write(ALIVE)
        elif corr == 0 and isinstance(frame, StreamError):
            raise to_error(frame)
        elif corr in self._calls:
            self._calls[corr].take(frame, size)

    def _write(self, data: bytes) -> None:
        if self._transport is not None and not self.closed:
            self._transport.write(data)


class PeerCall:
    """A Call to another origin: the head of its answer, and an iterator over the body.

    At most `WINDOW_BODY_BYTES` and one frame are buffered, because the other origin gets new credit
    only as the body is read.
    """

    def __init__(self, link: PeerLink, corr: int) -> None:
        self._link = link
        self._corr = corr
        self._answer: Answer | None = None
        self._parts: deque[tuple[bytes, int]] = deque()  # unread (data, size of the Body frame)
        self._news = asyncio.Event()
        self._window = Window.starting(0, WINDOW_BODIES, WINDOW_BODIES, WINDOW_BODY_BYTES)
        self._has_ended = False
        self._error: TailraceError | None = None

    # ---- for the link ----

    def take(self, frame: Frame, size: int) -> None:
        """Handle a frame of the answer; `size` is the frame's size in bytes."""
        match frame:
            case Answer():
                self._answer = frame
            case Body():
                self._parts.append((frame.data, size))
            case BodyEnd():
                self._has_ended = True
            case StreamError():
                self._has_ended = True
                self._error = to_error(frame)
        self._news.set()

    def fail(self, error: TailraceError) -> None:
        self._error = error
        self._news.set()

    def lost(self) -> TailraceError:
        """Return the error for this Call when its link is lost.

        Without an answer it is unknown whether the request was carried out.
        """
        if self._answer is None:
            return outcome_unknown()
        return OriginUnreachable(
            "the connection to the origin that holds the object was lost before the answer's end"
        )

    # ---- for the reader ----

    async def head(self) -> Answer:
        while self._answer is None:
            await self._more()
        return self._answer

    def __aiter__(self) -> PeerCall:
        return self

    async def __anext__(self) -> bytes:
        while not self._parts:
            if self._has_ended and self._error is None:
                await self.aclose()
                raise StopAsyncIteration
            await self._more()
        part, size = self._parts.popleft()
        self._window.passed(1, size)
        if self._window.renew(WINDOW_BODY_BYTES) and not self._has_ended:
            self._link.grant(self._corr, self._window)
        return part

    async def aclose(self) -> None:
        self._link.leave(self._corr, has_ended=self._has_ended)

    async def _more(self) -> None:
        if self._error is not None:
            raise self._error
        self._news.clear()
        await self._link.wait(self._news)


def _is_small(request: ObjectRequest, response: ObjectResponse) -> bool:
    """Return True if a body is known to be empty or small enough to be read as a whole."""
    if request.method == "HEAD" or response.status in NO_CONTENT:
        return True
    length = response.header("content-length") or ""
    return length.isascii() and length.isdecimal() and int(length) <= WINDOW_BODY_BYTES


def outcome_unknown() -> OriginUnreachable:
    return OriginUnreachable(
        "the origin that holds the object was lost: it is not known whether the request was"
        " carried out",
        code="outcome_unknown",
        hint="check first, or repeat the request unchanged if it has a Producer-Seq",
    )
