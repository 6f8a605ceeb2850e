"""Simulated origins that share a ledger: the real cores of streams and models, and nothing else.

Ledger, processes, clients and clocks are played. Every command is carried out a little later, and
its answer is reported later still, so that answers overtake each other and come when nobody waits
for them any more. After each event the world looks whether everything is as it must be.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from math import ceil, inf
from random import Random

from tailrace.ledger.errors import (
    Conflict,
    Damaged,
    LedgerAway,
    LedgerFull,
    Overloaded,
    StaleEpoch,
    StreamFull,
    TailraceError,
    Unavailable,
    WrongIndex,
)
from tailrace.ledger.frame import (
    TAG_OFFSET,
    FinishReason,
    Notice,
    Priority,
    StreamEnd,
    Token,
    Unread,
    decode,
    encode,
)
from tailrace.ledger.interface import Refusal
from tailrace.ledger.record_extra import IdSpan
from tailrace.origin.core import events as models
from tailrace.origin.core import stream_events as streams
from tailrace.origin.core.pool import ModelPool
from tailrace.origin.core.states import ModelState, StreamState, WorkerState
from tailrace.origin.core.step import END, StepFrames
from tailrace.origin.core.stream import Stream
from tailrace.origin.core.stream_table import ROOM_SHARES
from tailrace.origin.core.streams import StreamCore
from tailrace.origin.generations.recipe import Recipe, packed_ids
from tailrace.origin.generations.stream_log import RETRIED, History
from tailrace.origin.pool.members import PoolMember
from tailrace.origin.pool.policies.named_policy import named_policy
from tailrace.origin.pool.policies.policies import WarmPrices
from tailrace.origin.workers.worker_frame import CancelRun, Emission, Steer, Step
from tests.origin.simulation.simulated_models import Violation, require
from tests.origin.stage import READY, RECIPE

CHAOS_S = 60.0
"""How long things fail."""
RETURN_S = 5.0
"""How long the ledger goes on failing after that, while all readers come back."""
BOUND_S = 900.0
"""Maximum time in which every stream ends after that: the trials of open circuits come first, and
every model has its turns in the memory."""
LOOK_S = 0.5
"""Interval of what a supervisor does again and again."""
LOAD_S, ANSWER_S, STEP_S = 6.0, 0.4, 0.6
"""Maximum times of a load, of one leg of a request to the ledger, and between two steps."""
MAX_TOKENS = 20
IN_FLIGHT = 2
"""Maximum frames of a stream that a worker makes before it obeys an order."""
MAX_EVENTS = 60_000
NOT_A_NUMBER = "NaN in the logits"
"""Message of the runs that fail, and may succeed on another worker."""
HELD = "held"
"""Text that a worker has held back until its run fails."""
UNREAD_AFTER_S = 5
POLICIES = ("ttl-0", "ttl-5", "ttl-60", "greedy-dual")
MAX_STREAMS = 4
ON_WORKER = (StreamState.CLAIMING, StreamState.RUNNING, StreamState.CANCELLING)
"""States of a stream that has a worker."""
CLAIMED = (StreamState.CLAIMING, StreamState.RECALLED)
"""States of a stream for which a claim may be under way."""


@dataclass(eq=False)
class Stored:
    """A stream as the ledger has it, and what its client may expect of it."""

    id: bytes
    recipe: Recipe
    tokens: int
    kills: bool
    is_full_at: float
    epoch: int = 1
    frames: list[str] = field(default_factory=list)
    steered: int = 0
    """Number of Steer orders that are durable."""
    end: FinishReason | None = None
    message: str = ""
    failures: int = 0
    """Number of its runs that have failed."""
    owner: SimulatedOrigin | None = None
    is_damaged: bool = False
    producers: dict[int, object] = field(default_factory=dict)
    cancels: list[tuple[SimulatedOrigin, int]] = field(default_factory=list)
    is_cancelled: bool = False
    is_read: bool = True
    seat: int = 0
    """Chooses the origin that its reader is connected to."""

    @property
    def history(self) -> History:
        """Return what its log says."""
        codes = {"notice": "told", RETRIED: RETRIED}
        notices = [Notice(codes[one], "", at) for at, one in enumerate(self.frames) if one in codes]
        ids = [100] * self.frames.count("token")
        spans = [IdSpan(0, 1)] * self.steered
        output = max((at for at, one in enumerate(self.frames) if one not in codes), default=-1)
        has_end = self.end is not None
        made = len(self.frames) + has_end
        return History(made, ids, spans, notices=notices, has_end=has_end, last_output=output)

    def append(self, epoch: int, index: int) -> TailraceError | None:
        """Return why a record is refused, or None."""
        if self.is_damaged:
            return Damaged("its row does not match its checksum")
        if epoch != self.epoch:
            return StaleEpoch("another producer has it")
        if self.end is not None:
            return Conflict("the stream has ended")
        if index != len(self.frames):
            return WrongIndex(f"index {index} is not the next one")
        return None


@dataclass(eq=False)
class StartRun:
    """A run as its worker has it."""

    stored: Stored
    index: int
    is_cancelled: bool = False
    steers: list[Steer] = field(default_factory=list)
    has_made: bool = False


class PlayedWorker:
    """One process of a worker."""

    def __init__(self, origin: SimulatedOrigin, number: int) -> None:
        self.origin, self.number, self.world = origin, number, origin.world
        self.runs: dict[int, StartRun] = {}
        self.is_over = self.is_stopped = self.is_busy = False
        load_s = LOAD_S * (10 if self._fails(0.1) else 1)
        fails = self._fails(0.15)
        origin.after(load_s, self._fail_to_load if fails else self._become_ready)

    def _fails(self, chance: float) -> bool:
        return not self.world.is_calm and self.world.random.random() < chance

    def _fail_to_load(self) -> None:
        self.die()

    def _become_ready(self) -> None:
        if self.is_over:
            return
        name = self.origin.models.workers[self.number].model
        ready = replace(READY, model=name or "demo")
        self.origin.tell_models(models.WorkerReady(self.number, ready))
        if self.origin.models.workers[self.number].state is WorkerState.READY:
            self.origin.happen(streams.WorkerAvailable(self.number, is_new=True))
        self._later()

    def _later(self) -> None:
        self.origin.after(STEP_S, self._step)

    def die(self) -> None:
        """End; the owner hears of it a little later, perhaps after what was said before."""
        if not self.is_over:
            self.is_over = True
            self.origin.after(0.3, self._report_end)

    def _report_end(self) -> None:
        if self.is_busy and self.world.random.random() < 0.5:
            self.origin.after(0.3, self._report_end)  # what it said last is still being stored
            return
        self.origin.lost(self)

    def _step(self) -> None:
        """Make a frame of some runs, fall silent, or die."""
        if self.is_over:
            return
        random = self.world.random
        if self._fails(0.02):
            self.die()
            return
        if self._fails(0.02):
            self.origin.tell_models(models.WorkerSilent(self.number))
            self.origin.after(10.0, self._speak)
            return
        if self.runs and random.random() < 0.5:
            begun = [number for number, run in self.runs.items() if not run.has_made]
            self.origin.happen(streams.RunsStarted(self.number, begun))
            if any(self.runs[number].stored.kills for number in begun):
                self.die()
                return
        made = [
            emission
            for number, run in list(self.runs.items())
            if not run.stored.kills and random.random() < 0.7
            for emission in self._made(number, run)
        ]
        if made:
            self._store(made)
        else:
            self._later()

    def _speak(self) -> None:
        if not self.is_over:
            self.origin.tell_models(models.WorkerHeard(self.number))
            self.origin.happen(streams.WorkerAvailable(self.number))
            self._later()

    def _made(self, number: int, run: StartRun) -> list[Emission]:
        index, run.index, run.has_made = run.index, run.index + 1, True
        if run.is_cancelled or index >= run.stored.tokens:
            del self.runs[number]
            reason = FinishReason.CANCELLED if run.is_cancelled else FinishReason.LENGTH
            return [Emission(number, index, (), (), encode(StreamEnd(index, reason, index, 2)))]
        if self._fails(0.05):
            del self.runs[number]
            return self._failed(number, index, run.stored)
        steers, run.steers = run.steers, []
        ids = [one for steer in steers for one in steer.ids] or [100]
        spans = tuple(IdSpan(at, 1) for at in range(len(steers)))
        return [Emission(number, index, tuple(ids), spans, encode(Token("t", index)))]

    def _failed(self, number: int, index: int, stored: Stored) -> list[Emission]:
        """Return the text that was held back, and the end."""
        stored.failures += 1
        end = StreamEnd(index, FinishReason.FAILED, index + 1, 2, NOT_A_NUMBER, retryable=True)
        return [
            Emission(number, index, (), (), encode(Token(HELD, index))),
            Emission(number, index + 1, (), (), encode(end), can_retry=True),
        ]

    def _store(self, made: Sequence[Emission]) -> None:
        """Append a step. The next one is heard when the core knows how this one went."""
        step = self.origin.core.step(self.number, Step.of(made).cut())
        for failed in step.failed:
            stored = self.world.stored[failed.stream.id]
            is_first = RETRIED not in stored.frames or failed.stream.epoch < stored.epoch
            require(is_first, "a stream is retried for the second time")
        now = self.origin.clock()
        batch = step.appends(now, int(now * 1000), lambda _stream, _released: 0)
        self.is_busy = True

        def append() -> None:
            refusals: list[Refusal] = []
            away: dict[bytes, bool] = {}
            for at, frame in enumerate(batch.frames):
                # The frames of a stream are stored together or not at all.
                is_away = away.setdefault(batch.streams[at], self.world.is_away())
                lost = LedgerAway("it does not answer") if is_away else None
                error = lost or self.world.store(
                    batch.streams[at],
                    batch.epochs[at],
                    batch.indexes[at],
                    frame,
                    len(step.emissions.steered.get(at, ())),
                )
                if error is not None:
                    refusals.append(Refusal(batch[at], error))
            self.origin.after(ANSWER_S, lambda: self._stored(step, refusals))

        self.origin.after(ANSWER_S, append)

    def _stored(self, step: StepFrames, refusals: list[Refusal]) -> None:
        self.is_busy = False
        if self.origin.workers.get(self.number) is self:  # or nobody hears it any more
            self.origin.happen(streams.StepDurable(self.number, step, refusals))
            self._later()


class SimulatedOrigin:
    """The cores of one origin, and whatever carries out their commands."""

    def __init__(self, world: CoreWorld) -> None:
        self.world, random = world, world.random
        self.is_dead = False
        self.skew_s = random.choice((0.0, 1e5))
        members = [
            PoolMember(name, workers=random.choice((1, 1, 2)), is_pinned=name == "")
            for name in world.names
        ]
        policy = named_policy(random.choice(POLICIES), WarmPrices(60.0, 5.0))
        caps = {"cpu": random.choice((1.0, 2.0, inf))}
        self.models = ModelPool(members, policy, caps, random=Random(random.random()))
        self.core = StreamCore(
            MAX_STREAMS,
            self.models,
            paused_s=1e9,
            idle_s=1e9,
            cold_wait_s=None if "" in world.names else 500.0,
        )
        self.workers: dict[int, PlayedWorker] = {}
        self.claims: set[bytes] = set()
        self.ends: set[bytes] = set()
        self.tickets: set[int] = set()
        self.cancelled: list[Stream] = []
        """Records of streams with an accepted order to cancel."""
        self._wakes = 0
        self.tell_models(models.Tick(random.uniform(0.0, 1e9)))
        self.tell_models(models.Filled())
        self.after(LOOK_S, self._supervise)

    def clock(self) -> float:
        """Return the time of its own clock, which jumps."""
        return self.world.now + self.skew_s

    def after(self, longest_s: float, do: Callable[[], None]) -> None:
        """Do something a little later, unless it is dead by then."""
        self.world.after(longest_s, do, self)

    def _supervise(self) -> None:
        random, world = self.world.random, self.world
        unfinished = [one for one in world.stored.values() if one.end is None]
        if not world.is_away():
            listed = [
                one.id for one in unfinished if one.owner in (None, self) or one.owner.is_dead
            ]
            self.happen(streams.UnfinishedListed(listed))
        read: set[bytes] = set()
        if unfinished:
            living = world.living()
            seated = [one for one in unfinished if living[one.seat % len(living)] is self]
            read = {one.id for one in seated if one.is_read}
        self.happen(streams.ReadersSeen(read))
        is_low = not world.is_calm and random.random() < 0.03
        self.happen(streams.LoadMeasured(0.01 if is_low else 1.0))
        self.after(LOOK_S, self._supervise)

    # ---- events and commands ----

    def tell_models(self, event: models.Event) -> None:
        """Report an event to the core of models, and carry out its commands."""
        self.world.count()
        for command in self.models.handle(event, self.clock()):
            match command:
                case models.StartWorker(worker):
                    require(worker not in self.workers, "a worker has two processes")
                    self.workers[worker] = PlayedWorker(self, worker)
                case models.StopWorker(worker):
                    process = self.workers[worker]
                    process.is_over = process.is_stopped = True
                    self.after(2.0, lambda process=process: self.lost(process))  # type: ignore[misc]
        self._wakes += 1
        wake_s = max(self.models.wake_at() - self.clock(), 0.05)
        if wake_s < inf:
            wakes = self._wakes
            self.world.at(self.world.now + wake_s, lambda: self._tick(wakes))

    def _tick(self, wakes: int) -> None:
        if wakes == self._wakes and not self.is_dead:
            self.tell_models(models.Tick())

    def lost(self, process: PlayedWorker) -> None:
        """Hear that a process has ended."""
        if self.workers.get(process.number) is not process:
            return
        del self.workers[process.number]
        if process.is_stopped:
            self.tell_models(models.WorkerExited(process.number))
        else:
            self.tell_models(models.WorkerDied(process.number, "killed"))
        self.happen(streams.WorkerGone(process.number, is_death=not process.is_stopped))

    def happen(self, event: streams.StreamHappening) -> None:
        """Report an event to the core of streams, and carry out its commands."""
        self.world.count()
        for command in self.core.handle(event, self.clock()):
            self._carry_out(command)
        self._check()

    def _carry_out(self, command: streams.StreamCommand) -> None:
        match command:
            case streams.FindStreams():
                self.after(ANSWER_S, lambda: self._find(command))
            case streams.TakeOver(stream):
                require(stream.id not in self.claims, "a stream has two claims at a time")
                self.claims.add(stream.id)
                self.after(ANSWER_S, lambda: self._take_over(command))
            case streams.AppendNotices():
                self.after(ANSWER_S, lambda: self._log_notices(command))
            case streams.AppendEnd(stream):
                require(stream.id not in self.ends, "a stream is ended twice at a time")
                self.ends.add(stream.id)
                self.after(ANSWER_S, lambda: self._take_to_end(command))
            case streams.OrderRun():
                self._order(command)
            case streams.SendFrame(worker, run, frame):
                self._send(worker, run, frame)
            case streams.AnswerSteers(tickets, error):
                require(self.tickets.issuperset(tickets), "text was answered twice")
                self.tickets.difference_update(tickets)
                if error is None:
                    require(all(map(self.world.is_durable, tickets)), "text is not durable")
            case streams.ReportToModels(event):
                self.tell_models(event)
            case streams.RecordEnd(stream, reason, _):
                self._ended(stream, reason)

    def _ended(self, stream: Stream, reason: FinishReason) -> None:
        stored = self.world.stored[stream.id]
        known = stored.end is not None or stored.is_damaged
        require(known, f"a stream counts as ended ({reason}), and is not")

    def awaits_cancel(self, stored: Stored) -> bool:
        """Return True if a worker here has the order to cancel, under an epoch that is over."""
        here = self.core.table.by_id.get(stored.id)
        is_asked = here is not None and here.state is StreamState.CANCELLING
        return is_asked and here is not None and here.epoch < stored.epoch

    def _find(self, command: streams.FindStreams) -> None:
        if self.world.is_away():
            self.after(
                ANSWER_S,
                lambda: self.happen(streams.FindFailed(command.purpose, command.streams)),
            )
            return
        found: dict[bytes, streams.FoundStream | None] = {}
        for one in command.streams:
            stored = self.world.stored.get(one)
            found[one] = None
            if stored is not None and stored.end is None and not stored.is_damaged:
                made = len(stored.frames)
                found[one] = streams.FoundStream(stored.recipe, stored.epoch, made)
        self.after(ANSWER_S, lambda: self.happen(streams.StreamsFound(command.purpose, found)))

    def _claim_answer(self, stream: bytes, event: streams.StreamHappening) -> None:
        def answer() -> None:
            self.claims.discard(stream)
            self.happen(event)

        self.after(ANSWER_S, answer)

    def _take_over(self, command: streams.TakeOver) -> None:
        stream, run = command.stream, command.run
        stored, away = self.world.stored[stream.id], LedgerAway("it does not answer")
        if self.world.is_away():
            self._claim_answer(stream.id, streams.ClaimFailed(stream.id, run, away))
            return
        if stored.is_damaged:
            error = Damaged("its row does not match its checksum")
            self._claim_answer(stream.id, streams.ClaimFailed(stream.id, run, error))
            return
        epoch = stream.epoch
        if stream.has_producer:
            if stored.end is not None or epoch not in (stored.epoch, 0):
                self._claim_answer(stream.id, streams.ClaimFailed(stream.id, run))
                return
            stored.epoch = epoch = stored.epoch + 1
            stored.owner = self
        if self.world.is_away():  # and the answer is lost
            self._claim_answer(stream.id, streams.ClaimFailed(stream.id, run, away))
        else:
            taken = streams.TakenOver(stream.id, run, epoch, stored.history)
            self._claim_answer(stream.id, taken)

    def _log_notices(self, command: streams.AppendNotices) -> None:
        stored, history = self.world.stored[command.stream], command.history
        is_away = self.world.is_away()
        error: TailraceError | None = LedgerAway("it does not answer") if is_away else None
        for notice in command.notices:
            error = error or stored.append(command.epoch, history.next_index)
            if error is None:
                stored.frames.append(RETRIED if notice.code == RETRIED else "notice")
                history.next_index += 1
                history.notices.append(notice)
        event: streams.StreamHappening
        if error is not None:
            event = streams.ClaimFailed(command.stream, command.run, error)
        else:
            event = streams.NoticesLogged(command.stream, command.run, history)
        self.after(ANSWER_S, lambda: self.happen(event))

    def _take_to_end(self, command: streams.AppendEnd) -> None:
        """Take a stream over; another origin may do so as well before its end is written."""
        stored = self.world.stored[command.stream.id]
        if self.world.is_away():
            self._end_answer(command, LedgerAway("it does not answer"))
        elif stored.is_damaged:
            self._end_answer(command, Damaged("its row does not match its checksum"))
        elif stored.end is not None:
            self._end_answer(command, None)
        else:
            stored.epoch += 1
            stored.owner = self
            epoch = stored.epoch
            self.after(ANSWER_S, lambda: self._write_end(command, epoch))

    def _write_end(self, command: streams.AppendEnd, epoch: int) -> None:
        stored = self.world.stored[command.stream.id]
        if stored.end is not None:
            self._end_answer(command, None)
            return
        error = stored.append(epoch, len(stored.frames))
        if error is None:
            stored.end, stored.message = command.end.reason, command.end.message or ""
        if self.world.is_away():
            error = LedgerAway("the answer is lost")
        self._end_answer(command, error)

    def _end_answer(self, command: streams.AppendEnd, error: TailraceError | None) -> None:
        stream, nth = command.stream.id, command.nth

        def answer() -> None:
            self.ends.discard(stream)
            if error is None:
                self.happen(streams.EndStored(stream, nth))
            else:
                self.happen(streams.EndRefused(stream, nth, error))

        self.after(ANSWER_S, answer)

    def _order(self, command: streams.OrderRun) -> None:
        stream, process = command.stream, self.workers.get(command.worker)
        require(process is not None, "a worker without a process is given a stream")
        assert process is not None
        require(not process.is_stopped, "a worker that was told to stop is given a stream")
        stored = self.world.stored[stream.id]
        before = stored.producers.setdefault(stream.epoch, process)
        require(before is process, "two workers were given one epoch of a stream")
        if stream.epoch == stored.epoch:
            is_whole = command.history.next_index == len(stored.frames)
            require(is_whole, "a run goes on from another place than its log")
        run = process.runs[command.run] = StartRun(stored, command.history.next_index)
        run.steers = [frame for frame in command.follow_up if isinstance(frame, Steer)]

    def _send(self, worker: int, number: int, frame: object) -> None:
        process = self.workers.get(worker)
        run = None if process is None else process.runs.get(number)
        if run is not None and isinstance(frame, CancelRun):
            run.is_cancelled = True
        elif run is not None and isinstance(frame, Steer):
            run.steers.append(frame)

    # ---- what must be ----

    def _check(self) -> None:
        table, by_id = self.core.table, self.core.table.by_id
        if self.cancelled:
            self._check_cancels()
        entries = len(by_id) + len(table.opening) + len(table.paused) + len(table.left)
        if entries > len(by_id):
            distinct = {*by_id, *table.opening, *table.paused, *table.left}
            require(len(distinct) == entries, "a stream has two entries")
        waiting = table.waiting if by_id else ()
        for stream in by_id.values():
            state, worker = stream.state, stream.worker
            if (worker is not None) != (state in ON_WORKER):
                raise Violation(f"{state} on {worker}")
            if worker is not None:
                require(stream in table.on(worker), "a run is not known")
                is_up = self.models.workers[worker].is_up or self.workers[worker].is_stopped
                require(is_up, "a stream is on a worker that is not there")
            if (state is StreamState.WAITING) != (stream in waiting):
                raise Violation("a stream waits in no queue")
            if stream.id in self.claims and state not in CLAIMED:
                raise Violation(f"a claim was forgotten: {state}")

    def _check_cancels(self) -> None:
        """Require that each accepted order to cancel is pending here, or that its stream ended."""
        pending = []
        for stream in self.cancelled:
            if self.core.table.by_id.get(stream.id) is stream:
                require(stream.is_cancelled, "an order to cancel was forgotten")
                pending.append(stream)
            else:  # the record does not come back, and an end is never undone
                stored = self.world.stored[stream.id]
                is_over = stored.end is not None or stored.is_damaged
                require(is_over, "an order to cancel was forgotten")
        self.cancelled = pending


class CoreWorld:
    """Clients, origins and the ledger of one seed."""

    def __init__(self, seed: int) -> None:
        self.random = random = Random(seed)
        self.now = 0.0
        self.events = 0
        self.is_calm = False
        self.names = [""] if random.random() < 0.5 else ["m0", "m1", "m2"][: random.randint(1, 3)]
        self.away = random.choice((0.0, 0.02, 0.2))
        """How often the ledger does not answer."""
        self.full = random.choice((0.0, 0.0, 0.1))
        """Share of streams that reach their size limit, and of appends without room."""
        self.stored: dict[bytes, Stored] = {}
        self.origins: list[SimulatedOrigin] = []
        self.refused = 0
        self._tickets: dict[int, tuple[Stored, int]] = {}
        self._due: list[tuple[float, int, Callable[[], None], SimulatedOrigin | None]] = []
        self._numbers = 0

    def run(self) -> int:
        """Play the seed; return the number of events."""
        for _ in range(self.random.randint(1, 3)):
            self.origins.append(SimulatedOrigin(self))
        for number in range(self.random.randint(1, 12)):
            self.after(CHAOS_S / 2, lambda number=number: self._open(number))  # type: ignore[misc]
        self.after(20.0, self._trouble)
        self._play(CHAOS_S)
        self.is_calm = True
        for stored in self.stored.values():
            stored.is_read = True
        end_s = self.now + BOUND_S
        while self._is_unfinished() and self.now < end_s:
            self._play(self.now + 10.0)
        self._play(self.now + 10.0)
        self._require_ends()
        return self.events

    def at(
        self, at_s: float, do: Callable[[], None], origin: SimulatedOrigin | None = None
    ) -> None:
        """Do something at a time, unless `origin` is dead by then."""
        self._numbers += 1
        heappush(self._due, (at_s, self._numbers, do, origin))

    def after(
        self, longest_s: float, do: Callable[[], None], origin: SimulatedOrigin | None = None
    ) -> None:
        """Do something after a random time, unless `origin` is dead by then."""
        self.at(self.now + self.random.random() * longest_s, do, origin)

    def count(self) -> None:
        """Count an event."""
        self.events += 1
        if self.events >= MAX_EVENTS:
            raise Violation(f"not all streams have ended after {MAX_EVENTS} events")

    def is_away(self) -> bool:
        """Return True if the ledger does not answer now."""
        return self.now < CHAOS_S + RETURN_S and self.random.random() < self.away

    def is_durable(self, ticket: int) -> bool:
        """Return True if the text of an order is in its stream's log."""
        stored, nth = self._tickets[ticket]
        return stored.steered >= nth

    def _play(self, end_s: float) -> None:
        due = self._due
        while due and due[0][0] <= end_s:
            self.now, _, do, origin = heappop(due)
            if origin is None or not origin.is_dead:
                do()
        self.now = end_s

    def living(self) -> list[SimulatedOrigin]:
        """Return the origins that have not died."""
        return [one for one in self.origins if not one.is_dead]

    def _is_unfinished(self) -> bool:
        held = any(one.core.table.count for one in self.living())
        return held or any(one.end is None and not one.is_damaged for one in self.stored.values())

    def store(
        self, stream: bytes, epoch: int, index: int, frame: bytes, steers: int
    ) -> TailraceError | None:
        """Append a frame to a log; return why that is refused, if it is."""
        stored = self.stored[stream]
        if (error := stored.append(epoch, index)) is not None:
            return error
        if frame[TAG_OFFSET] == END:
            _, end = decode(frame)
            assert isinstance(end, StreamEnd)
            stored.end, stored.message = end.finish_reason, end.message or ""
            # An origin whose worker has not answered the order to cancel cannot know yet that
            # another origin has taken the stream, and ended it.
            stored.cancels = [one for one in stored.cancels if not one[0].awaits_cancel(stored)]
            return None
        if len(stored.frames) >= stored.is_full_at:
            return StreamFull("the stream is at its size limit")
        if not self.is_calm and self.random.random() < self.full / 10:
            return LedgerFull("the ledger is at its size limit")
        _, token = decode(frame)
        stored.frames.append(HELD if token == Token(HELD, index) else "token")
        stored.steered += steers
        return None

    # ---- trouble ----

    def _trouble(self) -> None:
        random, living = self.random, self.living()
        if self.is_calm:
            return
        match random.randrange(6):
            case 0:
                random.choice(living).is_dead = True
                self.origins.append(SimulatedOrigin(self))
            case 1:
                random.choice(living).skew_s += random.uniform(-20.0, 40.0)
            case 2 if self.stored and random.random() < 0.2:
                stored = random.choice(list(self.stored.values()))
                stored.is_damaged = stored.end is None
            case _:
                for stored in self.stored.values():
                    stored.is_read, stored.seat = random.random() < 0.5, random.randrange(6)
        self.after(12.0, self._trouble)

    # ---- clients ----

    def _open(self, number: int) -> None:
        """Keep room for a stream at some origin, and create it a little later."""
        random, origin = self.random, self.random.choice(self.living())
        id_ = bytes([number + 1]) * 16
        priority = random.choice([*Priority])
        unread = random.choice((Unread.RUN, Unread.RUN, Unread.PAUSE, Unread.CANCEL))
        told = (("truncated", "2 messages"),) if random.random() < 0.2 else ()
        name = random.choice(self.names)
        update = {
            "model": name or "demo",
            "prompt_ids": packed_ids((5, number)),
            "priority": priority.word,
            "unread": unread.word,
            "unread_after_s": UNREAD_AFTER_S,
            "notices": told,
        }
        full_at = random.randint(1, MAX_TOKENS) if random.random() < self.full else inf
        tokens, kills = random.randint(0, MAX_TOKENS), random.random() < 0.1
        recipe = RECIPE.model_copy(update=update)
        stored = Stored(id_, recipe, tokens + len(told), kills, full_at)
        try:
            origin.happen(streams.StreamsRequested([id_], priority))
        except Overloaded:
            self.refused += 1
            if not self.is_calm:
                self.after(5.0, lambda: self._open(number))
            return
        self._check_room(origin, priority)
        origin.tell_models(models.RequestArrived(name, id_))
        is_abandoned = random.random() < 0.1
        origin.after(1.0, lambda: self._create(origin, stored, name, is_abandoned))

    def _create(
        self, origin: SimulatedOrigin, stored: Stored, name: str, is_abandoned: bool
    ) -> None:
        if not is_abandoned and not self._may_open(origin, stored.id, name):
            origin.after(LOOK_S, lambda: self._create(origin, stored, name, is_abandoned))
            return
        if not is_abandoned:
            stored.owner = origin
            stored.is_read = self.is_calm or self.random.random() < 0.7
            self.stored[stored.id] = stored
            if not self.is_calm and self.random.random() < 0.05:
                self.origins.append(SimulatedOrigin(self))
                origin.is_dead = True  # nobody starts what was just created
                return
            count = origin.core.table.count
            origin.happen(streams.StreamsAdmitted([(stored.id, stored.recipe)]))
            require(origin.core.table.count == count, "a stream is counted twice")
        origin.happen(streams.RequestClosed([stored.id]))
        if is_abandoned:
            origin.tell_models(models.RequestEnded(name, stored.id))
            return
        for _ in range(self.random.choice((0, 0, 1, 2))):
            self.after(15.0, lambda: self._cancel(stored))
        for _ in range(self.random.choice((0, 0, 1, 3))):
            self.after(15.0, lambda: self._steer(stored))

    def _may_open(self, origin: SimulatedOrigin, id_: bytes, name: str) -> bool:
        """Return True if a request need not wait for its model: see `ModelHost.until_open`.

        A draining model counts only the streams that it serves. It may be unloaded while a stream
        is claimed that was created without that wait, which no real origin does.
        """
        model = origin.models.of(name)
        if not name or model.state is ModelState.LOADING:
            return True
        return model.requests[id_].taken_s is not None

    def _check_room(self, origin: SimulatedOrigin, priority: Priority) -> None:
        table = origin.core.table
        for level in range(priority + 1):
            words = {one.word for one in Priority if one >= level}
            count = sum(one.recipe.priority in words for one in table.by_id.values())
            count += sum(one.priority >= level for one in table.opening.values())
            limit = ceil(MAX_STREAMS * ROOM_SHARES[Priority(level)])
            require(count <= limit, f"{count} streams of a class that may have {limit}")

    def _cancel(self, stored: Stored) -> None:
        """Cancel a stream through any origin, and again."""
        origin = self.random.choice(self.living())
        here = origin.core.table.by_id.get(stored.id)
        if here is not None:
            origin.cancelled.append(here)
            stored.cancels.append((origin, len(stored.frames)))
        origin.happen(streams.CancelRequested(stored.id))
        stored.is_cancelled = True

    def _steer(self, stored: Stored) -> None:
        origin = self.random.choice(self.living())
        ticket = len(self._tickets) + 1
        try:
            origin.happen(streams.SteerRequested(stored.id, (7,), ticket))
        except (Conflict, Unavailable):
            return
        self._tickets[ticket] = stored, 1
        if origin.core.table.state_of(stored.id) is not StreamState.ABSENT:
            origin.tickets.add(ticket)

    # ---- what must be ----

    def _require_ends(self) -> None:
        for stored in self.stored.values():
            if stored.is_damaged:
                continue  # its readers are told
            require(stored.end is not None, "a stream has no end")
            made, retries = len(stored.frames), stored.frames.count(RETRIED)
            require(retries <= 1, "the log says twice that a run was retried")
            is_failed = stored.message == NOT_A_NUMBER
            held = stored.frames[-1:] if is_failed else []
            require(HELD not in stored.frames[: made - len(held)], "held text is in the log")
            match stored.end:
                case FinishReason.LENGTH:
                    # A run that fails at the last token is told of after it.
                    is_whole = stored.tokens <= made <= stored.tokens + retries
                    is_whole = is_whole or made >= stored.is_full_at
                    require(is_whole, f"a stream ended after {made} of {stored.tokens}")
                    late = [count for origin, count in stored.cancels if not origin.is_dead]
                    is_obeyed = all(made <= count + IN_FLIGHT + retries for count in late)
                    require(is_obeyed or self.away > 0, "an order to cancel was lost")
                case FinishReason.CANCELLED:
                    may_be = stored.is_cancelled or stored.recipe.unread == Unread.CANCEL.word
                    require(may_be, "a stream was cancelled by nobody")
                case FinishReason.FAILED if is_failed:
                    require(stored.failures > 1, "a stream ended with its first failed run")
                case FinishReason.FAILED:
                    why = stored.message
                    known = ("memory", "limit", "damaged", "out of step", "in time")
                    is_known = stored.kills or any(word in why for word in known)
                    require(is_known, f"a stream failed: {why}")
                case other:
                    require(False, f"a stream ended as {other}")
        for origin in self.living():
            require(not origin.tickets, "text was never answered")
            require(origin.core.table.count == 0, "an origin keeps streams that have ended")
            require(not origin.claims and not origin.ends, "an answer was never given")
            for model in origin.models.models:
                require(not model.requests, "a model counts requests that have ended")
