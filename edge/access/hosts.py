"""The host names that the edge answers to: a defence against DNS rebinding.

A web page's owner may let the page's DNS name resolve to this machine; the browser then treats the
edge as the page's own origin. But the page cannot choose the `Host` header. So an edge that listens
on loopback only, where no key is needed, answers to the names of loopback only.
"""

from __future__ import annotations

import re
from collections.abc import Collection

from tailrace.edge.access.connections import parsed_address
from tailrace.edge.access.head import Head
from tailrace.ledger.errors import CallerError

LOCALHOST = "localhost"


class HostRule:
    """Allows loopback names, IP addresses and `names`; allows every host if `on` is False."""

    def __init__(self, names: Collection[str], *, on: bool) -> None:
        self._names = frozenset(name.lower() for name in names)
        self._on = on

    def check(self, head: Head) -> None:
        """Raise CallerError (421; RFC 9110, 15.5.20) if the host name is not allowed."""
        name = name_of(head.host)
        # DNS rebinding needs a name, so IP addresses are safe. A request without a host (HTTP/1.0)
        # does not come from a browser.
        if not self._on or not name or name in self._names or _is_local(name):
            return
        shown = name if _SHOWN_HOST.fullmatch(name) else "edge.example"
        raise CallerError(
            "this edge does not answer for that host name",
            code="foreign_host",
            status=421,
            field="Host",
            hint=f'the edge\'s operator can set edge.hosts = ["{shown}"], and behind a proxy also'
            ' edge.trusted_proxies = ["ADDRESS OF THE PROXY"], such as "127.0.0.1"',
        )


_SHOWN_HOST = re.compile(r"[a-z0-9.-]{1,253}")


def name_of(host: str) -> str:
    """Return the host name in a `Host` header, in lower case and without port, [] and final dot."""
    name, separator, port = host.rpartition(":")
    if not separator or not port.isdecimal():
        name = host
    return name.removeprefix("[").removesuffix("]").removesuffix(".").lower()


def _is_local(name: str) -> bool:
    """Return True for `localhost` and names below it (RFC 6761, 6.3), and for IP addresses."""
    return name == LOCALHOST or name.endswith(f".{LOCALHOST}") or parsed_address(name) is not None


def is_loopback(host: str) -> bool:
    """Return True if a socket bound to this host can only be reached from this machine."""
    address = parsed_address(host)
    return host.lower() == LOCALHOST or (address is not None and address.is_loopback)
