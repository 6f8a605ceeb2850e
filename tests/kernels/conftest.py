"""Fixtures of the kernels' tests."""

import pytest
import torch

from tests.interpreter import kernel_device

DEVICE = kernel_device()


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Return where the tensors of a kernel's test lie."""
    return DEVICE
