"""The ports of `tailrace up`: checked before anything starts, so that the error names the flag."""

from __future__ import annotations

import socket

from ledger.errors import ConfigError
from ledger.settings import MAX_PORT

HOST = "127.0.0.1"
DRAWS = 20  # of a port that must be free twice, over TCP and over UDP


def claim_port(port: int, flag: str, *, quic: bool = False) -> int:
    """`port` on loopback if it is free, a free one for 0; with `quic` free for UDP as well.

    Raises ConfigError naming the port and the flag that chooses another.
    """
    for _ in range(DRAWS if port == 0 else 1):
        chosen = _bind(socket.SOCK_STREAM, port)
        if chosen is not None and (not quic or _bind(socket.SOCK_DGRAM, chosen) is not None):
            return chosen
    raise ConfigError(
        f"port {port} is in use",
        field=flag,
        hint=f"stop what listens there, or choose another: {flag} {_another(port)}",
    )


def _bind(kind: socket.SocketKind, port: int) -> int | None:
    """The port that could be bound, None if it is taken."""
    with socket.socket(socket.AF_INET, kind) as probe:
        if kind == socket.SOCK_STREAM:
            # As servers do: a port in TIME_WAIT is free. For UDP it would allow sharing.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            return None
        bound: int = probe.getsockname()[1]
        return bound


def _another(port: int) -> int:
    return port + 1 if port < MAX_PORT else 0
