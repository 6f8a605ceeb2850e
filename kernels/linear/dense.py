"""A linear layer of float weights in plain torch: the reference for its kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from tailrace.kernels.linear.epilogue import Epilogue
from tailrace.kernels.rows.norm import order_free_rms_norm


def dense_linear(
    x: Tensor,
    weight: Tensor,
    out: Tensor,
    *,
    norm: Tensor | None = None,
    eps: float = 1e-5,
    epilogue: Epilogue = Epilogue.STORE,
) -> None:
    """Compute out = epilogue(W round(norm(x))).

    x: fp32 [rows, in]. weight: bf16, fp16 or fp32 [out, in]; for SWIGLU [2 F, in], gate rows before
    up rows. out: fp32 [rows, out] or [rows, F]. norm: fp32 [in], the weight of an RMSNorm before
    the product. The operands are rounded to the weight's type, half to even; products are exact and
    sums are fp32. Raises ValueError for RELU2_GATE.
    """
    check_epilogue(epilogue)
    normed = x.float() if norm is None else order_free_rms_norm(x, norm, eps)
    rounded = normed.to(weight.dtype).float()
    put(torch.nn.functional.linear(rounded, weight.float()), out, epilogue)


def check_epilogue(epilogue: Epilogue) -> None:
    """Raise ValueError for an epilogue that linears with float activations do not have."""
    if epilogue is Epilogue.RELU2_GATE:
        raise ValueError("epilogue: RELU2_GATE, expected STORE, ADD or SWIGLU")


def put(y: Tensor, out: Tensor, epilogue: Epilogue) -> None:
    """Apply the epilogue to products y, fp32 [rows, weight rows], and store the result in `out`."""
    if epilogue is Epilogue.SWIGLU:
        gate, up = y.chunk(2, dim=-1)
        y = torch.nn.functional.silu(gate) * up
    if epilogue is Epilogue.ADD:
        out += y
    else:
        out.copy_(y)
