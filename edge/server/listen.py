"""An edge's sockets, and the server that is behind them from startup to shutdown."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import ExitStack, asynccontextmanager
from typing import NamedTuple, Self

import structlog
from hypercorn.config import Config
from hypercorn.utils import repr_socket_addr

from edge.config import EdgeConfig
from edge.quic.aioquic_core import AioquicCores
from edge.quic.http3 import Behind
from edge.quic.listen import QuicListener
from edge.server.connection import Connection
from edge.server.deadlines import SLOT_S
from edge.server.wire import Shared
from ledger.errors import ConfigError

LISTEN_BACKLOG = 1024
NOT_SENT_BYTES = 16 << 10
"""What of a connection may wait in the kernel without having been sent: a reader that stalls costs
no more, while one with a long way still has all of its bandwidth."""
SEND_BUFFER_BYTES = 256 << 10
"""What may be on its way to a client. The kernel's own bound is 4 MiB."""

log = structlog.get_logger("tailrace.edge")


class Sockets(NamedTuple):
    """Bound, and not listening yet."""

    plain: list[socket.socket]
    secure: list[socket.socket]
    quic: list[socket.socket]

    @classmethod
    def bound(cls, config: EdgeConfig) -> Self:
        """All that `config` names; ConfigError where an address cannot be had."""
        with ExitStack() as unless_all:
            sockets = cls([], [], [])
            unless_all.callback(sockets.close)
            for address in config.http:
                sockets.plain.extend(_bind("http", address))
            for address in config.https if config.certificate is not None else ():
                sockets.secure.extend(_bind("https", address))
                if config.http3:
                    sockets.quic.extend(_bind("https", address, socket.SOCK_DGRAM))
            unless_all.pop_all()
            return sockets

    def close(self) -> None:
        for each in (*self.plain, *self.secure, *self.quic):
            each.close()


def _bind(
    setting: str, address: str, kind: socket.SocketKind = socket.SOCK_STREAM
) -> list[socket.socket]:
    binding = Config()
    binding.bind = [address]
    if kind is socket.SOCK_DGRAM:
        binding.bind, binding.quic_bind = [], [address]
        # Datagram sockets are made only beside secure ones.
        binding.certfile = binding.keyfile = "-"
    try:
        made = binding.create_sockets()
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {address}: {error.strerror or error}",
            field=f"edge.{setting}",
            hint="free the port or choose another address",
        ) from error
    for stream in made.insecure_sockets:
        _bound_what_waits(stream)
    return [*made.insecure_sockets, *made.quic_sockets]


def _bound_what_waits(listener: socket.socket) -> None:
    """Connections have these from their listener. A Unix socket knows neither."""
    if listener.family in (socket.AF_INET, socket.AF_INET6):
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, NOT_SENT_BYTES)


@asynccontextmanager
async def listening(
    sockets: Sockets, shared: Shared, tls: Callable[[], ssl.SSLContext] | None
) -> AsyncIterator[QuicListener | None]:
    """Accept connections while the block runs; `tls` gives the certificate of the moment.

    What serves QUIC is given to the block, which may stop it before; None where nothing does.
    """
    loop = asyncio.get_running_loop()
    turning = loop.create_task(_turn(shared))
    servers: list[asyncio.Server] = []
    quic: QuicListener | None = None
    try:
        for each in sockets.plain:
            servers.append(await _listen(each, lambda: Connection(shared, None)))
            log.info("Running on http://" + _name(each))
        for each in sockets.secure:
            assert tls is not None
            servers.append(await _listen(each, lambda: Connection(shared, tls())))
            log.info("Running on https://" + _name(each))
        quic = _listen_quic(sockets.quic, shared) if sockets.quic else None
        yield quic
    finally:
        for server in servers:
            server.close()
        if quic is not None:
            await quic.stop(0)
        await shared.application.ended(0)
        turning.cancel()
        await asyncio.gather(turning, return_exceptions=True)


async def _listen(bound: socket.socket, make: Callable[[], Connection]) -> asyncio.Server:
    loop = asyncio.get_running_loop()
    return await loop.create_server(make, sock=bound, backlog=LISTEN_BACKLOG)


def _listen_quic(bound: Sequence[socket.socket], shared: Shared) -> QuicListener:
    config = shared.config
    assert config.certificate is not None and config.key is not None  # or nothing was bound
    behind = Behind(
        shared.turn,
        shared.routes,
        shared.application,
        shared.rest.headers,
        shared.deadlines,
        config.max_body_bytes,
        config.body_timeout_s,
        config.stalled_timeout_s,
    )
    listener = QuicListener(
        bound, AioquicCores(config.certificate, config.key), behind, shared.limits
    )
    listener.start()
    for each in bound:
        log.info("Running on https://" + _name(each) + " (QUIC)")
    return listener


async def _turn(shared: Shared) -> None:
    """The clock of all deadlines."""
    while True:
        await asyncio.sleep(SLOT_S)
        shared.deadlines.turn()
        shared.turn.flush()


def _name(bound: socket.socket) -> str:
    return repr_socket_addr(bound.family, bound.getsockname())


def alt_svc(sockets: Sequence[socket.socket]) -> list[str]:
    """What tells clients of HTTP/3."""
    addresses = [each.getsockname() for each in sockets]
    return [f'h3=":{address[1]}"; ma=3600' for address in addresses]
