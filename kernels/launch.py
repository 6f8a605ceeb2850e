"""What every launch of a Triton kernel has in common."""

from __future__ import annotations

from typing import Any

from triton import knobs

INTERPRETED: bool = knobs.runtime.interpret
"""Kernels run in Triton's interpreter, as TRITON_INTERPRET said when they were first imported.

A constant of every kernel that takes inline assembly, programmatic dependent launch or a dot
product of bfloat16: the interpreter has neither of the first two and gets the third wrong.
"""

MULTIPROCESSORS = 132
"""Of an H100 or H200."""
OPTIONS: dict[str, Any] = {"enable_fp_fusion": False}
"""Passed to every launch and every compilation.

A product that is fused with the addition behind it is not rounded in between; without fusion
fp32 arithmetic has the bits of the interpreter and of torch.
"""


def dependent_launch(dependent: bool) -> tuple[bool, dict[str, Any]]:
    """The constant PDL of a kernel and the options of its launch; see `dependent_triton`."""
    dependent = dependent and not INTERPRETED
    return dependent, {**OPTIONS, "launch_pdl": True} if dependent else OPTIONS


def next_power_of_2(size: int) -> int:
    """The smallest power of two that is not below `size`; 1 for 0."""
    return 1 << max(size - 1, 0).bit_length()
