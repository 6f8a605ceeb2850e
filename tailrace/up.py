"""`tailrace up`: origin and edge as child processes on loopback, and a sample to see it work."""

from __future__ import annotations

import asyncio
import signal
import socket
import sys
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console

from ledger.errors import ConfigError
from ledger.process import Stop
from ledger.settings import MAX_PORT
from ledger.tasks import first_of
from tailrace.certificate import CertificateFiles, development_certificate
from tailrace.child import Child
from tailrace.welcome import Addresses, print_addresses, print_sample, ready_line, wait_until_ready


@dataclass(frozen=True, slots=True)
class UpOptions:
    """What the command line chose; a port of 0 stands for any free one."""

    data: Path
    http_port: int = 8080
    https_port: int = 8443
    link_port: int = 8470
    sample: bool = True
    as_json: bool = False


def run(options: UpOptions) -> None:
    """Serve until SIGINT or SIGTERM. Raises TailraceError if it cannot start or stay up."""
    asyncio.run(_serve(options))


async def _serve(options: UpOptions) -> None:
    started_s = time.monotonic()
    # With --json stdout belongs to the one line that a program reads.
    console = Console(stderr=options.as_json, highlight=False)
    place = Addresses(
        http=f"{HOST}:{claim_port(options.http_port, '--http-port')}",
        https=f"{HOST}:{claim_port(options.https_port, '--https-port', quic=True)}",
        link=f"{HOST}:{claim_port(options.link_port, '--link-port')}",
        data=options.data.absolute(),
    )
    children = _children(place, console)

    async def welcome() -> None:
        await wait_until_ready(place, console)
        ready_s = time.monotonic() - started_s
        for child in children:
            child.proven = True
        if options.as_json:
            pids = {child.name: child.pid for child in children}
            print(ready_line(place, pids, ready_s), flush=True)
        print_addresses(place, ready_s, console)
        if options.sample:
            await print_sample(place, console)
        console.print("\nCtrl-C stops it.", style="dim")
        await asyncio.Event().wait()

    stop = Stop(signal.SIGHUP).asked
    await first_of(stop.wait(), welcome(), *(child.keep_running() for child in children))
    console.print("stopped", style="dim")


# ---- the children ----


def _children(place: Addresses, console: Console) -> tuple[Child, Child]:
    """The origin and the edge, not yet started."""
    logs = place.data / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    certificate = development_certificate(place.data / "certificate", datetime.now(UTC))

    def announce(line: str) -> None:
        console.print(line, style="yellow", markup=False, soft_wrap=True)

    origin = Child("origin", _origin_command(place), logs / "origin.log", announce)
    edge = Child("edge", _edge_command(place, certificate), logs / "edge.log", announce)
    return origin, edge


def _command(name: str, flags: dict[str, object]) -> list[str]:
    pairs = [part for flag, value in flags.items() for part in (flag, str(value))]
    return [sys.executable, "-P", "-m", "tailrace.cli", name, *pairs, "--until-eof"]


def _origin_command(place: Addresses) -> list[str]:
    return _command("origin", {"--link": place.link, "--data": place.data})


def _edge_command(place: Addresses, files: CertificateFiles) -> list[str]:
    flags = {
        "--http": place.http,
        "--https": place.https,
        "--origin": place.link,
        "--certificate": files.certificate,
        "--key": files.key,
    }
    return _command("edge", flags)


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
