"""Kernels that do next to nothing, to measure what a launch costs."""

# mypy: disallow-untyped-calls=False, disallow-untyped-decorators=False
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import cuda

from tailrace.kernels.launch import dependent_launch

LOADED_FLOATS = 4096
"""Numbers that a program loads before it waits, if any: 16 KiB, as much as a weight's tile."""


@triton.jit
def nothing_kernel(x_ptr, size: tl.constexpr, pdl: tl.constexpr):
    """Load `size` numbers, wait for the launch ahead, and store them where none is awaited."""
    if pdl:
        cuda.gdc_launch_dependents()
    if size > 0:
        place = tl.program_id(0) * size + tl.arange(0, size)
        x = tl.load(x_ptr + place)
        if pdl:
            cuda.gdc_wait()
        # Never true, but the compiler cannot know, so it keeps the load.
        tl.store(x_ptr + place, x, mask=x > 1e30)
    elif pdl:
        cuda.gdc_wait()


def nothing(x: Tensor, programs: int, *, loads: bool, warps: int, dependent: bool) -> None:
    """Launch `programs` programs. x: fp32 [programs * LOADED_FLOATS], below 1e30."""
    pdl, options = dependent_launch(dependent)
    size = LOADED_FLOATS if loads else 0
    nothing_kernel[(programs,)](x, size=size, pdl=pdl, num_warps=warps, **options)
