"""The linear parts of a decoder layer in few launches, and the LM head.

A layer is attention between two blocks of linears. The methods of a layer are:

    project_in    norm, then query, key and value of every row
    project_out   the residual stream += output projection, with BitNet's sub-norm before it
    feed_forward  norm, gate and up, activation, down into the residual stream

For few rows the norm is the prologue of the linear that reads it, so that a layer is five launches.
For more rows the norm is a launch of its own, because as a prologue every program of the linear
would repeat it for all rows. Both ways give the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from tailrace.kernels.linear.epilogue import Epilogue
from tailrace.kernels.linear.float_triton import Weight, float_linear
from tailrace.kernels.linear.int8_triton import GEMV_MAX_IN, int8_gemm, int8_gemv
from tailrace.kernels.linear.int8_triton import GEMV_MAX_ROWS as INT8_GEMV_MAX_ROWS
from tailrace.kernels.linear.linear_plan import NORM_MAX_INPUTS, NORM_MAX_ROWS, LinearWorkspace
from tailrace.kernels.linear.ternary_gemm_triton import ternary_gemm
from tailrace.kernels.linear.ternary_triton import GEMV_MAX_ROWS, ternary_gemv
from tailrace.kernels.linear.ternary_weights import TernaryWeights
from tailrace.kernels.rows.norm_triton import rms_norm, rms_norm_int8
from tailrace.kernels.shapes import DecoderShape


class Layer(Protocol):
    """The parts of one decoder layer other than attention.

    x: the residual stream, fp32 [rows, hidden]. dependent: launches for few rows may begin while
    earlier launches still run (`kernels.dependent_triton`).
    """

    def project_in(self, x: Tensor, qkv: Tensor, *, dependent: bool = False) -> None:
        """Compute qkv = W norm(x), fp32 [rows, (heads + 2 kv_heads) D]."""
        ...

    def project_out(self, mixed: Tensor, x: Tensor, *, dependent: bool = False) -> None:
        """Add attention's output to the residual stream: compute x += W mixed.

        W is the output projection. mixed: attention's output, fp32 [rows, heads D].
        """
        ...

    def feed_forward(self, x: Tensor, *, dependent: bool = False) -> None:
        """Compute x += down(activation(gate(norm(x)), up(norm(x))))."""
        ...


class Head(Protocol):
    """The LM head with the norm before it."""

    def __call__(self, x: Tensor, logits: Tensor, *, dependent: bool = False) -> None:
        """Compute logits = W norm(x): fp32 [rows, hidden] -> fp32 [rows, vocab]."""
        ...


class Scratch:
    """Scratch buffers that the layers of a decoder use one after another, for up to `rows` rows."""

    def __init__(self, shape: DecoderShape, rows: int, device: torch.device) -> None:
        widest = max(shape.hidden, shape.ffn, shape.queries)
        self._normed = torch.empty(rows * shape.hidden, device=device)
        self.inner = torch.empty(rows, shape.ffn, device=device)
        self._int8 = torch.empty(rows * widest, dtype=torch.int8, device=device)
        self.factor = torch.empty(rows, device=device)

    def normed(self, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
        """Return a contiguous buffer of fp32, bf16 or fp16 [rows, columns]."""
        return self._normed.view(dtype)[: rows * columns].view(rows, columns)

    def int8(self, rows: int, columns: int) -> Tensor:
        """Return a contiguous buffer of int8 [rows, columns]."""
        return self._int8[: rows * columns].view(rows, columns)


@dataclass(frozen=True, slots=True)
class TernaryLayer:
    """A BitNet layer: ternary weights, int8 activations, and norm weights in fp32."""

    scratch: Scratch
    eps: float
    input_norm: Tensor
    qkv: TernaryWeights
    attention_norm: Tensor
    output: TernaryWeights
    ffn_input_norm: Tensor
    gate_up: TernaryWeights
    ffn_norm: Tensor
    down: TernaryWeights
    gemv_rows: int = GEMV_MAX_ROWS
    """Maximum rows for which the linears compute the norms and run without tensor cores. With more
    rows the norms are launches of their own and the linears use tensor cores."""

    def project_in(self, x: Tensor, qkv: Tensor, *, dependent: bool = False) -> None:
        self._linear(x, self.input_norm, self.qkv, qkv, Epilogue.STORE, dependent)

    def project_out(self, mixed: Tensor, x: Tensor, *, dependent: bool = False) -> None:
        self._linear(mixed, self.attention_norm, self.output, x, Epilogue.ADD, dependent)

    def feed_forward(self, x: Tensor, *, dependent: bool = False) -> None:
        inner, gate = self.scratch.inner[: len(x)], Epilogue.RELU2_GATE
        self._linear(x, self.ffn_input_norm, self.gate_up, inner, gate, dependent)
        self.project_down(inner, x, dependent=dependent)

    def project_down(self, inner: Tensor, x: Tensor, *, dependent: bool = False) -> None:
        """Compute x += down(inner), where inner is the activation's result, fp32 [rows, ffn]."""
        self._linear(inner, self.ffn_norm, self.down, x, Epilogue.ADD, dependent)

    def _linear(
        self,
        x: Tensor,
        norm: Tensor,
        weights: TernaryWeights,
        out: Tensor,
        epilogue: Epilogue,
        dependent: bool,
    ) -> None:
        if len(x) <= self.gemv_rows:
            ternary_gemv(
                x, weights, out, norm=norm, eps=self.eps, epilogue=epilogue, dependent=dependent
            )
            return
        q, factor = self.scratch.int8(*x.shape), self.scratch.factor[: len(x)]
        rms_norm_int8(x, norm, self.eps, q, factor, dependent=dependent)
        ternary_gemm(q, factor, weights, out, epilogue=epilogue, dependent=dependent)


@dataclass(frozen=True, slots=True)
class DenseLayer:
    """A Llama or Qwen3 layer: linears of float or quantised weights [out, in], and SwiGLU."""

    scratch: Scratch
    workspace: LinearWorkspace
    eps: float
    input_norm: Tensor
    qkv: Weight
    output: Weight
    ffn_input_norm: Tensor
    gate_up: Weight
    down: Weight

    def project_in(self, x: Tensor, qkv: Tensor, *, dependent: bool = False) -> None:
        self._normed_linear(x, self.input_norm, self.qkv, qkv, Epilogue.STORE, dependent)

    def project_out(self, mixed: Tensor, x: Tensor, *, dependent: bool = False) -> None:
        self._added_linear(mixed, self.output, x, dependent)

    def feed_forward(self, x: Tensor, *, dependent: bool = False) -> None:
        inner, gate = self.scratch.inner[: len(x)], Epilogue.SWIGLU
        self._normed_linear(x, self.ffn_input_norm, self.gate_up, inner, gate, dependent)
        self._added_linear(inner, self.down, x, dependent)

    def _added_linear(self, x: Tensor, weight: Weight, out: Tensor, dependent: bool) -> None:
        float_linear(
            x, weight, out, workspace=self.workspace, epilogue=Epilogue.ADD, dependent=dependent
        )

    def _normed_linear(
        self,
        x: Tensor,
        norm: Tensor,
        weight: Weight,
        out: Tensor,
        epilogue: Epilogue,
        dependent: bool,
    ) -> None:
        normed_linear(
            x, norm, self.eps, weight, out, self.scratch, self.workspace, epilogue, dependent
        )


@dataclass(frozen=True, slots=True)
class DenseHead:
    """An LM head of bf16, fp16 or fp32 weights [vocab, hidden]."""

    scratch: Scratch
    workspace: LinearWorkspace
    eps: float
    norm: Tensor
    weight: Tensor

    def __call__(self, x: Tensor, logits: Tensor, *, dependent: bool = False) -> None:
        normed_linear(
            x, self.norm, self.eps, self.weight, logits,
            self.scratch, self.workspace, Epilogue.STORE, dependent,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Int8Head:
    """An LM head of int8 weights [vocab, hidden], an fp32 scale per row, and int8 activations."""

    scratch: Scratch
    eps: float
    norm: Tensor
    weight: Tensor
    scale: Tensor

    def __call__(self, x: Tensor, logits: Tensor, *, dependent: bool = False) -> None:
        if len(x) <= INT8_GEMV_MAX_ROWS and x.shape[1] <= GEMV_MAX_IN:
            int8_gemv(
                x, self.weight, self.scale, logits, norm=self.norm, eps=self.eps,
                dependent=dependent,
            )  # fmt: skip
            return
        q, factor = self.scratch.int8(*x.shape), self.scratch.factor[: len(x)]
        rms_norm_int8(x, self.norm, self.eps, q, factor, dependent=dependent)
        int8_gemm(q, factor, self.weight, self.scale, logits, dependent=dependent)


def normed_linear(
    x: Tensor,
    norm: Tensor,
    eps: float,
    weight: Weight,
    out: Tensor,
    scratch: Scratch,
    workspace: LinearWorkspace,
    epilogue: Epilogue,
    dependent: bool,
) -> None:
    """Apply a linear to norm(x); the norm is part of that launch or a launch of its own.

    A separate launch stores the normed values rounded to the weight's type. The fused norm rounds
    the same values in the same way, so that a row gets the same bits either way.
    """
    if len(x) <= NORM_MAX_ROWS and x.shape[1] <= NORM_MAX_INPUTS:
        float_linear(
            x, weight, out, workspace=workspace, norm=norm, eps=eps, epilogue=epilogue,
            dependent=dependent,
        )  # fmt: skip
        return
    dtype = weight.dtype if isinstance(weight, Tensor) else torch.bfloat16
    normed = scratch.normed(len(x), x.shape[1], dtype)
    rms_norm(x, norm, eps, normed, dependent=dependent)
    float_linear(normed, weight, out, workspace=workspace, epilogue=epilogue, dependent=dependent)
