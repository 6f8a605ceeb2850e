"""The head of a request, and the real client behind trusted proxies.

A proxy names its client in `X-Forwarded-For`, `-Proto` and `-Host`, or in `Forwarded` (RFC 7239).
The operator configures which of the two is read: a proxy passes the other one on unchanged, so a
client could forge it. Each proxy appends an entry, so the last entry is the nearest proxy's. Only
entries that trusted proxies wrote count: the client is the first address from the right that is not
a trusted proxy's.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Collection, Iterable, Iterator
from typing import Literal, NamedTuple

from tailrace.edge.access.connections import parsed_address


class Head(NamedTuple):
    """The head of one HTTP or WebSocket request; names of `headers` are in lower case.

    `address` is the client's address without its port, or empty for a Unix socket.
    """

    method: str
    path: str
    scheme: str
    address: str
    headers: tuple[tuple[bytes, bytes], ...]

    def value(self, name: bytes) -> str | None:
        """Return the value of the first header field of that name."""
        return next((text for key, text in self._texts() if key == name), None)

    def values(self, name: bytes) -> list[str]:
        """Return the members of a header field that is a list (RFC 9110, 5.6.1), in order."""
        joined = ",".join(text for key, text in self._texts() if key == name)
        return [member for part in joined.split(",") if (member := part.strip())]

    @property
    def host(self) -> str:
        """The `Host` header, or an empty string."""
        return self.value(b"host") or ""

    def _texts(self) -> Iterable[tuple[bytes, str]]:
        return ((key, value.decode("latin-1")) for key, value in self.headers)


Network = ipaddress.IPv4Network | ipaddress.IPv6Network
Header = Literal["x-forwarded", "forwarded"]

SCHEMES = {"http": "http", "https": "https", "ws": "http", "wss": "https"}
WEBSOCKET_SCHEMES = {"http": "ws", "https": "wss"}

_PAIR = re.compile(r'([A-Za-z0-9!#$%&\'*+.^_`|~-]+)=(?:"((?:[^"\\]|\\.)*)"|([^",;]*))')


class Hop(NamedTuple):
    """The client, scheme and host that one proxy reports; each field may be an empty string."""

    address: str
    scheme: str
    host: str


class Proxies:
    """The trusted proxies: those in `networks`, which name their clients in `header`."""

    def __init__(self, networks: Collection[Network], header: Header = "x-forwarded") -> None:
        self._networks = tuple(networks)
        self._hops = _forwarded if header == "forwarded" else _x_forwarded

    def trusts(self, address: str) -> bool:
        """Return True if the address is a trusted proxy's."""
        parsed = parsed_address(address)
        return parsed is not None and any(parsed in network for network in self._networks)

    def resolve(self, head: Head) -> Head:
        """Return the head as the outermost trusted proxy received it from the client."""
        if not self._networks:
            return head
        address, scheme, host = head.address, "", ""
        for hop in self._hops(head):
            if not self.trusts(address):
                break
            scheme, host = hop.scheme or scheme, hop.host or host
            if parsed_address(hop.address) is None:
                # The hop's address is "unknown" or obfuscated (RFC 7239, 6), so it cannot be a
                # trusted proxy's, and the entries before it do not count.
                break
            address = hop.address
        headers = head.headers
        if host:
            kept = tuple(field for field in headers if field[0] != b"host")
            headers = ((b"host", host.encode("latin-1")), *kept)
        return head._replace(address=address, scheme=_scheme(scheme, head.scheme), headers=headers)


def _scheme(said: str, current: str) -> str:
    """Return the scheme that a proxy reported, or its WebSocket form for a WebSocket request."""
    known = SCHEMES.get(said.lower())
    if known is None:
        return current
    return WEBSOCKET_SCHEMES[known] if current in ("ws", "wss") else known


def _bare(node: str) -> str:
    """Return an address without its port and brackets."""
    if node.startswith("["):
        return node[1:].partition("]")[0]
    return node.partition(":")[0] if node.count(":") == 1 else node


def _x_forwarded(head: Head) -> Iterator[Hop]:
    """Yield the hops of `X-Forwarded-*`, the nearest proxy's first.

    All hops get the scheme and the host that the nearest proxy has set: unlike `X-Forwarded-For`,
    the headers for these two need not have an entry for each hop.
    """
    schemes = head.values(b"x-forwarded-proto")
    hosts = head.values(b"x-forwarded-host")
    scheme = schemes[-1] if schemes else ""
    host = hosts[-1] if hosts else ""
    addresses = head.values(b"x-forwarded-for")
    if not addresses:
        yield Hop("", scheme, host)
    for address in reversed(addresses):
        yield Hop(_bare(address), scheme, host)


def _forwarded(head: Head) -> Iterator[Hop]:
    """Yield the hops of `Forwarded`, the nearest proxy's first."""
    joined = ",".join(head.values(b"forwarded"))
    for element in reversed(_elements(joined)):
        said = {
            name.lower(): re.sub(r"\\(.)", r"\1", quoted) or plain.strip()
            for name, quoted, plain in _PAIR.findall(element)
        }
        yield Hop(_bare(said.get("for", "")), said.get("proto", ""), said.get("host", ""))


def _elements(text: str) -> list[str]:
    """Split at the commas outside quoted strings."""
    parts = re.findall(r'(?:"(?:[^"\\]|\\.)*"|[^",])+', text)
    return [part for part in parts if part.strip()]
