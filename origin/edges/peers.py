"""Requests to objects that other origins run, sent over a link as an edge would.

Each object on a shared ledger has one origin that runs it. An origin that cannot be reached is
retried until its lease has lapsed, and then the object is claimed here. If it is alive all the same
(because of a wrong address or a split network), its objects are taken from it one by one: it is
fenced, so that costs a request, and no data.
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
"""Software name of an origin in its Hello. It is for people: it gives no rights."""
PEER_CONNECT_S = 2.0
PEER_SILENCE_S = 16.0
"""Timeout in seconds for a silent origin, until its heartbeats announce another."""
PEER_RETRY_S = 0.1
WINDOW_BODIES = 64
"""Maximum number of Body frames of one answer on their way from another origin."""
WINDOW_BODY_BYTES = 1 << 20
"""Maximum number of their bytes, and of the bytes of a body that is passed on whole."""
PEER_OUTAGE_S = 6.0
"""Time in seconds for which an unreachable origin may keep its objects; usually longer than its
lease."""

ALIVE = encode(Heartbeat(0, ready=True, patience_ms=round(PEER_SILENCE_S * 1000)))
"""Answer to each Heartbeat of the other origin."""

log = structlog.get_logger("origin")


@dataclass(frozen=True, slots=True)
class PeerTransport:
    """Transport by which the origins of a ledger reach each other, the same for all.

    `secrets` show that this origin is one of them (`TokenKeys.peer_secrets`).
    """

    scheme: str
    credentials: Credentials
    secrets: tuple[bytes, ...]


ALONE = PeerTransport(TCP, Credentials("origin.link"), (secrets.token_bytes(MAC_BYTES),))
"""For an origin that shares its ledger with no other."""


class Outages:
    """How long each address has been unreachable; every `now` is in seconds of one clock.

    Failures further apart than `PEER_OUTAGE_S` belong to two outages, since the time between them
    is unknown.
    """

    def __init__(self) -> None:
        self._failed: dict[str, tuple[float, float]] = {}  # first and last failure

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
    """The other origins of a ledger. `seize` takes an object from its owner."""

    def __init__(
        self,
        seize: Callable[[ObjectKey], Awaitable[None]],
        here: frozenset[str] = frozenset(),
        transport: PeerTransport = ALONE,
    ) -> None:
        """Create the peers.

        Objects of requests with a method in `here` are taken over by this origin.
        """
        self._transport = transport
        self._seize = seize
        self._here = here
        self._links: dict[str, PeerLink] = {}
        self._outages = Outages()
        # connection attempts by address
        self._attempts: dict[str, asyncio.Task[PeerLink | None]] = {}

    async def ask(
        self, held: HeldElsewhere, key: ObjectKey, request: ObjectRequest
    ) -> ObjectResponse | None:
        """Return the answer of the object's origin; None if the request must be retried here."""
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
        # A refusal, or an object unknown there: check that the right origin was asked.
        await self._wait_for(address, key)
        return None

    async def close(self) -> None:
        for attempt in self._attempts.values():
            attempt.cancel()
        for link in self._links.values():
            link.close()

    async def _link(self, address: str) -> PeerLink | None:
        """Return the link to an origin; None if there can be none."""
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
        """Wait for an unreachable origin to lose its lease."""
        now = asyncio.get_running_loop().time()
        if self._outages.failed(address, now) < PEER_OUTAGE_S:
            await asyncio.sleep(PEER_RETRY_S)
            return
        log.warning("object.seized", kind=key.kind, name=key.name, unreachable=address)
        await self._seize(key)


async def connect(address: str, transport: PeerTransport) -> PeerLink | None:
    """Return a link to the origin at HOST:PORT; None if none greets there."""
    link = PeerLink(transport.secrets)
    try:
        async with asyncio.timeout(PEER_CONNECT_S):
            place = LinkAddress(*parse_address(address), transport.scheme)
            await dial(lambda: link, place, transport.credentials)
            await link.greeted.wait()
    except (OSError, ValueError):  # TimeoutError is an OSError; the port may be missing
        link.close()
        return None
    return None if link.closed else link


class PeerLink(asyncio.Protocol):
    """One connection to another origin, shared by many Calls."""

    def __init__(self, shown: tuple[bytes, ...]) -> None:
        """`shown` are `PeerTransport.secrets`."""
        self._handshake = Handshake(Side.EDGE, *shown, shared=PEER)
        self._is_hello_heard = False
        self.greeted = asyncio.Event()
        self._transport: asyncio.Transport | None = None
        self._splitter = Splitter(tags=ANSWERING)
        self._heard_at = 0.0  # by the event loop's clock
        self._silence_timeout_s = PEER_SILENCE_S
        self._corrs = itertools.count(1)
        self._calls: dict[int, PeerCall] = {}

    @property
    def closed(self) -> bool:
        """True if nothing can be sent, so that new requests need another link."""
        return self._transport is None or self._transport.is_closing()

    async def call(self, key: ObjectKey, request: ObjectRequest) -> ObjectResponse:
        """Send a request and return its answer; raises the error of a StreamError.

        A small body of known length is returned whole. Any other is passed on as it arrives, and
        must be read to its end or closed.
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
        """Wait for `news` while the other origin is alive; raises when it is not."""
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
        """Forget a Call; one that has not ended is detached, so that the other origin frees it."""
        if self._calls.pop(corr, None) is not None and not has_ended:
            self._write(encode(Detach(), corr))

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    # ---- the transport ----

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # Not isinstance: uvloop's transports are no subclass of asyncio's.
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
            # A peer sends its first Hello and the Challenge after it to anyone who connects.
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

    It holds at most `WINDOW_BODY_BYTES` and one frame: credit is renewed as the body is read.
    """

    def __init__(self, link: PeerLink, corr: int) -> None:
        self._link = link
        self._corr = corr
        self._answer: Answer | None = None
        self._parts: deque[tuple[bytes, int]] = deque()  # each with the size of its frame
        self._news = asyncio.Event()
        self._window = Window.starting(0, WINDOW_BODIES, WINDOW_BODIES, WINDOW_BODY_BYTES)
        self._has_ended = False
        self._error: TailraceError | None = None

    # ---- for the link ----

    def take(self, frame: Frame, size: int) -> None:
        """Take a frame of `size` bytes."""
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
        """Return the error of a link that is lost now."""
        if self._answer is None:
            return outcome_unknown()
        return OriginUnreachable("the origin that holds the object was lost within its answer")

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
    """Return True if a body is known to be empty or small enough to be taken whole."""
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
