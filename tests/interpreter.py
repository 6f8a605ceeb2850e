"""Kernels run on the GPU where there is one, and in Triton's interpreter where there is none."""

from __future__ import annotations

import os

import torch


def kernel_device() -> torch.device:
    """Return where the tensors of a kernel's test lie.

    Called before kernels are imported: what it sets is read when they are decorated.
    """
    if torch.cuda.is_available():
        return torch.device("cuda")
    os.environ["TRITON_INTERPRET"] = "1"
    return torch.device("cpu")
