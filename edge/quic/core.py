"""What the server asks of a QUIC core: one connection, with HTTP/3 on it, as a sans-I/O object.

Datagrams and the time go in, datagrams and events come out. `edge/quic/aioquic_core.py` is the
only file that knows which library does the work.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Protocol

Address = tuple[str, int] | tuple[str, int, int, int]
"""As a socket gives it: of IPv4, or of IPv6."""
Headers = Sequence[tuple[bytes, bytes]]
Datagrams = Sequence[tuple[bytes, Address]]

MAX_HEADER_BYTES = 16 << 10
"""Of a request's header fields, as RFC 9114, 4.2.2 counts them; 431 beyond."""
MAX_REQUESTS_AT_ONCE = 128
"""Open requests of one connection."""
STREAM_WINDOW_BYTES = 64 << 10
"""Of one request's body that may come before what came has been read."""
CONNECTION_WINDOW_BYTES = 1 << 20
"""Of all bodies of a connection that may come before what came has been read."""
MAX_HELD_BYTES = 256 << 10
"""Of one response that may be kept because the client has not acknowledged it."""
MAX_CONTROL_BYTES = 64 << 10
"""A client may send about a connection in its whole life: settings, QPACK, priorities."""
TIMER_S = 0.001
"""The shortest time that the loop can wait; its own clock, too, has no less, and QUIC needs it."""
IDLE_TIMEOUT_S = 60.0
"""A connection that is silent for so long is gone; a stream's signs of life come more often."""


class Code(IntEnum):
    """Error codes of HTTP/3 (RFC 9114, 8.1) that are sent from here."""

    NO_ERROR = 0x100
    INTERNAL_ERROR = 0x102
    EXCESSIVE_LOAD = 0x107
    REQUEST_REJECTED = 0x10B
    REQUEST_CANCELLED = 0x10C


# ---- what a core has to say ----


@dataclass(frozen=True, slots=True)
class Asked:
    """A request's head; valid as HTTP/3 has it, its values not looked at."""

    stream: int
    headers: Headers
    ended: bool


@dataclass(frozen=True, slots=True)
class Came:
    """A piece of a request's body. `ended`: it is whole; trailers are dropped."""

    stream: int
    data: bytes
    ended: bool


@dataclass(frozen=True, slots=True)
class TooLong:
    """A request's head is over MAX_HEADER_BYTES. It may be answered; nothing else comes of it."""

    stream: int


@dataclass(frozen=True, slots=True)
class Left:
    """The client has reset a request, or wants no more of its response. The core has let go."""

    stream: int


@dataclass(frozen=True, slots=True)
class Issued:
    """Datagrams with this connection id are for this connection."""

    cid: bytes


@dataclass(frozen=True, slots=True)
class Retired:
    """Datagrams with this connection id are so no longer."""

    cid: bytes


@dataclass(frozen=True, slots=True)
class Established:
    """The handshake is over: the client is where it says it is."""


@dataclass(frozen=True, slots=True)
class Ended:
    """The connection is over, and no datagram follows."""

    reason: str


Event = Asked | Came | TooLong | Left | Issued | Retired | Established | Ended


class Core(Protocol):
    """One connection. Nothing that a client sends makes a method raise but by a fault of ours."""

    cids: Sequence[bytes]
    """By which a client may address it from the first."""

    @property
    def closing(self) -> bool:
        """Closed by either side: no request can be answered, but `Ended` is yet to come."""

    def receive(self, datagram: bytes, address: Address, now: float) -> None: ...

    def expire(self, now: float) -> None:
        """The time that `timer` said has come."""

    def timer(self) -> float | None:
        """When `expire` is to be called; ask after each `datagrams`."""

    def events(self) -> list[Event]:
        """What has happened since the last call."""

    def datagrams(self, now: float) -> Datagrams:
        """What is to be sent now; ask after everything that was done."""

    def start(self, stream: int, headers: Headers) -> None:
        """A response's head, with `:status` first."""

    def write(self, stream: int, data: bytes) -> None:
        """A piece of a response's body."""

    def end(self, stream: int) -> None: ...

    def reset(self, stream: int, code: Code) -> None:
        """Break the response off, and want no more of the request."""

    def stop(self, stream: int) -> None:
        """No more of the request is wanted; the response is."""

    def consumed(self, stream: int, size: int) -> None:
        """So many bytes of a request's body have been read: so many more may come."""

    def room(self, stream: int, unsent_bytes: int) -> int:
        """How much may be written so that at most `unsent_bytes` wait to be sent beside what
        leaves at once, and at most MAX_HELD_BYTES to be sent or acknowledged."""

    def go_away(self) -> None:
        """No new requests (GOAWAY); those that are under way go on."""

    def close(self, code: Code, reason: str = "") -> None: ...


# ---- datagrams that belong to no connection ----


@dataclass(frozen=True, slots=True)
class Stray:
    """The head of a datagram that has a long header, and belongs to no connection yet."""

    cid: bytes
    source_cid: bytes
    version: int
    known_version: bool
    initial: bool
    token: bytes


class Cores(Protocol):
    """Makes cores, and what is to be said to those who have none."""

    cid_bytes: int
    """Length of the connection ids that are issued; that of a short header is not in it."""

    def load(self, certificate: Path, key: Path) -> None:
        """From now on connections get this certificate; those that stand keep theirs."""

    def stray(self, datagram: bytes) -> Stray | None:
        """Its head; None if nothing can come of it."""

    def accept(self, original_cid: bytes, retried_cid: bytes | None) -> Core:
        """For a first Initial to `original_cid`; after a Retry it came to `retried_cid`."""

    def versions(self, stray: Stray) -> bytes:
        """Version Negotiation: which ones are spoken here."""

    def retry(self, stray: Stray, address: Address, now: float) -> bytes:
        """Come again with the token in it: then the client is where it says it is."""

    def retried(self, stray: Stray, address: Address, now: float) -> bytes | None:
        """The connection id of the Initial before the Retry; None if the token is not good."""

    def reset(self, datagram: bytes, now: float) -> bytes | None:
        """Return the stateless reset for a short header with an unknown id, if it gets one."""

    def refusal(self, stray: Stray, *, bad_token: bool) -> bytes:
        """There is no connection for it: the token is not good, or there are too many."""
