"""The models of an origin: carries out on workers what their core decides, and answers for them.

The core (`origin.core.pool`) has the rules and no I/O. Here its commands start and stop worker
processes, requests wait for their model, and edges and metrics are told.

An origin without [models] in its settings is a pool of one pinned model, whose name is empty until
a worker says it. Its requests do not wait: while it was never loaded, they are refused.
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

if TYPE_CHECKING:  # it needs tokenizers, which only models of our own need
    from tailrace.origin.checkpoint.prompt import PromptReader

LEAST_RETRY_S = 1.0
"""Minimum time after which a request that is refused for a loading model may be sent again."""
LOADING_RETRY_MS = 500
"""The same in an origin whose requests do not wait for their model."""
FAILED_STARTS = 4
"""Deaths in a row after which requests that do not wait are refused."""
CANNOT_START_RETRY_MS = 5_000
"""Minimum time after which such a request may be sent again."""
MIN_SLEEP_S, MAX_SLEEP_S = 0.05, 3600.0
"""Bounds of the time until the core is next reported a Tick."""
MAX_NAMED = 8
"""Maximum number of models that an error names."""

log = structlog.get_logger("models")

Readers = Mapping[str, "PromptReader | None"]
"""Readers of prompts by model; None where its workers answer in text."""


def log_record(record: PoolRecord) -> None:
    """Log what the pool does; requests have their own lines."""
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

    `live` is the pool that decides, `slots` are its workers by number. A request waits for its
    model for `wait_s`, or not at all where that is None. `changed` is called when edges should
    hear of a tier or of readiness. `pace` is the speed of the pool's clock, so that a recorded day
    can be played in a minute. `unix_s` is the system's time, which may jump.
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
        changed: Callable[[], None] = lambda: None,
        unix_s: Callable[[], float] = time.time,
        pace: float = 1.0,
    ) -> None:
        """Create it; `known` is what was known of models before they are loaded."""
        self.live, self.core = live, live.pool
        live.carry_out = self._carry_out
        self.happen = live.happen
        self.slots = slots
        self.wait_s = wait_s
        self.leaving = False
        """The origin goes away, when what is under way has ended."""
        self.readers = dict(readers or {})
        self.changed = changed
        self._known = known
        self._clock = live.clock_s
        self._unix_s = unix_s
        self._began_unix_s = unix_s()
        self._pace = pace
        self._metrics = metrics
        self._news = asyncio.Event()
        """Set, and made anew, when a model may have come nearer."""
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
        """Load what is pinned, and then of the others, in their order, as many as fit."""
        self.happen(Tick(self._unix_offset_s()))
        self.live.restore_pins()
        self.happen(Filled())

    async def learn(self, store: HistoryStore, origin: str) -> None:
        """Learn what a history says of these models before this origin began."""
        began_ms = round(self._began_unix_s * 1e3)
        rows = await queries.lately(store, origin, began_ms, MAX_REMEMBERED)
        past = [
            ArrivalRecord(model, at_ms / 1e3, 0.0, ended_ms / 1e3, Tier.HOT)
            for model, at_ms, ended_ms in rows
            if self.serves(model)
        ]
        await self.live.learn(past)
        log.info("models.learnt", requests=len(past))

    def close(self) -> None:
        """Report no Ticks any more."""
        if self._timer is not None:
            self._timer.cancel()

    # ---- what is known ----

    @property
    def names(self) -> tuple[str, ...]:
        """Return the models' names as requests give them, as far as they are known."""
        return tuple(name for model in self.core.models if (name := model.shown_name))

    def find(self, name: str) -> ServedModel:
        """Return the model that a request means; an unnamed one is compared at admission."""
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
        """Return the model of streams with that model's name, or None if it is not served."""
        return self.core.serving(name)

    def serves(self, name: str) -> bool:
        """Return True if a model is named so in the settings."""
        return bool(name) and self.core.find(name) is not None

    def is_up(self, name: str) -> bool:
        """Return True if a model has a worker; for one that is not served, if any model has."""
        return self.core.is_up(name)

    def worker(self, slot: WorkerSlot) -> Worker:
        """Return what the core knows of a slot's worker."""
        return self.core.workers[slot.number]

    def reader(self, name: str) -> PromptReader | None:
        """Return what reads a model's prompts; None where workers answer in text."""
        return self.readers.get(name, self.readers.get(""))

    @property
    def reasons(self) -> tuple[str, ...]:
        """Return why no model can be asked for a token now; empty when one can."""
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
        """Return the tiers of named models, as edges are told."""
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
        """Return the expected time until a model is ready, in real seconds."""
        return self.core.expected_s(model, self._clock()) / self._pace

    # ---- requests ----

    def check_starts(self, model: ServedModel) -> None:
        """Raise `Unavailable` where requests do not wait, for a model that is not there."""
        if self.wait_s is not None:
            return
        if not model.is_up and model.deaths >= (1 if model.ready is None else FAILED_STARTS):
            retry_ms = ceil(model.circuit.retry_s(self._clock()) * 1000)
            least_ms = max(CANNOT_START_RETRY_MS, retry_ms)
            raise Unavailable(f"the worker cannot start: {model.last_exit}", min_retry_ms=least_ms)
        if model.ready is None:
            raise Unavailable("the model is loading", code="loading", min_retry_ms=LOADING_RETRY_MS)

    async def until_open(self, model: ServedModel, stream: bytes, *, known: bool = True) -> str:
        """Wait until a requested stream can be opened: its model has taken it, or loads.

        Return what the stream's reader is to be told of that, if anything. Without `known`, only a
        worker can say whether the request can be served: then one must have been there. Raises
        `Unavailable` where it takes too long, with the time to ask again.
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
                # The time of a first load is a guess, which refuses nobody.
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
        return f"{model.name!r} was waited for {loop.time() - begun:.1f} s" if has_waited else ""

    def _about(self, model: ServedModel, expected_s: float) -> str:
        """Return what a load takes, and how well that is known."""
        if model.ready is not None:
            return f"which takes about {expected_s:.1f} s"
        if self.reader(model.name) is None:
            return "for the first time: how long that takes is not known"
        return f"for the first time, which by the size of its files takes about {expected_s:.1f} s"

    def _too_late(self, model: ServedModel, expected_s: float) -> Unavailable:
        after_ms = round(max(expected_s, LEAST_RETRY_S) * 1000)
        is_coming = model.state is ModelState.LOADING
        why = "is being loaded" if is_coming else "waits for room among the others"
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
        """Let waiting requests look again, and edges know what has changed for them."""
        state = self._state()
        if state != self._told:
            self._told = state
            self.changed()
        news, self._news = self._news, asyncio.Event()
        news.set()

    def _set_timer(self) -> None:
        """Have a Tick reported when something is due by itself."""
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
        """Return Unix time minus the core's clock; a clock that is played has no other time."""
        return None if self._pace != 1.0 else self._unix_s() - self._clock()


def settings_name(model: ServedModel) -> str:
    """Return the name that a model has in the settings."""
    return model.name


def _tier(model: ServedModel) -> Tier:
    """Return the tier that a new request finds: a draining model has to be loaded again."""
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
    """Return the pool of several models. ConfigError: a policy or a schedule that cannot be."""
    measured = [found.load_s for plan in plans if (found := known.find(plan.name)) is not None]
    typical_s = median(measured) if measured else LOAD_S  # what prewarming policies reckon with

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
