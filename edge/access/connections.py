"""Limits on the number of connections, in total and from one address.

The server calls `admit` for each connection that it accepts, and `release` when it has ended. The
process's limit on open files bounds the number of connections, too.
"""

from __future__ import annotations

import ipaddress
import resource
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

RESERVED_FILES = 128
"""Number of file descriptors that are not used for clients' connections, but kept for links to
origins, listening sockets, libraries, a connection that is being refused, and some to spare."""
IPV6_SITE_BITS = 64
"""Prefix length of the IPv6 network that counts as one client: customers usually get a /64."""


@dataclass(slots=True, eq=False)
class ConnectionLimits:
    """Counts the open connections.

    `exempt` returns True for addresses that `most_per_address` does not limit: proxies, whose
    connections belong to many clients. Connections from these addresses count towards `most`, too.
    """

    most: int
    most_per_address: int
    exempt: Callable[[str], bool] = lambda _: False
    count: int = 0
    _by_client_key: Counter[str] = field(default_factory=Counter)

    def admit(self, address: str) -> bool:
        """Count a new connection; return False if it exceeds a limit and must be closed at once."""
        key = client_key(address)
        is_bounded = not self.exempt(address)
        if self.count >= self.most:
            return False
        if is_bounded and self._by_client_key[key] >= self.most_per_address:
            return False
        self.count += 1
        self._by_client_key[key] += 1
        return True

    def release(self, address: str) -> None:
        """Stop counting a connection that was admitted and has ended."""
        key = client_key(address)
        self.count -= 1
        self._by_client_key[key] -= 1
        if not self._by_client_key[key]:
            del self._by_client_key[key]


def client_key(address: str) -> str:
    """Return the key by which one client is counted: the IPv4 address, or the IPv6 /64 network."""
    parsed = parsed_address(address)
    if isinstance(parsed, ipaddress.IPv6Address):
        return str(ipaddress.IPv6Network((int(parsed), IPV6_SITE_BITS), strict=False))
    return str(parsed or address)


def parsed_address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Parse an IP address, or return None; an IPv4-mapped IPv6 address is returned as IPv4."""
    try:
        parsed = ipaddress.ip_address(text)
    except ValueError:
        return None
    if isinstance(parsed, ipaddress.IPv6Address) and parsed.ipv4_mapped is not None:
        return parsed.ipv4_mapped
    return parsed


def raise_open_files() -> int:
    """Raise the soft limit on open files (often 1,024) to the hard limit; return the new limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = sys.maxsize if hard == resource.RLIM_INFINITY else hard
    if soft != resource.RLIM_INFINITY and soft < wanted:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        except (OSError, ValueError):
            return soft  # macOS reports an unlimited hard limit, but refuses to set the limit to it
        return wanted
    return sys.maxsize if soft == resource.RLIM_INFINITY else soft
