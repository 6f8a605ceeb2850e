"""How many connections there may be, in all and from one address.

Plain counting: whoever accepts asks `admit` for each connection and says `release` when it has
ended. What may be open is bounded by the files that the process may have open, too.
"""

from __future__ import annotations

import ipaddress
import resource
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

RESERVED_FILES = 128
"""Files that an edge has open besides its clients' connections, and some to spare: the links to
its origins, what it listens on, libraries, and a connection that is about to be refused."""
IPV6_SITE_BITS = 64
"""One customer's addresses of IPv6: whoever has one of them has them all."""


@dataclass(slots=True, eq=False)
class ConnectionLimits:
    """The count of open connections. `exempt` addresses count in all, but not by themselves.

    Those are proxies, whose connections are those of many clients.
    """

    most: int
    most_per_address: int
    exempt: Callable[[str], bool] = lambda _: False
    count: int = 0
    _by_place: Counter[str] = field(default_factory=Counter)

    def admit(self, address: str) -> bool:
        """Count a connection in; False where there is no room, and it is to be closed at once."""
        place = place_of(address)
        is_bounded = not self.exempt(address)
        if self.count >= self.most:
            return False
        if is_bounded and self._by_place[place] >= self.most_per_address:
            return False
        self.count += 1
        self._by_place[place] += 1
        return True

    def release(self, address: str) -> None:
        """A connection that was admitted has ended."""
        place = place_of(address)
        self.count -= 1
        self._by_place[place] -= 1
        if not self._by_place[place]:
            del self._by_place[place]


def place_of(address: str) -> str:
    """Return what counts as one client: the address, or its /64 of IPv6."""
    parsed = parsed_address(address)
    if isinstance(parsed, ipaddress.IPv6Address):
        return str(ipaddress.IPv6Network((int(parsed), IPV6_SITE_BITS), strict=False))
    return str(parsed or address)


def parsed_address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """What an address of IPv4 is written as in IPv6 is that of IPv4; None for what is none."""
    try:
        parsed = ipaddress.ip_address(text)
    except ValueError:
        return None
    if isinstance(parsed, ipaddress.IPv6Address) and parsed.ipv4_mapped is not None:
        return parsed.ipv4_mapped
    return parsed


def raise_open_files() -> int:
    """Raise the soft limit (1,024 on most systems) to the hard one; gives what holds now."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = sys.maxsize if hard == resource.RLIM_INFINITY else hard
    if soft != resource.RLIM_INFINITY and soft < wanted:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        except (OSError, ValueError):
            return soft  # macOS says that it is unlimited, and takes no more than its kernel has
        return wanted
    return sys.maxsize if soft == resource.RLIM_INFINITY else soft
