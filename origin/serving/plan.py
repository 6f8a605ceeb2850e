"""What each of several models is to be given, before any of them is loaded."""

from __future__ import annotations

from dataclasses import dataclass

from ledger.errors import ConfigError
from origin.config import OriginConfig
from origin.model_table import ModelTable, Tables
from origin.serving.memory_need import CPU, GPU, MIB, device_of, needed

CAP_SETTINGS = {CPU: "cpu_memory_mib", GPU: "gpu_memory_mib"}
"""The setting of each device's cap."""


@dataclass(frozen=True, slots=True)
class ModelPlan:
    """`config` is that of its workers, `size_mib` what all of them take of `device`."""

    name: str
    table: ModelTable
    config: OriginConfig
    device: str
    size_mib: float


def planned(tables: Tables, origin: OriginConfig) -> list[ModelPlan]:
    """Raises ConfigError or ModelError for what cannot be."""
    plans = []
    for name, table in tables.items():
        size, config = needed(name, table, table.alone(name, origin))
        plans.append(ModelPlan(name, table, config, device_of(config), size * config.workers / MIB))
    for device, setting in CAP_SETTINGS.items():
        _check_cap([plan for plan in plans if plan.device == device], setting, origin)
    return plans


def caps(origin: OriginConfig) -> dict[str, float]:
    """In MiB, of the devices that have one."""
    given = {device: getattr(origin, setting) for device, setting in CAP_SETTINGS.items()}
    return {device: float(cap) for device, cap in given.items() if cap is not None}


def _check_cap(plans: list[ModelPlan], setting: str, origin: OriginConfig) -> None:
    cap, field = getattr(origin, setting), f"origin.{setting}"
    on_gpu = [plan for plan in plans if plan.device == GPU and plan.size_mib]
    if cap is None and len(on_gpu) > 1:
        raise ConfigError(
            f"{on_gpu[0].name!r} and {on_gpu[1].name!r} are to share a GPU",
            field=field,
            hint="say how much of its memory they may take together",
        )
    if cap is None:
        return
    for plan in plans:
        if plan.size_mib > cap:
            raise ConfigError(
                f"{plan.name!r} takes {plan.size_mib:.0f} MiB, and the cap is {cap}",
                field=field,
                hint="a cap that holds the largest model, or a smaller kv_mib for it",
            )
    kept = [plan for plan in plans if plan.table.is_kept]
    taken = sum(plan.size_mib for plan in kept)
    largest = max((plan.size_mib for plan in plans if plan not in kept), default=0)
    if taken + largest > cap:
        what = ", ".join(plan.name for plan in kept)
        beside = f", and another one needs {largest:.0f}" if largest else ""
        raise ConfigError(
            f"what is always loaded ({what}) takes {taken:.0f} MiB{beside}; the cap is {cap}",
            field=field,
            hint="a larger cap, or fewer models with pin or minimum_warm",
        )
