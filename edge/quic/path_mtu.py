"""Path MTU discovery: how large the datagrams of a connection may be (RFC 8899; RFC 9000, 14.3).

Every path carries 1,200 bytes (RFC 9000, 14). When something has been sent to a client, a probe
follows: one packet of 1,452 bytes without data. If the probe is acknowledged, datagrams have that
size from then on, until several are lost in a row. Then the path has a smaller MTU, and datagrams
stay small.
"""

from __future__ import annotations

from aioquic.quic.packet_builder import QuicDeliveryState

SMALL_DATAGRAM_BYTES = 1200
"""Size of datagrams that every path carries."""
LARGE_DATAGRAM_BYTES = 1452
"""Size of datagrams that Ethernet carries with IPv6 and UDP, as nearly all paths do."""
MAX_PROBES, PROBE_INTERVAL_S = 3, 1.0
"""Maximum number of probes of a path, and seconds between them (RFC 8899, 5.1)."""
MAX_LOST_IN_A_ROW = 3
"""After this many large datagrams lost in a row, the path counts as one that carries only small
ones."""


class PathMtu:
    """The size of datagrams for one path."""

    __slots__ = ("_lost", "_next_probe_s", "_probes_left", "datagram_bytes")

    def __init__(self) -> None:
        self.datagram_bytes = SMALL_DATAGRAM_BYTES
        self._probes_left = MAX_PROBES
        self._next_probe_s = 0.0
        self._lost = 0  # large datagrams lost in a row

    def take_probe(self, now: float) -> bool:
        """Return True if a probe is to be sent now, and count it as sent."""
        if self._probes_left <= 0 or now < self._next_probe_s:
            return False
        self._probes_left -= 1
        self._next_probe_s = now + PROBE_INTERVAL_S
        return True

    def probe_delivered(self, delivery: QuicDeliveryState) -> None:
        """Handle the acknowledgement or the loss of a probe."""
        if delivery is QuicDeliveryState.ACKED and self._probes_left >= 0:
            self.datagram_bytes = LARGE_DATAGRAM_BYTES
            self._probes_left = 0

    def large_delivered(self, delivery: QuicDeliveryState) -> None:
        """Handle the acknowledgement or the loss of a large datagram."""
        self._lost = 0 if delivery is QuicDeliveryState.ACKED else self._lost + 1
        if self._lost >= MAX_LOST_IN_A_ROW:
            self.shrink()

    def shrink(self) -> None:
        """Use small datagrams from now on."""
        self.datagram_bytes = SMALL_DATAGRAM_BYTES
        self._probes_left = -1
