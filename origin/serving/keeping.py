"""Makes the keeper of several models, and its pool, from their settings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median

from ledger.errors import CallerError, ConfigError
from origin.config import OriginConfig
from origin.history.recorder import HistoryRecorder
from origin.metrics import Metrics
from origin.pool.members import PoolMember, Schedule
from origin.pool.records import PoolRecord
from origin.serving.keeper import ModelKeeper, log_record
from origin.serving.known_models import KnownModels
from origin.serving.live_pool import LivePool
from origin.serving.plan import ModelPlan, caps, first_load_s
from origin.serving.served_model import ServedModels
from origin.warm.policies import LOAD_S, WarmPrices
from origin.workers.worker_process import WorkerSlot


def keeper_of(
    config: OriginConfig,
    plans: Sequence[ModelPlan],
    models: ServedModels,
    withdraw: Callable[[WorkerSlot], None],
    is_open: Callable[[bytes], bool],
    recorder: HistoryRecorder,
    clock: Callable[[], float],
    pace: float,
    changed: Callable[[], None],
    metrics: Metrics,
) -> ModelKeeper:
    """Raises ConfigError for a policy or a schedule that cannot be."""
    known = KnownModels(config.data, {plan.name: plan.config for plan in plans})

    def tell(record: PoolRecord, of_shadow: bool) -> None:
        if not of_shadow:
            log_record(record)
        recorder.record(record, shadow=of_shadow)

    try:
        live = LivePool(
            [_member(plan, known) for plan in plans],
            config.policy,
            caps(config),
            WarmPrices(config.cold_cost_gpu_s, _typical_load_s(plans, known)),
            {plan.name: plan.table.policy for plan in plans if plan.table.policy is not None},
            tell,
            clock,
        )
        if config.shadow_policy is not None:
            live.run_shadow(config.shadow_policy)
    except CallerError as error:
        raise ConfigError(error.message, field=error.field, hint=error.hint) from error
    return ModelKeeper(
        models,
        live,
        known,
        metrics,
        clock=clock,
        wait_s=config.cold_wait_s,
        withdraw=withdraw,
        is_open=is_open,
        pace=pace,
        changed=changed,
    )


def _typical_load_s(plans: Sequence[ModelPlan], known: KnownModels) -> float:
    """What prewarming policies reckon with."""
    measured = [found.load_s for plan in plans if (found := known.find(plan.name)) is not None]
    return median(measured) if measured else LOAD_S


def _member(plan: ModelPlan, known: KnownModels) -> PoolMember:
    found = known.find(plan.name)
    field = f"models.{plan.name}.schedule"
    return PoolMember(
        plan.name,
        plan.size_mib,
        plan.device,
        first_load_s(plan.config) if found is None else found.load_s,
        is_pinned=plan.table.is_kept,
        schedules=tuple(Schedule.parse(text, field) for text in plan.table.schedule),
    )
