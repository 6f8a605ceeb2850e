"""Kernels run on the GPU where there is one, and in Triton's interpreter where there is none."""

from __future__ import annotations

import os

import pytest
import torch

# Read when a kernel is decorated, so before any module of kernels is imported.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Where the tensors of a kernel's test lie."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
