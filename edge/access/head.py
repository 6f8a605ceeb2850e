"""The head of a request, and who it came from where proxies stand in between.

A proxy that the operator trusts says whom it speaks for, in `X-Forwarded-For`, `-Proto` and
`-Host`, or in `Forwarded` (RFC 7239): the operator says which, and only that is read, because a
proxy passes on the other as some client has written it. The last entry is the nearest proxy's.
Entries count as far as trusted proxies wrote them: the first address from the right that is none
of theirs is the client.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Collection, Iterable, Iterator
from typing import Literal, NamedTuple

from tailrace.edge.access.connections import parsed_address


class Head(NamedTuple):
    """The head of one request, a WebSocket's too; names of `headers` are in lower case.

    `address` is the client's, without its port, and empty where there is none (a Unix socket).
    """

    method: str
    path: str
    scheme: str
    address: str
    headers: tuple[tuple[bytes, bytes], ...]

    def value(self, name: bytes) -> str | None:
        """Of the first header field of that name."""
        return next((text for key, text in self._texts() if key == name), None)

    def values(self, name: bytes) -> list[str]:
        """The members of a header field that is a list (RFC 9110, 5.6.1), in their order."""
        joined = ",".join(text for key, text in self._texts() if key == name)
        return [member for part in joined.split(",") if (member := part.strip())]

    @property
    def host(self) -> str:
        """The name and port that the client asked for; empty where it did not say."""
        return self.value(b"host") or ""

    def _texts(self) -> Iterable[tuple[bytes, str]]:
        return ((key, value.decode("latin-1")) for key, value in self.headers)


Network = ipaddress.IPv4Network | ipaddress.IPv6Network
Header = Literal["x-forwarded", "forwarded"]

SCHEMES = {"http": "http", "https": "https", "ws": "http", "wss": "https"}
WEBSOCKET_SCHEMES = {"http": "ws", "https": "wss"}

_PAIR = re.compile(r'([A-Za-z0-9!#$%&\'*+.^_`|~-]+)=(?:"((?:[^"\\]|\\.)*)"|([^",;]*))')


class Hop(NamedTuple):
    """What one proxy said of the request that it had; empty where it did not."""

    address: str
    scheme: str
    host: str


class Proxies:
    """The proxies in `networks`, which tell of clients in `header`."""

    def __init__(self, networks: Collection[Network], header: Header = "x-forwarded") -> None:
        self._networks = tuple(networks)
        self._hops = _forwarded if header == "forwarded" else _x_forwarded

    def trusts(self, address: str) -> bool:
        """Whether it is one of these proxies'."""
        parsed = parsed_address(address)
        return parsed is not None and any(parsed in network for network in self._networks)

    def resolve(self, head: Head) -> Head:
        """The request as the first of these proxies had it."""
        if not self._networks:
            return head
        address, scheme, host = head.address, "", ""
        for hop in self._hops(head):
            if not self.trusts(address):
                break
            scheme, host = hop.scheme or scheme, hop.host or host
            if parsed_address(hop.address) is None:
                break  # it says that it does not know, or hides it
            address = hop.address
        headers = head.headers
        if host:
            kept = tuple(field for field in headers if field[0] != b"host")
            headers = ((b"host", host.encode("latin-1")), *kept)
        return head._replace(address=address, scheme=_scheme(scheme, head.scheme), headers=headers)


def _scheme(said: str, current: str) -> str:
    """The scheme that a proxy said, as that of a WebSocket where it is one."""
    known = SCHEMES.get(said.lower())
    if known is None:
        return current
    return WEBSOCKET_SCHEMES[known] if current in ("ws", "wss") else known


def _bare(node: str) -> str:
    """An address without its port and brackets."""
    if node.startswith("["):
        return node[1:].partition("]")[0]
    return node.partition(":")[0] if node.count(":") == 1 else node


def _x_forwarded(head: Head) -> Iterator[Hop]:
    """The nearest proxy's word first. Scheme and host it alone says: they are no lists of hops."""
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
    """The nearest proxy's element first."""
    joined = ",".join(head.values(b"forwarded"))
    for element in reversed(_elements(joined)):
        said = {
            name.lower(): re.sub(r"\\(.)", r"\1", quoted) or plain.strip()
            for name, quoted, plain in _PAIR.findall(element)
        }
        yield Hop(_bare(said.get("for", "")), said.get("proto", ""), said.get("host", ""))


def _elements(text: str) -> list[str]:
    """Split at the commas that stand in no quoted string."""
    parts = re.findall(r'(?:"(?:[^"\\]|\\.)*"|[^",])+', text)
    return [part for part in parts if part.strip()]
