"""Programmatic dependent launch: what a kernel may do before the launches ahead of it have ended.

A dependent launch starts as soon as every program of the launch ahead has begun and said
`gdc_launch_dependents`, so that it loads weights while that one still works. The kernels say so
first of all, which means that a launch may start while several of those ahead still run. What
keeps this right is one rule, for every kernel that takes the flag:

    Each program waits (`gdc_wait`) before it writes anything, before it reads anything that a
    launch of the chain writes, and before it ends, on every path.

A chain is an ordinary launch and the dependent ones behind it, on one stream. `gdc_wait` returns
when the launch directly ahead has ended and what it wrote can be seen. By the rule that one could
not end before the launch ahead of it had, and so on up to the ordinary launch at the head, which
the stream starts after all that was ahead of it. So behind the wait everything of before has
ended, as it has behind an ordinary launch, and whatever lies there is ordered as ever:

    read after write    activations, keys and values of this step, partial sums;
    write after read    the residual stream, buffers and workspaces that layers take in turn,
                        a page that an earlier layer's attention may still be reading;
    counters            of splits that arrive: their launch has left them 0 before it ended.

Before the wait a kernel may read what no launch of a chain writes (READ_AHEAD): weights, norms,
scales, the factors of RoPE, and a step's lengths and block tables, which copies ahead of the chain
have brought. Attention that writes a step's own tokens may also read positions before these
(WRITTEN_BEFORE): of a layer's keys and values its chain writes nothing else. Asking for lines of
L2 (`prefetch`) is right for any address, since L2 is where multiprocessors see each
other's stores. A launch that takes no flag is ordinary: it starts after all ahead has ended, and
is the head of the next chain. So is a dependent one behind a copy or a graph.

The interpreter has no such instructions. `make aot` checks that each dependent launch has both,
that ahead of the wait it reads no other argument, and that its machine code does not write there.

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
    """Let the launch behind start, and wait for all ahead: of a kernel that has nothing to load."""
    if PDL:
        cuda.gdc_launch_dependents()
        cuda.gdc_wait()


@triton.jit
def prefetch(place):
    """Bring the lines at these addresses into L2; nothing waits for them."""
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
"""Arguments that kernels may read before they wait: nothing that runs in a chain writes them."""
WRITTEN_BEFORE = frozenset({"keys_ptr", "values_ptr", "key_scales_ptr", "value_scales_ptr"})
"""Those of which attention that writes a step's own tokens may read what was written before."""
