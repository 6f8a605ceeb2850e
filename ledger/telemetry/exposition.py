"""Serve /metrics on an address of its own, from a thread of the process."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import CollectorRegistry

from tailrace.ledger.errors import ConfigError

PATH = "/metrics"
REQUEST_TIMEOUT_S = 10.0
"""Timeout in seconds for reading a request and for sending its answer."""


def rendered(registry: CollectorRegistry, accept: str | None) -> tuple[str, bytes]:
    """Return Content-Type and body: OpenMetrics if the client accepts it, else Prometheus text."""
    encode, content_type = choose_encoder(accept or "")
    return content_type, encode(registry)


@contextmanager
def exposed(
    registry: CollectorRegistry, address: tuple[str, int] | None, setting: str
) -> Iterator[int | None]:
    """Serve /metrics at `address` while the block runs. Yields the port.

    Without an address nothing is served, and None is yielded. Errors name `setting`, which sets the
    address.

    Raises:
        ConfigError: The address cannot be used.
    """
    if address is None:
        yield None
        return
    host, port = address
    try:
        server = _Server(registry, host, port)
    except OSError as error:
        raise ConfigError(
            f"cannot serve metrics on {host}:{port}: {error.strerror or error}",
            field=setting,
            hint="free the port or choose another address",
        ) from error
    thread = threading.Thread(target=server.serve_forever, name="metrics", daemon=True)
    thread.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def __init__(self, registry: CollectorRegistry, host: str, port: int) -> None:
        self.registry = registry
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__((host, port), _Handler)

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignore clients that disconnect in the middle of an answer."""


class _Handler(BaseHTTPRequestHandler):
    timeout = REQUEST_TIMEOUT_S
    server: _Server

    def do_GET(self) -> None:
        if self.path.partition("?")[0] != PATH:
            self.send_error(404, explain=f"metrics are at {PATH}")
            return
        content_type, body = rendered(self.server.registry, self.headers.get("Accept"))
        self.send_response(200)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_HEAD = do_GET  # noqa: N815

    def version_string(self) -> str:
        return "tailrace"

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing, because Prometheus scrapes a process every few seconds."""
