"""Number formats of a model in memory, as settings of `[origin]` choose them.

Weights are converted at load. The formats are part of the engine's fingerprint.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

WeightsFormat = Literal["auto", "int8", "int4"]
KvFormat = Literal["auto", "int8", "fp8"]
HeadFormat = Literal["auto", "int8"]


@dataclass(frozen=True, slots=True)
class Formats:
    """Formats of weights, KV cache and LM head; `auto` is explained in docs/models.md."""

    weights: WeightsFormat = "auto"
    """Format of the weights of the linear maps in all layers."""
    kv_cache: KvFormat = "auto"
    head: HeadFormat = "auto"

    def __str__(self) -> str:
        """Return the formats other than `auto`, such as `int8 weights, fp8 KV cache`."""
        chosen = {"weights": self.weights, "KV cache": self.kv_cache, "head": self.head}
        return ", ".join(f"{how} {what}" for what, how in chosen.items() if how != "auto")

    def on(self, device: str) -> str:
        """Return a device's name together with the formats."""
        return f"{device}, {self}" if str(self) else device


AS_STORED = Formats()
