"""How large the datagrams of a connection may be: its path is asked (RFC 8899; RFC 9000, 14.3).

Any path carries BASE_BYTES. Once a client has been sent something, one packet of LARGE_BYTES that
says nothing goes too; if it is acknowledged, so large are they from then on, until so many are lost
in a row that the path must have become narrower. Sans-I/O.
"""

from __future__ import annotations

BASE_BYTES = 1200
"""RFC 9000, 14.1"""
LARGE_BYTES = 1452
"""What Ethernet carries of IPv6 and UDP: nearly every path's most."""
MAX_PROBES, PROBE_EVERY_S = 3, 1.0
"""RFC 8899, 5.1"""
LOST_IN_A_ROW = 10
"""Large datagrams, of which a path that is merely full would have let one through."""


class PathSize:
    """The size for one connection, which never grows again once it has shrunk."""

    __slots__ = ("_asks_from_s", "_lost", "_probes", "size")

    def __init__(self) -> None:
        self.size = BASE_BYTES
        self._probes = 0  # sent, of those that may be
        self._asks_from_s = 0.0
        self._lost = 0  # large datagrams since the last one that was acknowledged

    def asks(self, now: float) -> bool:
        """Whether the path is to be asked now, which counts as asked."""
        if self.size != BASE_BYTES or self._probes >= MAX_PROBES or now < self._asks_from_s:
            return False
        self._probes += 1
        self._asks_from_s = now + PROBE_EVERY_S
        return True

    def answered(self) -> None:
        """A probe has been acknowledged."""
        if self._probes <= MAX_PROBES:
            self.size = LARGE_BYTES

    def large_came(self) -> None:
        self._lost = 0

    def large_lost(self) -> None:
        self._lost += 1
        if self._lost >= LOST_IN_A_ROW:
            self.shrink()

    def shrink(self) -> None:
        """The path carries less, or there is another one."""
        self.size = BASE_BYTES
        self._probes = MAX_PROBES + 1
