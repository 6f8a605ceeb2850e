"""Transport of a link between edge and origin: TCP, TLS or a Unix socket, with authentication.

Both sides may authenticate: with certificates of a private CA (mutual TLS), or with a shared secret
(ledger/wire/handshake.py), which suits Unix sockets and private networks.
"""

from __future__ import annotations

import asyncio
import os
import ssl
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, NamedTuple, TypeVar

from pydantic import AfterValidator, SecretStr

from tailrace.ledger.errors import ConfigError
from tailrace.ledger.process.settings import parse_address

TLS = "tls"
TCP = "tcp"
UNIX = "unix"
SOCKET_MODE = 0o600
"""File mode of a Unix socket, with which both sides must run as the same user."""
MIN_SECRET_BYTES = 16
HINT = "write HOST:PORT, tls://HOST:PORT or unix:///PATH"

P = TypeVar("P", bound=asyncio.Protocol)


class LinkAddress(NamedTuple):
    """Address of a link. For a Unix socket `host` is the socket's path, and `port` is 0."""

    host: str
    port: int
    scheme: str = TCP

    @classmethod
    def parse(cls, text: str) -> LinkAddress:
        """Parse HOST:PORT, tls://HOST:PORT or unix:///PATH.

        Raises:
            ValueError: The text is not an address.
        """
        scheme, found, rest = text.partition("://")
        if not found:
            return cls(*parse_address(text))
        if scheme == UNIX and rest.startswith("/") and len(rest) > 1:
            return cls(rest, 0, UNIX)
        if scheme == TLS:
            return cls(*parse_address(rest), TLS)
        raise ValueError(HINT)

    def __str__(self) -> str:
        if self.scheme == UNIX:
            return f"unix://{self.host}"
        place = f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"
        return place if self.scheme == TCP else f"tls://{place}"


@dataclass(frozen=True, slots=True)
class Credentials:
    """Certificates and secret of one side. `setting` is the prefix of the settings' names."""

    setting: str
    ca: Path | None = None
    certificate: Path | None = None
    key: Path | None = None
    secret: bytes | None = None

    def connects(self) -> ssl.SSLContext:
        """Return the TLS context of the side that connects.

        Raises:
            ConfigError: A file cannot be used.
        """
        context = self._loaded(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT))
        if self.ca is None:
            context.load_default_certs(ssl.Purpose.SERVER_AUTH)
        return context

    def listens(self) -> ssl.SSLContext:
        """Return the TLS context of the side that listens.

        With a CA, only peers with a certificate of that CA are accepted.

        Raises:
            ConfigError: A file cannot be used.
        """
        context = self._loaded(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))
        if self.ca is not None:
            context.verify_mode = ssl.CERT_REQUIRED
        return context

    def _loaded(self, context: ssl.SSLContext) -> ssl.SSLContext:
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        if self.certificate is not None:
            try:
                context.load_cert_chain(self.certificate, self.key)
            except OSError as error:  # ssl.SSLError is an OSError
                hint = "give PEM files, the chain's leaf first, and the key of that leaf"
                raise self._unreadable("certificate", self.certificate, error, hint) from error
        if self.ca is not None:
            try:
                context.load_verify_locations(self.ca)
            except OSError as error:
                hint = "give a PEM file with the CA's certificate"
                raise self._unreadable("ca", self.ca, error, hint) from error
        return context

    def _unreadable(self, part: str, path: Path, error: OSError, hint: str) -> ConfigError:
        why = error.strerror or str(error)
        return ConfigError(f"cannot use {path}: {why}", field=f"{self.setting}_{part}", hint=hint)


async def dial(
    factory: Callable[[], P], address: LinkAddress, credentials: Credentials
) -> tuple[asyncio.BaseTransport, P]:
    """Connect to an address; return the transport, and the protocol that `factory` made.

    Raises:
        OSError: The peer cannot be reached.
    """
    loop = asyncio.get_running_loop()
    if address.scheme == UNIX:
        return await loop.create_unix_connection(factory, address.host)
    context = credentials.connects() if address.scheme == TLS else None
    return await loop.create_connection(factory, address.host, address.port, ssl=context)


async def listen(
    factory: Callable[[], asyncio.Protocol], address: LinkAddress, credentials: Credentials
) -> asyncio.Server:
    """Listen at an address; each connection gets a protocol that `factory` makes.

    Raises:
        OSError: The address cannot be used.
    """
    loop = asyncio.get_running_loop()
    if address.scheme != UNIX:
        context = credentials.listens() if address.scheme == TLS else None
        return await loop.create_server(factory, address.host, address.port, ssl=context)
    mask = os.umask(0o777 & ~SOCKET_MODE)
    try:
        return await loop.create_unix_server(factory, address.host)
    finally:
        os.umask(mask)


def os_reason(error: OSError) -> str:
    """Return the system's message for an error, without the address that asyncio adds to it."""
    number = error.errno or 0  # negative for errors of getaddrinfo, which strerror does not know
    return os.strerror(number) if number > 0 else error.strerror or str(error)


LinkText = Annotated[str, AfterValidator(lambda text: LinkAddress.parse(text) and text)]
"""Type of a setting that is the address of a link."""


def secret_bytes(secret: SecretStr | None) -> bytes | None:
    return None if secret is None else secret.get_secret_value().encode()


def check_link(
    name: str,
    addresses: Sequence[LinkAddress],
    credentials: Credentials,
    *,
    needs_certificate: bool,
) -> None:
    """Check that the settings of a link, whose names begin with `name`, fit together.

    Raises:
        ValueError: Settings contradict each other.
    """
    if (credentials.certificate is None) != (credentials.key is None):
        raise ValueError(f"{name}_certificate and {name}_key are given together or not at all")
    if credentials.secret is not None and len(credentials.secret) < MIN_SECRET_BYTES:
        raise ValueError(f"{name}_secret: give at least {MIN_SECRET_BYTES} characters")
    has_tls = any(address.scheme == TLS for address in addresses)
    if not has_tls and (credentials.ca is not None or credentials.certificate is not None):
        raise ValueError(f"{name}_ca and {name}_certificate need {name} = tls://HOST:PORT")
    if has_tls and needs_certificate and credentials.certificate is None:
        raise ValueError(f"{name}: tls:// needs {name}_certificate and {name}_key")
