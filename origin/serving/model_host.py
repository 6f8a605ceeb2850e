"""Hosts the models of an origin: carries out the commands of the model pool's core.

The core (`origin.core.pool`) has the rules and does no I/O. This module starts and stops worker
processes when the core orders it, lets requests wait for their model, and reports changes to edges
and metrics.

An origin without [models] in its settings is a pool of one pinned model, whose name is empty until
a worker reports it. Its requests do not wait: until the model is first loaded, they are refused.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import ceil
from random import Random
from statistics import median
from typing import TYPE_CHECKING

import structlog

from tailrace.ledger.errors import CallerError, ConfigError, NotFound, Unavailable
from tailrace.ledger.flow.circuit_breaker import CircuitState
from tailrace.ledger.frame import ModelTier
from tailrace.origin.config import OriginConfig
from tailrace.origin.core.events import (
    Command,
    Filled,
    RecordHistory,
    StartWorker,
    StopWorker,
    Tick,
    WorkerReady,
)
from tailrace.origin.core.model import ServedModel, Worker
from tailrace.origin.core.states import ModelState, WorkerState
from tailrace.origin.generations.stage_switches import Stages
from tailrace.origin.metrics import Metrics
from tailrace.origin.pool.history import queries
from tailrace.origin.pool.history.recorder import HistoryRecorder
from tailrace.origin.pool.history.schema import HistoryStore
from tailrace.origin.pool.members import PoolMember, Schedule
from tailrace.origin.pool.policies.policies import LOAD_S, WarmPrices
from tailrace.origin.pool.records import (
    ArrivalRecord,
    CircuitChange,
    PoolDecision,
    PoolRecord,
    StateChange,
    TierChange,
)
from tailrace.origin.pool.tiers import Tier
from tailrace.origin.serving.live_pool import MAX_REMEMBERED, LivePool
from tailrace.origin.serving.pins import Pins
from tailrace.origin.serving.plan import KnownModel, KnownModels, ModelPlan, caps, first_load_s
from tailrace.origin.workers.worker_frame import Ready
from tailrace.origin.workers.worker_process import WorkerSlot

if TYPE_CHECKING:  # the import needs the package tokenizers, which an origin may lack
    from tailrace.origin.checkpoint.prompt import PromptReader

LEAST_RETRY_S = 1.0
"""Minimum Retry-After in seconds of a request that is refused because its model is not loaded."""
LOADING_RETRY_MS = 500
"""Retry-After in ms while the only model of an origin is loaded for the first time."""
FAILED_STARTS = 4
"""Number of worker deaths in a row from which requests are refused in an origin without [models].
Before the first load, a single death is enough."""
CANNOT_START_RETRY_MS = 5_000
"""Minimum Retry-After in ms of a request that is refused because workers keep dying."""
MIN_SLEEP_S, MAX_SLEEP_S = 0.05, 3600.0
"""Bounds in seconds of the interval between two Ticks for the core."""
MAX_NAMED = 8
"""Maximum number of served models that an `unknown_model` error lists."""

log = structlog.get_logger("models")

Readers = Mapping[str, "PromptReader | None"]
"""The `PromptReader` of each model, which tokenizes its prompts; None if its workers are of kind
`text`."""


def log_record(record: PoolRecord) -> None:
    """Log a change of a model's tier, or a decision of the pool."""
    if isinstance(record, TierChange):
        log.info(
            "model.tier",
            model=record.model,
            tier=record.tier.word,
            was=record.before.word,
            reason=record.reason,
            s=None if record.took_s is None else round(record.took_s, 3),
        )
    elif isinstance(record, PoolDecision):
        log.info(
            "model.decision",
            model=record.model,
            choice=record.choice.value,
            policy=record.policy,
            reason=record.reason,
        )


class ModelHost:
    """The models of an origin and their workers' slots.

    `live` is the pool that makes the decisions, and `slots` has its workers by number. A request
    waits for its model for at most `wait_s` seconds, or not at all if that is None. `changed` is
    called when a tier or the origin's readiness has changed, which edges must learn. `pace` is the
    speed of the pool's clock relative to real time, so that a recorded day can be replayed in a
    minute. `unix_s` returns the system's Unix time, which may jump.
    """

    def __init__(
        self,
        live: LivePool,
        slots: Sequence[WorkerSlot],
        metrics: Metrics,
        *,
        wait_s: float | None = None,
        readers: Readers | None = None,
        known: KnownModels | None = None,
        pipelines: Mapping[str, Stages] | None = None,
        changed: Callable[[], None] = lambda: None,
        unix_s: Callable[[], float] = time.time,
        pace: float = 1.0,
    ) -> None:
        """Create the host.

        `known` has facts about models from their last load, and `pipelines` the stages of those
        models that are pipelines.
        """
        self.live, self.core = live, live.pool
        live.carry_out = self._carry_out
        self.happen = live.happen
        self.slots = slots
        self.wait_s = wait_s
        self.leaving = False
        """True while the origin drains: it finishes running streams and then ends."""
        self.readers = dict(readers or {})
        self._pipelines = dict(pipelines or {})
        self.changed = changed
        self._known = known
        self._clock = live.clock_s
        self._unix_s = unix_s
        self._began_unix_s = unix_s()
        self._pace = pace
        self._metrics = metrics
        self._news = asyncio.Event()
        """Wakes the requests that wait for a model; each change replaces it by a new event."""
        self._timer: asyncio.TimerHandle | None = None
        for model in filter(settings_name, self.core.models):
            metrics.serve_model(
                model.name,
                tier=partial(getattr, model, "tier"),
                circuit=partial(_circuit_state, model),
                streams=partial(_count_requests, model),
            )
            if known is not None and (found := known.find(model.name)) is not None:
                model.ready = found.ready
        metrics.circuit.set_function(lambda: max(map(_circuit_state, self.core.models)))
        self._told = self._state()

    def start(self) -> None:
        """Load pinned models, and then others in the order of the settings, as many as fit."""
        self.happen(Tick(self._unix_offset_s()))
        self.live.restore_pins()
        self.happen(Filled())

    async def learn(self, store: HistoryStore, origin: str) -> None:
        """Teach the pool's policies past requests from a history, up to this origin's start."""
        began_ms = round(self._began_unix_s * 1e3)
        rows = await queries.lately(store, origin, began_ms, MAX_REMEMBERED)
        past = [
            ArrivalRecord(model, at_ms / 1e3, 0.0, ended_ms / 1e3, Tier.HOT)
            for model, at_ms, ended_ms in rows
            if self.serves(model)
        ]
        await self.live.learn(past)
        log.info("policies.history_replayed", requests=len(past))

    def close(self) -> None:
        """Stop reporting Ticks to the core."""
        if self._timer is not None:
            self._timer.cancel()

    # ---- what is known ----

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names that requests use for the models; names still unknown are left out."""
        return tuple(name for model in self.core.models if (name := model.shown_name))

    def find(self, name: str) -> ServedModel:
        """Return the model of this name; raises NotFound if it is not served.

        The single model of an origin without [models] is returned for any name. Admission checks
        the name later.
        """
        model = self.of(name)
        if model is None:
            names = list(self.names)
            some = ", ".join(map(repr, names[:MAX_NAMED])) + (", …" if names[MAX_NAMED:] else "")
            raise NotFound(
                f"no model {name!r}",
                code="unknown_model",
                field="model",
                hint=f"this origin serves {some}",
            )
        return model

    def of(self, name: str) -> ServedModel | None:
        """Return the model that serves streams with this model name; None if there is none."""
        return self.core.serving(name)

    def serves(self, name: str) -> bool:
        """Return True if the settings have a model of this name."""
        return bool(name) and self.core.find(name) is not None

    def is_up(self, name: str) -> bool:
        """Return True if a worker has loaded the model.

        For a name that is not served, return True if any model is loaded.
        """
        return self.core.is_up(name)

    def worker(self, slot: WorkerSlot) -> Worker:
        """Return the core's record of a slot's worker."""
        return self.core.workers[slot.number]

    def reader(self, name: str) -> PromptReader | None:
        """Return the tokenizer of a model's prompts; None if its workers are of kind `text`."""
        return self.readers.get(name, self.readers.get(""))

    def stages(self, name: str) -> Stages:
        """Return the stages of a pipeline; empty for a model that is no pipeline."""
        return self._pipelines.get(name, {})

    @property
    def reasons(self) -> tuple[str, ...]:
        """Return why no model can produce tokens now; empty if at least one can."""
        if self.leaving:
            return ("this origin is shutting down",)
        by_model = [(model.name, model.reasons) for model in self.core.models]
        if not all(reasons for _, reasons in by_model):
            return ()
        return tuple(
            f"{name}: {reason}" if name else reason
            for name, reasons in by_model
            for reason in reasons
        )

    def tiers(self) -> tuple[ModelTier, ...]:
        """Return the tiers of all named models, as heartbeats report them to edges."""
        return tuple(
            ModelTier(
                model.name,
                _tier(model).word,
                round(self.expected_s(model.name) * 1000),
                model.trouble,
            )
            for model in filter(settings_name, self.core.models)
        )

    def expected_s(self, model: str) -> float:
        """Return the expected time until a model is ready, in seconds of real time."""
        return self.core.expected_s(model, self._clock()) / self._pace

    # ---- requests ----

    def check_starts(self, model: ServedModel) -> None:
        """Raise `Unavailable` if the model cannot start or still loads.

        If requests may wait (`wait_s`), do nothing: `until_open` decides about them.
        """
        if self.wait_s is not None:
            return
        if not model.is_up and model.deaths >= (1 if model.ready is None else FAILED_STARTS):
            retry_ms = ceil(model.circuit.retry_s(self._clock()) * 1000)
            least_ms = max(CANNOT_START_RETRY_MS, retry_ms)
            raise Unavailable(f"the worker cannot start: {model.last_exit}", min_retry_ms=least_ms)
        if model.ready is None:
            raise Unavailable("the model is loading", code="loading", min_retry_ms=LOADING_RETRY_MS)

    async def until_open(self, model: ServedModel, stream: bytes, *, known: bool = True) -> str:
        """Wait until a requested stream can be opened: its model serves it, or is being loaded.

        Return a notice for the stream's readers about the wait; it may be empty. If `known` is
        False, only a ready worker can tell whether the request can be served, so the wait lasts
        until the model has been loaded once. Raises `Unavailable`, with the time to retry, if the
        wait would be too long.
        """
        if self.wait_s is None:
            return ""
        loop = asyncio.get_running_loop()
        begun, has_waited = loop.time(), False
        deadline = begun + self.wait_s
        while (request := model.requests.get(stream)) and request.taken_s is None:
            self._check_circuit(model)
            left_s, expected_s = deadline - loop.time(), self.expected_s(model.name)
            if model.state is ModelState.LOADING:
                # The duration of a first load is only a guess, so it is no reason to refuse.
                if left_s <= 0 or (model.ready is not None and expected_s > left_s):
                    raise self._too_late(model, expected_s)
                if known or model.ready is not None:
                    return f"{model.name!r} is being loaded, {self._about(model, expected_s)}"
            news, has_waited = self._news, True
            try:
                async with asyncio.timeout_at(deadline):
                    await news.wait()
            except TimeoutError:
                raise self._too_late(model, expected_s) from None
        waited_s = loop.time() - begun
        return f"waited {waited_s:.1f} s for {model.name!r} to be loaded" if has_waited else ""

    def _about(self, model: ServedModel, expected_s: float) -> str:
        """Return the last part of a notice: how long the load takes, and if that is a guess."""
        if model.ready is not None:
            return f"which takes about {expected_s:.1f} s"
        if self.reader(model.name) is None:
            return "for the first time: how long that takes is not known"
        return f"for the first time, which by the size of its files takes about {expected_s:.1f} s"

    def _too_late(self, model: ServedModel, expected_s: float) -> Unavailable:
        after_ms = round(max(expected_s, LEAST_RETRY_S) * 1000)
        is_coming = model.state is ModelState.LOADING
        why = "is being loaded" if is_coming else "waits for memory that other models use"
        return Unavailable(
            f"{model.name!r} {why}",
            code="loading",
            hint=f"a request waits for its model for {self.wait_s:g} s (origin.cold_wait_s)",
            min_retry_ms=after_ms,
        )

    def _check_circuit(self, model: ServedModel) -> None:
        left_s = model.circuit.retry_s(self._clock()) / self._pace
        if model.circuit.state is CircuitState.OPEN and left_s > 0 and not model.is_up:
            after_ms = round(max(left_s, LEAST_RETRY_S) * 1000)
            raise Unavailable(
                f"no worker of {model.name!r} can start: {model.last_exit}",
                min_retry_ms=after_ms,
            )

    # ---- what happens ----

    def worker_ready(self, slot: WorkerSlot, ready: Ready) -> bool:
        """Report that a worker is ready; return False if it was told to stop meanwhile."""
        load_s = None if slot.start is None else slot.start.own_s
        price_s = None if load_s is None else load_s * self._pace
        self.happen(WorkerReady(slot.number, ready, price_s))
        if self.worker(slot).state is not WorkerState.READY:
            return False
        if self._known is not None and load_s is not None:
            self._known.learn(slot.model, KnownModel(ready, load_s))
        return True

    def _carry_out(self, commands: list[Command]) -> None:
        for command in commands:
            match command:
                case StartWorker(number):
                    self.slots[number].launch()
                case StopWorker(number):
                    self.slots[number].stop()
                case RecordHistory(StateChange() as change):
                    self._count(change)
                case RecordHistory(CircuitChange() as change):
                    self._log_circuit(change)
        self._notify()
        self._set_timer()

    def _count(self, change: StateChange) -> None:
        """Count loads and unloads of named models."""
        if not change.model:
            return
        if change.before is ModelState.QUEUED and change.state is ModelState.LOADING:
            self._metrics.model_loads.labels(change.model).inc()
            log.info("model.load", model=change.model)
        elif change.state is ModelState.LEAVING:
            self._metrics.model_leaves.labels(change.model).inc()
            log.info("model.leave", model=change.model)

    def _log_circuit(self, change: CircuitChange) -> None:
        if change.state == CircuitState.OPEN:
            last = self.core.of(change.model).last_exit
            log.error("circuit.open", model=change.model, reason=change.reason, last_exit=last)
        elif change.state == CircuitState.CLOSED:
            log.info("circuit.closed", model=change.model)

    def _state(self) -> object:
        return [_tier(model) for model in self.core.models], self.reasons

    def _notify(self) -> None:
        """Wake waiting requests, and call `changed` if tiers or readiness have changed."""
        state = self._state()
        if state != self._told:
            self._told = state
            self.changed()
        news, self._news = self._news, asyncio.Event()
        news.set()

    def _set_timer(self) -> None:
        """Schedule a Tick for the next time at which the core has work to do."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        wait_s = min(self.core.wake_at() - self._clock(), MAX_SLEEP_S)
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(max(wait_s, MIN_SLEEP_S) / self._pace, self._tick)

    def _tick(self) -> None:
        self._timer = None
        self.happen(Tick(self._unix_offset_s()))

    def _unix_offset_s(self) -> float | None:
        """Return Unix time minus the core's clock; None if the clock replays a recorded day."""
        return None if self._pace != 1.0 else self._unix_s() - self._clock()


def settings_name(model: ServedModel) -> str:
    """Return the model's name in the settings; empty if the settings do not give one."""
    return model.name


def _tier(model: ServedModel) -> Tier:
    """Return the tier as new requests find it.

    A draining model counts as unloaded, because it takes no request until it is loaded again.
    """
    return Tier.HOST if model.state is ModelState.DRAINING else model.tier


def _circuit_state(model: ServedModel) -> int:
    return [*CircuitState].index(model.circuit.state)


def _count_requests(model: ServedModel) -> int:
    return len(model.requests)


def single_pool(workers: int, clock: Callable[[], float], random: Random | None = None) -> LivePool:
    """Return the pool of an origin without [models]: one model, which stays loaded."""
    member = PoolMember("", is_pinned=True, workers=workers)
    prices, tell = WarmPrices(), lambda record, of_shadow: None
    return LivePool([member], "greedy-dual", {}, prices, {}, tell, clock, random=random)


def live_pool(
    config: OriginConfig,
    plans: Sequence[ModelPlan],
    known: KnownModels,
    recorder: HistoryRecorder,
    clock: Callable[[], float],
) -> LivePool:
    """Return the pool of several models. Raises ConfigError for a bad policy or schedule."""
    measured = [found.load_s for plan in plans if (found := known.find(plan.name)) is not None]
    # prewarming policies expect this duration of a load
    typical_s = median(measured) if measured else LOAD_S

    def tell(record: PoolRecord, of_shadow: bool) -> None:
        if not of_shadow:
            log_record(record)
        recorder.record(record, shadow=of_shadow)

    try:
        live = LivePool(
            [_member(plan, known) for plan in plans],
            config.policy,
            caps(config, plans),
            WarmPrices(config.cold_cost_gpu_s, typical_s),
            {plan.name: plan.table.policy for plan in plans if plan.table.policy is not None},
            tell,
            clock,
            Pins(config.data),
        )
        if config.shadow_policy is not None:
            live.run_shadow(config.shadow_policy)
        return live
    except CallerError as error:
        raise ConfigError(error.message, field=error.field, hint=error.hint) from error


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
        workers=plan.config.workers,
        shares=plan.shares_mib if plan.gpus else {},
    )
