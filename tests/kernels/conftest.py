import pytest
import torch

from tests.interpreter import kernel_device

DEVICE = kernel_device()


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Where the tensors of a kernel's test lie."""
    return DEVICE
