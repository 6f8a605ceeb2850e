"""The limits of devices; plans that follow them are in linear/test_linear_plan.py."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tailrace.kernels.gpu_limits import HOPPER, GpuLimits, limits_of


@pytest.fixture
def properties(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Properties of every CUDA device, as torch gives them."""
    found = SimpleNamespace(major=9, minor=0, multi_processor_count=114)
    limits_of.cache_clear()
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: found)
    return found


def test_plans_follow_the_device_and_not_its_capability(properties: Any) -> None:
    properties.shared_memory_per_block_optin = 200 << 10
    assert limits_of(torch.device("cuda", 0)) == GpuLimits(200 << 10, 114)


@pytest.mark.parametrize(
    ("capability", "kib"), [((9, 0), 227), ((8, 0), 163), ((12, 0), 99), ((13, 7), 99)]
)
def test_shared_memory_that_torch_does_not_tell_is_that_of_the_capability(
    properties: Any, capability: tuple[int, int], kib: int
) -> None:
    properties.major, properties.minor = capability
    assert limits_of(torch.device("cuda", 0)) == GpuLimits(kib << 10, 114)


def test_the_interpreter_plans_as_on_a_hopper() -> None:
    assert limits_of(torch.device("cpu")) == HOPPER
