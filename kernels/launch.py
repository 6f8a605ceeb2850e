"""Options and constants shared by all launches of Triton kernels."""

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
"""True if kernels run in Triton's interpreter, as TRITON_INTERPRET said at their first import.

Every kernel that uses inline assembly, programmatic dependent launch or a bf16 dot product takes
this as a constant: the interpreter supports neither of the first two and computes the third
wrongly.
"""

OPTIONS: dict[str, Any] = {"enable_fp_fusion": False}
"""Options passed to every launch and every compilation.

With fusion (FMA) a product is not rounded before it is added. Without it, fp32 arithmetic gives the
same bits as the interpreter and torch.
"""


def dependent_launch(dependent: bool) -> tuple[bool, dict[str, Any]]:
    """Return the constant PDL of a kernel and the options of its launch.

    PDL is programmatic dependent launch; see `kernels.dependent_triton`.
    """
    dependent = dependent and not INTERPRETED
    return dependent, {**OPTIONS, "launch_pdl": True} if dependent else OPTIONS


def next_power_of_2(size: int) -> int:
    """Return the smallest power of two that is not below `size`; 1 for 0."""
    return 1 << max(size - 1, 0).bit_length()
