"""Files that are read again while an edge runs: API keys and the certificate.

Files are polled, because a program that renews a certificate may not know of this process. SIGHUP
makes the edge read them at once. If a file cannot be read, its previous content stays in use and an
error is logged.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from ssl import SSLContext
from time import monotonic

import structlog
from hypercorn.config import Config

from tailrace.edge.access.authenticator import Authenticator
from tailrace.edge.access.keys import KeyRing, read_keys
from tailrace.edge.config import EdgeConfig
from tailrace.edge.quic.listen import QuicListener
from tailrace.ledger.errors import ConfigError
from tailrace.ledger.process.tasks import background

LOOK_S = 1.0
"""Interval between two checks whether a file has changed, in seconds."""

Stamp = tuple[tuple[int, int, int] | None, ...]

log = structlog.get_logger("tailrace.edge")


@dataclass(slots=True)
class WatchedFile:
    """A group of watched files, and the callback that reads them and may raise ConfigError."""

    name: str
    files: Sequence[Path]
    read: Callable[[], None]
    _stamp: Stamp = field(init=False)

    def __post_init__(self) -> None:
        self._stamp = tuple(map(_stamp_of, self.files))

    def look(self, *, asked: bool = False) -> None:
        """Read the files if one has changed, or in any case if `asked` is True (after SIGHUP)."""
        stamp = tuple(map(_stamp_of, self.files))
        if stamp == self._stamp and not asked:
            return
        self._stamp = stamp
        try:
            self.read()
        except ConfigError as error:
            log.error("reload failed", what=self.name, error=str(error))
        else:
            log.info("reloaded", what=self.name)


@asynccontextmanager
async def reloading(*what: WatchedFile, by_signal: bool = True) -> AsyncIterator[None]:
    """Check the files every `LOOK_S` while the block runs, and on SIGHUP if `by_signal`."""
    loop = asyncio.get_running_loop()
    asked = asyncio.Event()

    async def look() -> None:
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S):
                    await asked.wait()
            at_once = asked.is_set()
            asked.clear()
            for each in what:
                each.look(asked=at_once)

    if by_signal:
        loop.add_signal_handler(signal.SIGHUP, asked.set)
    try:
        async with background([look()]):
            yield
    finally:
        if by_signal:
            loop.remove_signal_handler(signal.SIGHUP)


def watched_keys(config: EdgeConfig, authenticator: Authenticator) -> WatchedFile:
    """Return a watch on the file of API keys, which gives new keys to `authenticator`.

    If the file is created while the edge runs, keys are needed from then on. If it is removed, the
    keys that were read last stay valid.
    """

    def read() -> None:
        if authenticator.ring is not None or config.api_keys.exists():
            authenticator.ring = read_keys(config.api_keys).ring()
            _warn_of_curtailed(authenticator.ring)

    return WatchedFile("API keys", (config.api_keys,), read)


class Certificate:
    """The TLS certificate for new connections, if any. A renewed one is also loaded into `quic`."""

    def __init__(self, config: EdgeConfig, server: Config) -> None:
        """Read the certificate; raise ConfigError if it cannot be read."""
        self.quic: QuicListener | None = None
        self._config = config
        self._server = server
        self.context: SSLContext | None = None  # stays None without TLS
        if config.certificate is not None:
            self._read()

    @property
    def watched(self) -> Sequence[WatchedFile]:
        certificate, key = self._config.certificate, self._config.key
        if certificate is None or key is None:
            return ()
        return (WatchedFile("certificate", (certificate, key), self._read),)

    def _read(self) -> None:
        try:
            self.context = self._server.create_ssl_context()
            certificate, key = self._config.certificate, self._config.key
            if self.quic is not None and certificate is not None and key is not None:
                self.quic.load(certificate, key)
        except OSError as error:  # ssl.SSLError is an OSError
            raise ConfigError(
                f"cannot read {self._config.certificate} or its key {self._config.key}:"
                f" {error.strerror or error}",
                field="edge.certificate",
                hint="give PEM files: the chain with the leaf first, and the leaf's private key",
            ) from error


def _stamp_of(file: Path) -> tuple[int, int, int] | None:
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


def require_keys(config: EdgeConfig) -> KeyRing | None:
    """Return the API keys, if there are any.

    Raises ConfigError if they cannot be read, or if they are missing and the settings require them.
    """
    path = config.api_keys
    if "api_keys" in config.model_fields_set or path.exists():
        return read_keys(path).ring()
    if config.listens_on_loopback_alone or config.allow_public_without_keys:
        return None
    raise ConfigError(
        "other machines can reach this edge, and there are no API keys",
        field="edge.api_keys",
        hint=f"make keys: tailrace key add NAME --keys {path}; or listen on 127.0.0.1; or pass"
        " --allow-public-without-keys",
    )


def open_authenticator(config: EdgeConfig) -> Authenticator:
    """Return the authenticator for the API keys; raise ConfigError as `require_keys` does."""
    ring = require_keys(config)
    if ring is None and config.listens_on_loopback_alone:
        log.info("no API keys: everybody on this machine may use this edge")
    elif ring is None:
        log.warning("no API keys: everybody who reaches this edge may use it")
    if ring is not None:
        _warn_of_curtailed(ring)
    return Authenticator(ring, monotonic, lambda: datetime.now(UTC))


def _warn_of_curtailed(ring: KeyRing) -> None:
    for key in ring.curtailed:
        log.warning(
            "an API key of a tenant has the right `admin`, which is ignored",
            key=key.id,
            tenant=key.tenant,
            hint="`admin` gives access to the streams of all tenants: make an operator's key"
            " without --tenant",
        )
