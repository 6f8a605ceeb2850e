"""Makes the keeper of several models, and its pool, from their settings."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ledger.errors import CallerError, ConfigError
from origin.config import OriginConfig
from origin.metrics import Metrics
from origin.pool.members import PoolMember
from origin.pool.warm_pool import WarmPool
from origin.serving.keeper import ModelKeeper, log_record
from origin.serving.known_models import KnownModels
from origin.serving.plan import ModelPlan, caps
from origin.serving.served_model import ServedModels
from origin.steady_clock import now_ms
from origin.warm.named import named_policy
from origin.warm.policies import KeepAlivePolicy
from origin.warm.prices import LOAD_S, WarmPrices
from origin.workers.worker_process import WorkerSlot


def keeper_of(
    config: OriginConfig,
    plans: Sequence[ModelPlan],
    models: ServedModels,
    withdraw: Callable[[WorkerSlot], None],
    is_open: Callable[[bytes], bool],
    changed: Callable[[], None],
    metrics: Metrics,
) -> ModelKeeper:
    """Raises ConfigError for a policy that is not known."""
    known = KnownModels(config.data, {plan.name: plan.config for plan in plans})
    members = [_member(plan, known) for plan in plans]
    policies = {
        plan.name: _policy(plan.table.policy, f"models.{plan.name}.policy")
        for plan in plans
        if plan.table.policy is not None
    }
    pool = WarmPool(
        members,
        _policy(config.policy, "origin.policy"),
        caps(config),
        policies=policies,
        keep=log_record,
    )
    return ModelKeeper(
        models,
        pool,
        known,
        metrics,
        clock=lambda: now_ms() / 1000,
        wait_s=config.cold_wait_s,
        withdraw=withdraw,
        is_open=is_open,
        changed=changed,
    )


def _member(plan: ModelPlan, known: KnownModels) -> PoolMember:
    found = known.find(plan.name)
    return PoolMember(
        plan.name,
        plan.size_mib,
        plan.device,
        LOAD_S if found is None else found.load_s,
        is_pinned=plan.table.is_kept,
    )


def _policy(name: str, field: str) -> KeepAlivePolicy:
    try:
        return named_policy(name, WarmPrices(), field)
    except CallerError as error:
        raise ConfigError(error.message, field=field, hint=error.hint) from error
