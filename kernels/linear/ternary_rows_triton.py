"""Ternary linears (W2A8) of a few rows that are int8 already, on the tensor cores.

`kernels.linear.ternary_triton` explains how a packed byte is read, and why every tile gives the
same bits. The tensor core instruction is m16n8k32. The 16 rows of its left operand are two 2-bit
fields of the bytes of 8 packed rows. The 8 columns of its right operand are 8 rows of activations.
Integer sums do not depend on the order of the inputs, as long as both operands use the same order;
the kernel uses an order in which each lane needs 16 contiguous bytes. So the weights stay packed as
on disk, are loaded from memory straight into registers, and one instruction unpacks four of them.
The compiler chooses the layout of operands. If it chose another one, the kernel would need more
instructions, but give the same numbers.

    eight rows take as many instructions as one
    each warp sums its own part of `in`; after one barrier all parts are added
    most weights are unpacked, in registers, before the preceding launch has ended
"""

# mypy: disallow-untyped-calls=False, disallow-untyped-decorators=False
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disable-error-code="assignment"

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import cuda

from tailrace.kernels.gpu_limits import HOPPER, GpuLimits, limits_of
from tailrace.kernels.launch import INTERPRETED, dependent_launch, next_power_of_2
from tailrace.kernels.linear.epilogue import Epilogue
from tailrace.kernels.linear.int8_words_triton import parted
from tailrace.kernels.linear.ternary_plan import (
    ROWS_TYPES,
    bitnet_linears,
    bytes_moved,
    part_constants,
)
from tailrace.kernels.linear.ternary_weights import TernaryWeights
from tailrace.kernels.shapes import DecoderShape
from tailrace.kernels.variant import Variant

NARROW_ROWS = 256
"""Maximum rows for which this kernel is used. It reads all weights again for each one or two groups
of 8 rows, so for more rows `ternary_gemm_kernel` is faster."""
PACKED_ROWS = 8
"""Packed rows per program; they hold 32 rows of the weight."""
GROUP = 8
"""Rows of activations that one instruction multiplies."""
CHUNK = 64
"""Inputs that a warp multiplies at once: of each of 8 rows, 4 lanes hold 16 bytes each."""
SHORT_CHUNKS = 64
"""Maximum chunks of a row for which a program has 8 warps. For longer rows it has 16."""
MANY_PROGRAMS, MANY_CHUNKS = 2, 40
"""If there are more than MANY_PROGRAMS programs per multiprocessor and a row has at most
MANY_CHUNKS chunks, a program has only 4 warps. Then four programs share a multiprocessor, and the
work besides the products is repeated by half as many warps."""
MAX_STEPS = 10
"""Maximum chunks that a warp holds in registers. A warp with more chunks takes several passes."""
MAX_AHEAD = {1: 5, 2: 3}
"""Maximum chunks that a warp unpacks before the wait for earlier launches, by the number of groups
of rows. A chunk takes 12 registers."""
MANY_STEPS, MANY_STEPS_AHEAD = 7, 4
"""If a warp has more than MANY_STEPS chunks, it unpacks at most MANY_STEPS_AHEAD before the wait,
since a thread of 16 warps has only 128 registers."""

_PACKED_ROWS = tl.constexpr(PACKED_ROWS)
_GROUP = tl.constexpr(GROUP)
_CHUNK = tl.constexpr(CHUNK)
_ADD = tl.constexpr(int(Epilogue.ADD))
_RELU2_GATE = tl.constexpr(int(Epilogue.RELU2_GATE))


@triton.jit
def part_of(row, FIRST: tl.constexpr, SECOND: tl.constexpr, THIRD: tl.constexpr):
    """Return each packed row's part, the output column of its field 0, and the part's row count.

    The output column of field i is that of field 0 plus i times the number of the part's rows.
    """
    after1, after2 = row >= FIRST, row >= FIRST + SECOND
    start = tl.where(after2, FIRST + SECOND, tl.where(after1, FIRST, 0))
    size = tl.where(after2, THIRD, tl.where(after1, SECOND, FIRST))
    return after1.to(tl.int32) + after2.to(tl.int32), 3 * start + row, size


@triton.jit
def gated(gate, up):
    """Return max(gate, 0) ** 2 * up, BitNet's gate. If gate is NaN, the result is NaN.

    Source: So et al., Primer, 2021, for the square; the `bitnet` model of transformers.
    """
    gate = tl.where(gate < 0.0, 0.0, gate)
    return gate * gate * up


@triton.jit
def elements(chunk, SLICES: tl.constexpr):
    """Return the indices of the elements of one chunk per warp: int32 [SLICES, 64]."""
    first = (chunk + tl.arange(0, SLICES)) * _CHUNK
    return first[:, None] + tl.arange(0, _CHUNK)[None, :]


@triton.jit
def load_weights(
    packed_ptr, first, OWN: tl.constexpr, END: tl.constexpr, chunk, IN: tl.constexpr,
    SLICES: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """Load a chunk of packed bytes per warp: uint8 [SLICES, 8, 64].

    Rows from END on and columns from IN on are read as 0.

    Of the 8 rows, those from OWN on are rows of `up`, which are stored END rows after those of the
    gate.
    """
    k = elements(chunk, SLICES)[:, None, :]
    own = tl.arange(0, _PACKED_ROWS)
    row = first + own % OWN
    mask = (row < END)[None, :, None]
    if not FULL:
        mask = mask & (k < IN)
    place = packed_ptr + (row + own // OWN * END)[None, :, None] * IN + k
    return tl.load(place, mask=mask, other=0, eviction_policy="evict_first")


@triton.jit
def load_activations(
    q_ptr, first, rows, chunk, IN: tl.constexpr, SLICES: tl.constexpr, GROUPS: tl.constexpr,
    FULL: tl.constexpr,
):  # fmt: skip
    """Load a chunk per warp of 8 * GROUPS rows of activations, int8 [SLICES, 64, 8 * GROUPS].

    Its elements are reordered for the right operand; from IN on they are 0. Rows beyond the batch
    repeat the last row, since their results are not stored.
    """
    row = first + tl.arange(0, GROUPS)[:, None] * _GROUP + tl.arange(0, _GROUP)[None, :]
    row = tl.minimum(row, rows - 1)
    k = elements(chunk, SLICES)[None, :, None, :]
    place = q_ptr + row.to(tl.int64)[:, None, :, None] * IN + k
    q = tl.load(place) if FULL else tl.load(place, mask=k < IN, other=0)
    q = tl.reshape(q, (GROUPS, SLICES, _GROUP, 4, 2, 2, 4))
    return tl.reshape(tl.permute(q, (1, 5, 3, 4, 6, 0, 2)), (SLICES, _CHUNK, GROUPS * _GROUP))


@triton.constexpr_function
def bits_asm(mask, flip):
    """Return the instruction that masks four bytes with `mask`, and flips the bits in `flip`."""
    if mask == 0:
        return f"mov.b32 $0, {flip * 0x01010101};"
    return f"lop3.b32 $0, $1, {mask * 0x01010101}, {flip * 0x01010101}, 0x6A;"


@triton.jit
def bits(packed, mask: tl.constexpr, flip: tl.constexpr, INTERPRETED: tl.constexpr):
    """Return (packed & mask) ^ flip of packed bytes, as int8."""
    if INTERPRETED:
        return ((packed & mask) ^ flip).to(tl.int8, bitcast=True)
    else:
        return tl.inline_asm_elementwise(
            bits_asm(mask, flip), "=r,r", [packed], dtype=tl.int8, is_pure=True, pack=4
        )


@triton.jit
def stacked(low, high, SLICES: tl.constexpr):
    """Stack two tensors [SLICES, 8, 64] as the rows of a left operand, [SLICES, 16, 64].

    Within a chunk the elements are in the order of `load_activations`. The compiler chooses another
    layout for a joined operand, so all left operands are joined, also that of ones.
    """
    both = tl.reshape(tl.join(low, high), (SLICES, _PACKED_ROWS, 4, 2, 2, 4, 2))
    return tl.reshape(tl.permute(both, (0, 6, 1, 4, 2, 3, 5)), (SLICES, 2 * _PACKED_ROWS, _CHUNK))


@triton.jit
def unpacked(tile, SLICES: tl.constexpr, INTERPRETED: tl.constexpr):
    """Unpack packed bytes into two left operands: of fields 0 and 1, and of fields 2 and 3.

    Field i as a number is (weight + 1) * 4**i. The highest bit of field 3 is the sign bit of an
    int8; it is flipped, so that field 3 is (weight - 1) * 64.
    """
    field0, field1 = bits(tile, 3, 0, INTERPRETED), bits(tile, 12, 0, INTERPRETED)
    field2, field3 = bits(tile, 48, 0, INTERPRETED), bits(tile, 192, 128, INTERPRETED)
    return stacked(field0, field1, SLICES), stacked(field2, field3, SLICES)


@triton.jit
def add_products(
    tiles, ready, columns, sums, STEPS: tl.constexpr, AHEAD: tl.constexpr, SLICES: tl.constexpr,
    INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Add the products of all chunks of a warp to `sums`.

    sums: the sums of activations, the products with fields 0 and 1, and those with fields 2 and 3.
    ready: the first AHEAD tiles, already unpacked.
    """
    total, low, high = sums
    one = bits(tiles[0], 0, 1, INTERPRETED)
    ones = stacked(one, one, SLICES)
    for step in tl.static_range(STEPS):
        q = columns[step]
        operands = ready[step] if step < AHEAD else unpacked(tiles[step], SLICES, INTERPRETED)
        total = tl.dot(ones, q, total, out_dtype=tl.int32)
        low = tl.dot(operands[0], q, low, out_dtype=tl.int32)
        high = tl.dot(operands[1], q, high, out_dtype=tl.int32)
    return total, low, high


@triton.jit
def over_slices(
    low, high, OWN: tl.constexpr, SLICES: tl.constexpr, LEVELS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """Add the sums of all warps; outputs are ordered by activation row, field, packed row: int32.

    Returns a tuple of one tensor [outputs]; with a gate a second one has the sums of `up`.
    """
    OUTPUTS: tl.constexpr = 4 * OWN * COLUMNS
    GATES: tl.constexpr = _PACKED_ROWS.value // OWN
    every = tl.reshape(tl.join(low, high), (SLICES, 2, GATES, OWN, COLUMNS, 2))
    every = tl.reshape(tl.permute(every, (4, 5, 1, 3, 2, 0)), (OUTPUTS, GATES * SLICES))
    # Splitting this dimension makes the compiler bring all slices of an output to one thread, in a
    # single exchange.
    parts = parted(every, OUTPUTS, LEVELS + GATES - 1)
    found = ()
    for gate in tl.static_range(GATES):
        total = parts[gate * SLICES]
        for i in tl.static_range(1, SLICES):
            total += parts[gate * SLICES + i]
        found = found + (total,)
    return found


@triton.jit(do_not_specialize=["rows"])
def ternary_rows_kernel(
    q_ptr, factor_ptr, packed_ptr, scale_ptr, out_ptr, rows,
    IN: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr, THIRD: tl.constexpr,
    SLICES: tl.constexpr, LEVELS: tl.constexpr, STEPS: tl.constexpr, PASSES: tl.constexpr,
    GROUPS: tl.constexpr, AHEAD: tl.constexpr, EPILOGUE: tl.constexpr, PDL: tl.constexpr,
    INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Compute a linear; a program has 8 packed rows and 8 * GROUPS rows of activations.

    The chunks of inputs are distributed over the warps. With a gate, 4 packed rows are gate and 4
    are `up`. rows: at least 1.
    """
    GATED: tl.constexpr = EPILOGUE == _RELU2_GATE
    END: tl.constexpr = FIRST if GATED else FIRST + SECOND + THIRD
    OWN: tl.constexpr = _PACKED_ROWS.value // 2 if GATED else _PACKED_ROWS.value
    COLUMNS: tl.constexpr = GROUPS * _GROUP
    PASS: tl.constexpr = STEPS * SLICES
    # The number of steps that need no mask. With a single pass only the last step can exceed the
    # inputs; with several passes any step can.
    FULL: tl.constexpr = IN // (SLICES * _CHUNK) if PASSES == 1 else 0
    first, first_token = tl.program_id(0) * OWN, tl.program_id(1) * COLUMNS
    tiles = ()
    for step in tl.static_range(STEPS):
        tile = load_weights(packed_ptr, first, OWN, END, step * SLICES, IN, SLICES, step < FULL)
        tiles = tiles + (tile,)
    out = tl.arange(0, 4 * OWN * COLUMNS)
    field, row = (out // OWN) % 4, first + out % OWN
    token = first_token + out // (4 * OWN)
    part, column, size = part_of(row, FIRST, SECOND, THIRD)
    scale = tl.load(scale_ptr + part, mask=row < END, other=0.0)
    up_scale = tl.load(scale_ptr + 1) if GATED else 0.0
    place = out_ptr + token.to(tl.int64) * (4 * END) + column + field * size
    mask = (row < END) & (token < rows)
    if PDL:
        cuda.gdc_launch_dependents()
    ready = ()
    for step in tl.static_range(AHEAD):
        ready = ready + (unpacked(tiles[step], SLICES, INTERPRETED),)
    if PDL:
        # The second `gdc_launch_dependents` has no effect on the GPU, but the compiler moves no
        # code across it. Without it, the compiler would move the unpacking behind the wait, to save
        # registers.
        cuda.gdc_launch_dependents()
        cuda.gdc_wait()
    sums = (tl.zeros((SLICES, 2 * _PACKED_ROWS, COLUMNS), tl.int32),) * 3
    for turn in range(PASSES):
        columns = ()
        for step in tl.static_range(STEPS):
            chunk = turn * PASS + step * SLICES
            q = load_activations(q_ptr, first_token, rows, chunk, IN, SLICES, GROUPS, step < FULL)
            columns = columns + (q,)
        sums = add_products(tiles, ready, columns, sums, STEPS, AHEAD, SLICES, INTERPRETED)
        if PASSES > 1:
            tiles = ()
            for step in tl.static_range(STEPS):
                chunk = (turn + 1) * PASS + step * SLICES
                tile = load_weights(packed_ptr, first, OWN, END, chunk, IN, SLICES, False)
                tiles = tiles + (tile,)
    factor = tl.load(factor_ptr + token, mask=token < rows, other=1.0)
    old = tl.load(place, mask=mask, other=0.0) if EPILOGUE == _ADD else 0.0
    total, low, high = sums
    upper = (tl.arange(0, 2 * _PACKED_ROWS) >= _PACKED_ROWS)[None, :, None]
    low -= tl.where(upper, total << 2, total)
    high -= tl.where(upper, -(total << 6), total << 4)
    sums = over_slices(low, high, OWN, SLICES, LEVELS, COLUMNS)
    y = tl.div_rn((sums[0] >> 2 * field).to(tl.float32), factor) * scale
    if GATED:
        up = tl.div_rn((sums[1] >> 2 * field).to(tl.float32), factor) * up_scale
        y = gated(y, up)
    if EPILOGUE == _ADD:
        y = old + y
    tl.store(place, y, mask=mask)


@dataclass(frozen=True, slots=True)
class RowsPlan:
    """Launch plan of `ternary_rows_kernel`; sums are integers, so every plan gives equal bits."""

    slices: int
    """Number of warps per program."""
    steps: int
    """Number of chunks that a warp multiplies in one pass."""
    passes: int
    groups: int
    """Number of groups of 8 rows by which a program multiplies the weights it loads: 1 or 2."""

    @classmethod
    def of(
        cls, packed_rows: int, in_features: int, rows: int, limits: GpuLimits = HOPPER
    ) -> RowsPlan:
        """Plan a linear for `rows` rows of activations."""
        chunks = triton.cdiv(in_features, CHUNK)
        programs = triton.cdiv(packed_rows, PACKED_ROWS)
        many = programs > MANY_PROGRAMS * limits.multiprocessors and chunks <= MANY_CHUNKS
        most = 4 if many else 8 if chunks <= SHORT_CHUNKS else 16
        slices = min(next_power_of_2(max(chunks, 2)), most)
        steps = triton.cdiv(chunks, slices)
        passes = triton.cdiv(steps, MAX_STEPS)
        return cls(slices, triton.cdiv(steps, passes), passes, 1 if rows <= GROUP else 2)

    @property
    def ahead(self) -> int:
        """Number of chunks that a warp unpacks before the wait for earlier launches."""
        if self.passes > 1:
            return 0
        most = MAX_AHEAD[self.groups]
        return min(self.steps, most if self.steps <= MANY_STEPS else min(most, MANY_STEPS_AHEAD))

    def constants(self) -> dict[str, Any]:
        """Constants that the kernel is compiled with."""
        return {
            "SLICES": self.slices,
            "LEVELS": self.slices.bit_length() - 1,
            "STEPS": self.steps,
            "PASSES": self.passes,
            "GROUPS": self.groups,
            "AHEAD": self.ahead,
        }


def ternary_rows(
    q: Tensor,
    factor: Tensor,
    weights: TernaryWeights,
    out: Tensor,
    epilogue: Epilogue,
    dependent: bool,
) -> None:
    """Launch `ternary_rows_kernel` for up to NARROW_ROWS rows.

    The caller, `ternary_gemm`, has checked the arguments.
    """
    first, second, third = weights.part_rows()
    limits = limits_of(weights.packed.device)
    plan = RowsPlan.of(weights.packed_rows, weights.in_features, len(q), limits)
    grid = (
        triton.cdiv(weights.packed_rows, PACKED_ROWS),
        triton.cdiv(len(q), GROUP * plan.groups),
    )
    dependent, options = dependent_launch(dependent)
    ternary_rows_kernel[grid](
        q,
        factor,
        weights.packed,
        weights.scale,
        out,
        len(q),
        IN=weights.in_features,
        FIRST=first,
        SECOND=second,
        THIRD=third,
        **plan.constants(),
        EPILOGUE=int(epilogue),
        PDL=dependent,
        INTERPRETED=INTERPRETED,
        num_warps=plan.slices,
        **options,
    )


def variants(shape: DecoderShape, limits: GpuLimits = HOPPER) -> Iterator[Variant]:
    """Yield all variants that are launched to serve `shape`; none if it has no ternary linears."""
    for step, (outs, width, epilogue) in bitnet_linears(shape).items():
        for rows, dependent in ((8, False), (8, True), (16, False), (16, True)):
            plan = RowsPlan.of(sum(outs) // 4, width, rows, limits)
            yield Variant(
                name=f"{shape.name}.{step} ternary gemm rows={rows}" + " dependent" * dependent,
                kernel=ternary_rows_kernel,
                signature=ROWS_TYPES,
                constants=part_constants(outs, width, epilogue)
                | plan.constants()
                | {"PDL": dependent},
                divisible=frozenset(ROWS_TYPES) - {"rows"},
                num_warps=plan.slices,
                programs=triton.cdiv(sum(outs) // 4, PACKED_ROWS),
                launch_pdl=dependent,
                expects=("IMMA", "LDG.E.EF.128"),
                bytes_moved=bytes_moved(outs, width, epilogue, rows, 1) + 4 * rows,
            )
