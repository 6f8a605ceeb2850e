"""The operation that a linear applies to its products before it stores them."""

from __future__ import annotations

from enum import IntEnum


class Epilogue(IntEnum):
    """Epilogue of a linear; the values are constants of the kernels."""

    STORE = 0
    """Store: out = y."""
    ADD = 1
    """Add to the residual stream: out += y."""
    RELU2_GATE = 2
    """BitNet's gate; the weight holds gate, then up: out = relu(gate) ** 2 * up."""
    SWIGLU = 3
    """SwiGLU; the weight holds gate, then up: out = silu(gate) * up."""

    @property
    def gated(self) -> bool:
        """True if the output has half as many columns as the weight has rows."""
        return self in (Epilogue.RELU2_GATE, Epilogue.SWIGLU)
