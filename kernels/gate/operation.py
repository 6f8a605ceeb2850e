"""The model of an H200 from which times are predicted: its constants, and one operation's time."""

from __future__ import annotations

from dataclasses import dataclass, replace

from tailrace.kernels.gpu_limits import HOPPER

COPY_TB_S = 4.3
"""Copy bandwidth in TB/s, read plus written, device to device on an H200 (measured)."""
STREAM_SHARE = 0.9
"""Share of the copy bandwidth that a kernel with all loads in flight reaches (assumed)."""
LAUNCH_US = 1.3
"""Time in us from the end of a kernel to the start of the next in a CUDA graph.

Source: Hazy Research, Look Ma, No Bubbles, 2025; measured on an H100.
"""
RAMP_US = 0.8
"""Time in us until the first loads of a kernel return: a loaded memory latency (assumed)."""
DEPENDENT_US = 0.5
"""Time in us that replaces LAUNCH_US + RAMP_US for a dependent launch, which loads weights before
the previous kernel ends (assumed)."""
BARRIER_US = 0.9
"""Time in us of a barrier of all programs (assumed): 0.3 us each for a fence, an atomic addition in
L2, and a poll that sees the last program's addition."""
L2_TB_S = 5.5
"""Bandwidth of the L2 cache in TB/s (assumed)."""
SMS, CLOCK_HZ = HOPPER.multiprocessors, 1.98e9
SCHEDULERS = 4
"""Schedulers per multiprocessor, each of which issues one instruction per clock to its warps."""
INSTRUCTION_CLOCKS = 2.0
"""Clocks that a warp takes per instruction after the wait (assumed), if a scheduler has one or two
warps and most instructions depend on the one before. With more warps per scheduler, it takes as
many clocks as the scheduler has warps."""
DP4A_PER_CLOCK = 64
"""dp4a instructions per multiprocessor and clock, each of eight operations (assumed to be as many
as 32-bit multiply-adds)."""
PEAKS = {
    "int8 tensor cores": 1979e12,
    "bf16 tensor cores": 989e12,
    "dp4a": SMS * CLOCK_HZ * DP4A_PER_CLOCK * 8,
}
"""Peak operations per second by kind of instruction. Those of tensor cores are from NVIDIA's data
sheet of the H200 SXM, without sparsity."""


@dataclass(frozen=True, slots=True)
class Operation:
    """One or several kernels that a bench measures together."""

    name: str
    """Name in the bench, such as `bitnet-2b4t.qkv ternary rows=1`."""
    bytes_moved: int
    launches: int = 1
    arithmetic: int = 0
    """Number of multiplications and additions; 0 if memory is certain to take longer."""
    peak: float = PEAKS["bf16 tensor cores"]
    """Peak operations per second of the kernel's instructions."""
    ordinary: int = 0
    """Number of ordinary launches, each at the head of a chain of dependent ones."""
    behind: float = 0.0
    """Clocks that the instructions after the waits for earlier launches take, in all launches
    together. They come from the counts of `make aot`; 0 without these."""
    barriers: int = 0
    """Number of barriers of all programs in the launches together."""
    cached: int = 0
    """Bytes read from L2, each as often as it is read; 0 if the L2 cache is no bound."""

    def floor_us(self, copy_tb_s: float = COPY_TB_S) -> float:
        """Return the lower bound of the time in us: bytes moved, divided by the copy bandwidth."""
        return self.bytes_moved / copy_tb_s / 1e6

    def expected_us(self, dependent: bool = False) -> float:
        """Return the expected time in us, with or without programmatic dependent launches."""
        busy = max(
            self.floor_us() / STREAM_SHARE,
            self.arithmetic / self.peak * 1e6,
            self.cached / L2_TB_S / 1e6,
        )
        busy += self.behind / CLOCK_HZ * 1e6 + self.barriers * BARRIER_US
        chained = self.launches - self.ordinary if dependent else 0
        return busy + chained * DEPENDENT_US + (self.launches - chained) * (LAUNCH_US + RAMP_US)

    def repeated(self, times: int) -> Operation:
        """Return `times` repetitions as one operation, which the bench does not measure."""
        return replace(
            self,
            name=f"{self.name}, {times} times",
            bytes_moved=times * self.bytes_moved,
            launches=times * self.launches,
            ordinary=times * self.ordinary,
            arithmetic=times * self.arithmetic,
            behind=times * self.behind,
            barriers=times * self.barriers,
            cached=times * self.cached,
        )
