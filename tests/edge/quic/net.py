"""A QUIC server and its clients in memory: real packets, no sockets, and a clock that is moved."""

from __future__ import annotations

import ssl
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from aioquic.h3.connection import H3_ALPN, FrameType, H3Connection, encode_frame
from aioquic.h3.events import DataReceived, HeadersReceived
from aioquic.quic import events as quic
from aioquic.quic.configuration import QuicConfiguration
from aioquic.quic.connection import QuicConnection
from starlette.types import ASGIApp

from tailrace.edge.access.connections import ConnectionLimits
from tailrace.edge.flush import FlushBatch
from tailrace.edge.quic.aioquic_library import AioquicLibrary
from tailrace.edge.quic.interface import Address, Datagrams
from tailrace.edge.quic.server import RETRY_FROM_HANDSHAKES, QuicServer
from tailrace.edge.server.asgi import AsgiApplication
from tailrace.edge.server.context import RunningRequest, ServerContext
from tailrace.edge.server.deadlines import Deadlines, nothing
from tailrace.edge.server.interfaces import Request, ResponseWriter
from tailrace.up import CertificateFiles
from tests.edge.server.manual_clock import ManualClock

STEP_S = 0.005
"""Step of the clock while no datagram is under way and a test waits, in seconds."""
MAX_STEPS = 4000

Fields = list[tuple[bytes, bytes]]
OPEN = b"/stream"
"""Path whose response stays open, and is written by the test."""
APP = b"/app"
"""The path that the ASGI application answers."""
MAX_BODY_BYTES = 1 << 20
BODY_TIMEOUT_S = 6.0
STALLED_TIMEOUT_S = 20.0


class Streaming:
    """The source of one response that the test writes to."""

    def __init__(self, writer: ResponseWriter) -> None:
        self.writer = writer
        self.left = False
        self.drains = 0

    def drained(self) -> None:
        self.drains += 1

    def disconnected(self) -> None:
        self.left = True


class Replying:
    """A request whose body is collected and then answered by `Replies`."""

    def __init__(self, replies: Replies, request: Request, writer: ResponseWriter) -> None:
        self.source = Streaming(writer)
        self._replies = replies
        self._request = request
        self._body = bytearray()
        self.consumed: Callable[[int], None] = lambda _size: None

    def feed(self, data: bytes, ended: bool) -> None:
        self._body += data
        self.consumed(len(data))
        if ended:
            self._replies.reply(replace(self._request, body=bytes(self._body)), self.source)

    def drained(self) -> None:
        self.source.drained()

    def disconnected(self) -> None:
        self.source.disconnected()


class Replies:
    """An application: OPEN stays open, APP is `asgi`'s, any other path is echoed."""

    def __init__(self, asgi: AsgiApplication | None = None) -> None:
        self.asgi = asgi
        self.requests: list[Request] = []
        self.streams: list[Streaming] = []

    def start(
        self,
        request: Request,
        writer: ResponseWriter,
        server: tuple[str, int] | None = None,
        consumed: Callable[[int], None] = lambda _size: None,
        refused: Callable[[], None] = nothing,
        wants_body: Callable[[], None] = nothing,
    ) -> RunningRequest:
        if self.asgi is not None and request.path == APP:
            return self.asgi.start(request, writer, server, consumed, refused, wants_body)
        running = Replying(self, request, writer)
        running.consumed = consumed
        return running

    def reply(self, request: Request, source: Streaming) -> None:
        self.requests.append(request)
        writer = source.writer
        writer.start(200, [(b"content-type", b"text/plain")])
        if request.path == OPEN:
            self.streams.append(source)
            return
        writer.write(b"%s %s %d" % (request.method.encode(), request.path, len(request.body)))
        writer.end()


class Net:
    """The server, the way to it, and the time."""

    local: tuple[str, int] | None = ("127.0.0.1", 443)
    server_address = ("127.0.0.1", 443)

    def __init__(
        self,
        files: CertificateFiles,
        limits: ConnectionLimits | None = None,
        app: ASGIApp | None = None,
        retry_from: int = RETRY_FROM_HANDSHAKES,
    ) -> None:
        self.files = files
        self.now = 100.0
        self.batch = FlushBatch()
        self.lost: Callable[[bytes], bool] = lambda _datagram: False  # on the way to clients
        self.sent = 0  # datagrams of the server
        self.clock = ManualClock(self.now)
        self.deadlines = Deadlines(self.clock, self.batch.flush)
        self.routes = Replies(AsgiApplication(app or no_app, self.batch, self.deadlines))
        context = ServerContext(
            self.batch,
            self.routes,
            list,
            self.deadlines,
            BODY_TIMEOUT_S,
            STALLED_TIMEOUT_S,
        )
        self.clients: list[Client] = []
        self.strays: list[tuple[bytes, Address]] = []  # datagrams without a receiver
        self._to_clients: deque[tuple[bytes, Address]] = deque()
        library = AioquicLibrary(files.certificate, files.key)
        self.server = QuicServer(
            library,
            context,
            lambda: self.now,
            limits or ConnectionLimits(10_000, 10_000),
            retry_from,
        )

    def send(self, datagrams: Datagrams) -> None:
        self.sent += len(datagrams)
        self._to_clients.extend(each for each in datagrams if not self.lost(each[0]))

    def receive(self, datagram: bytes, address: Address) -> None:
        self.server.receive(datagram, address, self)
        self.batch.flush()

    def client(self, **options: Any) -> Client:
        """Return a connected client."""
        client = Client(self, **options)
        self.until(lambda: client.connected)
        return client

    def settle(self) -> None:
        """Deliver the datagrams under way, without moving the clock."""
        self.batch.flush()
        moved = True
        while moved:
            moved = False
            for client in self.clients:
                for data, _ in client.quic.datagrams_to_send(self.now):
                    moved = True
                    self.receive(data, client.address)
            while self._to_clients:
                moved = True
                data, address = self._to_clients.popleft()
                to = next((c for c in self.clients if c.address == address), None)
                if to is None or to.silent:
                    self.strays.append((data, address))
                else:
                    to.receive(data)

    def pass_time(self, seconds: float = STEP_S) -> None:
        """Let it pass in small steps, as QUIC needs them."""
        end = self.now + seconds
        while self.now < end:
            self.now = min(end, self.now + STEP_S)
            self.clock.now = self.now
            self.clock.fire()
            for client in self.clients:
                at = client.quic.get_timer()
                if at is not None and at <= self.now and not client.silent:
                    client.quic.handle_timer(self.now)
                    client.take_events()
            self.settle()

    def until(self, condition: Callable[[], bool]) -> None:
        """Let time pass until it holds."""
        self.settle()
        for _ in range(MAX_STEPS):
            if condition():
                return
            self.pass_time()
        raise AssertionError("it did not come to that")


class Client:
    """A client of aioquic's; `answers` has its responses, by stream."""

    def __init__(self, net: Net, host: str = "127.0.0.1", **options: Any) -> None:
        self.net = net
        self.address = (host, 40_000 + len(net.clients))
        self.connected = False
        self.silent = False  # takes nothing, and says nothing of its own accord
        self.ended_with: int | None = None
        self.statuses: dict[int, int] = {}
        self.headers: dict[int, Fields] = {}
        self.bodies: dict[int, bytes] = {}
        self.whole: set[int] = set()
        self.reset: dict[int, int] = {}
        self.stopped: dict[int, int] = {}
        self.raw: dict[int, bytes] = {}
        self.tickets: list[Any] = []
        configuration = QuicConfiguration(
            is_client=True, alpn_protocols=H3_ALPN, server_name="localhost", **options
        )
        configuration.load_verify_locations(str(net.files.certificate))
        configuration.verify_mode = ssl.CERT_REQUIRED
        self.quic = QuicConnection(
            configuration=configuration, session_ticket_handler=self.tickets.append
        )
        self.http3: H3Connection = H3Connection(self.quic)
        net.clients.append(self)
        self.quic.connect(net.server_address, now=net.now)

    def receive(self, datagram: bytes) -> None:
        self.quic.receive_datagram(datagram, self.net.server_address, self.net.now)
        self.take_events()

    def take_events(self) -> None:
        while (event := self.quic.next_event()) is not None:
            if isinstance(event, quic.HandshakeCompleted):
                self.connected = True
            elif isinstance(event, quic.ConnectionTerminated):
                self.ended_with = event.error_code
            elif isinstance(event, quic.StreamReset):
                self.reset[event.stream_id] = event.error_code
            elif isinstance(event, quic.StopSendingReceived):
                self.stopped[event.stream_id] = event.error_code
            elif isinstance(event, quic.StreamDataReceived):
                self.raw[event.stream_id] = self.raw.get(event.stream_id, b"") + event.data
            for answer in self.http3.handle_event(event):
                if isinstance(answer, HeadersReceived):
                    self.headers[answer.stream_id] = list(answer.headers)
                    self.statuses[answer.stream_id] = int(dict(answer.headers)[b":status"])
                    self.bodies.setdefault(answer.stream_id, b"")
                elif isinstance(answer, DataReceived):
                    self.bodies[answer.stream_id] += answer.data
                if isinstance(answer, HeadersReceived | DataReceived) and answer.stream_ended:
                    self.whole.add(answer.stream_id)

    # ---- requests ----

    def ask(
        self,
        path: bytes,
        method: bytes = b"GET",
        fields: Sequence[tuple[bytes, bytes]] = (),
        body: bytes | None = None,
    ) -> int:
        """Send a request; gives its stream."""
        stream = self.quic.get_next_available_stream_id()
        self.http3.send_headers(stream, head(path, method, fields), end_stream=body is None)
        if body is not None:
            self.http3.send_data(stream, body, end_stream=True)
        return stream

    def get(self, path: bytes) -> bytes:
        """Return the body of an answer."""
        stream = self.ask(path)
        self.net.until(lambda: stream in self.whole)
        return self.bodies[stream]

    def open(self) -> tuple[int, Streaming]:
        """Return a response that stays open, and its source at the server."""
        before = len(self.net.routes.streams)
        stream = self.ask(OPEN)
        self.net.until(lambda: stream in self.statuses)
        assert len(self.net.routes.streams) == before + 1
        return stream, self.net.routes.streams[-1]

    # ---- what no well-behaved client sends ----

    def fields(self, stream: int, fields: Fields) -> bytes:
        """Return a HEADERS frame of whatever fields, encoded without looking at them."""
        return encode_frame(FrameType.HEADERS, self.http3._encode_headers(stream, fields))

    def send_raw(self, data: bytes, end: bool = False, stream: int | None = None) -> int:
        """Bytes on a request stream, of a new one unless it is given."""
        if stream is None:
            stream = self.quic.get_next_available_stream_id()
        self.quic.send_stream_data(stream, data, end)
        return stream


def head(path: bytes, method: bytes = b"GET", fields: Sequence[tuple[bytes, bytes]] = ()) -> Fields:
    return [
        (b":method", method),
        (b":scheme", b"https"),
        (b":authority", b"localhost"),
        (b":path", path),
        *fields,
    ]


async def no_app(*_arguments: object) -> None:
    raise AssertionError("every request is claimed by a route here")
