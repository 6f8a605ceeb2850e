"""HTTP/3 clients that count what comes: many connections in one process, the same for each peer."""

from __future__ import annotations

import asyncio
import socket
from contextlib import suppress
from math import inf
from time import monotonic

from aioquic.h3.connection import H3_ALPN, H3Connection
from aioquic.h3.events import DataReceived
from aioquic.quic.configuration import QuicConfiguration
from aioquic.quic.connection import QuicConnection
from aioquic.quic.events import HandshakeCompleted

SOCKET_BUFFER_BYTES = 4 << 20
EVENT = b"data: "


class Load:
    """One connection; `frames` counts the events of all its streams."""

    def __init__(self, port: int, cafile: str) -> None:
        configuration = QuicConfiguration(
            is_client=True,
            alpn_protocols=H3_ALPN,
            server_name="localhost",
            max_data=1 << 24,
            max_stream_data=1 << 22,
        )
        configuration.load_verify_locations(cafile)
        self._loop = asyncio.get_running_loop()
        self._quic = QuicConnection(configuration=configuration)
        self._http3 = H3Connection(self._quic)
        self._address = ("127.0.0.1", port)
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SOCKET_BUFFER_BYTES)
        self._socket.setblocking(False)
        self._socket.connect(self._address)
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = inf
        self._authority = f"localhost:{port}".encode()
        self.connected = asyncio.Event()
        self.ended = asyncio.Event()  # the last request
        self.frames = 0
        self._tails: dict[int, bytes] = {}

    def connect(self) -> None:
        self._loop.add_reader(self._socket, self._read)
        self._quic.connect(self._address, now=monotonic())
        self._send()

    def ask(self, path: str) -> None:
        self.ended.clear()
        self._http3.send_headers(
            self._quic.get_next_available_stream_id(),
            [
                (b":method", b"GET"),
                (b":scheme", b"https"),
                (b":authority", self._authority),
                (b":path", path.encode()),
                (b"accept", b"text/event-stream"),
            ],
            end_stream=True,
        )
        self._send()

    def stall(self) -> None:
        """Read nothing more, and say nothing."""
        if self._timer is not None:
            self._timer.cancel()
        self._loop.remove_reader(self._socket)

    def close(self) -> None:
        self._quic.close()
        self._send()
        self.stall()
        self._socket.close()

    def _read(self) -> None:
        now = monotonic()
        while True:
            try:
                data = self._socket.recv(4096)
            # The server is not up yet, or has gone.
            except (BlockingIOError, ConnectionRefusedError):
                break
            self._quic.receive_datagram(data, self._address, now)
        self._take()
        self._send()

    def _take(self) -> None:
        while (event := self._quic.next_event()) is not None:
            if isinstance(event, HandshakeCompleted):
                self.connected.set()
            for each in self._http3.handle_event(event):
                if isinstance(each, DataReceived):
                    data = self._tails.get(each.stream_id, b"") + each.data
                    self.frames += data.count(EVENT)
                    self._tails[each.stream_id] = data[-len(EVENT) + 1 :]
                    if each.stream_ended:
                        self.ended.set()

    def _send(self) -> None:
        for data, _ in self._quic.datagrams_to_send(monotonic()):
            with suppress(ConnectionRefusedError):
                self._socket.send(data)
        at = self._quic.get_timer()
        if at is not None and at < self._timer_at:
            if self._timer is not None:
                self._timer.cancel()
            self._timer_at = at
            self._timer = self._loop.call_later(max(0.001, at - monotonic()), self._expire)

    def _expire(self) -> None:
        self._timer, self._timer_at = None, inf
        at = self._quic.get_timer()
        if at is not None and at <= monotonic():
            self._quic.handle_timer(monotonic())
            self._take()
        self._send()
