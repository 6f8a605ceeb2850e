"""Compile options and constants that all launches of Triton kernels share."""

from __future__ import annotations

from typing import Any

import triton

from tailrace.kernels.triton_version import is_supported, supported_versions

if not is_supported(triton.__version__):
    raise ImportError(
        f"triton {triton.__version__} is installed, and the kernels need {supported_versions()}:"
        " install a torch of 2.11 to 2.13, which brings one of these"
    )

INTERPRETED: bool = triton.knobs.runtime.interpret
"""True if kernels run in Triton's interpreter: TRITON_INTERPRET was set at their import.

Every kernel that uses inline assembly, programmatic dependent launch or a bf16 dot product takes
this as a constant and avoids them if it is True: the interpreter lacks the first two and computes
bf16 dot products wrongly.
"""

OPTIONS: dict[str, Any] = {"enable_fp_fusion": False}
"""Options passed to every launch and every compilation.

Fusion of multiplications with additions (FMA) is off, because a fused product is not rounded before
it is added. Without fusion, fp32 arithmetic gives the same bits as the interpreter and torch.
"""


def dependent_launch(dependent: bool) -> tuple[bool, dict[str, Any]]:
    """Return the kernel constant PDL and the options of a dependent or an ordinary launch.

    PDL is programmatic dependent launch; see `kernels.dependent_triton`.
    """
    dependent = dependent and not INTERPRETED
    return dependent, {**OPTIONS, "launch_pdl": True} if dependent else OPTIONS


def next_power_of_2(size: int) -> int:
    """Return the smallest power of two that is not below `size`; 1 for 0."""
    return 1 << max(size - 1, 0).bit_length()
