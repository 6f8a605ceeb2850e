"""The core of models and workers: which are loaded, when and why. Events in, commands out.

A caller reports what happens and when (`handle`), carries out the commands that come back, and
reports a Tick at the time that `wake_at` names. The serving pool, the shadow pool and the
simulations all use this code. Callers cannot race, because every change of state follows the tables
in `states.py`. Time never goes back: an event with an earlier time than the previous event counts
as if both had the same time.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from math import inf
from random import Random
from typing import Any, Protocol

from tailrace.ledger.errors import CallerError, Conflict
from tailrace.ledger.flow.circuit_breaker import CircuitState
from tailrace.ledger.links.hints import Hint
from tailrace.origin.core import events
from tailrace.origin.core.events import Command, Event, RecordHistory, StartWorker, StopWorker
from tailrace.origin.core.model import (
    HINT_WINDOW_S,
    TURN_S,
    HintRecord,
    ModelRequest,
    ServedModel,
    Worker,
)
from tailrace.origin.core.states import (
    ABOUT_TO_GO,
    HOLDING_MEMORY,
    WORKER_TRANSITIONS,
    ModelEvent,
    ModelState,
    WorkerEvent,
    WorkerState,
    next_state,
)
from tailrace.origin.pool.members import LEAST_SIZE, PoolMember, Schedule
from tailrace.origin.pool.policies.policies import COLD_COST_GPU_S, GreedyDual, KeepAlivePolicy
from tailrace.origin.pool.records import (
    ArrivalRecord,
    CircuitChange,
    PoolChoice,
    PoolDecision,
    PoolRecord,
    StateChange,
    TierChange,
)
from tailrace.origin.pool.tiers import STAGE_TIERS, Tier
from tailrace.origin.workers.liveness import SETTLED_S, Circuit

PRICE_WEIGHT = 0.3
"""Weight of the newest load in the expected duration of a load, a moving average."""


class ShadowListener(Protocol):
    """The interface of the shadow pool, whose decisions are not carried out.

    It gets the requests of the pool that serves them.
    """

    def arrived(self, model: str, request: Hashable, now: float) -> None:
        """Note that a request has arrived."""

    def ended(self, request: Hashable, now: float, service_s: float) -> None:
        """Note that a request has ended, `service_s` seconds after the model could serve it."""


class ModelPool:
    """The models of one origin. `caps` has the memory limit of each device that has one.

    The caller must ensure that each model, and all pinned models together, fit the caps.
    """

    def __init__(
        self,
        members: Sequence[PoolMember],
        policy: KeepAlivePolicy,
        caps: Mapping[str, float] | None = None,
        *,
        cold_cost_gpu_s: float = COLD_COST_GPU_S,
        policies: Mapping[str, KeepAlivePolicy] | None = None,
        random: Random | None = None,
    ) -> None:
        """Create a pool; `policies` has the policies of models that do not use `policy`, by name.

        Workers are numbered from 0 on, in the order of `members`.
        """
        self.shadow: ShadowListener | None = None
        self.workers: list[Worker] = []
        self._caps = dict(caps or {})
        self._cold_cost = cold_cost_gpu_s
        self._policy = policy
        self._policies = dict(policies or {})
        self._ranking = policy if isinstance(policy, GreedyDual) else GreedyDual(cold_cost_gpu_s)
        self._models: dict[str, ServedModel] = {}
        for member in members:
            own = self._policies.get(member.name, policy)
            circuit = Circuit(random)
            model = ServedModel(member, own, member.load_s, member.is_pinned, circuit)
            model.workers = [
                Worker(len(self.workers) + nth, member.name) for nth in range(member.workers)
            ]
            self.workers += model.workers
            self._models[member.name] = model
        self._near = {name: self._sharing(model) for name, model in self._models.items()}
        """By name: the models that use a device of a model, including the model itself."""
        self._queue: list[str] = []
        """Names of the models that wait for memory; the one that has waited longest is first."""
        self._now = -inf
        self._unix_offset_s = 0.0
        self._commands: list[Command] = []
        self._handlers: dict[type[Event], Callable[[Any], object]] = {
            events.RequestArrived: self._arrive,
            events.RequestEnded: self._end,
            events.WorkerLoading: self._worker_loading,
            events.WorkerReady: self._worker_ready,
            events.WorkerSilent: lambda one: self._step(one.worker, WorkerEvent.SILENT),
            events.WorkerHeard: lambda one: self._step(one.worker, WorkerEvent.HEARD),
            events.WorkerProved: lambda one: self._prove(self.model_of(one.worker)),
            events.WorkerDied: self._worker_died,
            events.WorkerExited: self._worker_exited,
            events.ModelHinted: self._hinted,
            events.ModelPinned: self._pin,
            events.PoliciesSet: self._use,
            events.Filled: self._fill,
            events.Tick: self._tick,
        }

    def handle(self, event: Event, now: float) -> list[Command]:
        """Take note of an event, and return the commands to be carried out now, in order.

        Raises CallerError for a model that is not in this pool, and Conflict for a pin that leaves
        other models too little memory; then nothing has changed.
        """
        self._now = max(self._now, now)
        commands: list[Command] = []
        self._commands = commands
        self._handlers[type(event)](event)
        self._settle()
        return commands

    def wake_at(self) -> float:
        """Return when a Tick is next needed; infinite if only other events can change anything."""
        return min(map(self._due, self._models.values()), default=inf)

    # ---- what is known ----

    @property
    def models(self) -> Collection[ServedModel]:
        """Return all models, in the order of the settings."""
        return self._models.values()

    def find(self, name: str) -> ServedModel | None:
        """Return a model by its name, or None."""
        return self._models.get(name)

    def serving(self, name: str) -> ServedModel | None:
        """Return the model that serves streams with this model name, or None.

        An origin with a single model may not know its name; that model serves all streams.
        """
        return self.find(name) or self.find("")

    def is_up(self, name: str) -> bool:
        """Return True if a model has a loaded worker; for an unknown name, if any model has one."""
        model = self.find(name)
        return any(one.is_up for one in ([model] if model is not None else self.models))

    def may_take(self, worker: int, name: str) -> bool:
        """Return True if streams of the model `name` may be placed on this worker.

        Streams of a model that is not served may be placed on any worker, only to be ended.
        """
        is_served = bool(name) and self.find(name) is not None
        return self.workers[worker].model in ("", name) or not is_served

    def of(self, name: str) -> ServedModel:
        """Return the record of a model by its name; raises CallerError for an unknown name."""
        model = self._models.get(name)
        if model is None:
            hint = f"this pool has {', '.join(self._models)}"
            raise CallerError(f"no model is called {name!r}", field="model", hint=hint)
        return model

    def model_of(self, worker: int) -> ServedModel:
        """Return the model that a worker serves."""
        return self._models[self.workers[worker].model]

    def expected_s(self, name: str, now: float) -> float:
        """Return the seconds until a model is ready, if its load takes as long as earlier ones."""
        model = self.of(name)
        if model.is_ready:
            return 0.0
        begun_s = now - model.loading_s if model.state is ModelState.LOADING else 0.0
        return max(model.load_s - begun_s, 0.0)

    def used(self, device: str) -> float:
        """Return the memory that models hold on a device, also while they load or unload."""
        models = self._models.values()
        return sum(one.member.on(device) for one in models if one.state in HOLDING_MEMORY)

    def _sharing(self, model: ServedModel) -> list[ServedModel]:
        """Return all models that use a device of this model, including the model itself."""
        devices = {*model.member.devices}
        models = self._models.values()
        return [one for one in models if not devices.isdisjoint(one.member.devices)]

    def _missing(self, model: ServedModel) -> dict[str, float]:
        """Return the memory that a model lacks on each of its devices; empty if it fits."""
        lacks = {
            device: self.used(device) + model.member.on(device) - self._caps.get(device, inf)
            for device in model.member.devices
        }
        return {device: missing for device, missing in lacks.items() if missing > 0}

    # ---- requests ----

    def _arrive(self, event: events.RequestArrived) -> None:
        """Note a request; the model serves it now, or as soon as the model is ready."""
        model = self.of(event.model)
        if event.request in model.requests:
            return
        was_unused = not model.requests
        model.requests[event.request] = one = ModelRequest(self._now, model.tier)
        if self.shadow is not None:
            self.shadow.arrived(model.name, event.request, self._now)
        model.request_count += 1
        model.count_idling(self._now, idle=False)
        for hint in model.hints.values():
            hint.requested(self._now)
        if was_unused:
            if model.ended_s is not None:
                model.policy.observe(model.name, self._now - model.ended_s)
            model.ended_s, model.prewarm_at_s = None, inf
            self._ranking.arrived(model.name, max(model.member.size, LEAST_SIZE))
            if not model.is_ready:
                model.cold_starts += 1
                # The model serves this request only after a load. While the model is being
                # unloaded, its tier is still that of a loaded one, so a lower tier is recorded.
                one.tier = min(model.tier, Tier.DEVICE)
        if model.is_ready or (event.begun and model.state is ModelState.DRAINING):
            one.taken_s = self._now
            self._reach(model, Tier.HOT, "asked")
        else:
            self._want(model, PoolChoice.LOAD, "a request waits for it", {})

    def _end(self, event: events.RequestEnded) -> None:
        model = self.of(event.model)
        one = model.requests.pop(event.request, None)
        if one is None:
            return
        taken_s = self._now if one.taken_s is None else one.taken_s
        times = (self._unix(one.arrived_s), taken_s - one.arrived_s, self._unix(self._now))
        self._record(ArrivalRecord(model.name, *times, one.tier))
        if self.shadow is not None:
            self.shadow.ended(event.request, self._now, self._now - taken_s)
        if model.state is ModelState.DRAINING and len(model.requests) == len(model.waiting):
            self._leave_to_others(model)
            return
        if model.requests:
            return
        model.ended_s = self._now
        model.count_idling(self._now, idle=model.is_ready)
        if model.state is ModelState.QUEUED:  # it was queued for the request that has ended
            self._queue.remove(model.name)
            self._turn(model, ModelEvent.DROPPED, "its request has ended")
        self._decide(model)

    # ---- workers ----

    def _step(self, number: int, event: WorkerEvent) -> bool:
        """Change a worker's state by WORKER_TRANSITIONS; return False for an outdated event."""
        worker = self.workers[number]
        after = WORKER_TRANSITIONS.get((worker.state, event))
        if after is None:
            return False
        worker.state, worker.since_s = after, self._now
        if not worker.is_up:
            worker.ready = None
        return True

    def _worker_loading(self, event: events.WorkerLoading) -> None:
        worker = self.workers[event.worker]
        if worker.state in (WorkerState.RESTING, WorkerState.STOPPING):
            return
        model = self._models[worker.model]
        model.loading = event.progress
        tier = STAGE_TIERS.get(event.progress.stage)
        if tier is not None and model.state is ModelState.LOADING and tier > model.tier:
            self._reach(model, tier, "loading")

    def _worker_ready(self, event: events.WorkerReady) -> None:
        worker = self.workers[event.worker]
        if not self._step(worker.number, WorkerEvent.READY):
            return
        model = self._models[worker.model]
        worker.ready = event.ready
        model.ready, model.loading, model.deaths = event.ready or model.ready, None, 0
        if model.state is not ModelState.LOADING:
            return
        self._turn(model, ModelEvent.LOADED, "a worker is ready")
        model.retry_at_s = 0.0
        took_s = self._now - model.loading_s
        newest, known = (
            took_s if event.load_s is None else event.load_s,
            model.prices_s.get(model.loading_from),
        )
        price = newest if known is None else known + PRICE_WEIGHT * (newest - known)
        model.prices_s[model.loading_from] = model.load_s = price
        model.ready_s = self._now
        self._reach(model, Tier.COMPILED, model.reason, took_s)
        if waiting := model.waiting:
            for request in waiting:
                request.taken_s = self._now
            self._reach(model, Tier.HOT, "asked")
        if not model.requests:
            model.wasted_gpu_s += took_s
            model.count_idling(self._now, idle=True)

    def _worker_died(self, event: events.WorkerDied) -> None:
        worker = self.workers[event.worker]
        model = self._models[worker.model]
        was_up, was_stopping = worker.is_up, worker.state is WorkerState.STOPPING
        if not self._step(worker.number, WorkerEvent.DIED):
            return
        if was_stopping:
            self._check_gone(model)
            return
        model.deaths += 1
        model.last_exit, model.loading = event.reason, None
        before = model.circuit.state
        model.circuit.died(worker.number, self._now, was_ready=was_up)
        self._note_circuit(model, before)
        if model.state is ModelState.READY and not model.is_up:
            self._turn(model, ModelEvent.LOST, "its worker died")
            model.count_idling(self._now, idle=False)
            model.loading_s, model.loading_from = self._now, Tier.HOST
            model.reason = "its worker died"
            self._reach(model, Tier.HOST, model.reason)

    def _worker_exited(self, event: events.WorkerExited) -> None:
        if self._step(event.worker, WorkerEvent.EXITED):
            self._check_gone(self.model_of(event.worker))

    def _prove(self, model: ServedModel) -> None:
        """Close the model's circuit breaker, because a worker of it has proved that it can run."""
        before = model.circuit.state
        model.circuit.made()
        self._note_circuit(model, before)

    def _note_circuit(self, model: ServedModel, before: CircuitState) -> None:
        if model.circuit.state is not before:
            change = CircuitChange(model.name, model.circuit.state.value, model.circuit.reason)
            self._record(change)

    def _start_due(self) -> None:
        """Start the waiting workers whose circuit breaker allows it now."""
        for worker in self.workers:
            if worker.state is not WorkerState.WAITING:
                continue
            circuit = self._models[worker.model].circuit
            if circuit.wait_s(worker.number, self._now) == 0:
                self._step(worker.number, WorkerEvent.STARTED)
                self._commands.append(StartWorker(worker.number))

    def _unload(self, model: ServedModel, event: ModelEvent, reason: str) -> None:
        """Change a model's state by `event`, and order all its workers to end."""
        self._turn(model, event, reason)
        model.reason = reason
        for worker in model.workers:
            self._step(worker.number, WorkerEvent.UNWANTED)
            if worker.state is WorkerState.STOPPING:
                self._commands.append(StopWorker(worker.number))

    def _check_gone(self, model: ServedModel) -> None:
        """Free the memory of a model that is being unloaded, once all its workers have ended."""
        is_at_rest = all(worker.state is WorkerState.RESTING for worker in model.workers)
        if model.state not in ABOUT_TO_GO or not is_at_rest:
            return
        self._turn(model, ModelEvent.GONE, model.reason)
        model.loading = None
        self._reach(model, Tier.HOST, model.reason)
        if model.state is ModelState.QUEUED:
            self._enqueue(model)

    # ---- operators' orders and hints ----

    def _hinted(self, event: events.ModelHinted) -> None:
        for model in [self.of(event.model)] if event.model else list(self._models.values()):
            self._hint(model, event.hint)

    def _hint(self, model: ServedModel, hint: Hint) -> None:
        """Load a hinted model, if that is worth its cost and needs no eviction of another model."""
        if model.requests:
            return
        record = model.hints.setdefault(hint, HintRecord())
        share = 1.0 if hint is Hint.OPERATOR else record.share
        record.came(self._now)
        spent_s = model.load_s + (1 - share) * HINT_WINDOW_S
        features = {
            "share": share,
            "saved_gpu_s": share * self._cold_cost,
            "spent_gpu_s": spent_s,
        }
        if hint is not Hint.OPERATOR and share * self._cold_cost <= spent_s:
            why = f"a {hint} hint is right too seldom"
            self._log(model, PoolChoice.DECLINE, why, features)
            return
        until_s = self._now + model.load_s + HINT_WINDOW_S
        model.keep_until_s = max(model.keep_until_s, until_s)
        if model.state in (ModelState.LOADING, ModelState.READY, ModelState.QUEUED):
            return
        if hint is not Hint.OPERATOR and not self._fits(model):
            self._log(model, PoolChoice.DECLINE, "there is no free memory", features)
            return
        self._want(model, PoolChoice.PREWARM, f"hint: {hint}", features)

    def _fill(self, _: events.Filled) -> None:
        """Load models in the order of the settings, as many as fit."""
        self._settle()  # loads pinned models, so that they come before others
        for model in self._models.values():
            if model.state is ModelState.AWAY and self._fits(model):
                self._hint(model, Hint.OPERATOR)

    def _check_pins(self, model: ServedModel, device: str) -> None:
        """Raise Conflict if pinning a model leaves another one too little memory."""
        cap = self._caps.get(device, inf)
        pinned = [one for one in self._models.values() if one.is_pinned or one is model]
        taken = sum(one.member.on(device) for one in pinned)
        for one in (one for one in self._models.values() if device in one.member.devices):
            if taken + (0 if one in pinned else one.member.on(device)) > cap:
                raise Conflict(
                    f"pinned models take {taken:g} of {device}, whose cap is {cap:g}, and"
                    f" {one.name!r} takes {one.member.on(device):g}",
                    field="pin",
                    hint="pin fewer models, or raise the cap",
                )

    def _pin(self, event: events.ModelPinned) -> None:
        model, pinned = self.of(event.model), event.pinned
        for device in model.member.devices if pinned else ():
            self._check_pins(model, device)
        model.is_pinned = pinned
        if not pinned and not model.requests:
            self._decide(model)

    def _use(self, event: events.PoliciesSet) -> None:
        """Use other policies from now on, and let them decide about the idle models again."""
        if event.policy is not None:
            self._policy = event.policy
            if isinstance(event.policy, GreedyDual):
                self._ranking = event.policy
        if event.own is not None:
            self._policies = dict(event.own)
        for model in self._models.values():
            model.policy = self._policies.get(model.name, self._policy)
            if model.is_idle:
                self._decide(model)

    # ---- what is due ----

    def _tick(self, event: events.Tick) -> None:
        if event.unix_offset_s is not None:
            self._unix_offset_s = event.unix_offset_s

    def _settle(self) -> None:
        """Do everything that is due now; the next change is at the next event or at `wake_at`."""
        for model in self._models.values():
            if model.circuit.deaths and any(map(self._has_settled, model.workers)):
                self._prove(model)
            if model.is_idle and self._until(model) <= self._now:
                self._evict(model, f"{model.policy.name}: its keep-alive time is over")
        for model in self._models.values():
            if model.state is not ModelState.AWAY or model.requests:
                continue
            if wanted := self._operator_wants(model):
                self._want(model, PoolChoice.PREWARM, wanted, {})
            elif model.prewarm_at_s <= self._now:
                self._prewarm(model)
        before = len(self._commands)
        self._admit()
        for model in self._models.values():
            self._give_up_hopeless(model)
        if len(self._commands) > before:  # a change was recorded, so others may fit now
            self._admit()
        self._start_due()

    def _has_settled(self, worker: Worker) -> bool:
        """Return True if a worker has been ready for long enough to close the circuit breaker."""
        return worker.state is WorkerState.READY and worker.since_s + SETTLED_S <= self._now

    def _give_up_hopeless(self, model: ServedModel) -> None:
        """Unload a model whose workers die again and again, until the next trial is due.

        A model that is requested, pinned or scheduled keeps its memory unless another model waits
        for that memory.
        """
        if model.state not in (ModelState.LOADING, ModelState.DRAINING) or model.is_up:
            return
        retry_s = model.circuit.retry_s(self._now)
        if model.circuit.state is not CircuitState.OPEN or retry_s <= 0:
            return
        if (model.requests or self._operator_wants(model)) and not self._is_in_the_way(model):
            return
        reason = model.circuit.reason
        self._unload(model, ModelEvent.GIVEN_UP, reason)
        model.keep_until_s, model.prewarm_at_s = self._now, inf
        model.retry_at_s = self._now + retry_s
        self._log(model, PoolChoice.EVICT, reason, {})
        if model.requests:
            self._turn(model, ModelEvent.WANTED, "a request waits for it")
            model.reason = "a request waits for it"
        self._check_gone(model)

    def _is_in_the_way(self, model: ServedModel) -> bool:
        """Return True if another model waits for memory on a device of this model."""
        near = self._near[model.name]
        others = (one for one in near if one is not model and one.name in self._queue)
        return any(one.retry_at_s <= self._now for one in others)

    def _due(self, model: ServedModel) -> float:
        """Return when a Tick is next needed for a model if no other event happens."""
        due_s, circuit = self._model_due(model), model.circuit
        for worker in model.workers:
            if worker.state is WorkerState.WAITING and (retry_s := circuit.retry_s(self._now)):
                due_s = min(due_s, self._now + retry_s)
            elif worker.state is WorkerState.READY and circuit.deaths:
                due_s = min(due_s, worker.since_s + SETTLED_S)
        return due_s

    def _model_due(self, model: ServedModel) -> float:
        if model.state is ModelState.QUEUED and self._now < model.retry_at_s:
            return model.retry_at_s
        if model.requests:
            return self._turn_s(model) if model.state is ModelState.QUEUED else inf
        if model.is_ready:
            return self._until(model)
        if model.state is not ModelState.AWAY:
            return inf
        begins = [self._hours(one)[0] - model.load_s for one in model.member.schedules]
        if model.is_pinned:
            begins.append(self._now)
        return min([model.prewarm_at_s, *(max(begin_s, model.retry_at_s) for begin_s in begins)])

    def _until(self, model: ServedModel) -> float:
        """Return the time until which an idle model stays loaded."""
        if model.is_pinned:
            return inf
        until_s = model.keep_until_s
        if model.prewarm_at_s <= until_s:
            until_s = max(until_s, model.prewarm_until_s)
        for schedule in model.member.schedules:
            begin_s, end_s = self._hours(schedule)
            if begin_s - model.load_s <= self._now:
                until_s = max(until_s, end_s)
        return until_s

    def _operator_wants(self, model: ServedModel) -> str:
        """Return why the model is to be loaded without requests: "pinned" or "scheduled".

        The result is empty if there is no such reason, or before the model may be tried again.
        """
        if self._now < model.retry_at_s:
            return ""
        if model.is_pinned:
            return "pinned"
        begins = (self._hours(one)[0] - model.load_s for one in model.member.schedules)
        return "scheduled" if any(begin_s <= self._now for begin_s in begins) else ""

    # ---- the rules ----

    def _decide(self, model: ServedModel) -> None:
        """Ask a model's policy how long to keep it, and when to load it; policies use Unix time."""
        decision = model.policy.decide(model.name, self._unix(self._now))
        offset_s = self._unix_offset_s
        model.keep_until_s = decision.keep_until_s - offset_s
        model.prewarm_at_s = decision.prewarm_at_s - offset_s
        model.prewarm_until_s = decision.prewarm_until_s - offset_s
        self._log(model, PoolChoice.KEEP, decision.reason, decision.features)

    def _prewarm(self, model: ServedModel) -> None:
        """Load a model for which its policy expects a request soon, if it fits."""
        until_s, model.prewarm_at_s = model.prewarm_until_s, inf
        if until_s <= self._now:
            return
        if not self._fits(model):
            self._log(model, PoolChoice.DECLINE, "there is no free memory", {})
            return
        model.keep_until_s = until_s
        self._want(model, PoolChoice.PREWARM, "a request is expected soon", {})

    def _want(
        self, model: ServedModel, choice: PoolChoice, reason: str, features: dict[str, float]
    ) -> None:
        """Have a model loaded, now or as soon as there is memory for it."""
        before = model.state
        self._turn(model, ModelEvent.WANTED, reason)
        if model.state is not before:
            model.reason = reason
            self._log(model, choice, reason, features)
        if before is ModelState.AWAY:
            self._enqueue(model)

    def _enqueue(self, model: ServedModel) -> None:
        self._queue.append(model.name)
        model.queued_s = self._now

    def _admit(self) -> None:
        """Load waiting models that fit: models with requests first, then by waiting time.

        If a model does not fit, later models that need no eviction may be loaded before it. Once a
        requested model has waited for TURN_S, free memory is kept for it; otherwise small models
        could take that memory again and again.
        """
        if not self._queue:
            return
        blocked: set[str] = set()
        reserved: set[str] = set()
        for name in sorted(self._queue, key=lambda one: not self._models[one].requests):
            model = self._models[name]
            devices = {*model.member.devices}
            if self._now < model.retry_at_s or devices & reserved:
                continue
            missing = self._missing(model)
            if not missing:
                self._load(model)
            elif not devices & blocked:
                blocked |= devices
                self._make_room(model, missing)
                if model.requests and self._now >= model.queued_s + TURN_S:
                    reserved |= devices

    def _load(self, model: ServedModel) -> None:
        self._queue.remove(model.name)
        self._turn(model, ModelEvent.ADMITTED, model.reason)
        model.loading_s, model.loading_from = self._now, model.tier
        model.loads += 1
        for worker in model.workers:
            self._step(worker.number, WorkerEvent.WANTED)

    def _make_room(self, model: ServedModel, missing: Mapping[str, float]) -> None:
        """Evict idle models if this frees enough memory for `model`; otherwise drain busy ones.

        `missing` is the memory that `model` lacks, by device. Memory of models that are already
        being unloaded counts as free. Idle models are evicted only if this frees enough memory on
        every device, since a model is loaded on all of its devices or on none. If it does not, and
        requests have waited for TURN_S, busy models are drained.
        """
        near = self._near[model.name]
        going = (*ABOUT_TO_GO, ModelState.DRAINING)
        wanted = {
            device: lacks - sum(one.member.on(device) for one in near if one.state in going)
            for device, lacks in missing.items()
        }
        idle = [one for one in near if one.is_idle and not self._is_kept_from(one, model)]
        beyond = {
            device: lacks - sum(one.member.on(device) for one in idle)
            for device, lacks in wanted.items()
        }
        if all(lacks <= 0 for lacks in beyond.values()):
            self._evict_for(model, idle, wanted)
        elif model.requests and self._now >= model.queued_s + TURN_S:
            self._drain_for(model, near, beyond)

    def _evict_for(
        self, model: ServedModel, idle: Sequence[ServedModel], wanted: Mapping[str, float]
    ) -> None:
        """Evict the least valuable idle models, until the memory `wanted` is free on each device.

        An evicted model is unloaded from all of its devices.
        """
        gone: list[ServedModel] = []
        for device, lacks in wanted.items():
            sizes = {one.name: size for one in idle if (size := one.member.on(device))}
            still = lacks - sum(one.member.on(device) for one in gone)
            left = {name: size for name, size in sizes.items() if self._models[name] not in gone}
            if still > 0:
                victims = self._ranking.victims(left, left, still)
                gone += [self._models[name] for name in victims]
        for one in gone:
            self._evict(one, f"{model.name} needs its memory, and it was worth least")

    def _is_kept_from(self, one: ServedModel, other: ServedModel) -> bool:
        """Return True if the model `one` must not be unloaded to make room for `other`.

        A pin always keeps a model: `_check_pins` has ensured that pins leave memory for every other
        model. Schedules are not checked in this way, so they yield to requests that have waited for
        TURN_S.
        """
        if one.is_pinned or not other.requests or self._now < other.queued_s + TURN_S:
            return bool(self._operator_wants(one))
        return False

    def _drain_for(
        self, model: ServedModel, near: Sequence[ServedModel], beyond: Mapping[str, float]
    ) -> None:
        """Drain busy models, which are then unloaded, until `model` would fit.

        The model that has been ready longest is drained first. `beyond` is the memory that would
        still be missing on each device if all idle models were unloaded.
        """
        over: list[ServedModel] = []
        missing = {device: lacks for device, lacks in beyond.items() if lacks > 0}
        for one in sorted(self._busy(near, model), key=lambda one: one.ready_s):
            helps = any(one.member.on(device) for device in missing)
            if helps and one.turn_ends_s <= self._now:
                over.append(one)
                less = {device: lacks - one.member.on(device) for device, lacks in missing.items()}
                missing = {device: lacks for device, lacks in less.items() if lacks > 0}
        for one in over if not missing else ():
            one.reason = f"{model.name} has waited for its memory"
            self._turn(one, ModelEvent.DRAINED, one.reason)
            due_s = max(model.queued_s + TURN_S, one.turn_ends_s)
            features = {"waited_s": self._now - model.queued_s, "late_s": self._now - due_s}
            self._log(one, PoolChoice.DRAIN, one.reason, features)

    def _busy(self, near: Sequence[ServedModel], other: ServedModel) -> list[ServedModel]:
        """Return the models of `near` that have requests and may be drained for `other`."""
        busy = (one for one in near if one.is_ready and one.requests)
        return [one for one in busy if not self._is_kept_from(one, other)]

    def _leave_to_others(self, model: ServedModel) -> None:
        """Unload a drained model after the last request that it served.

        If other requests wait for the model, it is loaded again as soon as there is memory.
        """
        self._leave(model, model.reason)
        if model.requests:
            self._turn(model, ModelEvent.WANTED, "a request waits for it")
            model.cold_starts += 1
            model.reason = "a request waits for it"
        else:
            model.ended_s = self._now
            self._decide(model)
        self._check_gone(model)

    def _turn_s(self, model: ServedModel) -> float:
        """Return the time from which a busy model may be drained for a queued one.

        The time is infinite if no busy model can be drained.
        """
        due_s = model.queued_s + TURN_S
        if due_s > self._now:
            return due_s
        near = self._near[model.name]
        ends_s = min((one.turn_ends_s for one in self._busy(near, model)), default=inf)
        return ends_s if ends_s > self._now else inf

    def _evict(self, model: ServedModel, reason: str) -> None:
        self._leave(model, reason)
        self._check_gone(model)

    def _leave(self, model: ServedModel, reason: str) -> None:
        """Begin to unload a model; the caller then calls `_check_gone`."""
        self._unload(model, ModelEvent.EVICTED, reason)
        model.count_idling(self._now, idle=False)
        idle_s = 0.0 if model.ended_s is None else self._now - model.ended_s
        self._log(model, PoolChoice.EVICT, reason, {"idle_s": idle_s})

    def _fits(self, model: ServedModel) -> bool:
        waiting = [one for one in self._models.values() if one.name in self._queue]
        return all(
            self.used(device) + sum(one.member.on(device) for one in (*waiting, model))
            <= self._caps.get(device, inf)
            for device in model.member.devices
        )

    # ---- time and records ----

    def _unix(self, at_s: float) -> float:
        return at_s + self._unix_offset_s

    def _hours(self, schedule: Schedule) -> tuple[float, float]:
        """Return the begin and end of a schedule's current or next hours, on the core's clock."""
        hours = schedule.next_hours(self._unix(self._now))
        return hours.begin_s - self._unix_offset_s, hours.end_s - self._unix_offset_s

    def _turn(self, model: ServedModel, event: ModelEvent, reason: str) -> None:
        before, model.state = model.state, next_state(model.state, event)
        if model.state is not before:
            self._record(StateChange(model.name, before, model.state, reason))

    def _reach(
        self, model: ServedModel, tier: Tier, reason: str, took_s: float | None = None
    ) -> None:
        if tier is model.tier and took_s is None:
            return
        before, model.tier = model.tier, tier
        self._record(TierChange(model.name, self._unix(self._now), before, tier, reason, took_s))

    def _log(
        self, model: ServedModel, choice: PoolChoice, reason: str, features: dict[str, float]
    ) -> None:
        times: tuple[float | None, ...] = ()
        if choice is PoolChoice.KEEP:
            times = (self._unix(model.keep_until_s),)
            if model.prewarm_at_s != inf:
                ahead = model.prewarm_at_s, model.prewarm_until_s
                times = (*times, *map(self._unix, ahead))
        at_s = self._unix(self._now)
        self._record(
            PoolDecision(model.name, at_s, model.policy.name, choice, reason, features, *times)
        )

    def _record(self, record: PoolRecord) -> None:
        self._commands.append(RecordHistory(record))
