"""Ternary linears (W2A8) on the GPU, on weights packed as they lie in a BitNet checkpoint.

A 32-bit word along `in` of packed row r holds 16 weights: 4 of each of the output rows
i * R + r, with i = 0 .. 3 and R the packed rows of its part. `word & (0x03030303 << 2i)` has
weight + 1, times 4**i, in each byte and goes straight into dp4a: no weight is ever shifted.
The sums are divided by 4**i at the end, which is exact, and lack the sum of the activations,
which is subtracted. They are whole numbers: no tile, split or batch changes a bit of what
`kernels.linear.ternary.ternary_linear` gives.

    ternary_gemv   one row: norm and quantisation in the prologue, dp4a
    ternary_gemm   any number of rows that are int8 already, tensor cores
"""

# Triton's language has no types: its functions are compiled, not called.
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

from kernels.checks import check_same_device, check_tensor
from kernels.launch import INTERPRETED, dependent_launch
from kernels.linear.epilogue import Epilogue
from kernels.linear.int8_words_triton import (
    WORD,
    WORDS,
    dp4a,
    int8_rows,
    load_row,
    over_lines,
)
from kernels.linear.ternary_gemm_triton import ternary_gemm
from kernels.linear.ternary_plan import bitnet_linears, bytes_moved, check_linear, part_constants
from kernels.linear.ternary_rows_triton import part_of
from kernels.linear.ternary_weights import TernaryWeights
from kernels.shapes import DecoderShape
from kernels.variant import Variant

__all__ = [
    "GEMV_MAX_IN",
    "GEMV_MAX_ROWS",
    "TernaryWeights",
    "gemv_rows",
    "ternary_gemm",
    "ternary_gemv",
]

GEMV_MAX_ROWS = 1
"""Rows that ternary_gemv takes: two would repeat two norms in every program, which cost more than
launches of their own."""
GEMV_MAX_IN = 14_336
"""Elements along `in` that the registers of a program of 16 warps hold."""
PACKED_ROWS = 4
"""Packed rows that a program owns, 16 rows of the weight."""
SMALL_STEPS, SMALL_REGISTERS = 4, 64
"""Up to so many steps, and without a gate, a lane needs no more registers: then four programs of
8 warps, or two of 16, share a multiprocessor."""

_PACKED_ROWS = tl.constexpr(PACKED_ROWS)
_OUTS = tl.constexpr(4 * PACKED_ROWS)
_LEVELS = tl.constexpr((4 * PACKED_ROWS).bit_length() - 1)
_WORDS = tl.constexpr(WORDS)
_WORD = tl.constexpr(WORD)
_ADD = tl.constexpr(int(Epilogue.ADD))
_RELU2_GATE = tl.constexpr(int(Epilogue.RELU2_GATE))


@triton.constexpr_function
def masked_dp4a_asm(i):
    """dp4a of field i of a word.

    The mask is part of it, since masked words would be kept from row to row, in four times the
    registers of the words.
    """
    return f"{{.reg .b32 f; and.b32 f, $1, {0x03030303 << 2 * i}; dp4a.u32.s32 $0, f, $2, $3;}}"


@triton.jit
def masked_dp4a(words, activations, total, i: tl.constexpr, INTERPRETED: tl.constexpr):
    """total + the products of field i of each word, that is 4**i * (weight + 1), and x."""
    if INTERPRETED:
        for byte in tl.static_range(4):
            field = (words >> (8 * byte)) & (3 << 2 * i)
            total += field * ((activations << (24 - 8 * byte)) >> 24)
        return total
    else:
        return tl.inline_asm_elementwise(
            masked_dp4a_asm(i),
            "=r,r,r,r",
            [words, activations, total],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )


@triton.jit
def load_packed(
    words_ptr, first, END: tl.constexpr, IN: tl.constexpr, LINES: tl.constexpr, STEPS: tl.constexpr
):  # fmt: skip
    """PACKED_ROWS packed rows, each a tuple of STEPS tiles int32 [LINES, 32]; 0 from END.

    A lane has the same words of every row, which are those of the activations that it has. Each
    is read once: what comes from memory is not kept for others.
    """
    tiles = ()
    for row in tl.static_range(_PACKED_ROWS):
        for step in tl.static_range(STEPS):
            line = step * LINES + tl.arange(0, LINES)
            word = line[:, None] * _WORDS + tl.arange(0, _WORDS)[None, :]
            place = words_ptr + (first + row) * (IN // _WORD) + word
            mask = (word < IN // _WORD) & (first + row < END)
            tile = tl.load(place, mask=mask, other=0, eviction_policy="evict_first")
            tiles = tiles + (tile,)
    return tiles


@triton.jit
def products(
    tiles, words, FIRST: tl.constexpr, LINES: tl.constexpr, STEPS: tl.constexpr,
    INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Of a line: 4**i times the sums of weight * x, at [:, 4 * r + i] for row i * R + r.

    A lane has all of them, of its words; here each gets one, of all words of its line.
    """
    minus = tl.full((LINES, _WORDS), -1, tl.int32)
    total = tl.zeros((LINES, _WORDS), tl.int32)
    for step in tl.static_range(STEPS):
        total = dp4a(minus, words[FIRST + step], total, INTERPRETED)
    sums = ()
    for row in tl.static_range(_PACKED_ROWS):
        for i in tl.static_range(4):
            sum = total << 2 * i
            for step in tl.static_range(STEPS):
                tile = tiles[row * STEPS + step]
                sum = masked_dp4a(tile, words[FIRST + step], sum, i, INTERPRETED)
            sums = sums + (tl.sum(sum, 1)[:, None],)
    out = tl.arange(0, _OUTS)[None, :]
    for level in tl.static_range(_LEVELS):
        chosen = ()
        for i in tl.static_range(_OUTS >> (level + 1)):
            odd = (out >> level & 1) != 0
            chosen = chosen + (tl.where(odd, sums[2 * i + 1], sums[2 * i]),)
        sums = chosen
    return sums[0]


@triton.jit
def ternary_gemv_kernel(
    x_ptr, norm_ptr, words_ptr, scale_ptr, out_ptr, rows, eps,
    IN: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr, THIRD: tl.constexpr,
    LINES: tl.constexpr, STEPS: tl.constexpr, BATCH: tl.constexpr, LEVELS: tl.constexpr,
    NORM: tl.constexpr, EPILOGUE: tl.constexpr, PDL: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """One program: PACKED_ROWS packed rows; with a gate as many more of `up`.

    Behind the wait stands what nothing hides, so the rows of a batch, and all their sums, cross
    the warps together.
    """
    GATED: tl.constexpr = EPILOGUE == _RELU2_GATE
    END: tl.constexpr = FIRST if GATED else FIRST + SECOND + THIRD
    first = tl.program_id(0) * _PACKED_ROWS
    # All that does not depend on the launch before: in flight while the activations are made.
    tiles = load_packed(words_ptr, first, END, IN, LINES, STEPS)
    up_tiles, gains = (), ()
    if GATED:
        up_ptr = words_ptr + FIRST * (IN // _WORD)
        up_tiles = load_packed(up_ptr, first, END, IN, LINES, STEPS)
    if NORM:
        gains = load_row(norm_ptr, IN, LINES, STEPS)
    out = tl.arange(0, _OUTS)
    row, field = first + (out >> 2), out & 3
    part, column, size = part_of(row, FIRST, SECOND, THIRD)
    column += field * size
    if PDL:
        cuda.gdc_launch_dependents()
        cuda.gdc_wait()
    x, olds = (), ()
    for token in tl.static_range(BATCH):
        # A row beyond the batch repeats the last one and is not stored.
        x = x + load_row(x_ptr + min(token, rows - 1) * IN, IN, LINES, STEPS)
        if EPILOGUE == _ADD:
            mask = (row < END) & (token < rows)
            olds = olds + (tl.load(out_ptr + token * (4 * END) + column, mask=mask, other=0.0),)
    # Here no register has to keep them all the way.
    scale = tl.load(scale_ptr + part, mask=row < END, other=0.0)
    up_scale = tl.load(scale_ptr + 1) if GATED else 0.0
    words, factors = int8_rows(x, gains, eps, IN, LINES, STEPS, BATCH, LEVELS, NORM, INTERPRETED)
    sums = ()
    for token in tl.static_range(BATCH):
        sums = sums + (products(tiles, words, token * STEPS, LINES, STEPS, INTERPRETED),)
    if GATED:
        for token in tl.static_range(BATCH):
            up = products(up_tiles, words, token * STEPS, LINES, STEPS, INTERPRETED)
            sums = sums + (up,)
    LEVELS_OF_SUMS: tl.constexpr = LEVELS + 1 if GATED else LEVELS
    sums = over_lines(sums, LINES, LEVELS_OF_SUMS)
    for token in tl.static_range(BATCH):
        total = (sums[token] >> 2 * field).to(tl.float32)
        y = tl.div_rn(total, factors[token]) * scale
        if GATED:
            up = (sums[BATCH + token] >> 2 * field).to(tl.float32)
            up = tl.div_rn(up, factors[token]) * up_scale
            y = tl.where(y < 0.0, 0.0, y)
            y = y * y * up
        if EPILOGUE == _ADD:
            y = olds[token] + y
        mask = (row < END) & (token < rows)
        tl.store(out_ptr + token * (4 * END) + column, y, mask=mask)


@dataclass(frozen=True, slots=True)
class GemvPlan:
    """How a GEMV of one weight is divided, and how many rows it takes at once.

    Its sums are whole numbers, and so are those of the norm: no plan changes a bit.
    """

    lines: int
    """Lines of a row that a step reads, one to a warp."""
    steps: int
    batch: int
    """Rows in registers: 1 or 2."""
    programs: int
    registers: int
    """Of a thread at most; without a gate, so few that all programs are resident at once."""

    @classmethod
    def of(cls, packed_rows: int, in_features: int, rows: int, *, gated: bool) -> GemvPlan:
        """For packed rows of `in` elements, of the gate alone if `up` goes beside it.

        More warps would leave each fewer elements, that is a shorter chain behind the wait, but
        what does not become less by that is done once more in each of them.
        """
        row_lines = triton.cdiv(in_features, WORDS * WORD)
        lines = 1 if row_lines <= 4 else 8 if row_lines <= 28 else 16
        steps = triton.cdiv(row_lines, lines)
        batch = 1 if rows == 1 else GEMV_MAX_ROWS
        small = batch == 1 and not gated and steps <= SMALL_STEPS
        programs = triton.cdiv(packed_rows, PACKED_ROWS)
        return cls(lines, steps, batch, programs, SMALL_REGISTERS if small else 128)

    def constants(self) -> dict[str, Any]:
        """What the kernel is compiled with."""
        return {
            "LINES": self.lines,
            "STEPS": self.steps,
            "BATCH": self.batch,
            "LEVELS": self.batch.bit_length() - 1,
        }


def gemv_rows(shape: DecoderShape) -> int:
    """Up to so many rows of a decoder go through ternary_gemv: none if its own are too long."""
    return GEMV_MAX_ROWS if max(width for _, width in shape.linears.values()) <= GEMV_MAX_IN else 0


def ternary_gemv(
    x: Tensor,
    weights: TernaryWeights,
    out: Tensor,
    *,
    norm: Tensor | None = None,
    eps: float = 1e-5,
    epilogue: Epilogue = Epilogue.STORE,
    dependent: bool = False,
) -> None:
    """`ternary_linear` of rows, with RMSNorm before it and an epilogue after it, in one launch.

    x: fp32 [rows, in], rows up to GEMV_MAX_ROWS, in up to GEMV_MAX_IN. norm: fp32 [in], the
    weight of an RMSNorm (`order_free_rms_norm`) of x. out: fp32 [rows, sum of outs]; with
    RELU2_GATE the weights are two equal parts, gate and up, and out is [rows, out of one]; SWIGLU
    is not offered. x and out must not overlap. A row with NaN or infinite values gives NaN.
    dependent: programmatic dependent launch; the weights are read while the launch before it
    still runs, all else after it has ended.

    Moves in * sum of outs / 4 bytes of weights once, whatever the rows. Raises TypeError or
    ValueError naming the argument.
    """
    rows = check_linear("x", x, torch.float32, weights, out, epilogue)
    if rows > GEMV_MAX_ROWS:
        raise ValueError(f"x: {rows} rows, expected at most {GEMV_MAX_ROWS}")
    if weights.in_features > GEMV_MAX_IN:
        raise ValueError(f"x: in = {weights.in_features}, expected at most {GEMV_MAX_IN}")
    if norm is not None:
        check_tensor("norm", norm, torch.float32, weights.in_features)
    if not eps > 0:
        raise ValueError(f"eps: {eps}, expected a number above 0")
    check_same_device(x=x, packed=weights.packed, norm=norm, out=out)
    if rows == 0:
        return
    first, second, third = weights.part_rows()
    owned = first if epilogue.gated else weights.packed_rows
    plan = GemvPlan.of(owned, weights.in_features, rows, gated=epilogue.gated)
    dependent, options = dependent_launch(dependent)
    ternary_gemv_kernel[(plan.programs,)](
        x,
        x if norm is None else norm,
        weights.words,
        weights.scale,
        out,
        rows,
        eps,
        IN=weights.in_features,
        FIRST=first,
        SECOND=second,
        THIRD=third,
        **plan.constants(),
        NORM=norm is not None,
        EPILOGUE=int(epilogue),
        PDL=dependent,
        INTERPRETED=INTERPRETED,
        num_warps=plan.lines,
        maxnreg=plan.registers,
        **options,
    )


_TYPES = {
    "x_ptr": "*fp32",
    "norm_ptr": "*fp32",
    "words_ptr": "*i32",
    "scale_ptr": "*fp32",
    "out_ptr": "*fp32",
    "rows": "i32",
    "eps": "fp32",
}


def variants(shape: DecoderShape) -> Iterator[Variant]:
    """All compilations that serving `shape` launches: none unless its linears are ternary."""
    for step, (outs, width, epilogue) in bitnet_linears(shape).items():
        for rows, dependent in ((1, False), (1, True)):
            owned = sum(outs) // 4 // (2 if epilogue.gated else 1)
            plan = GemvPlan.of(owned, width, rows, gated=epilogue.gated)
            # Triton compiles an argument of 1 in.
            compiled_in = {"rows": 1} if rows == 1 else {}
            yield Variant(
                name=f"{shape.name}.{step} ternary gemv rows={rows}" + " dependent" * dependent,
                kernel=ternary_gemv_kernel,
                signature={
                    name: type_ for name, type_ in _TYPES.items() if name not in compiled_in
                },
                constants=part_constants(outs, width, epilogue)
                | plan.constants()
                | {"NORM": True, "PDL": dependent}
                | compiled_in,
                divisible=frozenset(_TYPES) - {"rows", "eps"},
                num_warps=plan.lines,
                launch_pdl=dependent,
                options={"maxnreg": plan.registers},
                expects=("IDP.4A", "REDUX", "LDG.E.EF"),
                bytes_moved=bytes_moved(outs, width, epilogue, rows, 4) + 4 * width,
                step=step if rows == 1 and not dependent else None,
            )
