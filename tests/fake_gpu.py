"""A GPU for Triton where there is none: it takes machine code and launches, and computes nothing.

For processes without TRITON_INTERPRET. Tensors lie on the CPU; what kernels would write is what
the memory held.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from triton.backends.compiler import GPUTarget
from triton.runtime import driver

SM_90 = GPUTarget("cuda", 90, 32)
SHARED_BYTES = 227 << 10
THREADS = 1024


class FakeGpu:
    """Device 0, until another driver is set. `launched` names each launch's kernel."""

    def __init__(self, target: GPUTarget = SM_90) -> None:
        self.launched: list[str] = []
        self._target = target
        self.utils = SimpleNamespace(
            get_device_properties=lambda device: {"max_shared_mem": SHARED_BYTES},
            load_binary=lambda name, code, shared, device: (1, name, 0, 0, THREADS),
        )
        driver.set_active(self)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return self._target

    def launcher_cls(self, source: Any, metadata: Any) -> Any:
        return lambda *_: self.launched.append(source.fn.__name__)
