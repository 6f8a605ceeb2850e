"""Two ternary linears of one row in one launch, with a barrier of all programs between them.

A pair is the output projection and gate_up, or `down` and the next layer's qkv. The first linear
adds to the residual stream; the second multiplies the normed residual stream by its weights. So a
layer of a BitNet model takes three launches instead of five. Each half runs the code of
`ternary_gemv`, whose sums are integers, so fused and separate launches give the same bits.

The weights of the second half are loaded before the barrier ends. These weights are prefetched into
L2 before the preceding launches have ended, and a program loads them into registers while it waits
at the barrier for the other programs.
"""

# mypy: disallow-untyped-calls=False, disallow-untyped-decorators=False
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disable-error-code="assignment, misc"

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import cuda

from tailrace.kernels.checks import check_same_device, check_tensor
from tailrace.kernels.dependent_triton import prefetch
from tailrace.kernels.gpu_limits import HOPPER, GpuLimits, limits_of
from tailrace.kernels.launch import INTERPRETED, dependent_launch, next_power_of_2
from tailrace.kernels.linear.epilogue import Epilogue
from tailrace.kernels.linear.grid_barrier_triton import arrive, wait_for_all
from tailrace.kernels.linear.int8_words_triton import WORD, WORDS, int8_row, load_row
from tailrace.kernels.linear.ternary_plan import bitnet_linears, bytes_moved, check_linear
from tailrace.kernels.linear.ternary_triton import (
    GEMV_MAX_IN,
    SMALL_STEPS,
    load_packed,
    outputs,
    outputs_of,
)
from tailrace.kernels.linear.ternary_weights import TernaryWeights
from tailrace.kernels.shapes import DecoderShape
from tailrace.kernels.variant import Variant

PAIR_ROWS = 1
"""Maximum rows of a pair. With more rows, norms are launches of their own, and no linears are
fused."""
LINES = 16
"""Warps per program. Their registers hold 8 packed rows of gate and 8 of `up`."""
OWN = 8
"""Packed rows per program in each half. A half with a gate has as many rows of `up` in addition."""
THREADS = LINES * WORDS
REGISTERS = 64 << 10
"""Number of registers of a multiprocessor."""
LONE_REGISTERS, SHARED_REGISTERS = 128, 64
"""Maximum registers per thread: if a program has a multiprocessor to itself; if two share it."""
PAIRS = {"o": "gate_up", "down": "qkv"}
"""Pairs of linears that one launch computes: first linear -> second linear. qkv is that of the next
layer."""

_CHUNK = tl.constexpr(64)
_WORD = tl.constexpr(WORD)
_LINE = tl.constexpr(WORDS)
_RELU2_GATE = tl.constexpr(int(Epilogue.RELU2_GATE))
_BOTH, _FIRST, _SECOND = 0, 1, 2
_BEFORE_BARRIER = tl.constexpr(_FIRST)
_BEHIND_BARRIER = tl.constexpr(_SECOND)


@triton.jit
def _request(
    words_ptr, program, IN: tl.constexpr, END: tl.constexpr, OWN: tl.constexpr,
    GATED: tl.constexpr, LINES_BLOCK: tl.constexpr,
):  # fmt: skip
    """Prefetch a program's packed rows into L2, and those of `up` if GATED; a line has 32 words."""
    ROW: tl.constexpr = IN // _WORD
    LAST: tl.constexpr = END * ROW - 1
    word = program * (OWN * ROW) + tl.arange(0, LINES_BLOCK) * _LINE
    # The block may have more lines than the program's rows. The rest belong to the next program,
    # which needs them soon, too.
    word = tl.minimum(word, LAST)
    prefetch(words_ptr + word)
    if GATED:
        prefetch(words_ptr + (LAST + 1) + word)


@triton.jit
def _first_half(
    x_ptr, gains, tiles, scale_ptr, out_ptr, eps, program, IN: tl.constexpr, END: tl.constexpr,
    OWN: tl.constexpr, LINES: tl.constexpr, STEPS: tl.constexpr, LEVELS: tl.constexpr,
    CHUNKS: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Compute the first linear, which has one part, and add its result to the residual stream."""
    field, column, _, own = outputs_of(program, END, 0, 0, END, OWN, LINES)
    x = load_row(x_ptr, IN, LINES, STEPS)
    old = tl.load(out_ptr + column, mask=own, other=0.0)
    scale = tl.load(scale_ptr)
    words, factor = int8_row(x, gains, eps, IN, LINES, STEPS, True, INTERPRETED)
    y = outputs(
        words, factor, tiles, field, scale, 0.0, OWN, OWN, LINES, STEPS, LEVELS, CHUNKS, False,
        INTERPRETED,
    )  # fmt: skip
    tl.store(out_ptr + column, old + y, mask=own)


@triton.jit
def _second_half(
    x_ptr, gains, tiles, scale_ptr, out_ptr, eps, program,
    IN: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr, THIRD: tl.constexpr,
    END: tl.constexpr, OWN: tl.constexpr, ROWS: tl.constexpr, LINES: tl.constexpr,
    STEPS: tl.constexpr, LEVELS: tl.constexpr, CHUNKS: tl.constexpr, GATED: tl.constexpr,
    INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Compute the second linear, of the residual stream that all programs have written."""
    field, column, part, own = outputs_of(program, FIRST, SECOND, THIRD, END, OWN, LINES)
    x = load_row(x_ptr, IN, LINES, STEPS, ".cg")
    scale = tl.load(scale_ptr + part, mask=own, other=0.0)
    up_scale = tl.load(scale_ptr + 1) if GATED else 0.0
    words, factor = int8_row(x, gains, eps, IN, LINES, STEPS, True, INTERPRETED)
    y = outputs(
        words, factor, tiles, field, scale, up_scale, OWN, ROWS, LINES, STEPS, LEVELS, CHUNKS,
        GATED, INTERPRETED,
    )  # fmt: skip
    tl.store(out_ptr + column, y, mask=own)


@triton.jit
def ternary_pair_kernel(
    x_ptr, norm_ptr, words_ptr, scale_ptr, residual_ptr,
    next_norm_ptr, next_words_ptr, next_scale_ptr, out_ptr, counter_ptr, eps,
    IN: tl.constexpr, ROWS_OUT: tl.constexpr, STEPS: tl.constexpr, LEVELS: tl.constexpr,
    NEXT_IN: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr, THIRD: tl.constexpr,
    NEXT_STEPS: tl.constexpr, NEXT_LEVELS: tl.constexpr, EPILOGUE: tl.constexpr,
    OWN: tl.constexpr, LINES: tl.constexpr, PROGRAMS: tl.constexpr, NEXT_PROGRAMS: tl.constexpr,
    LINES_BLOCK: tl.constexpr, HALF: tl.constexpr, PDL: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Compute residual += W norm(x), then out = epilogue(V norm(residual)).

    HALF: 0 to run both halves with the barrier between them; 1 or 2 to run only the first or the
    second half, in the interpreter. PROGRAMS, NEXT_PROGRAMS: number of programs that have packed
    rows of the first and of the second half.
    """
    GATED: tl.constexpr = EPILOGUE == _RELU2_GATE
    END: tl.constexpr = FIRST if GATED else FIRST + SECOND + THIRD
    ROWS: tl.constexpr = 2 * OWN if GATED else OWN
    PARTS: tl.constexpr = LINES // OWN
    NEXT_PARTS: tl.constexpr = LINES // ROWS
    CHUNKS: tl.constexpr = (IN // _WORD + PARTS * _CHUNK - 1) // (PARTS * _CHUNK)
    NEXT_CHUNKS: tl.constexpr = (NEXT_IN // _WORD + NEXT_PARTS * _CHUNK - 1) // (
        NEXT_PARTS * _CHUNK
    )
    ALL: tl.constexpr = max(PROGRAMS, NEXT_PROGRAMS)
    program = tl.program_id(0)
    if HALF != _BEHIND_BARRIER:
        tiles = load_packed(words_ptr, program * OWN, ROWS_OUT, IN, OWN, OWN, PARTS, CHUNKS)
        gains = load_row(norm_ptr, IN, LINES, STEPS)
        if not INTERPRETED:
            _request(next_words_ptr, program, NEXT_IN, END, OWN, GATED, LINES_BLOCK)
        if PDL:
            cuda.gdc_launch_dependents()
            cuda.gdc_wait()
        if program < PROGRAMS:
            _first_half(
                x_ptr, gains, tiles, scale_ptr, residual_ptr, eps, program,
                IN, ROWS_OUT, OWN, LINES, STEPS, LEVELS, CHUNKS, INTERPRETED,
            )  # fmt: skip
    if not INTERPRETED:
        before = arrive(counter_ptr, ALL)
    if program < (0 if HALF == _BEFORE_BARRIER else NEXT_PROGRAMS):
        next_tiles = load_packed(
            next_words_ptr, program * OWN, END, NEXT_IN, OWN, ROWS, NEXT_PARTS, NEXT_CHUNKS
        )
        next_gains = load_row(next_norm_ptr, NEXT_IN, LINES, NEXT_STEPS)
        if not INTERPRETED:
            wait_for_all(counter_ptr, before)
        _second_half(
            residual_ptr, next_gains, next_tiles, next_scale_ptr, out_ptr, eps, program,
            NEXT_IN, FIRST, SECOND, THIRD, END, OWN, ROWS, LINES, NEXT_STEPS, NEXT_LEVELS,
            NEXT_CHUNKS, GATED, INTERPRETED,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class PairPlan:
    """Launch plan of a pair of linears; all sums are integers, so every plan gives equal bits."""

    programs: int
    """Number of programs that have packed rows of the first linear."""
    next_programs: int
    steps: int
    """Number of lines (128 inputs each) of the first linear's input row that a warp multiplies."""
    next_steps: int
    registers: int
    """Maximum registers per thread."""
    resident: int
    """Maximum number of programs that the GPU runs at once."""

    @classmethod
    def of(
        cls,
        packed_rows: int,
        inputs: int,
        next_packed_rows: int,
        next_inputs: int,
        limits: GpuLimits = HOPPER,
    ) -> PairPlan:
        """Plan a pair of linears; packed rows of a gated linear are those of the gate alone."""
        programs = triton.cdiv(packed_rows, OWN), triton.cdiv(next_packed_rows, OWN)
        steps = _steps(inputs), _steps(next_inputs)
        lone = max(programs) <= limits.multiprocessors
        registers = LONE_REGISTERS if lone else SHARED_REGISTERS
        beside = REGISTERS // (THREADS * registers)
        return cls(*programs, *steps, registers, beside * limits.multiprocessors)

    @property
    def fits(self) -> bool:
        """True if all programs are resident at once and an input row fits their registers."""
        most = GEMV_MAX_IN // (LINES * WORDS * WORD)
        if self.registers == SHARED_REGISTERS:
            most = SMALL_STEPS
        return (
            max(self.programs, self.next_programs) <= self.resident
            and max(self.steps, self.next_steps) <= most
        )

    def constants(self) -> dict[str, Any]:
        """Constants that the kernel is compiled with."""
        return {
            "OWN": OWN,
            "LINES": LINES,
            "STEPS": self.steps,
            "LEVELS": (self.steps - 1).bit_length(),
            "NEXT_STEPS": self.next_steps,
            "NEXT_LEVELS": (self.next_steps - 1).bit_length(),
            "PROGRAMS": self.programs,
            "NEXT_PROGRAMS": self.next_programs,
        }


def _steps(inputs: int) -> int:
    return -(-inputs // (WORDS * WORD * LINES))


def pair_plan(
    weights: TernaryWeights, following: TernaryWeights, gated: bool, limits: GpuLimits
) -> PairPlan:
    """Return the launch plan of two weights; gated: True if the second has a gate and `up`."""
    next_rows = following.packed_rows // 2 if gated else following.packed_rows
    return PairPlan.of(
        weights.packed_rows, weights.in_features, next_rows, following.in_features, limits
    )


def ternary_pair(
    x: Tensor,
    norm: Tensor,
    weights: TernaryWeights,
    residual: Tensor,
    next_norm: Tensor,
    following: TernaryWeights,
    out: Tensor,
    counter: Tensor,
    *,
    eps: float,
    epilogue: Epilogue = Epilogue.STORE,
    dependent: bool = False,
) -> None:
    """Compute residual += W norm(x), then out = epilogue(V norm(residual)), of one row.

    The bits are those of two calls of `ternary_gemv`. x: fp32 [rows, in], one row or none. norm,
    next_norm: fp32 [in] of each linear. weights: W, which must be a single part. residual: fp32
    [rows, out of weights]. following: V; with the epilogue RELU2_GATE it has two equal parts,
    otherwise the epilogue is STORE. out: fp32, as `ternary_gemv` stores it. x, residual and out
    must not overlap. counter: int32 [1], 0 before the first launch; launches that share it must be
    on one stream (`grid_barrier_triton`). dependent: programmatic dependent launch.

    Moves the weights of both linears once. Raises TypeError or ValueError that names the argument,
    also if the programs of the launch are not resident at once on this GPU.
    """
    check_tensor("x", x, torch.float32, None, weights.in_features)
    check_tensor("residual", residual, torch.float32, len(x), weights.out_features)
    rows = check_linear("residual", residual, torch.float32, following, out, epilogue)
    if rows > PAIR_ROWS:
        raise ValueError(f"x: {rows} rows, expected at most {PAIR_ROWS}")
    if len(weights.outs) != 1:
        raise ValueError(f"weights: parts of {weights.outs} rows, expected a single part")
    if epilogue is Epilogue.ADD:
        raise ValueError("epilogue: ADD, expected STORE or RELU2_GATE")
    check_tensor("norm", norm, torch.float32, weights.in_features)
    check_tensor("next_norm", next_norm, torch.float32, following.in_features)
    check_tensor("counter", counter, torch.int32, 1)
    if not eps > 0:
        raise ValueError(f"eps: {eps}, expected a number above 0")
    check_same_device(
        x=x, packed=weights.packed, residual=residual, following=following.packed, norm=norm,
        next_norm=next_norm, out=out, counter=counter,
    )  # fmt: skip
    plan = pair_plan(weights, following, epilogue.gated, limits_of(x.device))
    if not plan.fits:
        raise ValueError(f"weights: {plan} has more programs or longer rows than fit the GPU")
    if rows == 0:
        return
    first, second, third = following.part_rows()
    dependent, options = dependent_launch(dependent)
    # The interpreter has no barrier, so there the halves are two launches.
    for half in (_FIRST, _SECOND) if INTERPRETED else (_BOTH,):
        ternary_pair_kernel[(max(plan.programs, plan.next_programs),)](
            x, norm, weights.words, weights.scale, residual,
            next_norm, following.words, following.scale, out, counter, eps,
            IN=weights.in_features, ROWS_OUT=weights.packed_rows,
            NEXT_IN=following.in_features, FIRST=first, SECOND=second, THIRD=third,
            EPILOGUE=int(epilogue), LINES_BLOCK=_lines_block(following.in_features),
            **plan.constants(), HALF=half, PDL=dependent, INTERPRETED=INTERPRETED,
            num_warps=LINES, maxnreg=plan.registers, **_cooperative(), **options,
        )  # fmt: skip


def _lines_block(inputs: int) -> int:
    """Return the number of lines of a program's packed rows, rounded up to a power of two."""
    return next_power_of_2(triton.cdiv(OWN * inputs, WORDS * WORD))


def _cooperative() -> dict[str, bool]:
    """Return the launch option that makes the driver refuse a grid that is not resident at once."""
    return {} if INTERPRETED else {"launch_cooperative_grid": True}


_TYPES = {
    "x_ptr": "*fp32",
    "norm_ptr": "*fp32",
    "words_ptr": "*i32",
    "scale_ptr": "*fp32",
    "residual_ptr": "*fp32",
    "next_norm_ptr": "*fp32",
    "next_words_ptr": "*i32",
    "next_scale_ptr": "*fp32",
    "out_ptr": "*fp32",
    "counter_ptr": "*i32",
    "eps": "fp32",
}


def variants(shape: DecoderShape, limits: GpuLimits = HOPPER) -> Iterator[Variant]:
    """Yield the variants of both pairs of a BitNet layer, if they fit a GPU with these limits."""
    linears = bitnet_linears(shape)
    for step, following in PAIRS.items() if linears else ():
        (out,), width, _ = linears[step]
        outs, next_width, epilogue = linears[following]
        owned = sum(outs) // 4 // (2 if epilogue.gated else 1)
        plan = PairPlan.of(out // 4, width, owned, next_width, limits)
        first, second, third = (rows // 4 for rows in (*outs, 0, 0)[:3])
        moved = bytes_moved((out,), width, Epilogue.ADD, 1, 4) + 4 * width
        moved += bytes_moved(outs, next_width, epilogue, 1, 4) + 4 * next_width
        for dependent in (False, True) if plan.fits else ():
            yield Variant(
                name=f"{shape.name}.{step}+{following} ternary pair rows=1"
                + " dependent" * dependent,
                kernel=ternary_pair_kernel,
                signature=_TYPES,
                constants=plan.constants()
                | {
                    "IN": width,
                    "ROWS_OUT": out // 4,
                    "NEXT_IN": next_width,
                    "FIRST": first,
                    "SECOND": second,
                    "THIRD": third,
                    "EPILOGUE": int(epilogue),
                    "LINES_BLOCK": _lines_block(next_width),
                    "HALF": _BOTH,
                    "PDL": dependent,
                    "INTERPRETED": False,
                },
                divisible=frozenset(_TYPES) - {"eps"},
                num_warps=LINES,
                programs=max(plan.programs, plan.next_programs),
                launch_pdl=dependent,
                options={"maxnreg": plan.registers, "launch_cooperative_grid": True},
                expects=("IDP.4A", "REDUX", "LDG.E.EF", "ATOMG", "LDG.E.STRONG", "CCTL.E.PF2"),
                bytes_moved=moved,
            )
