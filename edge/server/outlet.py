"""The seam between protocols and routes: one request, and one response's way to its client.

HTTP/1.1, HTTP/2 and HTTP/3 each make a `Request` and a `ResponseWriter` of what they read. A route that
carries tokens answers it with a `ResponseSource`, which no task and no queue stands context: a frame of
the link ends as a `write` in the very callback that read it. Every other request is the ASGI
application's, and so is every doubtful one: the same routes exist there.

Sans-I/O: nothing here knows a socket, an event loop or a clock.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import structlog

from tailrace.edge.access.rules import Admission

UNSENT_BYTES = 8 << 10
"""What may wait here for one client: `writable_bytes` is this less what does. A reader's credit at the
origin follows from it, so this is what a client that does not read costs."""
FLUSHED_TOGETHER = 8
"""What a processor has near it is the kernel's after a send, and ours again after a frame: so a few
are made, and then they are sent. Were it more, they would only wait for each other."""
READS_A_TIMED_ONE = 8
"""Of the reads of a link that bring something for clients."""

Headers = Sequence[tuple[bytes, bytes]]

log = structlog.get_logger("tailrace.edge")


@dataclass(frozen=True, slots=True)
class Request:
    """What a route needs of a request, whole with its body."""

    method: str
    path: bytes
    """As it came, percent-encoded, without the query."""
    query: bytes
    headers: Headers
    """Names in lower case; `host` stands for `:authority` too."""
    scheme: str
    peer: tuple[str, int] | None
    http_version: str
    """As ASGI spells it: "1.1", "2", "3"."""
    body: bytes = b""

    def header(self, name: bytes) -> bytes | None:
        """The first value of a header."""
        return next((value for each, value in self.headers if each == name), None)

    def text(self, name: bytes) -> str | None:
        """The same as text."""
        value = self.header(name)
        return None if value is None else value.decode("latin-1")


class ResponseWriter(Protocol):
    """One response's way to its client; made by a protocol, used by a source.

    Nothing raises, and after `end`, `reset`, or the source's `disconnected` nothing does anything.
    """

    def start(self, status: int, headers: Headers) -> None:
        """The head, once, before anything else. It may wait for the first `write` or `end`."""

    def write(self, data: bytes) -> None:
        """A piece of the body. It is taken whole, however little room there is: whoever writes
        looks at `writable_bytes` before each frame, so that it is exceeded by one frame at most."""

    def end(self) -> None:
        """The body is whole."""

    def reset(self) -> None:
        """The body is broken off, and the client can see that it is."""

    def writable_bytes(self) -> int:
        """How many bytes may be written now: UNSENT_BYTES less what is unsent, or less than 1.

        When it was less than 1, the source's `drained` is called once there is some again.
        """


class ResponseSource(Protocol):
    """Who answers a request by its writer; the protocol calls it, never while it calls."""

    def drained(self) -> None:
        """There is room again."""

    def disconnected(self) -> None:
        """The client has left: reset, closed, lost. It is called once, unless the response has
        ended before; the writer does nothing any more."""


class ConnectionProtocol(Protocol):
    """A protocol on a connection; HTTP/1.1 may give way to WebSocket or to HTTP/2."""

    def receive(self, data: bytes) -> None:
        """What the client has sent."""

    def drained(self) -> None:
        """The connection has room again, after `Transport.writable_bytes` had none."""

    def disconnected(self) -> None:
        """The connection is closed, or lost."""

    def drain(self) -> None:
        """The edge is going away: end what is idle, let what is under way come to its end."""


class Nobody:
    """A `ConnectionProtocol`, and the `ResponseSource` of an answer that has ended: nobody is to hear of anything."""

    def receive(self, data: bytes) -> None: ...

    def drained(self) -> None: ...

    def disconnected(self) -> None: ...

    def drain(self) -> None: ...


NOBODY = Nobody()


class Transport(Protocol):
    """A connection, as a protocol uses it. Nothing raises, and nothing is done after the end."""

    protocol: ConnectionProtocol
    secure: bool
    peer: tuple[str, int] | None
    server: tuple[str, int] | None

    def write(self, data: bytes) -> None: ...

    def writable_bytes(self) -> int:
        """UNSENT_BYTES less what is unsent; `ConnectionProtocol.drained` follows where it is below 1."""

    def pause_reading(self) -> None:
        """Give the protocol no more input until `resume_reading`. A bounded amount of input waits;
        beyond it the client is not read."""

    def resume_reading(self) -> None:
        """Give the protocol input again, in a later call."""

    def close(self, *, lingers: bool = False) -> None:
        """Once all that was written has left. One that lingers takes what the client still sends,
        for a while: to a client that is still pending_writes, a close is a reset and no answer."""

    def abort(self) -> None:
        """At once: what is unsent is thrown away, and the client can see that it is."""


@dataclass(slots=True, eq=False)
class Admitted:
    """A request that may be answered, as far as its head tells; its body may still come.

    It counts for its tenant until `done`, which whoever had it last calls. Calling it again does
    nothing.
    """

    request: Request
    admission: Admission
    began_s: float
    """The time of its head, as `perf_counter` has it."""
    ended: Callable[[Admission], None]
    _over: bool = False

    def done(self) -> None:
        """The request has been answered, or its client has gone."""
        if not self._over:
            self._over = True
            self.ended(self.admission)


class Routes(Protocol):
    """Which requests are answered past the application."""

    def claims(self, request: Request) -> bool:
        """Return True if `serve` may answer it, as far as its head (`body` is empty) can tell.

        If so, call `admit`, and then `serve` with the whole body. A body over the limit of the
        settings is the application's to refuse.
        """

    def admit(self, request: Request, writer: ResponseWriter) -> Admitted | None:
        """Apply the access rules, before anything is kept of the body.

        None: it has been refused, and the answer is at the writer.
        """

    def serve(
        self, admitted: Admitted, body: bytes, writer: ResponseWriter
    ) -> ResponseSource | None:
        """Answer it, or None: it is the application's, which is given `admitted`. The writer may
        be written to before this returns, but not where it returns None."""


class Flushable(Protocol):
    """Who gathers what is to be written until all of one read has come to it."""

    def flush(self) -> None:
        """Write what has gathered. Must not block and not raise."""


@dataclass(slots=True)
class FlushBatch:
    """One callback of the event loop: what it has touched is flushed once, at its end.

    A read of the link brings frames for many streams, and the streams of one HTTP/2 connection
    leave in one write. So a sink that gets a frame is dirty, flushed when the read is through,
    and writes to its writer, which touches the connection that it shares; that is flushed then.
    Whoever begins such a callback (a link's read, a connection's, a deadline, the application's
    send) calls `flush` at its end. No further turn of the loop passes between read and write. What
    connections have got by then they send a few after another, each in one piece.

    With a `clock_s`, what was written is timed when all of it has been, since the read of the link
    that brought it; `wrote` is told the seconds and of how many writes. That is done for one in
    `READS_A_TIMED_ONE`: of a frame that comes alone it took a twentieth of all that the frame
    costs. What had to wait for its client's room is timed whenever it leaves.
    """

    dirty: dict[Flushable, None] = field(default_factory=dict)
    pending_writes: list[Flushable] = field(
        default_factory=list
    )  # connections; only while `flushing`
    flushing: bool = False
    clock_s: Callable[[], float] | None = None
    wrote: Callable[[float, int], None] = lambda _seconds, _writes: None
    read_s: float = 0.0  # when the link was read that this is about; 0: it is about none
    writes: int = 0  # of what that read brought, each for one client
    late: list[float] = field(default_factory=list)  # when what came that had no room till now
    _untimed: int = 0  # so many more reads before the next that is timed

    def begin(self) -> None:
        """A link is read."""
        if self._untimed:
            self._untimed -= 1
        elif self.clock_s is not None:
            self.read_s = self.clock_s()

    def mark_dirty(self, who: Flushable) -> None:
        self.dirty[who] = None

    def flush(self) -> None:
        """Flush all that was dirty, in order, and what that touches; not within another one."""
        if self.flushing:
            return
        self.flushing = True
        try:
            while self.dirty:
                dirty, self.dirty = list(self.dirty), {}
                for begin in range(0, len(dirty), FLUSHED_TOGETHER):
                    _flush(dirty[begin : begin + FLUSHED_TOGETHER])
                    pending_writes, self.pending_writes = self.pending_writes, []
                    _flush(pending_writes)
        finally:
            self.flushing = False
            if self.read_s or self.late:
                self._measure()
                self.read_s = 0.0
            self.writes = 0

    def since(self) -> float:
        """When what is dealt with now has come, for `late`."""
        return self.read_s or (self.clock_s() if self.clock_s is not None else 0.0)

    def _measure(self) -> None:
        late, self.late = self.late, []
        if self.clock_s is None:
            return
        now = self.clock_s()
        if self.read_s and self.writes:
            self.wrote(now - self.read_s, self.writes)
            self._untimed = READS_A_TIMED_ONE - 1
        for since in late:
            self.wrote(now - since, 1)


def _flush(some: list[Flushable]) -> None:
    for who in some:
        try:
            who.flush()
        except Exception:  # one client's fault must not keep the rest from theirs
            log.exception("flush failed")
