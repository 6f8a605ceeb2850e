"""Figures of GPUs, from a stand-in for NVML that answers as its package does."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from tailrace.origin.gpu.meter import FRESH_S, GpuCollector, GpuMeter, GpuReading


class FakeNvml:
    """Two GPUs; the second is a slice, whose utilisation NVML does not tell."""

    class NVMLError(Exception):
        """Base of NVML's errors."""

    def __init__(self) -> None:
        self.busy_percent = 73
        self.asked = 0

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:  # noqa: N802
        if index > 1:
            raise self.NVMLError("Invalid Argument")
        return index

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> int:  # noqa: N802
        return {"GPU-a": 0, "MIG-b": 1}[uuid]

    def nvmlDeviceGetName(self, handle: int) -> str:  # noqa: N802
        self.asked += 1
        return ("NVIDIA H100", "NVIDIA H100 MIG 1g.10gb")[handle]

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> SimpleNamespace:  # noqa: N802
        return SimpleNamespace(used=60 << 30, total=80 << 30)

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> SimpleNamespace:  # noqa: N802
        if handle == 1:
            raise self.NVMLError("Not Supported")
        return SimpleNamespace(gpu=self.busy_percent, memory=1)


H100 = GpuReading("0", "NVIDIA H100", 0.73, 60 << 30, 80 << 30)


def test_a_gpu_is_read_by_index_and_by_uuid() -> None:
    meter = GpuMeter(FakeNvml())
    assert meter.read("0") == H100
    assert meter.read("GPU-a").utilisation == 0.73


def test_what_nvml_does_not_tell_is_absent_and_no_error() -> None:
    meter = GpuMeter(FakeNvml())
    a_slice = meter.read("MIG-b")
    assert (a_slice.memory_used_bytes, a_slice.utilisation) == (60 << 30, None)
    assert meter.read("7") == GpuReading("7")
    assert GpuMeter().read("0") == GpuReading("0")


def test_a_reading_is_reused_for_a_while() -> None:
    now, nvml = [10.0], FakeNvml()
    meter = GpuMeter(nvml, lambda: now[0])
    assert meter.read("0") is meter.read("0")
    nvml.busy_percent = 5
    now[0] += FRESH_S
    assert meter.read("0").utilisation == 0.05
    assert nvml.asked == 2


def test_without_the_package_or_the_driver_there_are_no_figures(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail() -> None:
        raise FakeNvml.NVMLError("NVML Shared Library Not Found")

    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert GpuMeter.open().read("0") == GpuReading("0")
    broken = SimpleNamespace(NVMLError=FakeNvml.NVMLError, nvmlInit=fail)
    monkeypatch.setitem(sys.modules, "pynvml", broken)
    assert GpuMeter.open().read("0") == GpuReading("0")
    whole = FakeNvml()
    monkeypatch.setattr(whole, "nvmlInit", lambda: None, raising=False)
    monkeypatch.setitem(sys.modules, "pynvml", whole)
    assert GpuMeter.open().read("0") == H100


def exposed(meter: GpuMeter) -> list[str]:
    registry = CollectorRegistry()
    registry.register(GpuCollector(meter, [(0, "0"), (1, "MIG-b"), (2, "0")]))
    lines = generate_latest(registry).decode().splitlines()
    return [line for line in lines if not line.startswith("#")]


def test_metrics_say_which_worker_has_which_gpu_and_how_busy_it_is() -> None:
    lines = exposed(GpuMeter(FakeNvml()))
    assert 'tailrace_worker_gpu{gpu="MIG-b",worker="1"} 1.0' in lines
    assert 'tailrace_gpu_utilisation_ratio{gpu="0"} 0.73' in lines
    assert not any("utilisation" in line and "MIG-b" in line for line in lines)
    assert 'tailrace_gpu_memory_used_bytes{gpu="0"} 6.442450944e+10' in lines


def test_without_nvml_metrics_say_only_which_worker_has_which_gpu() -> None:
    lines = exposed(GpuMeter())
    assert len(lines) == 3
    assert all(line.startswith("tailrace_worker_gpu{") for line in lines)
