"""The UDP sockets of the QUIC server: reading and writing datagrams on the event loop."""

from __future__ import annotations

import asyncio
import errno
import socket
import struct
import sys
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from time import monotonic

from tailrace.edge.access.connections import ConnectionLimits
from tailrace.edge.quic.interface import Address, Datagrams, QuicLibrary
from tailrace.edge.quic.server import DatagramPath, QuicServer
from tailrace.edge.server.context import ServerContext

MAX_DATAGRAM_BYTES = 4096
"""Maximum length of a datagram that is read; network paths usually carry up to 1,500 bytes."""
DATAGRAMS_PER_TURN = 256
"""Maximum number of datagrams of a socket that are read before the responses are sent."""
READ_S = 0.002
"""Time for reading datagrams of one socket in one iteration of the event loop, in seconds."""
SOCKET_BUFFER_BYTES = 2 << 20
"""Size of the kernel's socket buffers, in bytes: datagrams wait there while the loop is busy."""
MAX_UNSENT_DATAGRAMS = 1024
"""Maximum number of datagrams that wait while the kernel accepts none; further ones are dropped."""
ANY_ADDRESS = ("0.0.0.0", "::")
"""Addresses of a socket that listens on every local address."""

IP_PKTINFO = (socket.IPPROTO_IP, 8)
IPV6_RECVPKTINFO = (socket.IPPROTO_IPV6, 49)
IPV6_PKTINFO = (socket.IPPROTO_IPV6, 50)
"""Linux socket options (level, number) with which the kernel reports datagrams' local addresses."""
MTU_DISCOVER, IPV6_MTU_DISCOVER = (socket.IPPROTO_IP, 10), (socket.IPPROTO_IPV6, 23)
PMTUDISC_PROBE = 3
"""Linux socket options (level, number) and their value that forbids fragmentation of datagrams."""
UDP_SEGMENT = (17, 103)
"""Linux socket option (level, number): the kernel splits a buffer into datagrams of one length."""
MAX_SEGMENTS, MAX_SEGMENTED_BYTES = 64, 65_000
"""Maximum number of datagrams, and of bytes, that the kernel gets in one buffer (UDP_SEGMENT)."""
PACKET_INFO = frozenset((IP_PKTINFO, IPV6_PKTINFO))
ANCILLARY_BYTES = 128
MAX_LOCAL_ADDRESSES = 1024
"""Maximum number of local addresses for which a socket keeps a `LocalAddressPath`."""

Ancillary = Sequence[tuple[int, int, bytes]]
Outgoing = tuple[bytes, Address, Ancillary]
Receive = Callable[[bytes, Address, DatagramPath], None]


class QuicListener:
    """Serves QUIC on bound UDP sockets between `start` and `stop`."""

    def __init__(
        self,
        sockets: Sequence[socket.socket],
        library: QuicLibrary,
        context: ServerContext,
        limits: ConnectionLimits,
    ) -> None:
        self._batch = context.batch
        self._library = library
        self._sockets = [UdpSocket(each) for each in sockets]
        self._server = QuicServer(library, context, monotonic, limits)
        self._stopped = False

    def load(self, certificate: Path, key: Path) -> None:
        """Use this certificate for new connections."""
        self._library.load(certificate, key)

    def start(self) -> None:
        """Begin to read datagrams."""
        for each in self._sockets:
            each.start(self._server.receive, self._batch.flush)

    async def stop(self, timeout_s: float) -> None:
        """Take no new requests, wait `timeout_s` seconds at most for open ones, and close all."""
        if self._stopped:
            return
        self._stopped = True
        idle = asyncio.Event()
        self._server.when_idle = idle.set
        self._server.drain()
        self._batch.flush()
        if not self._server.idle:
            with suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await idle.wait()
        self._server.close()
        for each in self._sockets:
            each.close()


class UdpSocket:
    """One bound UDP socket: a `DatagramPath`."""

    def __init__(self, bound: socket.socket) -> None:
        self._loop = asyncio.get_running_loop()
        self._socket = bound
        self._unsent: deque[Outgoing] = deque()
        # Maps packet info to the path. Only used by a socket that listens on every local address.
        self._paths: dict[bytes, LocalAddressPath] = {}
        name = bound.getsockname()
        self.local: tuple[str, int] | None = (name[0], name[1])
        self.port = name[1]
        self._is_on_every_address = name[0] in ANY_ADDRESS and sys.platform == "linux"
        is_ipv6 = bound.family == socket.AF_INET6
        if self._is_on_every_address:
            bound.setsockopt(*(IPV6_RECVPKTINFO if is_ipv6 else IP_PKTINFO), 1)
        if sys.platform == "linux":
            bound.setsockopt(*(IPV6_MTU_DISCOVER if is_ipv6 else MTU_DISCOVER), PMTUDISC_PROBE)
        self._can_segment = can_segment(bound)
        bound.setblocking(False)
        for buffer in (socket.SO_RCVBUF, socket.SO_SNDBUF):
            bound.setsockopt(socket.SOL_SOCKET, buffer, SOCKET_BUFFER_BYTES)

    def start(self, receive: Receive, flush: Callable[[], None]) -> None:
        """Give every datagram to `receive`, and call `flush` after each batch of them."""
        self._loop.add_reader(self._socket, self._read, receive, flush)

    def close(self) -> None:
        """Close the socket; unsent datagrams are lost."""
        self._loop.remove_reader(self._socket)
        self._loop.remove_writer(self._socket)
        self._unsent.clear()
        self._socket.close()

    def send(self, datagrams: Datagrams) -> None:
        """Send datagrams from the socket's own address."""
        self.send_from(datagrams, ())

    def send_from(self, datagrams: Datagrams, source: Ancillary) -> None:
        """Send datagrams; `source` sets the local address, as ancillary data for the kernel."""
        if self._unsent:
            room = MAX_UNSENT_DATAGRAMS - len(self._unsent)
            self._unsent.extend((data, to, source) for data, to in datagrams[:room])
            return
        begin = 0
        while begin < len(datagrams):
            data, to = datagrams[begin]
            end = begin + 1
            if self._can_segment and end < len(datagrams):
                end = end_of_segments(datagrams, begin)
            if end > begin + 1:
                run = [each for each, _ in datagrams[begin:end]]
                sent = self._send_segments(run, to, source)
            else:
                sent = self._send_one(data, to, source)
            if not sent:
                self._unsent.extend((data, to, source) for data, to in datagrams[begin:])
                self._loop.add_writer(self._socket, self._write)
                return
            begin = end

    def _send_segments(self, run: Sequence[bytes], to: Address, source: Ancillary) -> bool:
        """Send datagrams of one length with one system call, which takes a fifth of the time.

        Return False if the kernel accepts none now.
        """
        size = (*UDP_SEGMENT, struct.pack("=H", len(run[0])))
        try:
            self._socket.sendmsg(run, (*source, size), 0, to)
        except BlockingIOError:
            return False
        except OSError as error:
            # EIO: the network device cannot segment. Other errors concern only this client.
            self._can_segment = error.errno != errno.EIO
            return all(self._send_one(data, to, source) for data in run)
        return True

    def _send_one(self, data: bytes, to: Address, source: Ancillary) -> bool:
        """Send a datagram; return False if the kernel accepts none now."""
        try:
            if source:
                self._socket.sendmsg((data,), source, 0, to)
            else:
                self._socket.sendto(data, to)
        except BlockingIOError:
            return False
        except OSError:
            pass  # the client cannot be reached: its connection times out
        return True

    def _write(self) -> None:
        """Send the waiting datagrams, because the kernel accepts datagrams again."""
        while self._unsent:
            if not self._send_one(*self._unsent[0]):
                return
            self._unsent.popleft()
        self._loop.remove_writer(self._socket)

    def _read(self, receive: Receive, flush: Callable[[], None]) -> None:
        path: DatagramPath = self
        until = monotonic() + READ_S
        for _ in range(DATAGRAMS_PER_TURN):
            try:
                if self._is_on_every_address:
                    data, ancillary, _flags, address = self._socket.recvmsg(
                        MAX_DATAGRAM_BYTES, ANCILLARY_BYTES
                    )
                    path = self._path_of(ancillary)
                else:
                    data, address = self._socket.recvfrom(MAX_DATAGRAM_BYTES)
            except BlockingIOError:
                break
            except OSError:
                continue  # an ICMP error about a datagram that this socket has sent
            receive(data, address, path)
            if monotonic() >= until:
                break
        flush()

    def _path_of(self, ancillary: Sequence[tuple[int, int, bytes]]) -> DatagramPath:
        """Return the path from the local address that a datagram was sent to."""
        for level, kind, data in ancillary:
            if (level, kind) in PACKET_INFO:
                if data not in self._paths and len(self._paths) < MAX_LOCAL_ADDRESSES:
                    self._paths[data] = LocalAddressPath(self, (level, kind, data))
                return self._paths.get(data, self)
        return self


def can_segment(bound: socket.socket) -> bool:
    """Return True if the kernel can split a buffer into datagrams (Linux 4.18 and later)."""
    if sys.platform != "linux":
        return False
    try:
        bound.setsockopt(*UDP_SEGMENT, 0)
    except OSError:
        return False
    return True


def end_of_segments(datagrams: Datagrams, begin: int) -> int:
    """Return the end index of the datagrams from `begin` that one system call can send.

    They have the same receiver and length; only the last one may be shorter.
    """
    first, to = datagrams[begin]
    size = len(first)
    most = min(begin + MAX_SEGMENTS, begin + MAX_SEGMENTED_BYTES // size, len(datagrams))
    for n in range(begin + 1, most):
        data, other = datagrams[n]
        if other != to or len(data) > size:
            return n
        if len(data) < size:
            return n + 1
    return max(most, begin + 1)


class LocalAddressPath:
    """A `DatagramPath` from one local address of a socket that listens on every address.

    The kernel would choose a source address by its routes, and clients ignore datagrams from an
    address that they did not send to.
    """

    def __init__(self, udp: UdpSocket, packet_info: tuple[int, int, bytes]) -> None:
        level, kind, data = packet_info
        self._udp = udp
        if level == socket.IPPROTO_IP:
            _, address, _ = struct.unpack("=I4s4s", data)
            host = socket.inet_ntop(socket.AF_INET, address)
            data = struct.pack("=I4s4s", 0, address, bytes(4))
        else:
            address, _ = struct.unpack("=16sI", data)
            host = socket.inet_ntop(socket.AF_INET6, address)
        self.local: tuple[str, int] | None = (host, udp.port)
        self._source: Ancillary = ((level, kind, data),)

    def send(self, datagrams: Datagrams) -> None:
        """Send datagrams from this address."""
        self._udp.send_from(datagrams, self._source)
