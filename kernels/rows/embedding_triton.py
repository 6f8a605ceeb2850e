"""The embedding of tokens, whose result is the beginning of a decoder's residual stream."""

# mypy: disallow-untyped-calls=False, disallow-untyped-decorators=False
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import cuda

from tailrace.kernels.checks import check_same_device, check_tensor
from tailrace.kernels.launch import OPTIONS, dependent_launch
from tailrace.kernels.rows.embedding import FAULT_TOKEN, TABLE_DTYPES
from tailrace.kernels.shapes import DecoderShape
from tailrace.kernels.variant import Variant

_BLOCK = 1024
_FAULT_TOKEN = tl.constexpr(FAULT_TOKEN)


@triton.jit(do_not_specialize=["drawn", "vocab"])
def embed_kernel(
    ids_ptr, before_ptr, table_ptr, out_ptr, faults_ptr, drawn, vocab, SIZE: tl.constexpr,
    BLOCK: tl.constexpr, HEAD: tl.constexpr,
):  # fmt: skip
    """Copy BLOCK columns of a row per program; HEAD lets a dependent launch start early."""
    if HEAD:
        cuda.gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    token = tl.load(ids_ptr + row)
    at = -1 - token
    token = tl.load(before_ptr + at, mask=(at >= 0) & (at < drawn), other=token)
    known = (token >= 0) & (token < vocab)
    place = table_ptr + token.to(tl.int64) * SIZE + column
    x = tl.load(place, mask=(column < SIZE) & known, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * SIZE + column, x, mask=column < SIZE)
    if tl.program_id(1) == 0:
        fault = tl.load(faults_ptr + row) | tl.where(known, 0, _FAULT_TOKEN)
        tl.store(faults_ptr + row, fault)


def embed(
    ids: Tensor,
    table: Tensor,
    out: Tensor,
    faults: Tensor,
    *,
    before: Tensor | None = None,
    chain: bool = False,
) -> None:
    """Write the rows of `table` for `ids` to `out`.

    ids: int32 [rows]. table: bf16, fp16 or fp32 [vocab, H]. out: fp32 [rows, H]. faults: int32
    [rows], cleared by the caller; an id outside the vocabulary sets the bit FAULT_TOKEN, and its
    row is zeros. before: int32 [draws], the tokens of the previous step; an id of -1 - n means the
    n-th of these tokens, if n is below `draws`. chain: True if dependent launches follow. This
    launch itself is always an ordinary one, the head of their chain. Moves one row of the table and
    4 H bytes per row. Raises TypeError or ValueError.
    """
    check_tensor("ids", ids, torch.int32, None)
    check_tensor("table", table, TABLE_DTYPES, None, None)
    rows, (vocab, size) = len(ids), table.shape
    if vocab == 0 or size == 0:
        raise ValueError(f"table: shape {(vocab, size)}, expected sizes above 0")
    check_tensor("out", out, torch.float32, rows, size)
    check_tensor("faults", faults, torch.int32, rows)
    drawn = ids[:0] if before is None else before
    check_tensor("before", drawn, torch.int32, None)
    check_same_device(ids=ids, before=before, table=table, out=out, faults=faults)
    if rows > 0:
        grid = (rows, triton.cdiv(size, _BLOCK))
        head, _ = dependent_launch(chain)
        embed_kernel[grid](
            ids, drawn, table, out, faults, len(drawn), vocab, SIZE=size, BLOCK=_BLOCK, HEAD=head,
            **OPTIONS,
        )  # fmt: skip


def variants(shape: DecoderShape) -> Iterator[Variant]:
    """Yield the embedding at the start of a step, with a bf16 table as in checkpoints."""
    pointers = {
        "ids_ptr": "*i32",
        "before_ptr": "*i32",
        "table_ptr": "*bf16",
        "out_ptr": "*fp32",
        "faults_ptr": "*i32",
    }
    for head in (False, True):
        yield Variant(
            name=f"{shape.name}.embed rows=1" + " head of a chain" * head,
            kernel=embed_kernel,
            signature={**pointers, "drawn": "i32", "vocab": "i32"},
            constants={"SIZE": shape.hidden, "BLOCK": _BLOCK, "HEAD": head},
            divisible=frozenset(pointers),
            expects=("PREEXIT",) if head else (),
            bytes_moved=6 * shape.hidden,
        )
