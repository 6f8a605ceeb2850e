"""What a linear does with its products before they leave the registers."""

from __future__ import annotations

from enum import IntEnum


class Epilogue(IntEnum):
    """The values are constants of the kernels."""

    STORE = 0
    """out = y."""
    ADD = 1
    """out += y: the residual stream."""
    RELU2_GATE = 2
    """The weight holds gate, then up: out = relu(gate) ** 2 * up."""
    SWIGLU = 3
    """The weight holds gate, then up: out = silu(gate) * up."""

    @property
    def gated(self) -> bool:
        """The output has half as many columns as the weight has rows."""
        return self in (Epilogue.RELU2_GATE, Epilogue.SWIGLU)
