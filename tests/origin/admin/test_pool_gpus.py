"""The GPUs of workers in the pool that operators are shown."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from tailrace.origin.admin.warm import pool_document
from tailrace.origin.gpu.meter import GpuMeter
from tests.origin.gpu.test_meter import FakeNvml
from tests.origin.stage import READY, Stage

pytestmark = pytest.mark.anyio


def gpus_of(stage: Stage) -> list[dict[str, Any] | None]:
    runs = SimpleNamespace(
        table=stage.runs.table,
        models=stage.models,
        paused_count=0,
        starts=stage.runs.starts,
    )
    told = pool_document(runs, stage.metrics, stage.slots, 4, lambda at_s: 0)  # type: ignore[arg-type]
    return [worker["gpu"] for worker in told["workers"]]


async def test_a_worker_is_shown_with_the_figures_of_its_gpu(stage: Stage) -> None:
    assert gpus_of(stage) == [None, None]
    stage.metrics.serve_gpus(GpuMeter(FakeNvml()), {0: "0", 1: "MIG-b"})
    first, second = gpus_of(stage)
    assert first is not None and second is not None
    assert (first["gpu"], first["utilisation"]) == ("0", 0.73)
    assert (second["gpu"], second["utilisation"]) == ("MIG-b", None)


async def test_a_worker_that_chose_the_cpu_has_no_gpu(stage: Stage) -> None:
    stage.metrics.serve_gpus(GpuMeter(FakeNvml()), {0: "0", 1: "1"})
    await stage.ready(stage.slots[0], replace(READY, device="cpu torch"))
    await stage.ready(stage.slots[1], replace(READY, device="cuda triton (NVIDIA H100)"))
    assert [gpu and gpu["gpu"] for gpu in gpus_of(stage)] == [None, "1"]
