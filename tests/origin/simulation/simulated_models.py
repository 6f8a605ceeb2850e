"""A simulated origin around the core of models and workers: processes, requests, clocks, faults.

Everything is drawn from a seed. The origin here is honest about one thing only: what its processes
are. It holds the core to that after each event.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from heapq import heappop, heappush
from math import inf
from random import Random

from tailrace.ledger.errors import Conflict
from tailrace.ledger.flow.circuit_breaker import CircuitState
from tailrace.ledger.links.hints import Hint
from tailrace.origin.core.events import (
    Command,
    Event,
    Filled,
    ModelHinted,
    ModelPinned,
    PoliciesSet,
    RecordHistory,
    RequestArrived,
    RequestEnded,
    StartWorker,
    StopWorker,
    Tick,
    WorkerDied,
    WorkerExited,
    WorkerHeard,
    WorkerLoading,
    WorkerProved,
    WorkerReady,
    WorkerSilent,
)
from tailrace.origin.core.model import TURN_S, ServedModel
from tailrace.origin.core.pool import ModelPool
from tailrace.origin.core.states import ModelState, WorkerState
from tailrace.origin.pool.members import PoolMember, Schedule
from tailrace.origin.pool.policies.named_policy import named_policy
from tailrace.origin.pool.policies.policies import WarmPrices
from tailrace.origin.pool.records import ArrivalRecord, StateChange
from tailrace.origin.workers.liveness import OPEN_MAX_S
from tailrace.origin.workers.worker_frame import LoadProgress

POLICIES = ("ttl-0", "ttl-5", "ttl-60", "break-even", "adaptive-ttl", "greedy-dual")
SCHEDULES = ("daily 00:00-24:00", "mon-fri 08:00-18:00", "sat,sun 22:00-02:00")
WITHOUT_PROCESS = (WorkerState.RESTING, WorkerState.WAITING)
STAGES = ("check", "read", "unpack", "move", "warm-up")

CHAOS_S = 120.0
"""How long everything may fail; then faults stop, and everybody must be served."""
CALM_S = 300.0
"""How long requests go on coming after that."""
FAULTS_HZ, RATES_HZ = 1.0, (0.1, 0.25, 1.0)
"""Mean rates of faults and requests in the chaos, and of requests after it."""
LOAD_S, LEAVE_S, SERVICE_S = 8.0, 3.0, 10.0
"""Maximum times of a load, of an end and of a request, where nothing fails."""
SETTLE_S = 1.5 * OPEN_MAX_S + LOAD_S
"""Time in which what failed before the calm is tried again at the latest."""
MAX_FLAPS = 3
"""Maximum number of loads in a row that are given up before a process was started."""
MAX_IDLE_TICKS = 3
"""Maximum number of Ticks at one instant: more would keep a processor busy."""


class Violation(AssertionError):
    """The core has broken its word."""


def require(kept: bool, broken: str) -> None:
    """Raise `Violation` unless something is as it must be."""
    if not kept:
        raise Violation(broken)


class Life(Enum):
    """The life of a simulated process."""

    LOADING = "loading"
    READY = "ready"
    ENDED = "ended"
    """It is gone; its owner has not heard of that yet."""


@dataclass(eq=False)
class Process:
    """One process of a worker: it reports at most once that it is ready, and once that it ended."""

    life: Life = Life.LOADING
    is_stopped: bool = False
    serving: set[int] = field(default_factory=set)


@dataclass(eq=False)
class Client:
    """A request for a model, from its arrival to its end.

    Only a stream is given to workers: a request becomes one when it is taken, or its model loads.
    """

    model: str
    arrived_s: float
    is_stream: bool
    worker: int | None = None
    serves: int = 0
    """How often a worker began with it; a death makes that more than one."""


class SimulatedModels:
    """The processes, the requests and the clocks of one origin, around its core."""

    def __init__(self, seed: int) -> None:
        self.random = random = Random(seed)
        self.now = random.choice((0.0, 1e6))
        self.begin_s = self.now
        self.steps = 0
        self.serves = self.deaths = 0
        self.is_calm = False
        names = [f"m{number}" for number in range(random.randint(1, 4))]
        self.is_single = len(names) == 1 and random.random() < 0.5
        if self.is_single:
            names = [""]
        sizes = {name: random.choice((1.0, 1.0, 2.0)) for name in names}
        kept = {name for name in names if random.random() < 0.3} | ({""} & set(names))
        others = [sizes[name] for name in names if name not in kept]
        least = sum(sizes[name] for name in kept) + max(others, default=0.0)
        self.cap = random.choice((least, least, least + 1.0, inf))
        members = [
            PoolMember(
                name,
                sizes[name],
                load_s=random.choice((1.0, LOAD_S)),
                is_pinned=name in kept,
                schedules=(self._schedule(),) if random.random() < 0.2 else (),
                workers=random.choice((1, 1, 2)),
            )
            for name in names
        ]
        self.broken = {name for name in names if random.random() < 0.25}
        """Models none of whose workers becomes ready before the calm."""
        policy = named_policy(random.choice(POLICIES), WarmPrices(60.0, 5.0))
        caps = {"cpu": self.cap}
        self.core = ModelPool(members, policy, caps, random=Random(random.random()))
        self.processes: dict[int, Process] = {}
        self.clients: dict[int, Client] = {}
        self._models = {model.name: model for model in self.core.models}
        self._waiting: dict[int, Client] = {}
        """The clients that no worker serves."""
        self._clients_of: dict[str, set[int]] = {name: set() for name in names}
        """The numbers of the clients, by model."""
        self._names = names
        self._rate_hz = random.choice(RATES_HZ)
        self._numbers = iter(range(10**9))
        self._due: list[tuple[float, int, object]] = []
        self._flaps = dict.fromkeys(names, 0)
        self._is_started = dict.fromkeys(names, True)
        self._idle_ticks = 0

    def _schedule(self) -> Schedule:
        return Schedule.parse(self.random.choice(SCHEDULES))

    # ---- the run ----

    def run(self) -> None:
        """Play the chaos, then the calm; raises `Violation`."""
        self.happen(Tick(self.random.uniform(0.0, 1e9)))
        self.happen(Filled())
        self._play(CHAOS_S, self._fault_or_request)
        self.is_calm, self.broken = True, set()
        calm_s = self.now
        self._play(CALM_S, self._request)
        self._play(SETTLE_S + self.bound_s(), None)
        require(not self.clients, f"{len(self.clients)} requests were never served")
        require(self.now >= calm_s, "time went back")
        for model in self.core.models:
            require(not model.requests, f"{model.name} has requests that have ended")
            if model.is_pinned:
                require(model.is_up, f"{model.name} is pinned, and has no worker")

    def bound_s(self) -> float:
        """Return how long a request may wait, where nothing fails: the turns of all others."""
        turn_s = TURN_S + LOAD_S + SERVICE_S + LEAVE_S
        return 2 * (len(self._names) + 1) * turn_s

    def _play(self, for_s: float, next_thing: object) -> None:
        end_s = self.now + for_s
        at_s = self.now + self._pause()
        while True:
            due_s = self._due[0][0] if self._due else inf
            wake_s = self.core.wake_at()
            own_s = at_s if next_thing is not None else inf
            first_s = min(due_s, wake_s, own_s)
            if first_s > end_s:
                break
            self._idle_ticks = self._idle_ticks + 1 if wake_s <= self.now < due_s else 0
            self.now = max(self.now, first_s)
            if due_s <= first_s:
                heappop(self._due)[2]()  # type: ignore[operator]
            elif wake_s <= first_s:
                require(self._idle_ticks <= MAX_IDLE_TICKS, "it wakes all the time")
                self.happen(Tick())
            else:
                next_thing()  # type: ignore[operator]
                at_s = self.now + self._pause()
        self.now = end_s
        self.happen(Tick())

    def _pause(self) -> float:
        return self.random.expovariate(self._rate_hz if self.is_calm else FAULTS_HZ)

    def _after(self, wait_s: float, do: object) -> None:
        heappush(self._due, (self.now + wait_s, next(self._numbers), do))

    # ---- what happens ----

    def _fault_or_request(self) -> None:
        draw = self.random.random()
        if draw < 0.55:
            self._request()
        elif draw < 0.70:
            self._kill(self._victim())
        elif draw < 0.78:
            self._fall_silent(self.random.choice(self.core.workers).number)
        elif draw < 0.84:
            self._leave_a_request()
        elif draw < 0.88:
            self.happen(Tick(self.random.uniform(-1e5, 1e9)))  # the system's clock was set
        else:
            self._order()

    def _request(self) -> None:
        number, name = next(self._numbers), self.random.choice(self._names)
        client = Client(name, self.now, self.random.random() < 0.2)
        self.clients[number] = self._waiting[number] = client
        self._clients_of[name].add(number)
        self.happen(RequestArrived(name, number, client.is_stream))

    def _leave_a_request(self) -> None:
        """Have the client of a request go away, whether it is served or waits."""
        if self.clients:
            self._end(self.random.choice(sorted(self.clients)))

    def _end(self, number: int) -> None:
        client = self.clients.pop(number, None)
        if client is None:
            return
        self._clients_of[client.model].discard(number)
        if client.worker is None:
            del self._waiting[number]
        else:
            self.processes[client.worker].serving.discard(number)
        self.happen(RequestEnded(client.model, number))

    def _order(self) -> None:
        random, name = self.random, self.random.choice(self._names)
        if self.is_single:
            return
        match random.randrange(3):
            case 0:
                hint = random.choice([*Hint])
                self.happen(ModelHinted(random.choice((name, "")), hint))
            case 1:
                policy = named_policy(random.choice(POLICIES), WarmPrices(60.0, 5.0))
                self.happen(PoliciesSet(policy))
            case _:
                pinned = random.random() < 0.5
                try:
                    self.happen(ModelPinned(name, pinned))
                except Conflict:
                    return  # there would be no room for the others
                require(self.core.of(name).is_pinned == pinned, "an order was not carried out")

    # ---- processes ----

    def _start(self, number: int) -> None:
        require(number not in self.processes, f"worker {number} has two processes")
        process = self.processes[number] = Process()
        held = {self.core.workers[one].model for one in self.processes}
        used = sum(self.core.of(name).member.size for name in held)
        if used > self.cap:
            raise Violation(f"{used:g} of {self.cap:g} are used by processes")
        random, name = self.random, self.core.workers[number].model
        load_s = random.uniform(0.1, LOAD_S)
        fails = not self.is_calm and (name in self.broken or random.random() < 0.2)
        if not self.is_calm and random.random() < 0.1:
            load_s *= 10  # it hangs, and is killed in the end, or is merely slow
        stage = LoadProgress(random.choice(STAGES), 0, 0)
        self._after(load_s / 2, lambda: self._progress(number, process, stage))
        if fails:
            self._after(load_s, lambda: self._die(number, process))
        else:
            self._after(load_s, lambda: self._become_ready(number, process))

    def _progress(self, number: int, process: Process, stage: LoadProgress) -> None:
        if process.life is Life.LOADING:
            self.happen(WorkerLoading(number, stage))

    def _become_ready(self, number: int, process: Process) -> None:
        """Become ready; that is reported a little later, even if it was told to stop meanwhile."""
        if process.life is not Life.LOADING:
            return
        process.life = Life.READY

        def report() -> None:
            if process.life is Life.READY and self.processes.get(number) is process:
                load_s = self.random.choice((None, 0.5))
                self.happen(WorkerReady(number, None, load_s))

        self._after(self.random.choice((0.0, 0.0, 0.2, 1.0)), report)

    def _victim(self) -> int:
        """Return a worker to kill: often one that drains, whose model may then be broken."""
        draining = [
            worker
            for worker in self.core.workers
            if self.core.model_of(worker.number).state is ModelState.DRAINING
        ]
        if draining and self.random.random() < 0.5:
            worker = self.random.choice(draining)
            if self.random.random() < 0.5:
                self.broken.add(worker.model)
            return worker.number
        return self.random.choice(self.core.workers).number

    def _kill(self, number: int) -> None:
        process = self.processes.get(number)
        if process is not None and process.life is not Life.ENDED:
            self._die(number, process)

    def _die(self, number: int, process: Process) -> None:
        """End a process that was not told to; its owner hears of it a little later."""
        if process.life is Life.ENDED:
            return
        process.life = Life.ENDED
        self.deaths += 1

        def report() -> None:
            if self.processes.get(number) is not process:
                return
            self._forget(number)
            self.happen(WorkerDied(number, "killed"))

        self._after(self.random.choice((0.0, 0.0, 0.1, 0.5)), report)

    def _stop(self, number: int) -> None:
        process = self.processes.get(number)
        require(process is not None, f"worker {number} is stopped, and has no process")
        assert process is not None
        require(not process.is_stopped, f"worker {number} is stopped twice")
        require(not process.serving, f"worker {number} is stopped while it serves requests")
        process.is_stopped = True

        def end() -> None:
            if self.processes.get(number) is not process:
                return  # it died before, and that was reported
            process.life = Life.ENDED
            self._forget(number)
            self.happen(WorkerExited(number))

        self._after(self.random.uniform(0.0, LEAVE_S), end)

    def _forget(self, number: int) -> None:
        """Remove a process that is gone; what it served waits for another one."""
        for served in self.processes.pop(number).serving:
            client = self._waiting[served] = self.clients[served]
            client.worker = None

    def _fall_silent(self, number: int) -> None:
        process = self.processes.get(number)
        if process is None or process.life is not Life.READY:
            return
        self.happen(WorkerSilent(number))

        def hear() -> None:
            if self.processes.get(number) is process and process.life is Life.READY:
                self.happen(WorkerHeard(number))

        self._after(self.random.uniform(0.1, 5.0), hear)

    # ---- the core ----

    def happen(self, event: Event) -> None:
        """Report an event, carry out the commands, and look whether all is as it must be."""
        self.steps += 1
        self._carry_out(self.core.handle(event, self.now))
        self._serve()
        self._check()

    def _carry_out(self, commands: list[Command]) -> None:
        for command in commands:
            match command:
                case StartWorker(number):
                    self._is_started[self.core.workers[number].model] = True
                    self._start(number)
                case StopWorker(number):
                    self._stop(number)
                case RecordHistory(StateChange() as change):
                    self._count_flaps(change)
                case RecordHistory(ArrivalRecord() as arrival):
                    require(arrival.waited_s >= 0, "a request waited for a negative time")

    def _count_flaps(self, change: StateChange) -> None:
        name = change.model
        if change.state is ModelState.LOADING and change.before is ModelState.QUEUED:
            self._is_started[name] = False
        elif change.before is ModelState.LOADING and change.state is ModelState.LEAVING:
            self._flaps[name] = 0 if self._is_started[name] else self._flaps[name] + 1
            require(self._flaps[name] <= MAX_FLAPS, f"{name} is loaded and given up all the time")

    def _serve(self) -> None:
        """Give requests that wait to the workers that the core calls ready."""
        for number, client in sorted(self._waiting.items()):
            model = self._models[client.model]
            if not client.is_stream:
                is_taken = model.requests[number].taken_s is not None
                if not is_taken and model.state is not ModelState.LOADING:
                    continue
                client.is_stream = True
                self._carry_out(
                    self.core.handle(RequestArrived(client.model, number, begun=True), self.now)
                )
            for worker in model.workers:
                if worker.state is WorkerState.READY:
                    self._begin(number, client, worker.number)
                    break

    def _begin(self, number: int, client: Client, worker: int) -> None:
        process = self.processes.get(worker)
        if process is None or process.life is Life.ENDED:
            return  # its death is not known yet; the request stays where it would be thrown back
        require(process.life is Life.READY, f"worker {worker} is called ready, and loads")
        require(not process.is_stopped, f"worker {worker} is called ready, and was told to stop")
        client.worker = worker
        del self._waiting[number]
        client.serves += 1
        self.serves += 1
        process.serving.add(number)
        serves = client.serves

        def end() -> None:
            is_over = self.clients.get(number) is not client or client.serves != serves
            if is_over or client.worker is None or process.life is not Life.READY:
                return  # it was thrown back, or will be
            if self.core.model_of(worker).circuit.deaths:
                self.happen(WorkerProved(worker))
            self._end(number)

        self._after(self.random.uniform(0.0, SERVICE_S), end)

    def _check(self) -> None:
        core, processes = self.core, self.processes
        for worker in core.workers:
            process = processes.get(worker.number)
            if (process is not None) != (worker.state not in WITHOUT_PROCESS):
                raise Violation(f"worker {worker.number}: {worker.state}")
            if process is not None and process.is_stopped and worker.is_up:
                raise Violation(f"worker {worker.number} was stopped, and is up")
        for model in core.models:
            if model.requests.keys() != self._clients_of[model.name]:
                raise Violation(f"{model.name} counts other requests")
            is_open = model.circuit.state is CircuitState.OPEN
            is_held = model.state in (ModelState.LOADING, ModelState.DRAINING)
            if is_open and is_held and not model.is_up:
                self._check_hopeless(model)
        if self.is_calm:
            self._check_waits()

    def _check_hopeless(self, model: ServedModel) -> None:
        """Require that a model that may not start keeps its memory only while no other waits."""
        models = self.core.models
        waits = {one.name for one in models if one.state is ModelState.QUEUED}
        waits -= {one.name for one in models if one.retry_at_s > self.now}
        may_retry = model.circuit.retry_s(self.now) <= 0
        require(may_retry or not waits, f"{model.name} cannot start, and keeps its memory")

    def _check_waits(self) -> None:
        settled_s, bound_s = self.begin_s + CHAOS_S + SETTLE_S, self.bound_s()
        for client in self._waiting.values():
            since_s = max(client.arrived_s, settled_s)
            if self.now - since_s > bound_s:
                raise Violation(f"{client.model} starves")
