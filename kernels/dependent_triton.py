"""Programmatic dependent launch (PDL): what a kernel may do before earlier launches have ended.

A dependent launch starts as soon as every program of the preceding launch has begun and executed
`gdc_launch_dependents`, so that it loads weights while the preceding launch still computes. Our
kernels execute it first of all, so a launch may start while several earlier ones still run. One
rule, for every kernel that takes the flag, keeps this correct:

    Each program waits (`gdc_wait`) before it writes anything, before it reads anything that a
    launch of the chain writes, and before it ends, on every path.

A chain is an ordinary launch and the dependent ones that follow it on the same stream. `gdc_wait`
returns when the preceding launch has ended and its writes are visible. By the rule, that launch
could end only after the launch before it had ended, and so on up to the ordinary launch at the
head, which the stream starts after all earlier work. So after the wait all earlier launches have
ended, just as when an ordinary launch starts, and all dependences hold:

    read after write    activations, keys and values of this step, partial sums;
    write after read    the residual stream, buffers and workspaces that layers take in turn,
                        a page that an earlier layer's attention may still be reading;
    counters            of finished splits: each launch resets them to 0 before it ends.

Before the wait a kernel may read what no launch of a chain writes (READ_AHEAD): weights, norms,
scales, the factors of RoPE, and a step's lengths and block tables, which were copied before the
chain began. Attention that writes a step's own tokens may also read earlier positions
(WRITTEN_BEFORE), since its chain writes no other keys and values of its layer. `prefetch` is
correct for any address: it loads into L2, where multiprocessors see each other's stores. A launch
without the flag is ordinary: it starts after all earlier ones have ended, and is the head of the
next chain. A dependent launch that follows a copy or a graph starts only after that copy or graph
has ended, and is the head of a chain, too.

The interpreter lacks these instructions. `make aot` checks that each dependent launch contains both
instructions, and that before the wait it reads only the arguments named above and writes nothing.

Source: CUDA C++ Programming Guide, Programmatic Dependent Launch; PTX ISA, griddepcontrol.
"""

# mypy: disallow-untyped-calls=False, disallow-untyped-decorators=False
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import cuda


@triton.jit
def wait_for_launches_ahead(PDL: tl.constexpr):
    """Allow the next launch to start early, then wait for all earlier launches to end.

    This is for kernels that have nothing to load before the wait.
    """
    if PDL:
        cuda.gdc_launch_dependents()
        cuda.gdc_wait()


@triton.jit
def prefetch(place):
    """Load the cache lines at these addresses into L2, without waiting for them."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l",
        [place],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


READ_AHEAD = frozenset(
    {
        *("words_ptr", "packed_ptr", "weight_ptr", "scale_ptr", "zero_ptr", "norm_ptr"),
        *("lengths_ptr", "sequences_ptr", "tables_ptr", "cos_ptr", "sin_ptr"),
    }
)
"""Names of arguments that kernels may read before they wait: no launch of a chain writes them."""
WRITTEN_BEFORE = frozenset({"keys_ptr", "values_ptr", "key_scales_ptr", "value_scales_ptr"})
"""Names of arguments in which attention may, before it waits, read what earlier steps wrote."""
