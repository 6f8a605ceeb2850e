"""Which web pages, and under which names, may ask: one rule for CORS, WebSocket and every route.

A browser says in `Origin` whose page asks. What the same-origin policy only hides from a page
has been carried out all the same, and a WebSocket it does not even hide: so a page that is not
allowed is refused before anything is done for it. Programs send no `Origin` and are not meant.

A page may also have its own name point to this machine (DNS rebinding), and is of the same
origin then. It cannot choose what the browser says in `Host`: an edge that listens on loopback
alone, where no key is asked for, answers to loopback's own names.
"""

from __future__ import annotations

from collections.abc import Collection

from edge.access.connections import parsed_address
from edge.access.head import Head
from ledger.errors import CallerError, Forbidden

ANY_ORIGIN = "*"
"""Pages of every origin."""
LOCALHOST = "localhost"
DEFAULT_PORTS = (":80", ":443")


class OriginRule:
    """`allowed` are origins as browsers spell them, or `*`; an edge's own pages always may."""

    def __init__(self, allowed: Collection[str]) -> None:
        self._allowed = frozenset(allowed)
        self.any = ANY_ORIGIN in self._allowed
        """Whether every page may ask, so that the answer to all of them is the same."""
        self.none = not self._allowed
        """Whether no page of another origin may."""

    def names(self, origin: str) -> bool:
        """Whether the setting allows this origin."""
        return self.any or origin in self._allowed

    def check(self, head: Head) -> None:
        """Raises Forbidden where a page asks that may not."""
        origin = head.value(b"origin")
        if origin is None or self.names(origin) or _is_own(origin, head.host):
            return
        raise Forbidden(
            "pages of this origin may not use this edge",
            code="foreign_origin",
            field="Origin",
            hint="the edge's operator can name it in edge.allowed_origins",
        )


def _is_own(origin: str, host: str) -> bool:
    """Whether a page is of the name and port that it asks.

    Schemes are not compared: behind a proxy that ends TLS the edge would not know its own.
    """
    _, separator, authority = origin.partition("://")
    return bool(separator and authority) and _bare(authority) == _bare(host)


def _bare(authority: str) -> str:
    """Without a port that goes without saying."""
    lower = authority.lower()
    for port in DEFAULT_PORTS:
        lower = lower.removesuffix(port)
    return lower


class HostRule:
    """Answers to loopback's names, to addresses, and to `names`; to any where it is not `on`."""

    def __init__(self, names: Collection[str], *, on: bool) -> None:
        self._names = frozenset(name.lower() for name in names)
        self._on = on

    def check(self, head: Head) -> None:
        """Raises CallerError (421; RFC 9110, 15.5.20) for a request that was meant for another."""
        name = _name_of(head.host)
        # Only a name can be pointed elsewhere. Without any it is no browser (HTTP/1.0).
        if not self._on or not name or name in self._names or _is_local(name):
            return
        raise CallerError(
            "this edge does not go by that name",
            code="foreign_host",
            status=421,
            field="Host",
            hint="ask for localhost, or name it in edge.hosts",
        )


def _name_of(host: str) -> str:
    """Without the port and the brackets of IPv6."""
    name, separator, port = host.rpartition(":")
    if not separator or not port.isdecimal():
        name = host
    return name.removeprefix("[").removesuffix("]").removesuffix(".").lower()


def _is_local(name: str) -> bool:
    """Localhost (RFC 6761, 6.3), or an address."""
    return name == LOCALHOST or name.endswith(f".{LOCALHOST}") or parsed_address(name) is not None


def is_loopback(host: str) -> bool:
    """Whether what listens there can only be reached from this machine."""
    address = parsed_address(host)
    return host.lower() == LOCALHOST or (address is not None and address.is_loopback)
