"""How a model's rotary embedding is stretched beyond the context it was trained on; no torch.

`rope_table` beside this computes with these. Every constructor raises ValueError that names the
argument.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """Every position divided by `factor`.

    Source: Chen et al., Extending Context Window of Large Language Models via Positional
    Interpolation, 2023.
    """

    factor: float

    def __post_init__(self) -> None:
        _check_above("factor", self.factor, 0)


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Slow frequencies divided by `factor`, fast ones left, those between blended.

    A frequency is slow that turns fewer than `low_turns` times in `original_context` tokens,
    and fast that turns more than `high_turns` times.

    Source: the `llama3` scaling of Llama 3.1 (Grattafiori et al., The Llama 3 Herd of Models,
    2024; `apply_scaling` of its reference code).
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
    """Fast frequencies left, slow ones divided by `factor`, a ramp between the two.

    Fast is one that turns more than `fast_turns` times in `original_context` tokens, slow one
    that turns fewer than `slow_turns` times. `truncate` rounds the ends of the ramp to whole
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
        """Between which pairs of dimensions the frequencies go over: (first, last)."""
        first, last = (
            head_dim
            * math.log(self.original_context / (turns * 2 * math.pi))
            / (2 * math.log(theta))
            for turns in (self.fast_turns, self.slow_turns)
        )
        if self.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, head_dim - 1)
        return first, last + 0.001 if first == last else last  # a ramp has a length


RopeScaling = LinearScaling | Llama3Scaling | YarnScaling


def yarn_attention_factor(
    factor: float, mscale: float | None = None, mscale_all_dim: float | None = None
) -> float:
    """What YaRN multiplies cos and sin by where a checkpoint does not say it.

    0.1 ln(factor) + 1, as in the paper; with both weights, the ratio of the two as DeepSeek has it.
    """

    def magnitude(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if mscale and mscale_all_dim:
        return magnitude(mscale) / magnitude(mscale_all_dim)
    return magnitude(1.0)


def _check_above(name: str, value: float, bound: float) -> None:
    if not (value > bound and math.isfinite(value)):
        raise ValueError(f"{name}: {value}, expected a number above {bound:g}")
