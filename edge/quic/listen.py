"""UDP sockets of QUIC on the event loop: reading, writing, and the timer of the server."""

from __future__ import annotations

import asyncio
import errno
import socket
import struct
import sys
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from math import inf
from pathlib import Path
from time import monotonic

from tailrace.edge.access.connections import ConnectionLimits
from tailrace.edge.quic.core import TIMER_S, Address, Cores, Datagrams
from tailrace.edge.quic.server import QuicServer, Way
from tailrace.edge.server.dispatch import ServerContext

MAX_DATAGRAM_BYTES = 4096
"""A datagram that is longer is no client's: a path carries 1,500 bytes."""
DATAGRAMS_PER_TURN = 256
"""Maximum datagrams that are read before what they bring about is sent."""
READ_S = 0.002
"""Time after which the other datagrams of a socket wait for the next turn of the event loop."""
SOCKET_BUFFER_BYTES = 2 << 20
"""Asked of the kernel, which may give less: what comes while a turn lasts has to wait there."""
MAX_UNSENT_DATAGRAMS = 1024
"""Kept while the kernel takes none; beyond, they are lost, as on any way."""
ANY_ADDRESS = ("0.0.0.0", "::")


IP_PKTINFO = (socket.IPPROTO_IP, 8)
IPV6_RECVPKTINFO = (socket.IPPROTO_IPV6, 49)
IPV6_PKTINFO = (socket.IPPROTO_IPV6, 50)
"""Options of Linux, in levels and numbers: to be told which address a datagram came to."""
MTU_DISCOVER, IPV6_MTU_DISCOVER = (socket.IPPROTO_IP, 10), (socket.IPPROTO_IPV6, 23)
PMTUDISC_PROBE = 3
"""Options of Linux, and the value with which no datagram is fragmented on its way."""
UDP_SEGMENT = (17, 103)
"""The option of Linux that a piece is cut into datagrams of a length."""
MAX_SEGMENTS, MAX_PIECE_BYTES = 64, 65_000
"""So many datagrams, and bytes, at most in one piece."""
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
        context: ServerContext,
        limits: ConnectionLimits,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._batch = context.batch
        self._cores = cores
        self._ends = [SocketEnd(each) for each in sockets]
        self._server = QuicServer(cores, context, monotonic, self._wake_at, limits)
        self._timer: asyncio.TimerHandle | None = None
        self._waking_at = inf
        self._stopped = False

    def load(self, certificate: Path, key: Path) -> None:
        """New connections get this certificate."""
        self._cores.load(certificate, key)

    def start(self) -> None:
        for end in self._ends:
            end.start(self._server.receive, self._batch.flush)

    async def stop(self, patience_s: float) -> None:
        """No new requests; wait for those under way, as long as `patience_s`; then close all."""
        if self._stopped:
            return
        self._stopped = True
        idle = asyncio.Event()
        self._server.when_idle = idle.set
        self._server.drain()
        self._batch.flush()
        if not self._server.idle:
            with suppress(TimeoutError):
                async with asyncio.timeout(patience_s):
                    await idle.wait()
        self._server.close()
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
        self._batch.flush()


class SocketEnd:
    """One bound datagram socket: a `Way`."""

    def __init__(self, bound: socket.socket) -> None:
        self._loop = asyncio.get_running_loop()
        self._socket = bound
        self._unsent: deque[Outgoing] = deque()
        self._ways: dict[bytes, LocalWay] = {}  # of a socket that listens everywhere
        name = bound.getsockname()
        self.local: tuple[str, int] | None = (name[0], name[1])
        self.port = name[1]
        self._everywhere = name[0] in ANY_ADDRESS and sys.platform == "linux"
        if self._everywhere:
            told = IPV6_RECVPKTINFO if bound.family == socket.AF_INET6 else IP_PKTINFO
            bound.setsockopt(*told, 1)
        if sys.platform == "linux":
            told = IPV6_MTU_DISCOVER if bound.family == socket.AF_INET6 else MTU_DISCOVER
            bound.setsockopt(*told, PMTUDISC_PROBE)
        self._segments = segments(bound)
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
        begin = 0
        while begin < len(datagrams):
            data, to = datagrams[begin]
            end = begin + 1
            if self._segments and end < len(datagrams):
                end = alike(datagrams, begin)
            if end > begin + 1:
                run = [each for each, _ in datagrams[begin:end]]
                sent = self._sent_together(run, to, source)
            else:
                sent = self._sent(data, to, source)
            if not sent:
                self._unsent.extend((data, to, source) for data, to in datagrams[begin:])
                self._loop.add_writer(self._socket, self._write)
                return
            begin = end

    def _sent_together(self, run: Sequence[bytes], to: Address, source: Ancillary) -> bool:
        """The same for datagrams that the kernel makes of one piece, for a fifth of the time."""
        size = (*UDP_SEGMENT, struct.pack("=H", len(run[0])))
        try:
            self._socket.sendmsg(run, (*source, size), 0, to)
        except BlockingIOError:
            return False
        except OSError as error:
            # No way to this client, or a narrow one, or through a device that cannot.
            self._segments = error.errno != errno.EIO
            return all(self._sent(data, to, source) for data in run)
        return True

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
        until = monotonic() + READ_S
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
            if monotonic() >= until:
                break
        flush()

    def _way_of(self, told: Sequence[tuple[int, int, bytes]]) -> Way:
        """By the address that a datagram came to: its answer has to leave from there."""
        for level, kind, data in told:
            if (level, kind) in PACKET_INFO:
                if data not in self._ways and len(self._ways) < MAX_LOCAL_ADDRESSES:
                    self._ways[data] = LocalWay(self, (level, kind, data))
                return self._ways.get(data, self)
        return self


def segments(bound: socket.socket) -> bool:
    """Whether the kernel makes datagrams of one piece, as Linux does since 4.18."""
    if sys.platform != "linux":
        return False
    try:
        bound.setsockopt(*UDP_SEGMENT, 0)
    except OSError:
        return False
    return True


def alike(datagrams: Datagrams, begin: int) -> int:
    """Where those end that can leave as one piece: of one length, but for a shorter last one."""
    first, to = datagrams[begin]
    size = len(first)
    most = min(begin + MAX_SEGMENTS, begin + MAX_PIECE_BYTES // size, len(datagrams))
    for n in range(begin + 1, most):
        data, other = datagrams[n]
        if other != to or len(data) > size:
            return n
        if len(data) < size:
            return n + 1
    return max(most, begin + 1)


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
        self.local: tuple[str, int] | None = (host, end.port)
        self._source: Ancillary = ((level, kind, data),)

    def send(self, datagrams: Datagrams) -> None:
        self._end.send_from(datagrams, self._source)
