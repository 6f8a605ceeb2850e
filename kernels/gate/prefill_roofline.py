"""Predicted times of prefill on an H200: several hundred rows of one prompt at a time.

A step of decoding is bound by memory. Prefill multiplies each weight by many rows, so here two
other bounds count. One is the tensor cores. The other is the L2 cache, since each group of rows
reads all weights again, and each tile of a weight reads all activations again.
`kernels.gate.roofline` prints the tables.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from tailrace.kernels.gate.operation import PEAKS, Operation
from tailrace.kernels.linear.linear_plan import plan_linear
from tailrace.kernels.linear.ternary_gemm_triton import TILE_PACKED, TILE_ROWS
from tailrace.kernels.linear.ternary_plan import bitnet_linears
from tailrace.kernels.linear.ternary_plan import bytes_moved as ternary_bytes
from tailrace.kernels.shapes import PAGE_TOKENS, DecoderShape, Family

STEP_ROWS = 512
"""Maximum rows of a prompt that one step of prefill computes."""
PROMPTS = (512, 2048)
"""Lengths in tokens of the prompts whose time is predicted."""
SHARED_BYTES_PER_CLOCK = 128
"""Bytes that a multiprocessor reads from shared memory in one clock."""
PRODUCTS_PER_CLOCK = 2048
"""Number of bf16 multiplications that a multiprocessor's tensor cores do in one clock."""
PRODUCT_OUT, PRODUCT_IN = 64, 16
"""Number of weight rows and of inputs in one tensor core product of a warp group."""
ROWS_PER_PROGRAM = 64
"""Rows of activations that one program of a float linear multiplies by its tile of the weight."""
COLUMNS = 16
"""Columns (rows of activations) of one tensor core product, as the kernel has them now."""
WIDER = ((64, 64), (128, 128), (256, 256))
"""Other pairs of COLUMNS and ROWS_PER_PROGRAM for which times are predicted, too."""
ONES_SHARE = 5 / 4
"""Number of products of a ternary linear for each product with weights: besides the four fields of
a packed byte, a fifth product with ones sums the activations."""


def tensor_share(columns: int) -> float:
    """Return the share of the tensor cores' peak that products of this many columns can reach.

    Both bf16 operands are read from shared memory. The weight's operand is read again for every
    product, so narrow products spend most of their time on reading it.
    """
    clocks = PRODUCT_OUT * columns * PRODUCT_IN / PRODUCTS_PER_CLOCK
    read = 2 * PRODUCT_IN * (PRODUCT_OUT + columns) / SHARED_BYTES_PER_CLOCK
    return clocks / max(clocks, read)


def float_linear(
    shape: DecoderShape, step: str, rows: int, columns: int, per_program: int
) -> Operation:
    """Return a layer's bf16 linear as an operation.

    Its input is bf16 if a norm comes before the linear, else fp32.
    """
    out, inputs = shape.linears[step]
    plan = plan_linear(out, inputs, 2, gated=step == "gate_up")
    x_bytes = 2 if step in ("qkv", "gate_up") else 4
    blocks = math.ceil(rows / per_program)
    return Operation(
        f"{shape.name}.{step} bf16 rows={rows}",
        plan.bytes_moved(rows, x_bytes),
        arithmetic=2 * rows * out * inputs,
        peak=PEAKS["bf16 tensor cores"] * tensor_share(columns),
        cached=blocks * 2 * out * inputs + plan.tiles * rows * inputs * x_bytes,
    )


def ternary_linear(shape: DecoderShape, step: str, rows: int) -> Operation:
    """Return a ternary linear, whose input rows are int8 already, as an operation."""
    outs, inputs, epilogue = bitnet_linears(shape)[step]
    packed_rows = sum(outs) // 4
    tiles = math.ceil(packed_rows / TILE_PACKED)
    blocks = math.ceil(rows / TILE_ROWS)
    return Operation(
        f"{shape.name}.{step} ternary rows={rows}",
        ternary_bytes(outs, inputs, epilogue, rows, 1),
        arithmetic=int(ONES_SHARE * 2 * rows * sum(outs) * inputs),
        peak=PEAKS["int8 tensor cores"],
        cached=blocks * packed_rows * inputs + tiles * rows * inputs,
    )


def norm(shape: DecoderShape, width: int, rows: int) -> Operation:
    """Return a norm as an operation.

    It reads fp32, and stores bf16, or int8 and a factor per row.
    """
    element = 1 if shape.family is Family.BITNET else 2
    moved = rows * width * (4 + element) + 4 * width
    return Operation(f"{shape.name}.norm of {width} rows={rows}", moved)


def rope_write(shape: DecoderShape, rows: int) -> Operation:
    """Return the launch of the same name in `rope_triton` as an operation.

    It rotates queries and keys, and stores keys and values in bf16.
    """
    moved = rows * (4 * (2 * shape.queries + 2 * shape.keys) + 2 * 2 * shape.keys)
    return Operation(f"{shape.name}.rope_write rows={rows}", moved)


def attention(shape: DecoderShape, start: int, rows: int) -> Operation:
    """Return prefill attention as an operation, for `rows` rows of one sequence from `start` on.

    A program computes one query head for the rows of one page, and reads all pages up to that one.
    """
    pages = range(start // PAGE_TOKENS, math.ceil((start + rows) / PAGE_TOKENS))
    positions = sum(page + 1 for page in pages) * PAGE_TOKENS
    return Operation(
        f"{shape.name}.prefill attention rows={rows} from {start}",
        (start + rows) * 2 * 2 * shape.keys + rows * 2 * 4 * shape.queries,
        arithmetic=4 * PAGE_TOKENS * positions * shape.queries,
        cached=positions * 2 * 2 * shape.queries,
        ordinary=1,
    )


def layer(
    shape: DecoderShape,
    start: int,
    rows: int,
    columns: int = COLUMNS,
    per_program: int = ROWS_PER_PROGRAM,
) -> Iterator[Operation]:
    """Yield the launches of a layer, in order."""
    ternary = shape.family is Family.BITNET
    widths = {"qkv": shape.hidden, "gate_up": shape.hidden}
    if ternary:
        widths |= {"o": shape.queries, "down": shape.ffn}
    for step in ("qkv", "o", "gate_up", "down"):
        if step in widths:
            yield norm(shape, widths[step], rows)
        if ternary:
            yield ternary_linear(shape, step, rows)
        else:
            yield float_linear(shape, step, rows, columns, per_program)
        if step == "qkv":
            yield rope_write(shape, rows)
            yield attention(shape, start, rows)


def prompt_us(
    shape: DecoderShape, tokens: int, columns: int = COLUMNS, per_program: int = ROWS_PER_PROGRAM
) -> float:
    """Return a prompt's time in us, all launches in CUDA graphs, without LM head and sampler."""
    steps = range(0, tokens, STEP_ROWS)
    parts = (
        part.expected_us()
        for start in steps
        for part in layer(shape, start, min(STEP_ROWS, tokens - start), columns, per_program)
    )
    return shape.layers * sum(parts)


def section(shape: DecoderShape) -> tuple[str, list[Operation]]:
    """Return the table for the first step of a prompt: its title and the launches of all layers."""
    parts = [part.repeated(shape.layers) for part in layer(shape, 0, STEP_ROWS)]
    return f"{shape.name}: prefill of {STEP_ROWS} tokens", parts


def totals(shape: DecoderShape) -> Iterator[str]:
    """Yield lines with the times of whole prompts; for float weights also with WIDER products."""
    kinds = [(COLUMNS, ROWS_PER_PROGRAM)]
    if shape.family is not Family.BITNET:
        kinds += WIDER
    for tokens in PROMPTS:
        for columns, per_program in kinds:
            us = prompt_us(shape, tokens, columns, per_program)
            kind = f"{columns} columns, {per_program} rows per program"
            if shape.family is Family.BITNET:
                kind = "int8 tensor cores"
            rate = tokens / us * 1e3
            yield f"{shape.name}, {tokens} tokens, {kind}: {us / 1e3:.1f} ms, {rate:.1f} k tokens/s"
