"""The number formats that a model is held in, where they are not those of its checkpoint.

Settings of `[origin]` choose them, they are made at load, and they are part of the fingerprint.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

WeightsFormat = Literal["auto", "int8", "int4"]
KvFormat = Literal["auto", "int8", "fp8"]
HeadFormat = Literal["auto", "int8"]


@dataclass(frozen=True, slots=True)
class Formats:
    """`auto` is what the checkpoint has, or what suits the device: see docs/models.md."""

    weights: WeightsFormat = "auto"
    """Of the linears of the layers."""
    kv_cache: KvFormat = "auto"
    head: HeadFormat = "auto"

    def __str__(self) -> str:
        """What was chosen, such as `int8 weights, fp8 KV cache`; empty where nothing was."""
        chosen = {"weights": self.weights, "KV cache": self.kv_cache, "head": self.head}
        return ", ".join(f"{how} {what}" for what, how in chosen.items() if how != "auto")

    def on(self, device: str) -> str:
        """What a model of these says it runs on."""
        return f"{device}, {self}" if str(self) else device


AS_STORED = Formats()
