"""Linear layers of int8 or int4 weights and float activations: formats and reference.

Both formats divide a weight row into groups of GROUP inputs, and a group into 16-bit words. Shifts
and masks turn a tile of words into 16 / bits tiles of elements, without an exchange between
threads:

    words: int16 [in / 128, out, W], W = 128 * bits / 16. Bits `p * bits` and up of word
    [g, o, j] hold the weight of row o and input `g * 128 + p * W + j`.

The words of a group are contiguous for all rows, so that a tile of several rows is contiguous in
memory. int8 is two's complement with one scale per row, as in Dettmers et al., "LLM.int8()" (2022);
int4 is a code 0 .. 15 with a scale and a zero per row and group, as in Frantar et al., "GPTQ"
(2022). A weight is (code - zero) * scale. With a zero, a group can use all 16 codes: for normally
distributed weights the error is 0.100 of their standard deviation, and 0.117 without a zero.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tailrace.kernels.linear.dense import check_epilogue, put
from tailrace.kernels.linear.epilogue import Epilogue
from tailrace.kernels.linear.row_slices import row_slices
from tailrace.kernels.rows.norm import order_free_rms_norm

GROUP = 128
"""Inputs per group. In int4 a row's inputs of a group share a scale; in both formats their words
are contiguous."""
WORD_BITS = 16
MIN_SCALE = 1e-10
"""Minimum scale, used for a row or group of zeros."""


@dataclass(frozen=True, slots=True)
class WeightOnly:
    """A quantised weight [out, in]; `in` is a multiple of GROUP."""

    bits: int
    """Bits per weight: 4 or 8."""
    words: Tensor
    """Packed weights, int16 [in / 128, out, 8 * bits]."""
    scale: Tensor
    """Scales, fp32: [out] for 8 bits, [in / 128, out] for 4 bits."""
    zero: Tensor | None = None
    """Code that stands for 0, uint8 [in / 128, out] of 0 .. 15, for 4 bits; None for 8 bits."""

    @property
    def shape(self) -> tuple[int, int]:
        """Shape (out, in) of the weight."""
        return self.words.shape[1], self.words.shape[0] * GROUP


def pack_words(codes: Tensor, bits: int) -> Tensor:
    """Pack integers [out, in], of which the low `bits` count, into words [in / 128, out, W]."""
    if codes.dim() != 2 or codes.shape[1] % GROUP or codes.numel() == 0:
        raise ValueError(f"codes: shape {tuple(codes.shape)}, expected [out, in], in % 128 == 0")
    parts = WORD_BITS // bits
    fields = codes.to(torch.int32).reshape(len(codes), -1, parts, GROUP // parts)
    shifts = torch.arange(0, WORD_BITS, bits, dtype=torch.int32, device=codes.device)
    words = ((fields & ((1 << bits) - 1)) << shifts[:, None]).sum(2, dtype=torch.int32)
    signed = (words ^ (1 << 15)) - (1 << 15)
    return signed.to(torch.int16).transpose(0, 1).contiguous()


def unpack_words(words: Tensor, bits: int) -> Tensor:
    """Unpack int16 words [in / 128, out, W] into codes: int32 [out, in] of 0 .. 2**bits - 1."""
    shifts = torch.arange(0, WORD_BITS, bits, dtype=torch.int32, device=words.device)
    fields = (words.to(torch.int32)[:, :, None, :] >> shifts[:, None]) & ((1 << bits) - 1)
    return fields.transpose(0, 1).reshape(words.shape[1], -1)


def quantise_int8(w: Tensor) -> WeightOnly:
    """Quantise a float weight [out, in] to 8 bits; a row's largest magnitude becomes 127.

    Only a few rows at a time are converted to fp32, so that little additional memory is needed.
    """
    _check_float(w)
    out, inputs = w.shape
    words = torch.empty(inputs // GROUP, out, 8 * 8, dtype=torch.int16, device=w.device)
    scale = torch.empty(out, device=w.device)
    for rows in row_slices(out, inputs):
        real = w[rows].float()
        scale[rows] = own = (real.abs().amax(1) / 127).clamp(min=MIN_SCALE)
        codes = real.div(own[:, None]).round_().clamp_(-127, 127)
        words[:, rows] = pack_words(codes, 8)
    return WeightOnly(8, words, scale)


def quantise_int4(w: Tensor) -> WeightOnly:
    """Quantise a float weight [out, in] to 4 bits; a group's range is spread over codes 0 to 15.

    Only a few rows at a time are converted to fp32, as in `quantise_int8`.
    """
    _check_float(w)
    out, inputs = w.shape
    groups = inputs // GROUP
    words = torch.empty(groups, out, 8 * 4, dtype=torch.int16, device=w.device)
    scales = torch.empty(groups, out, device=w.device)
    zeros = torch.empty(groups, out, dtype=torch.uint8, device=w.device)
    for rows in row_slices(out, inputs):
        real = w[rows].float().reshape(-1, groups, GROUP)
        low, high = real.amin(2).clamp(max=0), real.amax(2).clamp(min=0)
        scale = ((high - low) / 15).clamp(min=MIN_SCALE)
        zero = (-low / scale).round()
        codes = real.div(scale[:, :, None]).round_().add_(zero[:, :, None]).clamp_(0, 15)
        words[:, rows] = pack_words(codes.reshape(-1, inputs), 4)
        scales[:, rows] = scale.t()
        zeros[:, rows] = zero.to(torch.uint8).t()
    return WeightOnly(4, words, scales, zeros)


def dequantise(weights: WeightOnly) -> Tensor:
    """Return the weights that the codes represent: fp32 [out, in]."""
    codes = unpack_words(weights.words, weights.bits)
    if weights.zero is None:
        return ((codes ^ 0x80) - 0x80).float() * weights.scale[:, None]
    groups = codes.reshape(len(codes), -1, GROUP)
    zero = weights.zero.t()[:, :, None].int()
    return ((groups - zero).float() * weights.scale.t()[:, :, None]).reshape(codes.shape)


def weight_only_linear(
    x: Tensor,
    weights: WeightOnly,
    out: Tensor,
    *,
    norm: Tensor | None = None,
    eps: float = 1e-5,
    epilogue: Epilogue = Epilogue.STORE,
) -> None:
    """Compute epilogue(dequantised W round(norm(x))) like `dense_linear` with bf16 activations.

    x: fp32 [rows, in]. out: fp32 [rows, out], or [rows, out / 2] for SWIGLU, whose weight holds
    gate rows, then up rows. norm: fp32 [in]. Raises ValueError for RELU2_GATE.
    """
    check_epilogue(epilogue)
    normed = x.float() if norm is None else order_free_rms_norm(x, norm, eps)
    rounded = normed.to(torch.bfloat16).float()
    put(torch.nn.functional.linear(rounded, dequantise(weights)), out, epilogue)


def _check_float(w: Tensor) -> None:
    if not w.is_floating_point():
        raise TypeError(f"w: dtype {w.dtype} is not a floating type")
    if w.dim() != 2 or w.shape[1] % GROUP or w.numel() == 0:
        raise ValueError(f"w: shape {tuple(w.shape)}, expected [out, in] with in % {GROUP} == 0")
