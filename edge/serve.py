"""Runs an edge: Hypercorn on uvloop, until SIGTERM or SIGINT."""

from __future__ import annotations

import asyncio
import logging

import structlog
import uvloop
from hypercorn.asyncio import serve as hypercorn_serve
from hypercorn.config import Config
from hypercorn.protocol import ws_stream

from edge.access.connections import RESERVED_FILES
from edge.access.open_files import raise_open_files
from edge.app import create_app
from edge.config import EdgeConfig
from edge.origins.link import Link
from edge.session import MAX_READ_MESSAGE_BYTES
from ledger.errors import ConfigError, Unavailable
from ledger.log import configure_logging
from ledger.process import look_less_often, stop_signal

GRACEFUL_TIMEOUT_S = 2.0
"""For responses under way at shutdown; their streams run on, and are resumed elsewhere."""
KEEP_ALIVE_TIMEOUT_S = 75.0
"""Longer than the usual 60 s of a proxy, so that the proxy is the one to hang up."""
READ_HEADER_BYTES = 16 << 10
H2_MAX_CONCURRENT_STREAMS = 256
H2_MAX_REQUESTS = 1 << 31
"""As good as none. At its own limit, 1,000, Hypercorn says GOAWAY and then sends nothing more of
the streams that are under way, whose readers wait for ever."""
WEBSOCKET_PING_INTERVAL_S = 20.0
LISTEN_BACKLOG = 1024

log = structlog.get_logger("tailrace.edge")


def run(config: EdgeConfig) -> None:
    """Serve until told to stop. Raises ConfigError where an address cannot be had."""
    configure_logging(config.log_level)
    refuse_compression()
    _take_files(config)
    logging.getLogger("quic").setLevel(logging.WARNING)  # aioquic: lines per connection
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(config))


async def serve(config: EdgeConfig) -> None:
    link = Link(*config.origin_addresses)
    stopped = stop_signal()

    async def shutdown() -> None:
        await stopped.wait()
        log.info("shutting down")
        link.refuse_all(
            Unavailable("this edge is shutting down", hint="resume on another, or here again")
        )

    _try_certificate(config)
    _try_addresses(config)
    server = server_config(config)
    app = create_app(link, config)
    look_less_often()
    await hypercorn_serve(app, server, shutdown_trigger=shutdown)  # type: ignore[arg-type]


def _take_files(config: EdgeConfig) -> int:
    """How many files may be open; the log says where that is too few."""
    open_files = raise_open_files()
    if open_files < config.max_connections + RESERVED_FILES:
        log.warning(
            "few files may be open",
            limit=open_files,
            connections=max(1, open_files - RESERVED_FILES),
            wanted=config.max_connections,
            hint="raise the hard limit: ulimit -Hn, LimitNOFILE of systemd; or lower"
            " edge.max_connections",
        )
    return open_files


def server_config(config: EdgeConfig) -> Config:
    """Hypercorn's settings for an edge; TLS and QUIC only where there is a certificate."""
    server = Config()
    if config.certificate is not None and config.key is not None:
        server.certfile, server.keyfile = str(config.certificate), str(config.key)
        server.bind = list(config.https)
        server.quic_bind = list(config.https) if config.http3 else []
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
    server.keep_alive_max_requests = H2_MAX_REQUESTS
    server.websocket_max_message_size = MAX_READ_MESSAGE_BYTES
    server.websocket_ping_interval = WEBSOCKET_PING_INTERVAL_S
    return server


def refuse_compression() -> None:
    """No WebSocket extension is agreed to: of permessage-deflate 400 kB can inflate to 400 MB.

    Hypercorn offers it always and has no setting for it (its issue 307).
    """
    vars(ws_stream)["server_extensions_handshake"] = lambda _offered, _ours: None


def _try_certificate(config: EdgeConfig) -> None:
    try:
        server_config(config).create_ssl_context()
    except OSError as error:  # ssl's own is one
        raise ConfigError(
            f"cannot read {config.certificate} or its key {config.key}: {error.strerror or error}",
            field="edge.certificate",
            hint="give PEM files, the chain's leaf first, and the key of that leaf",
        ) from error


def _try_addresses(config: EdgeConfig) -> None:
    """Bind what is going to be bound, so that a busy port is an error before anything starts."""
    for address in config.http:
        plain = Config()
        plain.bind = [address]
        _try_address("http", address, plain)
    for address in config.https if config.certificate is not None else ():
        secure = server_config(config)
        secure.bind, secure.insecure_bind = [address], []
        secure.quic_bind = [address] if config.http3 else []
        _try_address("https", address, secure)


def _try_address(setting: str, address: str, server: Config) -> None:
    try:
        sockets = server.create_sockets()
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {address}: {error.strerror or error}",
            field=f"edge.{setting}",
            hint="free the port or choose another address",
        ) from error
    for bound in (*sockets.secure_sockets, *sockets.insecure_sockets, *sockets.quic_sockets):
        bound.close()
