"""Runs an edge: Hypercorn on uvloop, until SIGTERM or SIGINT."""

from __future__ import annotations

import asyncio
import logging
import signal

import structlog
import uvloop
from hypercorn.asyncio import serve as hypercorn_serve
from hypercorn.config import Config

from edge.app import create_app
from edge.config import EdgeConfig
from edge.link import Link
from edge.session import MAX_MESSAGE_BYTES
from ledger.errors import ConfigError, Unavailable
from ledger.log import configure_logging

GRACEFUL_TIMEOUT_S = 2.0
"""For responses under way at shutdown; their streams run on, and are resumed elsewhere."""
KEEP_ALIVE_TIMEOUT_S = 75.0
"""Longer than the usual 60 s of a proxy, so that the proxy is the one to hang up."""
READ_HEADER_BYTES = 16 << 10
H2_MAX_CONCURRENT_STREAMS = 256
WEBSOCKET_PING_INTERVAL_S = 20.0
LISTEN_BACKLOG = 1024

log = structlog.get_logger("tailrace.edge")


def run(config: EdgeConfig) -> None:
    """Serve until told to stop. Raises ConfigError where an address cannot be had."""
    configure_logging(config.log_level)
    logging.getLogger("quic").setLevel(logging.WARNING)  # aioquic: lines per connection
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(config))


async def serve(config: EdgeConfig) -> None:
    link = Link(*config.origin_addresses)
    stopped = _stop_signal()

    async def shutdown() -> None:
        await stopped.wait()
        log.info("shutting down")
        link.refuse_all(
            Unavailable("this edge is shutting down", hint="resume on another, or here again")
        )

    server = server_config(config)
    try:
        _try_addresses(server)
        await hypercorn_serve(create_app(link, config), server, shutdown_trigger=shutdown)  # type: ignore[arg-type]
    except OSError as error:
        raise ConfigError(
            f"cannot listen or read the certificate: {error}",
            field="edge.http",
            hint="free the port or choose another address",
        ) from error


def server_config(config: EdgeConfig) -> Config:
    """Hypercorn's settings for an edge; TLS and QUIC only where there is a certificate."""
    server = Config()
    if config.certificate is not None and config.key is not None:
        server.certfile, server.keyfile = str(config.certificate), str(config.key)
        server.bind = list(config.https)
        server.quic_bind = list(config.https)
        server.insecure_bind = list(config.http)
    else:
        server.bind = list(config.http)
    server.backlog = LISTEN_BACKLOG
    server.include_server_header = False
    server.accesslog = None
    server.errorlog = logging.getLogger("hypercorn.error")
    server.graceful_timeout = GRACEFUL_TIMEOUT_S
    server.keep_alive_timeout = KEEP_ALIVE_TIMEOUT_S
    server.h11_max_incomplete_size = READ_HEADER_BYTES
    server.h2_max_concurrent_streams = H2_MAX_CONCURRENT_STREAMS
    server.websocket_max_message_size = MAX_MESSAGE_BYTES
    server.websocket_ping_interval = WEBSOCKET_PING_INTERVAL_S
    return server


def _try_addresses(server: Config) -> None:
    """Bind what is going to be bound, so that a busy port is an error before anything starts."""
    sockets = server.create_sockets()
    for bound in (*sockets.secure_sockets, *sockets.insecure_sockets, *sockets.quic_sockets):
        bound.close()


def _stop_signal() -> asyncio.Event:
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for name in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(name, stopped.set)
    return stopped
