"""`tailrace up`: runs an origin and an edge as child processes, and shows a sample stream."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import sys
import time
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import httpx
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
from rich.console import Console
from rich.status import Status

from tailrace.chat import Viewer, printable
from tailrace.child import Child
from tailrace.client import Client
from tailrace.ledger.errors import ConfigError, TailraceError
from tailrace.ledger.process.durable_file import OWNER_MODE, replace_file
from tailrace.ledger.process.lifecycle import Stop
from tailrace.ledger.process.settings import MAX_PORT
from tailrace.ledger.process.tasks import first_of
from tailrace.ledger.process.version import tailrace_version
from tailrace.upstream import UpstreamServer

VALID_DAYS = 14
REUSE_DAYS = 1  # a certificate that expires within this many days is replaced
CLOCK_SKEW = timedelta(minutes=5)  # certificates begin earlier, as a client's clock may be slow

NAMES: tuple[x509.GeneralName, ...] = (
    x509.DNSName("localhost"),
    x509.IPAddress(ip_address("127.0.0.1")),
    x509.IPAddress(ip_address("::1")),
)


@dataclass(frozen=True, slots=True)
class CertificateFiles:
    """PEM files of a certificate and its private key."""

    certificate: Path
    key: Path


def development_certificate(folder: Path, now: datetime) -> CertificateFiles:
    """Return a certificate for localhost in `folder`; create one if none is valid for another day.

    `now` must have a time zone. Only the owner can read the key's file. The certificate has an EC
    P-256 key and is valid for at most 14 days, because browsers require both for a certificate that
    a page trusts by its hash (W3C WebTransport, serverCertificateHashes).
    """
    files = CertificateFiles(folder / "localhost.crt", folder / "localhost.key")
    if not _usable(files, now):
        folder.mkdir(parents=True, exist_ok=True)
        key = ec.generate_private_key(ec.SECP256R1())
        certificate = _sign(key, now)
        key_pem = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        replace_file(files.key, key_pem, mode=OWNER_MODE)
        replace_file(files.certificate, certificate.public_bytes(Encoding.PEM), mode=0o644)
    return files


def _usable(files: CertificateFiles, now: datetime) -> bool:
    try:
        certificate = x509.load_pem_x509_certificate(files.certificate.read_bytes())
        held = files.key.is_file()
    except (OSError, ValueError):
        return False
    return held and certificate.not_valid_after_utc - now > timedelta(days=REUSE_DAYS)


def _sign(key: ec.EllipticCurvePrivateKey, now: datetime) -> x509.Certificate:
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "Tailrace development")])
    begins = now.astimezone(UTC) - CLOCK_SKEW
    server_only = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH])
    return (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(begins)
        .not_valid_after(begins + timedelta(days=VALID_DAYS))
        .add_extension(x509.SubjectAlternativeName(NAMES), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(server_only, critical=False)
        .sign(key, hashes.SHA256())
    )


HOST = "127.0.0.1"
DRAWS = 20  # attempts to find a port that is free for both TCP and UDP
READY_POLL_S = 0.1
READY_TIMEOUT_S = 1.0  # timeout of one request to /readyz, in seconds
# A missing link to the origin counts as part of a normal start for this many seconds.
ORIGIN_START_S = 30.0
SAMPLE_PROMPT = "Once upon a time"
SAMPLE_QUESTION = "Tell me a short story about a fox."
SAMPLE_TOKENS = 64
SAMPLE_SEED = 7
NO_SAMPLE = "This edge requires an API key. Set TAILRACE_API_KEY to one to see a sample here."
SAMPLE_CUT_AFTER = 24  # number of tokens after which the sample's connection is cut


@dataclass(frozen=True, slots=True)
class Addresses:
    """Addresses of the servers as HOST:PORT, and the data folder."""

    http: str
    https: str
    link: str
    data: Path

    @property
    def http_url(self) -> str:
        return f"http://{self.http}"

    @property
    def https_url(self) -> str:
        return f"https://{self.https}"


async def serve(
    data: Path,
    http_port: int,
    https_port: int,
    link_port: int,
    *,
    upstream: UpstreamServer | None = None,
    sample: bool,
    as_json: bool,
    api_key: str | None = None,
) -> None:
    """Serve the demo model, or the models of `upstream`, until SIGINT or SIGTERM.

    A port of 0 stands for any free one. `api_key` is for the sample, if the edge has API keys.

    Raises TailraceError if the origin or the edge cannot start, or ends too often.
    """
    started_s = time.monotonic()
    # With --json, everything for people goes to stderr: stdout has only one line, for programs.
    console = Console(stderr=as_json, highlight=False)
    place = Addresses(
        http=f"{HOST}:{claim_port(http_port, '--http-port')}",
        https=f"{HOST}:{claim_port(https_port, '--https-port', quic=True)}",
        link=f"{HOST}:{claim_port(link_port, '--link-port')}",
        data=data.absolute(),
    )
    children = _children(place, upstream, console)

    async def welcome() -> None:
        needs_key = await wait_until_ready(place, console)
        ready_s = time.monotonic() - started_s
        for child in children:
            child.proven = True
        if as_json:
            pids = {child.name: child.pid for child in children}
            print(ready_line(place, upstream, pids, ready_s), flush=True)
        print_addresses(place, upstream, ready_s, console, needs_key=needs_key)
        if sample and needs_key and not api_key:
            console.print(f"\n{NO_SAMPLE}", style="yellow", markup=False, soft_wrap=True)
        elif sample:
            await print_sample(place, upstream, console, api_key)
        console.print("\nCtrl-C stops it.", style="dim")
        await asyncio.Event().wait()

    stop = Stop(signal.SIGHUP).asked
    await first_of(stop.wait(), welcome(), *(child.keep_running() for child in children))
    console.print("stopped", style="dim")


# ---- the children ----


def _children(place: Addresses, upstream: UpstreamServer | None, console: Console) -> list[Child]:
    """Return the child processes of the origin and the edge, which are not started yet."""
    logs = place.data / "logs"
    try:
        logs.mkdir(parents=True, exist_ok=True)
        certificate = development_certificate(place.data / "certificate", datetime.now(UTC))
    except OSError as error:
        raise ConfigError(
            f"cannot write to {place.data}: {error.strerror}",
            field="--data",
            hint="name a folder that you may write to: --data FOLDER",
        ) from error
    flags: dict[str, dict[str, object]] = {
        "origin": {"--link": place.link, "--data": place.data},
        "edge": {
            "--http": place.http,
            "--https": place.https,
            "--origin": place.link,
            "--certificate": certificate.certificate,
            "--key": certificate.key,
            "--operator-without-key": True,  # safe, because this edge listens on loopback only
        },
    }

    if upstream is not None:
        flags["origin"] |= upstream.origin_flags(place.data)

    def announce(line: str) -> None:
        console.print(line, style="yellow", markup=False, soft_wrap=True)

    return [
        Child(name, _command(name, said), logs / f"{name}.log", announce)
        for name, said in flags.items()
    ]


def _command(name: str, flags: dict[str, object]) -> list[str]:
    pairs = [
        part
        for flag, value in flags.items()
        for part in ((flag,) if value is True else (flag, str(value)))
    ]
    return [sys.executable, "-P", "-m", "tailrace.cli", name, *pairs, "--until-eof"]


def claim_port(port: int, flag: str, *, quic: bool = False) -> int:
    """Return `port` if it is free on loopback, or any free port if `port` is 0.

    With `quic`, the port must be free for UDP, too. This is checked before any process starts, so
    that the error can name the flag that changes the port. Raises ConfigError if it is in use.
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
    """Bind a port for a moment to test it; return its number, or None if it is in use."""
    with socket.socket(socket.AF_INET, kind) as probe:
        if kind == socket.SOCK_STREAM:
            # Servers set SO_REUSEADDR, too: a TCP port in TIME_WAIT then counts as free. For UDP
            # the option would also allow a port that another process uses, so it is not set.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            return None
        bound: int = probe.getsockname()[1]
        return bound


# ---- what a person is shown ----


async def wait_until_ready(place: Addresses, console: Console) -> bool:
    """Poll /readyz until the edge is ready; meanwhile show why it is not.

    Returns True if the edge requires API keys: without one, such an edge does not list its origins.
    """
    shown = ""
    began_s = time.monotonic()
    # trust_env=False: a proxy from the environment could not reach loopback.
    async with httpx.AsyncClient(trust_env=False, timeout=READY_TIMEOUT_S) as client:
        with console.status("starting") as status:
            while (answer := await _ask_ready(client, place)) is None or not answer["ready"]:
                reason = why_not_ready(answer, time.monotonic() - began_s)
                if reason != shown:
                    _show_progress(reason, status, console)
                    shown = reason
                await asyncio.sleep(READY_POLL_S)
    return "origins" not in answer


async def _ask_ready(client: httpx.AsyncClient, place: Addresses) -> dict[str, Any] | None:
    """Return the edge's answer to /readyz, or None if it does not answer."""
    try:
        answer = await client.get(f"{place.http_url}/readyz")
    except httpx.TransportError:
        return None
    document: dict[str, Any] = answer.json()
    return document


def why_not_ready(answer: dict[str, Any] | None, waited_s: float) -> str:
    """Return why the edge is not ready, from its answer to /readyz `waited_s` after the start.

    The edge starts faster than the origin, and at first reports that it has no link to an origin.
    This is part of a normal start, so it is shown as a problem only after ORIGIN_START_S. An edge
    with API keys never says here if it has a link.
    """
    if answer is None:
        return "starting the edge"
    is_linked = any(origin["up"] for origin in answer.get("origins", ()))
    if not is_linked and waited_s < ORIGIN_START_S:
        return "starting the origin"
    return ", ".join(answer["reasons"])


def _show_progress(reason: str, status: Status, console: Console) -> None:
    if console.is_terminal:
        status.update(reason)
    else:
        console.print(f"  {reason}", markup=False)


def ready_line(
    place: Addresses, upstream: UpstreamServer | None, pids: dict[str, int | None], ready_s: float
) -> str:
    """Return the line of JSON for `--json`: addresses, models and process ids."""
    return json.dumps(
        {
            "ready": True,
            "models": ["demo"] if upstream is None else list(upstream.models),
            "upstream": None if upstream is None else upstream.url,
            "http": place.http_url,
            "https": place.https_url,
            "link": place.link,
            "data": str(place.data),
            "pids": pids,
            "ready_ms": round(ready_s * 1000),
        }
    )


def print_addresses(
    place: Addresses,
    upstream: UpstreamServer | None,
    ready_s: float,
    console: Console,
    *,
    needs_key: bool,
) -> None:
    """Print the addresses, and a curl command for a first request."""
    key_flag = '-H "Authorization: Bearer $TAILRACE_API_KEY" ' if needs_key else ""
    key = "$TAILRACE_API_KEY" if needs_key else "unused"
    if upstream is None:
        serves = "the demo model"
        request = {"model": "demo", "prompt": SAMPLE_PROMPT, "max_tokens": 200}
        flags, path = "-H 'Accept: text/event-stream' ", "/v1/generate"
    else:
        serves = f"{', '.join(upstream.models)} of {upstream.url}"
        turn = {"role": "user", "content": SAMPLE_QUESTION}
        request = {"model": upstream.models[0], "messages": [turn], "stream": True}
        flags, path = "-H 'Content-Type: application/json' ", "/v1/chat/completions"
    console.print(
        f"Tailrace {tailrace_version()} serves {serves}, ready after {ready_s:.1f} s\n\n"
        f"  HTTP           {place.http_url}\n"
        f"  HTTPS, HTTP/3  {place.https_url}\n"
        f"  console        {place.http_url}/\n"
        f"  origin link    {place.link}\n"
        f"  data and logs  {place.data}\n\n"
        "Try it:\n\n"
        f"  curl -N {place.http_url}{path} {key_flag}{flags}-d '{json.dumps(request)}'\n\n"
        "Point any OpenAI SDK at it:\n\n"
        f"  export OPENAI_BASE_URL={place.http_url}/v1 OPENAI_API_KEY={key}",
        markup=False,
        soft_wrap=True,  # line breaks within the command would break it when it is copied
    )


async def print_sample(
    place: Addresses, upstream: UpstreamServer | None, console: Console, api_key: str | None
) -> None:
    """Show one short stream that is cut and resumed; if it fails, only print the error."""
    console.print(f"\nA sample, cut after {SAMPLE_CUT_AFTER} tokens and resumed:\n")

    def write(text: str) -> None:
        console.print(printable(text), end="", markup=False, soft_wrap=True)

    def note(text: str) -> None:
        console.print(text, end="", style="bold cyan", markup=False, soft_wrap=True)

    viewer = Viewer(write, note, SAMPLE_CUT_AFTER)
    request: dict[str, Any]
    if upstream is None:
        request = {"prompt": SAMPLE_PROMPT, "seed": SAMPLE_SEED}
        write(f"  {SAMPLE_PROMPT}")
    else:
        turn = {"role": "user", "content": SAMPLE_QUESTION}
        request = {"model": upstream.models[0], "messages": [turn]}
        write(f"  > {SAMPLE_QUESTION}\n\n  ")
    try:
        # trust_env=False: a proxy from the environment could not reach loopback.
        async with Client(
            [place.http_url], api_key=api_key, on_state=viewer.on_state, trust_env=False
        ) as client:
            _, summary = await viewer.follow(client.generate(**request, max_tokens=SAMPLE_TOKENS))
    except TailraceError as error:
        console.print(f"\nthe sample failed: {error}", style="red", markup=False)
        return
    console.print(f"\n\n  {summary}", style="dim")
