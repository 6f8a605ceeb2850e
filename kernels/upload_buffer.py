"""A buffer of numbers at a fixed address on a device, filled on the host and sent in one copy."""

from __future__ import annotations

import torch
from torch import Tensor


class UploadBuffer:
    """int32 numbers for a captured graph, with two pinned host buffers that are used alternately.

    There are two, because the numbers of the next step are filled in while the copy for the
    previous step may not even have begun. there: int32 [size] on the device, at an address that
    never changes.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        pinned = device.type == "cuda"
        self.there = torch.zeros(size, dtype=torch.int32, device=device)
        self._here = [torch.zeros(size, dtype=torch.int32, pin_memory=pinned) for _ in range(2)]
        self._copied = [
            torch.cuda.Event() if pinned else None  # type: ignore[no-untyped-call]
            for _ in range(2)
        ]

    def next(self) -> Tensor:
        """Return the host buffer to fill in next; waits while its last copy is still under way."""
        self._here.reverse()
        self._copied.reverse()
        if (copied := self._copied[0]) is not None:
            copied.synchronize()
        return self._here[0]

    def send(self) -> None:
        """Copy the buffer that was filled in to the device, in stream order."""
        self.there.copy_(self._here[0], non_blocking=True)
        if (copied := self._copied[0]) is not None:
            copied.record()
