"""Carries out what the pool decides: has models loaded and leave, and requests wait for theirs.

The pool (`origin.pool`) has the rules and no I/O. What happens to streams and workers is told to
it here, and its orders wake workers' slots or put them to rest. A model leaves only when no stream
of it runs or waits, and no request for it is on its way.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from statistics import median

import structlog

from tailrace.ledger.errors import CallerError, ConfigError, Unavailable
from tailrace.ledger.flow.circuit_breaker import CircuitState
from tailrace.ledger.frame import ModelTier
from tailrace.origin.config import OriginConfig
from tailrace.origin.generations.stream import GeneratedStream
from tailrace.origin.metrics import Metrics
from tailrace.origin.pool.history import queries
from tailrace.origin.pool.history.recorder import HistoryRecorder
from tailrace.origin.pool.history.schema import HistoryStore
from tailrace.origin.pool.members import PoolMember, Schedule
from tailrace.origin.pool.policies.policies import LOAD_S, WarmPrices
from tailrace.origin.pool.records import ArrivalRecord, PoolDecision, PoolRecord, TierChange
from tailrace.origin.pool.tiers import ABOUT_TO_GO, STAGE_TIERS, Residence, Tier
from tailrace.origin.pool.warm_pool import PoolOrder
from tailrace.origin.serving.live_pool import MAX_REMEMBERED, LivePool
from tailrace.origin.serving.pins import Pins
from tailrace.origin.serving.plan import KnownModel, KnownModels, ModelPlan, caps, first_load_s
from tailrace.origin.serving.served_model import ServedModel, ServedModels
from tailrace.origin.workers.worker_process import WorkerSlot

LEAST_RETRY_S = 1.0
"""Who is refused for a model that loads is told to wait for so long at least."""
MIN_SLEEP_S, MOST_SLEEP_S = 0.05, 3600.0
"""Between two looks at what is due by itself."""

log = structlog.get_logger("models")


def log_record(record: PoolRecord) -> None:
    """What the pool does, for the log; requests have their own lines."""
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


class ModelKeeper:
    """`clock` gives Unix time in seconds, `wait_s` is how long a request waits for its model, and
    `withdraw` takes a slot from those that are given streams, `is_open` says whether a stream runs
    or waits here, `changed` is called when edges should hear of a tier. `pace` is how fast that
    clock runs: a day that was recorded can be played in a minute."""

    def __init__(
        self,
        models: ServedModels,
        live: LivePool,
        known: KnownModels,
        metrics: Metrics,
        *,
        clock: Callable[[], float],
        wait_s: float,
        withdraw: Callable[[WorkerSlot], None],
        is_open: Callable[[bytes], bool],
        pace: float = 1.0,
        changed: Callable[[], None] = lambda: None,
    ) -> None:
        self.live, self.pool = live, live.pool
        live.carry_out = self._do
        self._pace = pace
        self.wait_s = wait_s
        self._models = models
        self._known = known
        self._clock = clock
        self._began_s = clock()
        self._withdraw = withdraw
        self._is_open = is_open
        self._visits: set[bytes] = set()
        self._changed = changed
        self._told: list[Tier] = []
        self._news = asyncio.Event()
        """Set, and made anew, when a model may have come nearer."""
        self._timer: asyncio.TimerHandle | None = None
        self._metrics = metrics
        for model in models:
            metrics.serve_model(
                model.name,
                tier=partial(getattr, self.pool.of(model.name), "tier"),
                circuit=partial(_circuit_state, model),
                streams=partial(getattr, self.pool.of(model.name), "visits"),
            )
            if (found := known.find(model.name)) is not None:
                model.ready = found.ready

    def start(self) -> None:
        """Load what is pinned, and then of the others, in their order, as many as fit."""
        self.live.restore_pins()
        now = self._clock()
        self._do([*self.pool.tick(now), *self.pool.fill(now)])

    async def learn(self, store: HistoryStore, origin: str) -> None:
        """What a history says of these models before this origin began."""
        rows = await queries.lately(store, origin, round(self._began_s * 1e3), MAX_REMEMBERED)
        past = [
            ArrivalRecord(model, at_ms / 1e3, 0.0, ended_ms / 1e3, Tier.HOT)
            for model, at_ms, ended_ms in rows
            if self._models.serves(model)
        ]
        await self.live.learn(past)
        log.info("models.learnt", requests=len(past))

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    # ---- requests ----

    def arrive(self, model: str, stream: bytes, *, begun: bool = True) -> None:
        """A stream wants its model, or a request for one does; told again, nothing changes."""
        if stream not in self._visits and self._models.serves(model):
            self._visits.add(stream)
            self._do(self.pool.arrive(model, stream, self._clock(), begun=begun))

    def end(self, stream: bytes) -> None:
        """It is over, or waits no longer."""
        if stream in self._visits:
            self._visits.discard(stream)
            self._do(self.pool.end(stream, self._clock()))

    @asynccontextmanager
    async def loading(
        self, model: ServedModel, stream: bytes, *, known: bool = True
    ) -> AsyncIterator[str]:
        """Within, a stream of that id can be opened: see `begin`. It stays a visit if it was."""
        self.arrive(model.name, stream, begun=False)
        try:
            yield await self.begin(model, known=known)
        finally:
            if not self._is_open(stream):
                self.end(stream)

    async def begin(self, model: ServedModel, *, known: bool = True) -> str:
        """Wait until a stream of a model that was asked for may be opened: it is ready, or on its
        way. Gives what the stream's reader is to be told of that, if anything.

        Without `known`, only a worker can say whether what is asked can be done: then one must
        have been there. Raises `Unavailable` where it takes too long, with when to ask again.
        """
        loop = asyncio.get_running_loop()
        begun, has_waited = loop.time(), False
        deadline = begun + self.wait_s
        while not self.pool.of(model.name).is_ready:
            self._check_circuit(model)
            left_s, expected_s = deadline - loop.time(), self.expected_s(model.name)
            if self.pool.of(model.name).residence is Residence.LOADING:
                # Of one that was never loaded it is a guess, which refuses nobody.
                if left_s <= 0 or (model.ready is not None and expected_s > left_s):
                    raise self._too_late(model, expected_s)
                if known or model.ready is not None:
                    return f"{model.name!r} is being loaded, {_about(model, expected_s)}"
            news, has_waited = self._news, True
            try:
                async with asyncio.timeout_at(deadline):
                    await news.wait()
            except TimeoutError:
                raise self._too_late(model, expected_s) from None
        return f"{model.name!r} was waited for {loop.time() - begun:.1f} s" if has_waited else ""

    def expected_s(self, model: str) -> float:
        """Until it may be asked, as far as loads were measured; in time as it passes."""
        return self.pool.expected_s(model, self._clock()) / self._pace

    def _too_late(self, model: ServedModel, expected_s: float) -> Unavailable:
        after_ms = round(max(expected_s, LEAST_RETRY_S) * 1000)
        is_coming = self.pool.of(model.name).residence is Residence.LOADING
        why = "is being loaded" if is_coming else "waits for room among the others"
        return Unavailable(
            f"{model.name!r} {why}",
            code="loading",
            hint=f"a request waits for its model for {self.wait_s:g} s (origin.cold_wait_s)",
            min_retry_ms=after_ms,
        )

    def _check_circuit(self, model: ServedModel) -> None:
        left_s = model.circuit.retry_s(time.monotonic())
        if model.circuit.state is CircuitState.OPEN and left_s > 0 and not model.up:
            after_ms = round(max(left_s, LEAST_RETRY_S) * 1000)
            raise Unavailable(
                f"no worker of {model.name!r} can start: {model.fate}",
                min_retry_ms=after_ms,
            )

    # ---- workers ----

    def reached(self, model: ServedModel, stage: str) -> None:
        """Its loading has come to that stage."""
        tier = STAGE_TIERS.get(stage)
        if tier is not None and self.pool.of(model.name).residence is Residence.LOADING:
            self.pool.stage(model.name, tier, self._clock())

    def loaded(self, model: ServedModel, slot: WorkerSlot) -> None:
        """Take note that a worker of a model is ready, and may be given streams."""
        load_s = None if slot.start is None else slot.start.own_s
        if model.ready is not None and load_s is not None:
            self._known.learn(model.name, KnownModel(model.ready, load_s))
        if self.pool.of(model.name).residence in (Residence.LOADING, Residence.READY):
            price_s = None if load_s is None else load_s * self._pace
            self._do(self.pool.loaded(model.name, self._clock(), price_s))

    def lost(self, model: ServedModel) -> None:
        """A worker of it died; another one is started unless its circuit is open."""
        residence = self.pool.of(model.name).residence
        if not model.up and residence in (Residence.LOADING, Residence.READY):
            self.pool.lost(model.name, self._clock())
        self._give_up()
        self._tell()

    def rested(self, model: ServedModel) -> None:
        """A slot of it is at rest; once all are, its room is free."""
        is_going = self.pool.of(model.name).residence in ABOUT_TO_GO
        if is_going and all(slot.is_resting for slot in model.slots):
            self._do(self.pool.gone(model.name, self._clock()))

    def look(self, streams: Iterable[GeneratedStream], now: float) -> list[GeneratedStream]:
        """Now and then: gives the streams that were opened while their model was on its way, and
        have waited for it too long; where it was never loaded and its circuit is open, at once.
        `now` is on the clock of when they were asked for."""
        self._give_up()
        return [
            stream
            for stream in streams
            if stream.asked_s is not None and not stream.started
            if self._models.serves(stream.recipe.model)
            if not self.pool.of(stream.recipe.model).is_ready
            if now - stream.asked_s > self.wait_s
            or _never_starts(self._models.find(stream.recipe.model))
        ]

    def why_late(self, model: str) -> str:
        """What the readers of streams that `look` gave are told."""
        trouble = _trouble(self._models.find(model))
        return f"{model!r} was not loaded in time" + (f": {trouble}" if trouble else "")

    def _give_up(self) -> None:
        """Give up models whose workers die again and again, until their next trial is due.

        One that has streams keeps its place unless another model waits for the room.
        """
        for model in self._models:
            kept, now = self.pool.of(model.name), self._clock()
            left_s = model.circuit.retry_s(time.monotonic())
            is_hopeless = not model.up and model.circuit.state is CircuitState.OPEN and left_s > 0
            if not is_hopeless or kept.residence not in (Residence.LOADING, Residence.DRAINING):
                continue
            if not kept.visits or self.pool.is_in_the_way(model.name, now):
                retry_at_s = now + left_s * self._pace
                self._do(self.pool.given_up(model.name, now, model.circuit.reason, retry_at_s))

    # ---- orders ----

    def _do(self, orders: Iterable[PoolOrder]) -> None:
        for order in orders:
            model = self._models.find(order.model)
            counter = self._metrics.model_loads if order.load else self._metrics.model_leaves
            counter.labels(model.name).inc()
            log.info("model.load" if order.load else "model.leave", model=model.name)
            for slot in model.slots:
                if order.load:
                    slot.wake()
                else:
                    self._withdraw(slot)
                    slot.rest()
        self._tell()
        self._set_timer()

    def _tell(self) -> None:
        """Whoever waits looks again; edges are told where a tier has changed."""
        tiers = [self._tier(model.name) for model in self._models]
        if tiers != self._told:
            self._told = tiers
            self._changed()
        news, self._news = self._news, asyncio.Event()
        news.set()

    def _set_timer(self) -> None:
        """Have the pool look again when something is due by itself."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        now = self._clock()
        wait_s = min(self.pool.wake_at(now) - now, MOST_SLEEP_S)
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(max(wait_s, MIN_SLEEP_S) / self._pace, self._tick)

    def _tick(self) -> None:
        self._timer = None
        self._do(self.pool.tick(self._clock()))

    # ---- what is known ----

    def _tier(self, model: str) -> Tier:
        """As a new request finds it: one that drains has to be loaded again for that."""
        is_draining = self.pool.of(model).residence is Residence.DRAINING
        return Tier.HOST if is_draining else self.pool.of(model).tier

    def tiers(self) -> tuple[ModelTier, ...]:
        """As edges are told."""
        return tuple(
            ModelTier(
                model.name,
                self._tier(model.name).word,
                round(self.expected_s(model.name) * 1000),
                _trouble(model),
            )
            for model in self._models
        )


def _circuit_state(model: ServedModel) -> int:
    return [*CircuitState].index(model.circuit.state)


def _about(model: ServedModel, expected_s: float) -> str:
    """What a load takes, and how well that is known."""
    if model.ready is not None:
        return f"which takes about {expected_s:.1f} s"
    if model.reader is None:
        return "for the first time: how long that takes is not known"
    return f"for the first time, which by the size of its files takes about {expected_s:.1f} s"


def _never_starts(model: ServedModel) -> bool:
    return model.ready is None and model.circuit.state is CircuitState.OPEN


def _trouble(model: ServedModel) -> str:
    """Why a request for it gets nothing now, though it may be loading."""
    if model.up or not model.circuit.reason:
        return ""
    return f"{model.circuit.reason}; the last: {model.fate}"


def live_pool(
    config: OriginConfig,
    plans: Sequence[ModelPlan],
    known: KnownModels,
    recorder: HistoryRecorder,
    clock: Callable[[], float],
) -> LivePool:
    """Of several models, by their settings. ConfigError: a policy or a schedule that cannot be."""

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
            caps(config),
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
    )
