"""The interface between the QUIC server and the library that implements QUIC and HTTP/3.

A connection is a sans-I/O object: datagrams and times go in, datagrams and events come out. The
implementation on aioquic is `aioquic_library.py`, with `aioquic_connection.py` and
`aioquic_sending.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Protocol

Address = tuple[str, int] | tuple[str, int, int, int]
"""Address of an IPv4 or an IPv6 socket."""
Headers = Sequence[tuple[bytes, bytes]]
Datagrams = Sequence[tuple[bytes, Address]]

MAX_HEADER_BYTES = 16 << 10
"""Maximum size of a request's header fields, in bytes as counted by RFC 9114, 4.2.2. A request with
more is answered with 431."""
MAX_REQUESTS_AT_ONCE = 128
"""Maximum number of open requests of a connection."""
STREAM_WINDOW_BYTES = 64 << 10
"""Flow-control window of a stream: maximum unread bytes of one request's body."""
CONNECTION_WINDOW_BYTES = 1 << 20
"""Flow-control window of a connection: maximum unread bytes of all its request bodies together."""
MAX_HELD_BYTES = 256 << 10
"""Maximum bytes of one response that are kept until the client acknowledges them."""
MAX_CONTROL_BYTES = 64 << 10
"""Maximum bytes that a client may send in total on each of its unidirectional streams (control and
QPACK). Each request adds to this limit."""
TIMER_S = 0.001
"""Shortest delay of a connection's timer, in seconds: the resolution of the event loop."""
IDLE_TIMEOUT_S = 60.0
"""Time without a packet after which a connection is closed. Keepalives of streams are more
frequent."""


class Code(IntEnum):
    """Error codes of HTTP/3 (RFC 9114, 8.1) that the edge sends."""

    NO_ERROR = 0x100
    INTERNAL_ERROR = 0x102
    EXCESSIVE_LOAD = 0x107
    REQUEST_REJECTED = 0x10B
    REQUEST_CANCELLED = 0x10C


# ---- events of a connection ----


@dataclass(frozen=True, slots=True)
class RequestReceived:
    """The head of a request arrived. It is valid HTTP/3, but its values have not been checked."""

    stream: int
    headers: Headers
    ended: bool


@dataclass(frozen=True, slots=True)
class DataReceived:
    """A piece of a request's body arrived; `ended` marks the last one. Trailers are dropped."""

    stream: int
    data: bytes
    ended: bool


@dataclass(frozen=True, slots=True)
class HeadersTooLarge:
    """A request's head is over MAX_HEADER_BYTES. The request may be answered; no body follows."""

    stream: int


@dataclass(frozen=True, slots=True)
class StreamReset:
    """The client has reset a request, or refuses its response; the stream is closed."""

    stream: int


@dataclass(frozen=True, slots=True)
class ConnectionIdIssued:
    """Datagrams with this connection id belong to the connection from now on."""

    cid: bytes


@dataclass(frozen=True, slots=True)
class ConnectionIdRetired:
    """Datagrams with this connection id no longer belong to the connection."""

    cid: bytes


@dataclass(frozen=True, slots=True)
class HandshakeCompleted:
    """The handshake is complete, which also proves the client's address."""


@dataclass(frozen=True, slots=True)
class ConnectionTerminated:
    """The connection has ended, and sends no more datagrams."""

    reason: str


Event = (
    RequestReceived
    | DataReceived
    | HeadersTooLarge
    | StreamReset
    | ConnectionIdIssued
    | ConnectionIdRetired
    | HandshakeCompleted
    | ConnectionTerminated
)


class QuicConnection(Protocol):
    """One QUIC connection with HTTP/3 on it.

    No input of a client may cause an exception: a method that raises has a bug.
    """

    cids: Sequence[bytes]
    """Connection ids that a client may use from the beginning."""

    @property
    def is_closing(self) -> bool:
        """True once either side has closed the connection.

        No request can be answered any more, although `ConnectionTerminated` is yet to come.
        """

    def receive(self, datagram: bytes, address: Address, now: float) -> None:
        """Handle a datagram of the client."""

    def expire(self, now: float) -> None:
        """Do the work that is due at the time that `timer` returned."""

    def timer(self) -> float | None:
        """Return when to call `expire`, in seconds of the clock of `now`; None for no timer.

        Each call of `datagrams` may change this time.
        """

    def events(self) -> list[Event]:
        """Return what has happened since the last call."""

    def datagrams(self, now: float) -> Datagrams:
        """Return the datagrams to send now. Call it after every other method."""

    def start(self, stream: int, headers: Headers) -> None:
        """Send the head of a response, with `:status` first."""

    def write(self, stream: int, data: bytes) -> None:
        """Send a piece of a response's body."""

    def end(self, stream: int) -> None:
        """End a response."""

    def reset(self, stream: int, code: Code) -> None:
        """Reset a response, and ask the client to stop sending its request."""

    def stop(self, stream: int) -> None:
        """Ask the client to stop sending a request, whose response continues."""

    def consumed(self, stream: int, size: int) -> None:
        """Let the client send `size` more bytes of a request, because as many have been read."""

    def writable_bytes(self, stream: int, unsent_bytes: int) -> int:
        """Return how many bytes of a response may be written now.

        After that, at most `unsent_bytes` wait in addition to the bytes that may be sent at once,
        and at most MAX_HELD_BYTES are unsent or unacknowledged.
        """

    def go_away(self) -> None:
        """Ask the client to send no new requests (GOAWAY); open requests continue."""

    def close(self, code: Code, reason: str = "") -> None:
        """Close the connection."""


# ---- datagrams that belong to no connection ----


@dataclass(frozen=True, slots=True)
class UnroutedDatagram:
    """The head of a datagram with a long header that belongs to no connection."""

    cid: bytes
    source_cid: bytes
    version: int
    known_version: bool
    initial: bool
    token: bytes


class QuicLibrary(Protocol):
    """A QUIC implementation: creates connections, and answers datagrams without a connection."""

    cid_bytes: int
    """Length of the connection ids that are issued; a short header does not contain the length."""

    def load(self, certificate: Path, key: Path) -> None:
        """Use this certificate for new connections."""

    def parse(self, datagram: bytes) -> UnroutedDatagram | None:
        """Return the head of a datagram, or None if it cannot begin a connection."""

    def accept(self, original_cid: bytes, retried_cid: bytes | None) -> QuicConnection:
        """Return a new connection for a client's first Initial packet.

        `retried_cid` is the id that the client used after a Retry.
        """

    def version_negotiation(self, unrouted: UnroutedDatagram) -> bytes:
        """Return the Version Negotiation packet that answers an unknown version."""

    def retry(self, unrouted: UnroutedDatagram, address: Address, now: float) -> bytes:
        """Return a Retry packet, whose token proves the client's address when it comes back."""

    def original_cid(
        self, unrouted: UnroutedDatagram, address: Address, now: float
    ) -> bytes | None:
        """Return the connection id from before a Retry; None if the token is not valid."""

    def stateless_reset(self, datagram: bytes, now: float) -> bytes | None:
        """Return the stateless reset for a datagram with an unknown connection id, or None."""

    def refusal(self, unrouted: UnroutedDatagram, *, bad_token: bool) -> bytes:
        """Return a packet that refuses the connection, for a bad token or too many connections."""
