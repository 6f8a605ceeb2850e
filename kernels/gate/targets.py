"""GPU architectures that the ahead-of-time gate compiles for, and their differences."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas

from tailrace.kernels.gpu_limits import LIMITS, GpuLimits
from tailrace.kernels.variant import Variant

FP8_ARCH = 89
"""First architecture with instructions that convert between fp8 and other floats."""
DEPENDENT_ARCH = 90
"""First architecture with programmatic dependent launch."""
TOOL_SECONDS = 10
"""Timeout in seconds for the call of ptxas that lists the architectures it knows."""


@dataclass(frozen=True, slots=True)
class Target:
    """One GPU architecture, such as sm_90."""

    arch: int
    """Number of the architecture: 90 for sm_90."""
    instructions: Mapping[str, tuple[str, ...]]
    """Maps an instruction of sm_90 to the instructions that do its work on this architecture. An
    instruction that is not in the table has the same name on both architectures."""
    spill_bytes: int
    """Maximum bytes of spills of one kernel; a kernel with more fails the gate."""

    @property
    def name(self) -> str:
        """Name as NVIDIA's tools spell it, without a suffix."""
        return f"sm_{self.arch}"

    @property
    def limits(self) -> GpuLimits:
        """Shared memory and multiprocessors of the GPU that represents the architecture."""
        return LIMITS[divmod(self.arch, 10)]

    @property
    def triton(self) -> GPUTarget:
        """The target as Triton's compiler takes it."""
        return GPUTarget("cuda", self.arch, 32)

    def runs(self, variant: Variant) -> bool:
        """Return True if the architecture has the fp8 and the dependent launch of the variant."""
        fp8 = any("fp8" in kind for kind in variant.signature.values())
        least = max(FP8_ARCH if fp8 else 0, DEPENDENT_ARCH if variant.launch_pdl else 0)
        return self.arch >= least

    def instead_of(self, mnemonic: str) -> tuple[str, ...]:
        """Return the alternatives of which one must occur where a plan expects `mnemonic`."""
        return self.instructions.get(mnemonic, (mnemonic,))


_WARP_PRODUCTS = {"HGMMA": ("HMMA",), "IGMMA": ("IMMA",)}
"""Instructions to expect on architectures without wgmma: matrix products by one warp (mma)."""

_FIFTH_GENERATION = {"HGMMA": ("UTCHMMA", "HMMA"), "IGMMA": ("UTCIMMA", "IMMA")}
"""Instructions to expect on sm_100: products in tensor memory if Triton uses it, or by one warp."""
FEW_SPILLS = 640
"""Maximum bytes of spills of a kernel on the architectures other than sm_90.

Tiles and warps were chosen for sm_90, so other architectures may spill; that costs time but changes
no result. A store and a load of 4 bytes count as 8.
"""

SM_90 = Target(90, {}, spill_bytes=0)
"""The architecture that the kernels are written for. The gate compiles every variant for it."""
OTHERS = (
    Target(80, _WARP_PRODUCTS, FEW_SPILLS),
    Target(89, _WARP_PRODUCTS, FEW_SPILLS),
    Target(100, _FIFTH_GENERATION, FEW_SPILLS),
    Target(120, _WARP_PRODUCTS, FEW_SPILLS),
)
"""Architectures for which the gate compiles only a sample of the variants."""
TARGETS = {target.arch: target for target in (SM_90, *OTHERS)}


@lru_cache
def is_known(arch: int) -> bool:
    """Return True if the ptxas that Triton would use compiles for this architecture.

    The result is also False if Triton ships no ptxas for the architecture.
    """
    try:
        path = get_ptxas(arch).path
        text = subprocess.run(
            [path, "--help"], capture_output=True, text=True, check=True, timeout=TOOL_SECONDS
        ).stdout
    except (AttributeError, RuntimeError, OSError, subprocess.SubprocessError):
        return False
    return names(text, arch)


def names(help_text: str, arch: int) -> bool:
    """Return True if the help text of ptxas lists the architecture.

    From sm_90 on the name in the text ends with `a`.
    """
    suffix = "a" if arch >= SM_90.arch else ""
    return re.search(rf"'sm_{arch}{suffix}'", help_text) is not None
