"""When packets may be sent: aioquic's congestion control and pacing, with small changes."""

from __future__ import annotations

from collections.abc import Iterable
from math import ceil

from aioquic.quic.congestion.base import K_INITIAL_WINDOW, register_congestion_control
from aioquic.quic.congestion.reno import RenoCongestionControl
from aioquic.quic.packet_builder import QuicSentPacket
from aioquic.quic.recovery import QuicPacketPacer

from tailrace.edge.quic.interface import TIMER_S

CONGESTION_CONTROL = "reno-counting-losses"
"""Name of `LossCountingReno` in a QuicConfiguration."""
PACING_GAIN = 2
"""Pacing rate, in congestion windows per round trip. Linux uses 2 while a window grows."""
UNPACED_PACKETS = 64
"""Maximum number of packets that leave at once before the first round-trip time is known. The
congestion window allows fewer."""


class LossCountingReno(RenoCongestionControl):
    """aioquic's New Reno congestion control, which also counts how often packets were lost."""

    losses = 0

    def on_packets_lost(self, *, now: float, packets: Iterable[QuicSentPacket]) -> None:
        """Count a loss."""
        self.losses += 1
        super().on_packets_lost(now=now, packets=packets)


register_congestion_control(CONGESTION_CONTROL, LossCountingReno)


class TimerPacer(QuicPacketPacer):
    """aioquic's pacing, adapted to timers with a resolution of one millisecond.

    An initial window may be sent at once (RFC 9002, 7.7), and so may all packets that are due
    before the next timer can fire.
    """

    def update_rate(self, congestion_window: int, smoothed_rtt: float) -> None:
        """Use a new congestion window and round-trip time."""
        super().update_rate(PACING_GAIN * congestion_window, smoothed_rtt)
        initial_window_s = K_INITIAL_WINDOW * (self.packet_time or 0.0)
        self.bucket_max = max(self.bucket_max, TIMER_S, initial_window_s)

    def allowed_packets(self, now: float) -> int:
        """Return how many packets may be sent now."""
        if self.packet_time is None:
            return UNPACED_PACKETS
        self.update_bucket(now=now)
        return max(0, ceil(self.bucket_time / self.packet_time))

    def count_packets(self, count: int) -> None:
        """Count packets that have been sent."""
        if self.packet_time is not None:
            self.bucket_time -= count * self.packet_time  # may be negative, by less than one packet
