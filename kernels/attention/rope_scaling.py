"""Scalings of rotary embeddings for contexts longer than in training. This file needs no torch.

`rope.rope_table` applies them. Every constructor raises a ValueError that names the wrong argument.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """Linear scaling: divides every position by `factor`.

    Source: Chen et al., Extending Context Window of Large Language Models via Positional
    Interpolation, 2023.
    """

    factor: float

    def __post_init__(self) -> None:
        _check_above("factor", self.factor, 0)


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Llama 3's scaling: divides slow frequencies by `factor`, keeps fast ones, blends the others.

    A frequency is slow if it makes fewer than `low_turns` turns in `original_context` tokens, and
    fast if it makes more than `high_turns`.

    Source: the `llama3` scaling of Llama 3.1 (Grattafiori et al., The Llama 3 Herd of Models, 2024;
    `apply_scaling` of its reference code).
    """

    factor: float
    low_turns: float
    high_turns: float
    original_context: int

    def __post_init__(self) -> None:
        _check_above("factor", self.factor, 0)
        _check_above("low_turns", self.low_turns, 0)
        _check_above("high_turns", self.high_turns, self.low_turns)
        _check_above("original_context", self.original_context, 0)


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """YaRN: keeps fast frequencies, divides slow ones by `factor`, with a ramp between the two.

    A frequency is fast if it makes more than `fast_turns` turns in `original_context` tokens, and
    slow if it makes fewer than `slow_turns`. `truncate` rounds the ends of the ramp to whole
    dimensions. cos and sin are multiplied by `attention_factor`.

    Source: Peng et al., YaRN: Efficient Context Window Extension of Large Language Models, 2023.
    """

    factor: float
    original_context: int
    attention_factor: float
    fast_turns: float = 32.0
    slow_turns: float = 1.0
    truncate: bool = True

    def __post_init__(self) -> None:
        _check_above("factor", self.factor, 0)
        _check_above("original_context", self.original_context, 0)
        _check_above("attention_factor", self.attention_factor, 0)
        _check_above("slow_turns", self.slow_turns, 0)
        _check_above("fast_turns", self.fast_turns, self.slow_turns)

    def ramp(self, head_dim: int, theta: float) -> tuple[float, float]:
        """Return the indices of the dimension pairs where the ramp begins and ends."""
        first, last = (
            head_dim
            * math.log(self.original_context / (turns * 2 * math.pi))
            / (2 * math.log(theta))
            for turns in (self.fast_turns, self.slow_turns)
        )
        if self.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, head_dim - 1)
        # The ends must differ, since `rope_frequencies` divides by their distance.
        return first, last + 0.001 if first == last else last


RopeScaling = LinearScaling | Llama3Scaling | YarnScaling


def yarn_attention_factor(
    factor: float, mscale: float | None = None, mscale_all_dim: float | None = None
) -> float:
    """Return YaRN's attention factor for a checkpoint that does not state it.

    Without mscale weights it is 0.1 ln(factor) + 1, as in the paper. With both weights it is the
    ratio of 0.1 mscale ln(factor) + 1 to the same with mscale_all_dim, as in DeepSeek's models.
    """

    def magnitude(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if mscale and mscale_all_dim:
        return magnitude(mscale) / magnitude(mscale_all_dim)
    return magnitude(1.0)


def _check_above(name: str, value: float, bound: float) -> None:
    if not (value > bound and math.isfinite(value)):
        raise ValueError(f"{name}: {value}, expected a number above {bound:g}")
