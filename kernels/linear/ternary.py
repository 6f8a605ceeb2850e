"""Ternary linear layers (BitNet b1.58): packing, and the reference that every kernel must match.

Packed layout, as in Hugging Face BitNet checkpoints: a weight [out, in] is stored as uint8 [out /
4, in]; with R = out / 4, bits 2i and 2i+1 of byte [r, k] hold `w[i * R + r, k] + 1`. Source: Ma et
al., "The Era of 1-bit LLMs" (2024), and the `bitnet` model of transformers in its offline mode of
`autobitlinear`. In that mode the result is multiplied by the weight scale, not divided.
"""

from __future__ import annotations

import torch

from tailrace.kernels.shapes import WEIGHTS_PER_BYTE

MIN_ABSMAX = 1e-5
INT8_MAX = 127
INT8_MIN = -128


def quantize_absmean(w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise a float weight to ternary values and a scale.

    `w` is a floating tensor of any shape. Returns (int8 of the same shape with values -1, 0, 1,
    fp32 scalar scale = mean |w|), so that `ternary * scale` approximates `w`.
    """
    if not w.is_floating_point():
        raise TypeError(f"w: dtype {w.dtype} is not a floating type")
    real = w.float()
    scale = real.abs().mean().clamp(min=MIN_ABSMAX)
    return (real / scale).round().clamp(-1, 1).to(torch.int8), scale


def pack_ternary(w: torch.Tensor) -> torch.Tensor:
    """Pack int8 [out, in] of -1, 0, 1 into uint8 [out / 4, in]."""
    if w.dtype != torch.int8:
        raise TypeError(f"w: dtype {w.dtype}, expected torch.int8")
    if w.dim() != 2 or w.shape[0] % WEIGHTS_PER_BYTE:
        raise ValueError(f"w: shape {tuple(w.shape)}, expected [out, in] with out % 4 == 0")
    if bool(((w < -1) | (w > 1)).any()):
        raise ValueError("w: values outside -1, 0, 1")
    quarters = (
        (w + 1)
        .to(torch.uint8)
        .reshape(WEIGHTS_PER_BYTE, w.shape[0] // WEIGHTS_PER_BYTE, w.shape[1])
    )
    packed = torch.zeros_like(quarters[0])
    for i in range(WEIGHTS_PER_BYTE):
        packed |= quarters[i] << (2 * i)
    return packed


def unpack_ternary(packed: torch.Tensor) -> torch.Tensor:
    """Unpack uint8 [out / 4, in] into int8 [out, in] of -1, 0, 1.

    Raises ValueError for the code 3.
    """
    if packed.dtype != torch.uint8:
        raise TypeError(f"packed: dtype {packed.dtype}, expected torch.uint8")
    if packed.dim() != 2:
        raise ValueError(f"packed: shape {tuple(packed.shape)}, expected [out / 4, in]")
    codes = torch.cat([(packed >> (2 * i)) & 3 for i in range(WEIGHTS_PER_BYTE)])
    if codes.numel() and int(codes.max()) == 3:
        raise ValueError("packed: holds the code 3, which stands for no ternary value")
    return codes.to(torch.int8) - 1


def quantize_activations(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise `x` [..., in] to int8 with one factor per token.

    Returns (integers in -128 .. 127 held as fp32 [..., in], fp32 factor [..., 1] by which `x` was
    multiplied). Rounding is half to even.
    """
    real = x.float()
    factor = INT8_MAX / real.abs().amax(dim=-1, keepdim=True).clamp(min=MIN_ABSMAX)
    return (real * factor).round().clamp(INT8_MIN, INT8_MAX), factor


def ternary_linear(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Compute a ternary linear of `x` [..., in] in plain torch: [..., out] of x's dtype.

    `weight` is packed (uint8 [out / 4, in]) or unpacked (int8 [out, in]); `scale` has one element.
    The products are summed as integers below 2**24, which fp32 holds exactly, so that no order of
    summation, batch size or split changes the result.
    """
    if not x.is_floating_point():
        raise TypeError(f"x: dtype {x.dtype} is not a floating type")
    if weight.dim() != 2 or weight.dtype not in (torch.uint8, torch.int8):
        raise TypeError(
            f"weight: {weight.dtype} {tuple(weight.shape)}, expected uint8 [out / 4, in] packed "
            "or int8 [out, in]"
        )
    if x.shape[-1] != weight.shape[1]:
        raise ValueError(f"x: last dimension {x.shape[-1]}, but weight has in = {weight.shape[1]}")
    if scale.numel() != 1:
        raise ValueError(f"scale: {scale.numel()} elements, expected one")
    ternary = unpack_ternary(weight) if weight.dtype == torch.uint8 else weight
    quantized, factor = quantize_activations(x)
    summed = torch.nn.functional.linear(quantized, ternary.float())
    return (summed / factor * scale.float()).to(x.dtype)
