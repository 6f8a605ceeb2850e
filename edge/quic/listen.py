"""The sockets of QUIC, and the loop's part: reading, writing, one timer, and whether it answers."""

from __future__ import annotations

import asyncio
import socket
import struct
import sys
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from math import inf
from pathlib import Path
from time import monotonic

from edge.access.connections import ConnectionLimits
from edge.quic.core import Address, Cores, Datagrams
from edge.quic.probe import PROBE_EVERY_S, PROBE_TIMEOUT_S, Probe
from edge.quic.server import QuicServer, Way
from edge.server.incoming import Behind

MAX_DATAGRAM_BYTES = 4096
"""A datagram that is longer is no client's: a path carries 1,500 bytes."""
DATAGRAMS_PER_TURN = 256
"""Read before what they bring about is sent, and before others have their turn."""
SOCKET_BUFFER_BYTES = 2 << 20
"""Asked of the kernel, which may give less: what comes while a turn lasts has to wait there."""
MAX_UNSENT_DATAGRAMS = 1024
"""Kept while the kernel takes none; beyond, they are lost, as on any way."""
TIMER_S = 0.001
"""The shortest time that the loop can wait; its own clock, too, has no less, and QUIC needs it."""
ANY_ADDRESS = {"0.0.0.0": "127.0.0.1", "::": "::1"}
"""Where to ask a socket that listens everywhere."""


IP_PKTINFO = (socket.IPPROTO_IP, 8)
IPV6_RECVPKTINFO = (socket.IPPROTO_IPV6, 49)
IPV6_PKTINFO = (socket.IPPROTO_IPV6, 50)
"""Options of Linux, in levels and numbers: to be told which address a datagram came to."""
PACKET_INFO = frozenset((IP_PKTINFO, IPV6_PKTINFO))
ANCILLARY_BYTES = 128
MAX_LOCAL_ADDRESSES = 1024
"""A host has not more of its own."""

Ancillary = Sequence[tuple[int, int, bytes]]
Outgoing = tuple[bytes, Address, Ancillary]
Receive = Callable[[bytes, Address, Way], None]


class QuicListener:
    """Serves QUIC on bound datagram sockets between `start` and `stop`."""

    def __init__(
        self,
        sockets: Sequence[socket.socket],
        cores: Cores,
        behind: Behind,
        limits: ConnectionLimits,
        probe_timeout_s: float = PROBE_TIMEOUT_S,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._turn = behind.turn
        self._cores = cores
        self._ends = [SocketEnd(each) for each in sockets]
        self._server = QuicServer(cores, behind, monotonic, self._wake_at, limits)
        self._probes = [Probe(end.reached_at, probe_timeout_s) for end in self._ends]
        self._probing: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._waking_at = inf
        self._stopped = False

    @property
    def answers(self) -> bool:
        """Whether QUIC answers at every socket, as far as was asked."""
        return all(probe.answered for probe in self._probes)

    def load(self, certificate: Path, key: Path) -> None:
        """New connections get this certificate."""
        self._cores.load(certificate, key)

    def start(self) -> None:
        for end in self._ends:
            end.start(self._server.receive, self._turn.flush)
        self._probing = self._loop.create_task(self._probe())

    async def stop(self, patience_s: float) -> None:
        """No new requests; wait for those under way, as long as `patience_s`; then close all."""
        if self._stopped:
            return
        self._stopped = True
        idle = asyncio.Event()
        self._server.when_idle = idle.set
        self._server.drain()
        self._turn.flush()
        if not self._server.idle:
            with suppress(TimeoutError):
                async with asyncio.timeout(patience_s):
                    await idle.wait()
        self._server.close()
        if self._probing is not None:
            self._probing.cancel()
            await asyncio.gather(self._probing, return_exceptions=True)
        if self._timer is not None:
            self._timer.cancel()
        for end in self._ends:
            end.close()

    def _wake_at(self, at: float) -> None:
        if at < self._waking_at:
            if self._timer is not None:
                self._timer.cancel()
            self._waking_at = at
            # The loop's timers have milliseconds: less would be at once, and too early.
            delay_s = max(at - monotonic(), TIMER_S)
            self._timer = self._loop.call_later(delay_s, self._expire)

    def _expire(self) -> None:
        self._timer, self._waking_at = None, inf
        self._server.expire()
        self._turn.flush()

    async def ask(self) -> None:
        """Ask every socket whether it answers."""
        for probe in self._probes:
            await probe.ask()

    async def _probe(self) -> None:
        while True:
            await asyncio.sleep(PROBE_EVERY_S)
            await self.ask()


class SocketEnd:
    """One bound datagram socket: a `Way`."""

    def __init__(self, bound: socket.socket) -> None:
        self._loop = asyncio.get_running_loop()
        self._socket = bound
        self._unsent: deque[Outgoing] = deque()
        self._ways: dict[bytes, LocalWay] = {}  # of a socket that listens everywhere
        name = bound.getsockname()
        self.local: tuple[str, int] | None = (name[0], name[1])
        self.reached_at = (ANY_ADDRESS.get(name[0], name[0]), name[1])
        self._everywhere = name[0] in ANY_ADDRESS and sys.platform == "linux"
        if self._everywhere:
            told = IPV6_RECVPKTINFO if bound.family == socket.AF_INET6 else IP_PKTINFO
            bound.setsockopt(*told, 1)
        bound.setblocking(False)
        for buffer in (socket.SO_RCVBUF, socket.SO_SNDBUF):
            bound.setsockopt(socket.SOL_SOCKET, buffer, SOCKET_BUFFER_BYTES)

    def start(self, receive: Receive, flush: Callable[[], None]) -> None:
        """Give every datagram to `receive`, and call `flush` after each batch of them."""
        self._loop.add_reader(self._socket, self._read, receive, flush)

    def close(self) -> None:
        self._loop.remove_reader(self._socket)
        self._loop.remove_writer(self._socket)
        self._unsent.clear()
        self._socket.close()

    def send(self, datagrams: Datagrams) -> None:
        self.send_from(datagrams, ())

    def send_from(self, datagrams: Datagrams, source: Ancillary) -> None:
        """Send them; `source` tells the kernel from which of our addresses."""
        if self._unsent:
            room = MAX_UNSENT_DATAGRAMS - len(self._unsent)
            self._unsent.extend((data, to, source) for data, to in datagrams[:room])
            return
        for n, (data, to) in enumerate(datagrams):
            if not self._sent(data, to, source):
                self._unsent.extend((data, to, source) for data, to in datagrams[n:])
                self._loop.add_writer(self._socket, self._write)
                return

    def _sent(self, data: bytes, to: Address, source: Ancillary) -> bool:
        """Whether the kernel has taken it, or never will."""
        try:
            if source:
                self._socket.sendmsg((data,), source, 0, to)
            else:
                self._socket.sendto(data, to)
        except BlockingIOError:
            return False
        except OSError:
            pass  # no way to this client: its packets are lost, and it is taken for gone
        return True

    def _write(self) -> None:
        """The kernel takes datagrams again."""
        while self._unsent:
            if not self._sent(*self._unsent[0]):
                return
            self._unsent.popleft()
        self._loop.remove_writer(self._socket)

    def _read(self, receive: Receive, flush: Callable[[], None]) -> None:
        way: Way = self
        for _ in range(DATAGRAMS_PER_TURN):
            try:
                if self._everywhere:
                    data, told, _flags, address = self._socket.recvmsg(
                        MAX_DATAGRAM_BYTES, ANCILLARY_BYTES
                    )
                    way = self._way_of(told)
                else:
                    data, address = self._socket.recvfrom(MAX_DATAGRAM_BYTES)
            except BlockingIOError:
                break
            except OSError:
                continue  # what a client's host has said of an earlier datagram
            receive(data, address, way)
        flush()

    def _way_of(self, told: Sequence[tuple[int, int, bytes]]) -> Way:
        """By the address that a datagram came to: its answer has to leave from there."""
        for level, kind, data in told:
            if (level, kind) in PACKET_INFO:
                if data not in self._ways and len(self._ways) < MAX_LOCAL_ADDRESSES:
                    self._ways[data] = LocalWay(self, (level, kind, data))
                return self._ways.get(data, self)
        return self


class LocalWay:
    """A `Way` from one of the addresses of a socket that listens everywhere.

    Left to itself the kernel would answer from the address that it likes best, and a client
    takes nothing from an address that it has not asked.
    """

    def __init__(self, end: SocketEnd, told: tuple[int, int, bytes]) -> None:
        level, kind, data = told
        self._end = end
        if level == socket.IPPROTO_IP:
            _, address, _ = struct.unpack("=I4s4s", data)
            host = socket.inet_ntop(socket.AF_INET, address)
            data = struct.pack("=I4s4s", 0, address, bytes(4))
        else:
            address, _ = struct.unpack("=16sI", data)
            host = socket.inet_ntop(socket.AF_INET6, address)
        self.local: tuple[str, int] | None = (host, end.reached_at[1])
        self._source: Ancillary = ((level, kind, data),)

    def send(self, datagrams: Datagrams) -> None:
        self._end.send_from(datagrams, self._source)
