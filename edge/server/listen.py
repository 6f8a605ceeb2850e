"""The sockets of an edge, and the servers that listen on them from startup to shutdown."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import ExitStack, asynccontextmanager
from itertools import chain
from typing import NamedTuple, Self

import structlog
from hypercorn.config import Config
from hypercorn.utils import repr_socket_addr

from tailrace.edge.config import EdgeConfig
from tailrace.edge.quic.aioquic_library import AioquicLibrary
from tailrace.edge.quic.listen import QuicListener
from tailrace.edge.quic.reuseport_bpf import route_by_connection_id
from tailrace.edge.server.connection import Connection
from tailrace.edge.server.context import TcpContext
from tailrace.ledger.errors import ConfigError
from tailrace.ledger.process.settings import parse_address

LISTEN_BACKLOG = 1024
"""Maximum number of connections that wait to be accepted."""
NOT_SENT_BYTES = 8 << 10
"""Maximum unsent bytes of a connection in the kernel (TCP_NOTSENT_LOWAT). It bounds the memory that
a stalled client costs. Sent bytes do not count, so distant clients keep their bandwidth."""
SEND_BUFFER_BYTES = 256 << 10
"""Size of the send buffer of a connection, in bytes. The kernel's own maximum is 4 MiB."""

log = structlog.get_logger("tailrace.edge")


class Sockets(NamedTuple):
    """Bound sockets that do not listen yet. Each process has its own UDP sockets."""

    plain: list[socket.socket]
    secure: list[socket.socket]
    quic: list[socket.socket]
    quic_of_others: list[list[socket.socket]]

    @classmethod
    def bound(cls, config: EdgeConfig) -> Self:
        """Bind all addresses of `config`; raise ConfigError if one cannot be bound."""
        with ExitStack() as unless_all:
            sockets = cls([], [], [], [[] for _ in range(1, config.processes)])
            unless_all.callback(sockets.close)
            for address in config.http:
                sockets.plain.extend(_bind("http", address))
            for address in config.https if config.certificate is not None else ():
                sockets.secure.extend(_bind("https", address))
                if config.http3:
                    each = _bind_datagrams("https", address, config.processes)
                    for mine, made in zip(
                        (sockets.quic, *sockets.quic_of_others), each, strict=True
                    ):
                        mine.append(made)
            unless_all.pop_all()
            return sockets

    def of(self, process: int) -> Sockets:
        """Return the sockets of one process, without the UDP sockets of the others."""
        quic = [self.quic, *self.quic_of_others][process]
        return self._replace(quic=quic, quic_of_others=[])

    def close(self) -> None:
        """Close all sockets."""
        for each in (*self.plain, *self.secure, *self.quic, *chain(*self.quic_of_others)):
            each.close()


def _bind(setting: str, address: str) -> list[socket.socket]:
    binding = Config()
    binding.bind = [address]
    try:
        made = binding.create_sockets()
    except OSError as error:
        raise _taken(setting, address, error) from error
    for stream in made.insecure_sockets:
        _bound_buffers(stream)
    return made.insecure_sockets


def _bind_datagrams(setting: str, address: str, count: int) -> list[socket.socket]:
    """Return `count` UDP sockets on one address, which the kernel selects by connection id."""
    host, port = parse_address(address)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with ExitStack() as unless_all:
        made = [
            unless_all.enter_context(socket.socket(family, socket.SOCK_DGRAM)) for _ in range(count)
        ]
        try:
            for each in made:
                if count > 1:
                    each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
                each.bind((host, port or made[0].getsockname()[1]))
            if count > 1:
                route_by_connection_id(made)
        except OSError as error:
            raise _taken(setting, address, error) from error
        unless_all.pop_all()
        return made


def _taken(setting: str, address: str, error: OSError) -> ConfigError:
    return ConfigError(
        f"cannot listen on {address}: {error.strerror or error}",
        field=f"edge.{setting}",
        hint="free the port or choose another address",
    )


def _bound_buffers(listener: socket.socket) -> None:
    """Limit the send buffers of a TCP listener; its connections inherit the limits."""
    if listener.family in (socket.AF_INET, socket.AF_INET6):
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, NOT_SENT_BYTES)


@asynccontextmanager
async def listening(
    sockets: Sockets,
    context: TcpContext,
    tls: Callable[[], ssl.SSLContext | None],
    process: int = 0,
) -> AsyncIterator[QuicListener | None]:
    """Accept connections while the block runs.

    `tls` returns the current TLS context. The block gets the QUIC listener, which it may stop
    earlier, or None if HTTP/3 is not served.
    """
    servers: list[asyncio.Server] = []
    quic: QuicListener | None = None
    try:
        # All sockets listen before any socket is served, so that a ready edge is ready on all.
        for each in (*sockets.plain, *sockets.secure):
            each.listen(LISTEN_BACKLOG)
        for each in sockets.plain:
            servers.append(await _listen(each, lambda: Connection(context, None)))
            log.info("Running on http://" + _name(each))
        for each in sockets.secure:
            servers.append(await _listen(each, lambda: Connection(context, tls())))
            log.info("Running on https://" + _name(each))
        quic = _listen_quic(sockets.quic, context, process) if sockets.quic else None
        yield quic
    finally:
        for server in servers:
            server.close()
        if quic is not None:
            await quic.stop(0)
        await context.application.ended(0)


async def _listen(bound: socket.socket, make: Callable[[], Connection]) -> asyncio.Server:
    loop = asyncio.get_running_loop()
    return await loop.create_server(make, sock=bound, backlog=LISTEN_BACKLOG)


def _listen_quic(bound: Sequence[socket.socket], context: TcpContext, process: int) -> QuicListener:
    config = context.config
    first_cid_byte = process if config.processes > 1 else None
    # QUIC sockets exist only with a certificate.
    assert config.certificate is not None and config.key is not None
    secret = config.origin_credentials.secret
    library = AioquicLibrary(config.certificate, config.key, first_cid_byte, secret)
    listener = QuicListener(bound, library, context, context.limits)
    listener.start()
    for each in bound:
        log.info("Running on https://" + _name(each) + " (QUIC)")
    return listener


def _name(bound: socket.socket) -> str:
    return repr_socket_addr(bound.family, bound.getsockname())


def alt_svc(sockets: Sequence[socket.socket]) -> list[str]:
    """Return the Alt-Svc header values that announce HTTP/3 on these sockets."""
    addresses = [each.getsockname() for each in sockets]
    return [f'h3=":{address[1]}"; ma=3600' for address in addresses]
