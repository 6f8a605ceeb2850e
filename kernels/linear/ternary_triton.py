"""Ternary linears (W2A8) on the GPU, on weights packed as in a BitNet checkpoint.

A byte of a packed row holds four 2-bit fields. Field i of packed row r is weight + 1 for output row
i * R + r, where R is the number of packed rows of its part. So a 32-bit word holds 16 weights: 4
inputs of 4 output rows. dp4a multiplies the word's bytes by 4 activations without shifting any
weight: only the bits above field i are masked off, so that a byte is the sum of 4**j * (weight + 1)
over fields j = 0 .. i. The difference of the sums for i and i - 1 is the sum for field i. It is
divided by 4**i, which is exact, and the sum of the activations is subtracted, to replace weight + 1
by weight. All sums are integers, so no tile, split or batch changes a bit of the result of
`kernels.linear.ternary.ternary_linear`.

    ternary_gemv   one row: norm and quantisation in the prologue, dp4a
    ternary_gemm   any number of rows that are int8 already, tensor cores
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
from tailrace.kernels.launch import INTERPRETED, dependent_launch
from tailrace.kernels.linear.epilogue import Epilogue
from tailrace.kernels.linear.int8_words_triton import (
    WORD,
    WORDS,
    dp4a,
    int8_row,
    joined,
    load_row,
    parted,
)
from tailrace.kernels.linear.ternary_gemm_triton import ternary_gemm
from tailrace.kernels.linear.ternary_plan import (
    bitnet_linears,
    bytes_moved,
    check_linear,
    part_constants,
)
from tailrace.kernels.linear.ternary_rows_triton import gated, part_of
from tailrace.kernels.linear.ternary_weights import TernaryWeights
from tailrace.kernels.shapes import DecoderShape
from tailrace.kernels.variant import Variant

__all__ = [
    "GEMV_MAX_IN",
    "GEMV_MAX_ROWS",
    "TernaryWeights",
    "gemv_rows",
    "ternary_gemm",
    "ternary_gemv",
]

GEMV_MAX_ROWS = 1
"""Maximum rows of ternary_gemv. Every program repeats the norms of all rows; for two rows that
would take longer than a separate launch for the norms."""
GEMV_MAX_IN = 14_336
"""Maximum inputs of ternary_gemv: the registers of 16 warps cannot hold a longer row."""
CHUNK = 64
"""Words of a packed row that a warp reads at once: two per lane."""
SHORT_LINES = 28
"""Maximum lines (128 inputs each) of a row for which a program has 8 packed rows, which are 32 rows
of the weight. For longer rows it has 4 packed rows."""
SMALL_STEPS, SMALL_REGISTERS = 4, 64
"""If a row takes at most SMALL_STEPS steps, a thread gets at most SMALL_REGISTERS registers. Then
two programs of 16 warps fit on a multiprocessor, so that all programs of a launch run at once."""

_CHUNK = tl.constexpr(CHUNK)
_WORDS = tl.constexpr(WORDS)
_WORD = tl.constexpr(WORD)
_ADD = tl.constexpr(int(Epilogue.ADD))
_RELU2_GATE = tl.constexpr(int(Epilogue.RELU2_GATE))


@triton.constexpr_function
def masked_dp4a_asm(i):
    """Return the instructions of a dp4a of fields 0 to i of a word.

    The mask is part of them. If it were an operation of its own, the compiler would keep the masked
    words in registers from row to row, which takes four times as many registers as the words.
    """
    if i == 3:
        return "dp4a.u32.s32 $0, $1, $2, $3;"
    mask = 0x01010101 * ((4 << 2 * i) - 1)
    return f"{{.reg .b32 f; and.b32 f, $1, {mask}; dp4a.u32.s32 $0, f, $2, $3;}}"


@triton.jit
def masked_dp4a(words, activations, total, i: tl.constexpr, INTERPRETED: tl.constexpr):
    """Return total + activations * fields 0 to i of each word; field j is 4**j * (weight + 1)."""
    if INTERPRETED:
        for byte in tl.static_range(4):
            fields = (words >> (8 * byte)) & ((4 << 2 * i) - 1)
            total += fields * ((activations << (24 - 8 * byte)) >> 24)
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
    words_ptr, first, END: tl.constexpr, IN: tl.constexpr, OWN: tl.constexpr, ROWS: tl.constexpr,
    PARTS: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """Load a program's packed rows as a tuple of CHUNKS tiles, int32 [ROWS, PARTS, 64].

    Each part of a row belongs to one warp. Rows from END on are 0. Of a program's rows, those from
    OWN on are rows of `up`, which are stored END rows after those of the gate. Each word is read
    only once, so the loads tell the caches not to keep it.
    """
    own = tl.arange(0, ROWS)[:, None, None]
    row = first + own % OWN
    words_ptr += (row + own // OWN * END) * (IN // _WORD)
    part = tl.arange(0, PARTS)[None, :, None] * _CHUNK + tl.arange(0, _CHUNK)[None, None, :]
    tiles = ()
    for chunk in tl.static_range(CHUNKS):
        word = chunk * (PARTS * _CHUNK) + part
        mask = row < END
        if (chunk + 1) * PARTS * _CHUNK > IN // _WORD:
            mask = mask & (word < IN // _WORD)
        tile = tl.load(words_ptr + word, mask=mask, other=0, eviction_policy="evict_first")
        tiles = tiles + (tile,)
    return tiles


@triton.jit
def less_words(words, COUNT: tl.constexpr, INTERPRETED: tl.constexpr):
    """Return minus the sum of the signed bytes of COUNT words, element-wise."""
    total = tl.zeros_like(words[0])
    for i in tl.static_range(COUNT):
        total = dp4a(tl.full(total.shape, -1, tl.int32), words[i], total, INTERPRETED)
    return total


@triton.jit
def for_all_warps(
    words, STEPS: tl.constexpr, LEVELS: tl.constexpr, LINES: tl.constexpr, PARTS: tl.constexpr,
    CHUNKS: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Give every warp the words that it needs, as CHUNKS tiles int32 [1, PARTS, 64].

    words: STEPS tiles [LINES, 32], a row of activations that is divided among the warps. The words
    are exchanged through shared memory all at once, with two barriers. The exchange needs
    2**LEVELS tiles. Another tile is returned at the end, whose numbers sum up to minus the sum of
    the row's activations. If STEPS < 2**LEVELS, lanes sum their own words before the exchange, and
    send the result in an unused tile.
    """
    crossing = words
    if STEPS < 1 << LEVELS:
        minus = less_words(words, STEPS, INTERPRETED)
        for _ in tl.static_range((1 << LEVELS) - STEPS):
            crossing = crossing + (minus,)
    # Splitting by halves of the warps first makes the compiler do the whole exchange at this place.
    SIDES: tl.constexpr = LINES * _WORDS // (PARTS * _CHUNK)
    SIZE: tl.constexpr = PARTS * _CHUNK
    DEEPER: tl.constexpr = 2 if SIDES == 8 else 1 if SIDES == 4 else 0
    every = tl.reshape(joined(crossing, LEVELS), (2, SIDES // 2, SIZE, 1 << LEVELS))
    low, high = tl.split(tl.trans(every, 2, 1, 3, 0))
    low = parted(low, SIZE, LEVELS + DEEPER)
    high = parted(high, SIZE, LEVELS + DEEPER)
    sides = low + high
    tiles = ()
    for step in tl.static_range(STEPS):
        for side in tl.static_range(SIDES):
            if step * SIDES + side < CHUNKS:
                tile = sides[(side << LEVELS) + step]
                tiles = tiles + (tl.reshape(tile, (1, PARTS, _CHUNK)),)
    if STEPS < 1 << LEVELS:
        minus = sides[STEPS]
        for side in tl.static_range(1, SIDES):
            minus += sides[(side << LEVELS) + STEPS]
        return tiles + (tl.reshape(minus, (1, PARTS, _CHUNK)),)
    else:
        return tiles + (less_words(tiles, CHUNKS, INTERPRETED),)


@triton.jit
def products(
    tiles, chunks, ROWS: tl.constexpr, PARTS: tl.constexpr, CHUNKS: tl.constexpr,
    INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Return 4**i times the sum of weight * x, per part of a packed row: [ROWS, PARTS] for each i.

    chunks: the result of `for_all_warps`. For each field i, the products with fields 0 .. i are
    summed. A field holds weight + 1, so (1 + 4 + .. + 4**i) times the sum of activations is
    subtracted. The sum of field i alone is then the difference of two such sums.
    """
    SHAPE: tl.constexpr = (ROWS, PARTS, _CHUNK)
    sums, below = (), 0
    for i in tl.static_range(4):
        sum = tl.broadcast_to(chunks[CHUNKS] * ((4 << 2 * i) // 3), SHAPE)
        for chunk in tl.static_range(CHUNKS):
            x = tl.broadcast_to(chunks[chunk], SHAPE)
            sum = masked_dp4a(tiles[chunk], x, sum, i, INTERPRETED)
        sum = tl.sum(sum, 2)
        sums = sums + (sum - below,)
        below = sum
    return sums


@triton.jit
def of_rows(sums, OWN: tl.constexpr, ROWS: tl.constexpr, PARTS: tl.constexpr):
    """Sum `products` over all parts of a row; output 4 * r + i belongs to packed row r and field i.

    The result is int32 [LINES * 32], so that every warp has all outputs; with 4 packed rows it has
    each of them twice. Returns a tuple of one such tensor; with a gate a second one has the sums of
    `up`.
    """
    LINES: tl.constexpr = ROWS * PARTS
    GATES: tl.constexpr = ROWS // OWN
    OUTS: tl.constexpr = 4 * OWN
    found = ()
    if GATES * PARTS == 1:
        # Lane l of every warp reads field l % 4 of the row of warp l // 4.
        lane = tl.broadcast_to(tl.arange(0, _WORDS)[None, :], (LINES, _WORDS))
        own = tl.broadcast_to(sums[0], (LINES, _WORDS))
        for i in tl.static_range(1, 4):
            own = tl.where(lane % 4 == i, sums[i], own)
        place = tl.reshape(lane // 4 * _WORDS + lane, (LINES * _WORDS,))
        found = (tl.gather(tl.reshape(own, (LINES * _WORDS,)), place, 0),)
    else:
        fields = tl.reshape(joined(sums, 2), (GATES, OWN, PARTS, 4))
        fields = tl.reshape(tl.trans(fields, 1, 3, 0, 2), (1, 1, OUTS, GATES * PARTS))
        fields = tl.broadcast_to(fields, (LINES, _WORDS // OUTS, OUTS, GATES * PARTS))
        parts = parted(fields, LINES * _WORDS, GATES * PARTS // 2)
        for gate in tl.static_range(GATES):
            sum = parts[gate * PARTS]
            for part in tl.static_range(1, PARTS):
                sum += parts[gate * PARTS + part]
            found = found + (sum,)
    return found


@triton.jit
def outputs_of(
    program, FIRST: tl.constexpr, SECOND: tl.constexpr, THIRD: tl.constexpr, END: tl.constexpr,
    OWN: tl.constexpr, LINES: tl.constexpr,
):  # fmt: skip
    """Return each thread's field, output column and part, and True if the thread stores its output.

    Every warp has all outputs of the program; only the first warp stores them.
    """
    thread = tl.arange(0, LINES * _WORDS)
    out = thread % _WORDS
    row, field = program * OWN + out // 4 % OWN, out % 4
    part, column, size = part_of(row, FIRST, SECOND, THIRD)
    return field, column + field * size, part, (row < END) & (thread < 4 * OWN)


@triton.jit
def outputs(
    words, factor, tiles, field, scale, up_scale, OWN: tl.constexpr, ROWS: tl.constexpr,
    LINES: tl.constexpr, STEPS: tl.constexpr, LEVELS: tl.constexpr, CHUNKS: tl.constexpr,
    GATED: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Multiply quantised activations by packed rows, and return the output of each thread, fp32."""
    PARTS: tl.constexpr = LINES // ROWS
    chunks = for_all_warps(words, STEPS, LEVELS, LINES, PARTS, CHUNKS, INTERPRETED)
    sums = products(tiles, chunks, ROWS, PARTS, CHUNKS, INTERPRETED)
    sums = of_rows(sums, OWN, ROWS, PARTS)
    factor = tl.reshape(tl.broadcast_to(factor[:, None], (LINES, _WORDS)), (LINES * _WORDS,))
    y = tl.div_rn((sums[0] >> 2 * field).to(tl.float32), factor) * scale
    if GATED:
        up = tl.div_rn((sums[1] >> 2 * field).to(tl.float32), factor) * up_scale
        y = gated(y, up)
    return y


@triton.jit
def ternary_gemv_kernel(
    x_ptr, norm_ptr, words_ptr, scale_ptr, out_ptr, eps,
    IN: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr, THIRD: tl.constexpr,
    OWN: tl.constexpr, LINES: tl.constexpr, STEPS: tl.constexpr, LEVELS: tl.constexpr,
    NORM: tl.constexpr, EPILOGUE: tl.constexpr, PDL: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Compute a linear of one row; a program has OWN packed rows, with a gate OWN more of `up`.

    The work after the wait for earlier launches takes full time, since no other work hides it. To
    exchange few sums between lanes and warps, warps first share the quantisation of the
    activations, each for a part of the row, and then share the packed rows.
    """
    GATED: tl.constexpr = EPILOGUE == _RELU2_GATE
    END: tl.constexpr = FIRST if GATED else FIRST + SECOND + THIRD
    ROWS: tl.constexpr = 2 * OWN if GATED else OWN
    PARTS: tl.constexpr = LINES // ROWS
    CHUNKS: tl.constexpr = (IN // _WORD + PARTS * _CHUNK - 1) // (PARTS * _CHUNK)
    program = tl.program_id(0)
    # Weights and the norm do not depend on earlier launches, so they are loaded while those
    # launches still compute the activations.
    tiles = load_packed(words_ptr, program * OWN, END, IN, OWN, ROWS, PARTS, CHUNKS)
    gains = ()
    if NORM:
        gains = load_row(norm_ptr, IN, LINES, STEPS)
    field, column, part, own = outputs_of(program, FIRST, SECOND, THIRD, END, OWN, LINES)
    if PDL:
        cuda.gdc_launch_dependents()
        cuda.gdc_wait()
    x = load_row(x_ptr, IN, LINES, STEPS)
    old = tl.load(out_ptr + column, mask=own, other=0.0) if EPILOGUE == _ADD else 0.0
    # The scales are loaded only now, so that they occupy no registers during the wait.
    scale = tl.load(scale_ptr + part, mask=own, other=0.0)
    up_scale = tl.load(scale_ptr + 1) if GATED else 0.0
    words, factor = int8_row(x, gains, eps, IN, LINES, STEPS, NORM, INTERPRETED)
    y = outputs(
        words, factor, tiles, field, scale, up_scale,
        OWN, ROWS, LINES, STEPS, LEVELS, CHUNKS, GATED, INTERPRETED,
    )  # fmt: skip
    if EPILOGUE == _ADD:
        y = old + y
    tl.store(out_ptr + column, y, mask=own)


@dataclass(frozen=True, slots=True)
class GemvPlan:
    """Launch plan of a ternary GEMV.

    Every plan gives the same bits, since all sums are integers.
    """

    own: int
    """Packed rows per program. With a gate, a program has as many rows of `up` in addition."""
    lines: int
    """Lines (128 inputs each) of a row per step, and warps: each warp has one line. There are at
    least as many as packed rows."""
    steps: int
    programs: int
    registers: int
    """Maximum registers per thread."""

    @classmethod
    def of(cls, packed_rows: int, in_features: int, gated: bool) -> GemvPlan:
        """Plan a GEMV; with a gate, `packed_rows` counts those of the gate alone.

        Every program quantises the activations. So fewer programs with more packed rows do less
        work together, but each program takes longer.
        """
        row_lines = triton.cdiv(in_features, WORDS * WORD)
        short = row_lines <= SHORT_LINES
        own, lines = 8 if short else 4, 8 if short and not gated else 16
        steps = triton.cdiv(row_lines, lines)
        programs = triton.cdiv(packed_rows, own)
        small = lines == 16 and steps <= SMALL_STEPS
        return cls(own, lines, steps, programs, SMALL_REGISTERS if small else 128)

    def constants(self) -> dict[str, Any]:
        """Constants that the kernel is compiled with."""
        return {
            "OWN": self.own,
            "LINES": self.lines,
            "STEPS": self.steps,
            "LEVELS": (self.steps - 1).bit_length(),
        }


def gemv_rows(shape: DecoderShape) -> int:
    """Return the maximum number of rows of a step for which a decoder uses `ternary_gemv`.

    It is 0 if the decoder has a linear with too many inputs.
    """
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
    """Compute a norm, `ternary_linear` and an epilogue of one row, in one launch.

    x: fp32 [rows, in], one row or none, with up to GEMV_MAX_IN inputs. norm: fp32 [in], the weight
    of an RMSNorm (`order_free_rms_norm`) of x. out: fp32 [rows, sum of outs]; with RELU2_GATE the
    weights are two equal parts, gate and up, and out is [rows, out of one]; SWIGLU is not
    supported. x and out must not overlap. A row with NaN or infinite values gives NaN. dependent:
    programmatic dependent launch; the weights are read while the preceding launch still runs,
    everything else after its end.

    Moves in * sum of outs / 4 bytes of weights once. Raises TypeError or ValueError that names the
    argument.
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
    plan = GemvPlan.of(owned, weights.in_features, epilogue.gated)
    dependent, options = dependent_launch(dependent)
    ternary_gemv_kernel[(plan.programs,)](
        x,
        x if norm is None else norm,
        weights.words,
        weights.scale,
        out,
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
    "eps": "fp32",
}


def variants(shape: DecoderShape) -> Iterator[Variant]:
    """Yield all variants that are launched to serve `shape`; none if it has no ternary linears."""
    for step, (outs, width, epilogue) in bitnet_linears(shape).items():
        owned = sum(outs) // 4 // (2 if epilogue.gated else 1)
        plan = GemvPlan.of(owned, width, epilogue.gated)
        for dependent in (False, True):
            yield Variant(
                name=f"{shape.name}.{step} ternary gemv rows=1" + " dependent" * dependent,
                kernel=ternary_gemv_kernel,
                signature=_TYPES,
                constants=part_constants(outs, width, epilogue)
                | plan.constants()
                | {"NORM": True, "PDL": dependent},
                divisible=frozenset(_TYPES) - {"eps"},
                num_warps=plan.lines,
                programs=plan.programs,
                launch_pdl=dependent,
                options={"maxnreg": plan.registers},
                expects=("IDP.4A", "REDUX", "LDG.E.EF"),
                bytes_moved=bytes_moved(outs, width, epilogue, 1, 4) + 4 * width,
                step=None if dependent else step,
            )
