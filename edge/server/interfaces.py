"""Interfaces between connections, protocols and the producers of responses.

HTTP/1.1, HTTP/2 and HTTP/3 each turn their input into a `Request` and offer a `ResponseWriter` for
its response. A stream of tokens is a `ResponseSource` that writes without a task and without a
queue: a frame that is read from an origin's link is passed to `write` in the same callback.

Sans-I/O: nothing here knows a socket, an event loop or a clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

UNSENT_BYTES = 8 << 10
"""Maximum unsent bytes that this process keeps for one client; `writable_bytes` is this limit minus
the unsent bytes. Frames are only requested from the origin as the client reads, so a stalled client
costs about this much memory."""

Headers = Sequence[tuple[bytes, bytes]]


@dataclass(frozen=True, slots=True)
class Request:
    """The head of one request, and its body if the whole body is already known."""

    method: str
    path: bytes
    """The path as sent, percent-encoded, without the query."""
    query: bytes
    headers: Headers
    """Names in lower case; `host` stands for `:authority` too."""
    scheme: str
    peer: tuple[str, int] | None
    http_version: str
    """The version as ASGI spells it: "1.1", "2", "3"."""
    body: bytes = b""

    def header(self, name: bytes) -> bytes | None:
        """Return the value of the first header of this name, or None."""
        return next((value for each, value in self.headers if each == name), None)

    def text(self, name: bytes) -> str | None:
        """Return the value of the first header of this name as text, or None."""
        value = self.header(name)
        return None if value is None else value.decode("latin-1")


class ResponseWriter(Protocol):
    """The writer of one response, which a protocol makes and a `ResponseSource` uses.

    No method raises. After `end`, `reset`, or a call of the source's `disconnected`, every call is
    ignored.
    """

    def start(self, status: int, headers: Headers) -> None:
        """Send the head, once, before anything else. It may be sent with the first `write`."""

    def write(self, data: bytes) -> None:
        """Send a piece of the body.

        The whole piece is accepted, whatever its size. Callers check `writable_bytes` before each
        frame, so that the limit is exceeded by one frame at most.
        """

    def end(self) -> None:
        """End the response: its body is complete."""

    def reset(self) -> None:
        """Break the body off, so that the client can see that it is incomplete."""

    def writable_bytes(self) -> int:
        """Return how many bytes may be written now: UNSENT_BYTES minus the unsent bytes.

        After a value below 1, the source's `drained` is called once there is room again.
        """


class ResponseSource(Protocol):
    """The producer of one response.

    The protocol calls these methods, but never while the source itself is calling the writer.
    """

    def drained(self) -> None:
        """Continue the response, because the writer has room again."""

    def disconnected(self) -> None:
        """End the response, because the client has reset it or the connection is lost.

        Called once, unless the response has ended before. The writer ignores everything from then
        on.
        """


class ConnectionProtocol(Protocol):
    """The protocol spoken on a connection; HTTP/1.1 may switch to WebSocket or HTTP/2."""

    def receive(self, data: bytes) -> None:
        """Handle input of the client."""

    def drained(self) -> None:
        """Continue to write: the transport has room again, after `writable_bytes` was below 1."""

    def disconnected(self) -> None:
        """End all requests, because the connection is closed or lost."""

    def drain(self) -> None:
        """Close an idle connection; let requests under way end, and take no new ones."""


class NullListener:
    """Null object: a `ConnectionProtocol` and a `ResponseSource` that ignores every event."""

    def receive(self, data: bytes) -> None: ...

    def drained(self) -> None: ...

    def disconnected(self) -> None: ...

    def drain(self) -> None: ...


NULL_LISTENER = NullListener()


class Transport(Protocol):
    """The connection below a protocol. No method raises; calls after the close are ignored."""

    protocol: ConnectionProtocol
    secure: bool
    peer: tuple[str, int] | None
    server: tuple[str, int] | None

    def write(self, data: bytes) -> None: ...

    def writable_bytes(self) -> int:
        """Return how many bytes may be written now: UNSENT_BYTES minus the unsent bytes.

        After a value below 1, the protocol's `drained` is called once there is room again.
        """

    def pause_reading(self) -> None:
        """Give the protocol no input until `resume_reading`.

        A bounded amount of input is buffered meanwhile; beyond it the socket is not read.
        """

    def resume_reading(self) -> None:
        """Give the protocol input again, but not before this method has returned."""

    def close(self, *, lingers: bool = False) -> None:
        """Close the connection once everything that was written has been sent.

        With `lingers`, input is read and dropped for a while first: otherwise a client that is
        still sending would see a reset instead of its answer.
        """

    def abort(self) -> None:
        """Close the connection at once and drop unsent data, so that the client sees the loss."""
