"""`tailrace up`: origin and edge as child processes on loopback, and a sample to see it work."""

from __future__ import annotations

import asyncio
import signal
import socket
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console

from ledger.errors import ConfigError
from ledger.process import Stop
from ledger.settings import MAX_PORT
from ledger.tasks import first_of
from tailrace.certificate import development_certificate
from tailrace.child import Child
from tailrace.welcome import Addresses, print_addresses, print_sample, ready_line, wait_until_ready


async def serve(
    data: Path, http_port: int, https_port: int, link_port: int, *, sample: bool, as_json: bool
) -> None:
    """Serve until SIGINT or SIGTERM; a port of 0 stands for any free one.

    Raises TailraceError if it cannot start or stay up.
    """
    started_s = time.monotonic()
    # With --json stdout belongs to the one line that a program reads.
    console = Console(stderr=as_json, highlight=False)
    place = Addresses(
        http=f"{HOST}:{claim_port(http_port, '--http-port')}",
        https=f"{HOST}:{claim_port(https_port, '--https-port', quic=True)}",
        link=f"{HOST}:{claim_port(link_port, '--link-port')}",
        data=data.absolute(),
    )
    children = _children(place, console)

    async def welcome() -> None:
        await wait_until_ready(place, console)
        ready_s = time.monotonic() - started_s
        for child in children:
            child.proven = True
        if as_json:
            pids = {child.name: child.pid for child in children}
            print(ready_line(place, pids, ready_s), flush=True)
        print_addresses(place, ready_s, console)
        if sample:
            await print_sample(place, console)
        console.print("\nCtrl-C stops it.", style="dim")
        await asyncio.Event().wait()

    stop = Stop(signal.SIGHUP).asked
    await first_of(stop.wait(), welcome(), *(child.keep_running() for child in children))
    console.print("stopped", style="dim")


# ---- the children ----


def _children(place: Addresses, console: Console) -> list[Child]:
    """The origin and the edge, not yet started."""
    logs = place.data / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    certificate = development_certificate(place.data / "certificate", datetime.now(UTC))
    flags: dict[str, dict[str, object]] = {
        "origin": {"--link": place.link, "--data": place.data},
        "edge": {
            "--http": place.http,
            "--https": place.https,
            "--origin": place.link,
            "--certificate": certificate.certificate,
            "--key": certificate.key,
        },
    }

    def announce(line: str) -> None:
        console.print(line, style="yellow", markup=False, soft_wrap=True)

    return [
        Child(name, _command(name, said), logs / f"{name}.log", announce)
        for name, said in flags.items()
    ]


def _command(name: str, flags: dict[str, object]) -> list[str]:
    pairs = [part for flag, value in flags.items() for part in (flag, str(value))]
    return [sys.executable, "-P", "-m", "tailrace.cli", name, *pairs, "--until-eof"]


HOST = "127.0.0.1"
DRAWS = 20  # of a port that must be free twice, over TCP and over UDP


def claim_port(port: int, flag: str, *, quic: bool = False) -> int:
    """`port` on loopback if it is free, a free one for 0; with `quic` free for UDP as well.

    Asked before anything starts, so that the error can name the flag.

    Raises ConfigError naming the port and the flag that chooses another.
    """
    for _ in range(DRAWS if port == 0 else 1):
        chosen = _bind(socket.SOCK_STREAM, port)
        if chosen is not None and (not quic or _bind(socket.SOCK_DGRAM, chosen) is not None):
            return chosen
    another = port + 1 if port < MAX_PORT else 0
    raise ConfigError(
        f"port {port} is in use",
        field=flag,
        hint=f"stop what listens there, or choose another: {flag} {another}",
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
