"""Shapes of the decoders that kernels are planned, compiled and measured for."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

PAGE_TOKENS = 64
"""Positions in a page of the KV cache: one tile of attention, 16 KiB of bf16 keys at D = 128."""
HEAD_DIMS = (32, 64, 80, 96, 128, 256)
"""Sizes of a head, in elements, that the kernels are tested with."""
WEIGHTS_PER_BYTE = 4
"""Number of ternary weights packed into a byte."""
FP32_HEAD_BYTES = 64 * 1024 * 1024


def has_fp32_head(vocab: int, hidden: int) -> bool:
    """Return True if a GPU keeps the LM head, the keys and the values as fp32.

    That is so for models whose head takes at most FP32_HEAD_BYTES in fp32: with such a small head,
    the larger type costs no noticeable time.
    """
    return vocab * hidden * 4 <= FP32_HEAD_BYTES


class Family(Enum):
    """Kind of decoder: what its layers compute, apart from their sizes."""

    BITNET = "bitnet"
    """Ternary linears of int8 activations, sub-norms, squared ReLU."""
    LLAMA = "llama"
    """Dense linears, SwiGLU."""
    QWEN3 = "qwen3"
    """Llama with an RMSNorm of every query and key head."""


@dataclass(frozen=True, slots=True)
class DecoderShape:
    """Sizes of a decoder, in elements; `context` is in tokens."""

    name: str
    family: Family
    hidden: int
    ffn: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    context: int
    rope_theta: float = 500_000.0
    norm_eps: float = 1e-5

    @property
    def queries(self) -> int:
        """Elements of all query heads of a token."""
        return self.heads * self.head_dim

    @property
    def keys(self) -> int:
        """Elements of all key heads of a token; its value heads have as many."""
        return self.kv_heads * self.head_dim

    @property
    def linears(self) -> dict[str, tuple[int, int]]:
        """Sizes (out, in) of the four linears of a layer, as they are launched."""
        return {
            "qkv": (self.queries + 2 * self.keys, self.hidden),
            "o": (self.hidden, self.queries),
            "gate_up": (2 * self.ffn, self.hidden),
            "down": (self.hidden, self.ffn),
        }


BITNET_2B4T = DecoderShape("bitnet-2b4t", Family.BITNET, 2560, 6912, 30, 20, 5, 128, 128_256, 4096)
LLAMA_8B = DecoderShape("llama-8b", Family.LLAMA, 4096, 14_336, 32, 32, 8, 128, 128_256, 131_072)
QWEN3_8B = DecoderShape(
    "qwen3-8b", Family.QWEN3, 4096, 12_288, 36, 32, 8, 128, 151_936, 40_960, 1e6, 1e-6
)
REAL_SHAPES = (BITNET_2B4T, LLAMA_8B, QWEN3_8B)
"""Shapes of real models, for which every kernel is planned and compiled."""

DEMO = DecoderShape("demo", Family.BITNET, 192, 512, 6, 6, 3, 32, 1024, 1024)
LLAMA_1B = DecoderShape("llama-1b", Family.LLAMA, 2048, 8192, 16, 32, 8, 64, 128_256, 131_072)
DANUBE_1_8B = DecoderShape(
    "danube-1.8b", Family.LLAMA, 2560, 6912, 24, 32, 8, 80, 32_000, 16_384, 1e4
)
PHI3_MINI = DecoderShape("phi3-mini", Family.LLAMA, 3072, 8192, 32, 32, 32, 96, 32_064, 4096, 1e4)
FALCON3_7B = DecoderShape(
    "falcon3-7b", Family.LLAMA, 3072, 23_040, 28, 12, 4, 256, 131_072, 32_768, 1_000_042.0, 1e-6
)
ATTENTION_SHAPES = (*REAL_SHAPES, DEMO, LLAMA_1B, DANUBE_1_8B, PHI3_MINI, FALCON3_7B)
"""Shapes with every head size, for kernels whose work depends on it: attention, RoPE, cache writes.
"""
