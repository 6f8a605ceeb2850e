"""Limits of GPUs that launch plans depend on: shared memory and number of multiprocessors.

`limits_of` reads them from a device. The table LIMITS has them for one GPU per compute capability,
so that plans can be compiled and tested on a machine without a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

Capability = tuple[int, int]
"""Compute capability of a GPU: (9, 0) is sm_90."""

LEAST_CAPABILITY: Capability = (8, 0)
"""Minimum compute capability of a GPU; sm_80 is the first with bf16 on tensor cores and
asynchronous copies."""
LEAST_SHARED_BYTES = 99 << 10
"""Minimum bytes of shared memory per program that a GPU must have; every launch plan is tested to
fit into them."""


@dataclass(frozen=True, slots=True)
class GpuLimits:
    """The resources of a GPU on which a plan's tiles, stages, splits and programs depend."""

    shared_bytes: int
    """Maximum bytes of shared memory per program, if the launch opts in to more than 48 KiB."""
    multiprocessors: int
    """Number of streaming multiprocessors."""

    def __str__(self) -> str:
        return f"{self.shared_bytes} shared bytes, {self.multiprocessors} multiprocessors"


LIMITS: dict[Capability, GpuLimits] = {
    (8, 0): GpuLimits(163 << 10, 108),  # A100
    (8, 6): GpuLimits(99 << 10, 84),  # A40
    (8, 7): GpuLimits(163 << 10, 16),  # Orin
    (8, 9): GpuLimits(99 << 10, 142),  # L40S
    (9, 0): GpuLimits(227 << 10, 132),  # H100 SXM, H200
    (10, 0): GpuLimits(227 << 10, 148),  # B200
    (10, 3): GpuLimits(227 << 10, 148),  # B300
    (12, 0): GpuLimits(99 << 10, 170),  # GeForce RTX 5090
    (12, 1): GpuLimits(99 << 10, 48),  # GB10
}
"""Limits by compute capability, with the multiprocessors of the GPU that is named beside each row.

Shared memory is that of a multiprocessor less 1 KiB, which CUDA reserves for each program. Sources:
NVIDIA, CUDA C++ Programming Guide 13.0, table of technical specifications per compute capability;
for 8.0 to 9.0 also `arch_traits` in NVIDIA's CCCL. Multiprocessors are from NVIDIA's data sheets.
"""
HOPPER = LIMITS[9, 0]
"""Limits of an H100 SXM or H200, for which the plans were designed."""


@lru_cache
def limits_of(device: torch.device) -> GpuLimits:
    """Return the limits of a device; a CPU, on which kernels are interpreted, has those of HOPPER.

    Plans follow the device rather than the table, since GPUs of one capability, and slices of a GPU
    (MIG), differ in their multiprocessors.
    """
    if device.type != "cuda":
        return HOPPER
    import torch  # imported here, since the supervisor imports this file and has no torch

    properties = torch.cuda.get_device_properties(device)
    # getattr, because torch's type stubs and some builds for other hardware lack this attribute.
    shared = getattr(properties, "shared_memory_per_block_optin", 0)
    known = LIMITS.get((properties.major, properties.minor))
    if not shared:
        shared = known.shared_bytes if known else LEAST_SHARED_BYTES
    return GpuLimits(shared, properties.multi_processor_count)
