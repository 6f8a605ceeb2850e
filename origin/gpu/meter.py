"""Utilisation and memory of GPUs, read through NVIDIA's management library (NVML).

The package `nvidia-ml-py` is optional: without it, or without a driver, there are no figures.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

FRESH_S = 1.0
"""Seconds for which a reading is reused, because NVML takes milliseconds for each one."""


@dataclass(frozen=True, slots=True)
class GpuReading:
    """Figures of one GPU; those that are not known are None.

    `gpu` is the index or UUID by which CUDA_VISIBLE_DEVICES names it.
    """

    gpu: str
    name: str | None = None
    utilisation: float | None = None
    """Share of NVML's last sample period during which a kernel ran, from 0 to 1."""
    memory_used_bytes: int | None = None
    """Memory in use by all processes, not only by workers."""
    memory_bytes: int | None = None


class GpuMeter:
    """Reads figures of GPUs, which are given by index or UUID.

    `nvml` is the module `pynvml`, or None if it cannot be used.
    """

    def __init__(
        self, nvml: Any | None = None, clock_s: Callable[[], float] = time.monotonic
    ) -> None:
        self._nvml = nvml
        self._clock_s = clock_s
        self._read: dict[str, tuple[float, GpuReading]] = {}

    @classmethod
    def open(cls) -> GpuMeter:
        """Return a meter; if NVML cannot be used, all its figures are None."""
        try:
            nvml = importlib.import_module("pynvml")
        except ImportError:
            return cls()
        try:
            nvml.nvmlInit()
        except nvml.NVMLError:
            return cls()
        return cls(nvml)

    def read(self, gpu: str) -> GpuReading:
        """Return the figures of a GPU, at most FRESH_S old."""
        now = self._clock_s()
        at_s, reading = self._read.get(gpu, (-FRESH_S, GpuReading(gpu)))
        if now - at_s >= FRESH_S:
            reading = self._figures(gpu)
            self._read[gpu] = now, reading
        return reading

    def _figures(self, gpu: str) -> GpuReading:
        if self._nvml is None:
            return GpuReading(gpu)
        nvml, found = self._nvml, dict[str, Any]()
        with suppress(nvml.NVMLError):
            if gpu.isdecimal():
                handle = nvml.nvmlDeviceGetHandleByIndex(int(gpu))
            else:
                handle = nvml.nvmlDeviceGetHandleByUUID(gpu)
            found["name"] = nvml.nvmlDeviceGetName(handle)
            memory = nvml.nvmlDeviceGetMemoryInfo(handle)
            found |= {"memory_used_bytes": memory.used, "memory_bytes": memory.total}
            # Read last, because this raises an error for a slice of a GPU (MIG).
            found["utilisation"] = nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100
        return GpuReading(gpu, **found)


class GpuCollector(Collector):
    """Prometheus metrics of the workers' GPUs, which are read at each scrape.

    `workers` has a pair of worker number and GPU for each worker.
    """

    def __init__(self, meter: GpuMeter, workers: Sequence[tuple[int, str]]) -> None:
        self._meter = meter
        self._workers = workers

    def collect(self) -> Iterator[Metric]:
        placed = GaugeMetricFamily(
            "tailrace_worker_gpu", "1 for the GPU that the worker has", labels=("worker", "gpu")
        )
        for worker, gpu in self._workers:
            placed.add_metric((str(worker), gpu), 1)
        yield placed
        readings = [self._meter.read(gpu) for gpu in dict.fromkeys(gpu for _, gpu in self._workers)]
        figures = {
            "utilisation": ("utilisation_ratio", "Share of time in which a kernel ran"),
            "memory_used_bytes": ("memory_used_bytes", "GPU memory in use by all processes"),
            "memory_bytes": ("memory_bytes", "GPU memory"),
        }
        for field, (name, help_) in figures.items():
            family = GaugeMetricFamily(f"tailrace_gpu_{name}", help_, labels=("gpu",))
            for reading in readings:
                if (value := getattr(reading, field)) is not None:
                    family.add_metric((reading.gpu,), value)
            yield family
