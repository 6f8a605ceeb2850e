"""A barrier of all programs of a launch, after which they can read what the others have written.

Every program calls `arrive` once; a program that needs the results of others then calls
`wait_for_all`. All programs of the launch must be resident at once: otherwise programs that wait
would keep others from starting, for ever. A cooperative launch makes the driver refuse a grid that
is too large.

The counter is one int32, 0 at first, and is never reset. Program 0 adds 2**31 - (programs - 1) and
all others add 1, so that its topmost bit changes when the last program has arrived. Launches that
use the same counter must run one after another, for example on one stream.

The interpreter runs programs one after another, so a barrier would never end. There the caller
launches the parts before and after the barrier separately.

Source: the grid synchronisation of cooperative groups in NVIDIA's CUDA toolkit; for the order of
memory the PTX ISA, memory consistency model: a release, and a barrier before it, make the writes of
all threads of a program visible to those that acquire.
"""

# mypy: disallow-untyped-calls=False, disallow-untyped-decorators=False
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

import triton
import triton.language as tl

# Only the first thread of a program polls the counter, to keep the load on its address in L2 low.
_POLL_ASM = """{
.reg .pred p;
.reg .b32 seen;
mov.u32 seen, %tid.x;
setp.ne.u32 p, seen, 0;
@p bra DONE;
AGAIN:
ld.acquire.gpu.global.b32 seen, [$1];
xor.b32 seen, seen, $2;
setp.ge.s32 p, seen, 0;
@p bra AGAIN;
DONE:
mov.b32 $0, 0;
}"""
_POLL = tl.constexpr(_POLL_ASM)


@triton.constexpr_function
def addend_of_first(programs):
    """Return the number that program 0 adds, so that the sum of all additions is 2**31.

    It must fit a signed 32-bit integer. So for a launch of one program it is -2**31, which has the
    same bits as 2**31.
    """
    return 2**31 - (programs - 1) if programs > 1 else -(2**31)


@triton.jit
def arrive(counter_ptr, PROGRAMS: tl.constexpr):
    """Count this program as arrived; return the counter's value before that, for `wait_for_all`."""
    tl.debug_barrier()
    FIRST: tl.constexpr = addend_of_first(PROGRAMS)
    addend = tl.where(tl.program_id(0) == 0, FIRST, 1)
    return tl.atomic_add(counter_ptr, addend, sem="acq_rel")


@triton.jit
def wait_for_all(counter_ptr, before):
    """Wait until all programs have arrived and their writes are visible. before: from `arrive`."""
    tl.inline_asm_elementwise(
        _POLL, "=r,l,r", [counter_ptr, before], dtype=tl.int32, is_pure=False, pack=1
    )
    tl.debug_barrier()
