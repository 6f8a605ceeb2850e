"""Memory that models take within the caps, and caps that cannot be kept."""

from __future__ import annotations

from typing import Any

import pytest

from tailrace.ledger.errors import ConfigError
from tailrace.origin.config import DEMO_MODEL, OriginConfig
from tailrace.origin.pool.model_table import ModelTable, PipelineModel, Tables
from tailrace.origin.serving.plan import caps, planned


def table(**more: Any) -> ModelTable:
    return ModelTable(folder=DEMO_MODEL, memory_mib=60, device="cpu", **more)


def on_gpu(memory_mib: int, **more: Any) -> ModelTable:
    return ModelTable(folder=DEMO_MODEL, memory_mib=memory_mib, device="cuda", **more)


def test_memory_is_accounted_by_gpu_and_workers_are_spread_over_them() -> None:
    tables = {
        "wide": on_gpu(20_000, workers=2),
        "first": on_gpu(9_000),
        "second": on_gpu(5_000),
        "third": on_gpu(5_000),
    }
    origin = OriginConfig(gpu_memory_mib=40_000, gpus=("0", "GPU-b"))
    plans = planned(tables, origin)
    assert [plan.gpus for plan in plans] == [("0", "GPU-b"), ("0",), ("GPU-b",), ("GPU-b",)]
    assert plans[0].shares_mib == {"cuda:0": 20_000, "cuda:GPU-b": 20_000}
    assert plans[1].shares_mib == {"cuda:0": 9_000}
    found = caps(origin, plans)
    assert (found["cuda:0"], found["cuda:GPU-b"]) == (40_000, 40_000)


def test_models_on_gpus_of_their_own_need_no_cap() -> None:
    tables = {name: on_gpu(9_000) for name in "ab"}
    plans = planned(tables, OriginConfig(gpus=("0", "1")))
    assert [plan.gpus for plan in plans] == [("0",), ("1",)]
    with pytest.raises(ConfigError, match="'a' and 'b' share a GPU"):
        planned(tables, OriginConfig(gpus=("0",)))


def test_a_model_whose_worker_does_not_fit_a_gpu_is_refused() -> None:
    tables = {"a": on_gpu(30_000, workers=4)}
    assert planned(tables, OriginConfig(gpus=("0", "1"), gpu_memory_mib=60_000))
    with pytest.raises(ConfigError, match="cap of 59000 MiB is too small: 'a' takes 60000 MiB"):
        planned(tables, OriginConfig(gpus=("0", "1"), gpu_memory_mib=59_000))


def test_a_pipeline_gets_a_gpu_for_its_stages_of_kind_gpu() -> None:
    def served(stage: str) -> PipelineModel:
        words = {"stage": "tests.origin.pipelines.staged:Words"}
        return PipelineModel(pipeline={"stages": [words, {"stage": stage}]}, memory_mib=700)

    tables: Tables = {
        "plain": served("group"),
        "heavy": served("tests.origin.pipelines.staged:Scale"),
    }
    plans = planned(tables, OriginConfig(device="cuda", gpus=("GPU-b",)))
    assert [plan.gpus for plan in plans] == [(), ("GPU-b",)]
    assert plans[0].shares_mib == {"cpu": 700}
    assert plans[1].shares_mib == {"cuda:GPU-b": 700}
    [on_cpu] = planned({"heavy": tables["heavy"]}, OriginConfig(device="cpu"))
    assert (on_cpu.gpus, on_cpu.shares_mib) == ((), {"cpu": 700})


def test_every_worker_of_a_model_counts() -> None:
    tables = {"a": table(workers=2), "b": table(minimum_warm=3), "c": ModelTable(producer="d:e")}
    origin = OriginConfig(cpu_memory_mib=300, device="cpu")
    assert [(plan.name, plan.size_mib) for plan in planned(tables, origin)] == [
        ("a", 120),
        ("b", 180),
        ("c", 0),
    ]
    assert caps(origin) == {"cpu": 300}


@pytest.mark.parametrize(
    ("tables", "settings", "message"),
    [
        (
            {"a": table(), "b": table(workers=2)},
            {"cpu_memory_mib": 100},
            "origin.cpu_memory_mib: the cap of 100 MiB is too small: 'b' takes 120 MiB",
        ),
        (
            {"a": table(pin=True), "b": table(workers=2)},
            {"cpu_memory_mib": 170},
            r"cap of 170 .* always loaded \(a\) take 60 MiB, and the largest other model needs 120",
        ),
        (
            {"a": table(pin=True), "b": table(minimum_warm=1)},
            {"cpu_memory_mib": 100},
            r"cap of 100 MiB .* always loaded \(a, b\) take 120 MiB",
        ),
        (
            {name: table().model_copy(update={"device": "cuda", "memory_mib": 9000})
             for name in "ab"},
            {},
            "origin.gpu_memory_mib: missing, although 'a' and 'b' share a GPU",
        ),
    ],
)  # fmt: skip
def test_a_cap_that_cannot_be_kept_is_named(
    tables: dict[str, ModelTable], settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        planned(tables, OriginConfig(**settings))
