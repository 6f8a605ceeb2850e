"""The operation that a linear applies to its products before it stores them."""

from __future__ import annotations

from enum import IntEnum


class Epilogue(IntEnum):
    """Epilogue of a linear: how it combines its products y with `out`. Kernels use the numbers."""

    STORE = 0
    """Store the products: out = y."""
    ADD = 1
    """Add to the residual stream: out += y."""
    RELU2_GATE = 2
    """BitNet's gate: out = relu(gate) ** 2 * up. The weight has the rows of gate, then those of
    up."""
    SWIGLU = 3
    """SwiGLU: out = silu(gate) * up. The weight has the rows of gate, then those of up."""

    @property
    def gated(self) -> bool:
        """True if the output has half as many columns as the weight has rows."""
        return self in (Epilogue.RELU2_GATE, Epilogue.SWIGLU)
