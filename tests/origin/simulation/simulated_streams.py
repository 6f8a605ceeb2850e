"""Simulated origins that share one ledger: real runs and a real ledger, on a loop from a seed.

The disk, the workers and the clients are played here. Everything between them is what an origin
runs: `Runs`, `ModelHost`, the core, and `SqliteLedger` on a disk in memory. Callbacks run in any
order, so answers of the ledger and reports of workers overtake each other.
"""

from __future__ import annotations

import asyncio
from asyncio import events
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

from tailrace.ledger.branch import BranchPoint
from tailrace.ledger.errors import LedgerAway, NotFound, Unavailable
from tailrace.ledger.flow.credit_window import Window
from tailrace.ledger.frame import (
    Durability,
    FinishReason,
    Notice,
    Priority,
    Sampling,
    StreamEnd,
    Token,
    Unread,
    decode,
    encode,
    index_of,
    tag_of,
)
from tailrace.ledger.interface import Append, Appends, NewStream, Record, Refusal
from tailrace.ledger.sqlite.ledger import SqliteLedger
from tailrace.ledger.usage import UsageQuery, UsageSums
from tailrace.origin.core.streams import GENERATING, MAX_DEATHS
from tailrace.origin.edges.feed import Feed
from tailrace.origin.generations.recipe import Recipe, packed_ids, prompt_hash
from tailrace.origin.generations.runs import Runs
from tailrace.origin.generations.stream_log import RETRIED
from tailrace.origin.metrics import Metrics
from tailrace.origin.serving.model_host import ModelHost, single_pool
from tailrace.origin.workers.liveness import OPEN_MAX_S
from tailrace.origin.workers.worker_frame import (
    ActiveRuns,
    CancelRun,
    Emission,
    Frame,
    Ready,
    StartRun,
    Step,
)
from tailrace.origin.workers.worker_process import WorkerSlot
from tests.ledger.simulation.simulated_loop import SimulatedLoop
from tests.ledger.simulation.simulated_storage import SimulatedDisk, SimulatedStorage
from tests.origin.simulation.simulated_models import Violation, require

READY = Ready("tokens", "demo", "fingerprint", "cpu", context=64, vocab=300, load_ms=1)
MAX_TOKENS = 24
IN_FLIGHT = 2
"""Maximum frames of a stream that a worker makes before it obeys an order."""
NOT_A_NUMBER = "NaN in the logits"
"""Message of the runs that fail, and may succeed on another worker."""
HELD = "held"
"""Text that a worker has held back until its run fails."""
MAX_STEPS = 150_000
"""Callbacks in which all must end; a few thousand are usual."""
CHAOS_S = 60.0
"""How long things fail."""
OPENS_S = 50.0
"""How long clients open streams: all that begin are there when nothing fails any more."""
BOUND_S = 400.0
"""Maximum time in which every stream ends after that: trials of open circuits come first."""
KILLER_S = MAX_DEATHS * OPEN_MAX_S
"""Time that BOUND_S lacks for each further stream that kills workers, if several do: each must kill
MAX_DEATHS of them, and before each of these deaths the circuit may be open for OPEN_MAX_S."""
UNREAD_AFTER_S = 20
MAX_STREAMS = 12
"""Maximum number of streams of a seed, branches included."""
MAX_RECORDS = 100
"""More records than any stream has."""


@dataclass(frozen=True, slots=True)
class Cancel:
    """An order to cancel a stream: which origin accepted it, and after how many frames."""

    origin: SimulatedOrigin
    frames: int
    ran_here: bool
    """True if a worker of this origin made the stream, as far as the origin knew."""

    def was_overtaken(self, by: SimulatedOrigin) -> bool:
        """Return True if another origin took the stream over from the worker that was to obey.

        The origin that accepted the order only hears of it when its worker's next step is refused.
        It then writes the end, but with a slow worker the other origin may be faster.
        """
        return self.ran_here and by is not self.origin


@dataclass(eq=False)
class Expected:
    """One stream as its client knows it, with the number of tokens at which it ends."""

    number: int
    tokens: int
    kills: bool
    unread: Unread
    parent: Expected | None = None
    """The stream that it is a branch of."""
    shared: tuple[Record, ...] = ()
    """The first records of the parent, which a branch shares."""
    log: list[Record] | None = None
    """The records of a stream that its client has deleted."""
    cancelled: bool = False
    failures: int = 0
    """Number of its runs that have failed."""
    owner: SharedLedger | None = None
    """The ledger of the origin that created it or took it over last."""
    cancels: list[Cancel] = field(default_factory=list)
    """Orders to cancel that were accepted."""
    producers: dict[int, PlayedProcess] = field(default_factory=dict)
    """The process that was ordered to produce it, by epoch."""
    read: int = 0
    """Index before which its client has all frames."""
    finished: SimulatedOrigin | None = None
    """The origin that has sent the end to its client."""

    @property
    def id(self) -> bytes:
        return bytes([self.number + 1]) * 16

    @property
    def shared_ids(self) -> list[int]:
        return [each for record in self.shared for each in record.ids]

    def ids(self, count: int) -> list[int]:
        """Return the first `count` token ids: shared ones, then its own."""
        shared = self.shared_ids
        return shared + [self.own_id(nth) for nth in range(len(shared), count)]

    def own_id(self, nth: int) -> int:
        """Return the id of the nth token, which no other stream makes."""
        return 100 * (self.number + 1) + nth

    def own_text(self, nth: int) -> str:
        """Return the text of the nth token, which no other stream makes."""
        return f"{self.number}t{nth}"


class SharedLedger:
    """One origin's connection to the ledger: it may be away, or gone with its origin.

    A shared ledger knows which origins live. So here `unfinished` leaves out their streams.
    """

    def __init__(self, world: StreamWorld) -> None:
        self.world = world
        self.is_dead = False

    async def _asked(self) -> None:
        """Fail now and then before anything is done, or be slow."""
        if self.is_dead:
            await asyncio.get_running_loop().create_future()  # nobody hears an answer
        random = self.world.random
        if not self.world.is_calm and random.random() < self.world.away:
            raise LedgerAway("the ledger does not answer")

    async def _answered(self, *, may_fail: bool = True) -> None:
        """Fail now and then after it was done: the answer is lost."""
        if self.is_dead:
            await asyncio.get_running_loop().create_future()
        if may_fail and not self.world.is_calm and self.world.random.random() < self.world.away:
            raise LedgerAway("the answer of the ledger is lost")

    async def take_over(self, stream: bytes) -> int:
        await self._asked()
        epoch = await self.world.ledger.take_over(stream)
        self.world.streams[stream].owner = self
        await self._answered()
        return epoch

    async def create(self, *new: NewStream) -> Any:
        await self._asked()
        created = await self.world.ledger.create(*new)
        for one in new:
            self.world.streams[one.stream].owner = self
        await self._answered(may_fail=False)
        return created

    async def append(self, batch: Sequence[Append] | Appends) -> Sequence[Refusal]:
        columns = Appends.of(batch)
        try:
            await self._asked()
        except LedgerAway as error:
            return [Refusal(columns[at], error) for at in range(len(columns))]
        refused = await self.world.ledger.append(batch)
        await self._answered(may_fail=False)
        return refused

    async def unfinished(self) -> list[bytes]:
        await self._asked()
        found = await self.world.ledger.unfinished()
        await self._answered()
        streams = self.world.streams
        return [one for one in found if not self._is_anothers(streams[one].owner)]

    def _is_anothers(self, owner: SharedLedger | None) -> bool:
        return owner is not None and owner is not self and not owner.is_dead

    async def info(self, stream: bytes) -> Any:
        await self._asked()
        info = await self.world.ledger.info(stream)
        await self._answered()
        return info

    async def frames(self, stream: bytes, start: int, limit: int) -> list[bytes]:
        await self._asked()
        frames = await self.world.ledger.frames(stream, start, limit)
        await self._answered()
        return frames

    async def deliver(self, tokens: Mapping[bytes, int]) -> None:
        await self._asked()
        await self.world.ledger.deliver(tokens)
        await self._answered()

    async def read(self, stream: bytes, start: int, limit: int) -> Any:
        await self._asked()
        records = await self.world.ledger.read(stream, start, limit)
        await self._answered()
        return records


class SimulatedSlot(WorkerSlot):
    """A slot whose process is played: it makes the tokens that the prompt of a run says."""

    def __init__(self, number: int, origin: SimulatedOrigin) -> None:
        super().__init__(number, ("", ""))
        self.origin = origin
        self.process: PlayedProcess | None = None

    def launch(self) -> None:
        require(self.process is None, "a slot has two processes")
        self.process = PlayedProcess(self)
        self.origin.world.spawn(self.process.live())

    def stop(self) -> None:
        require(self.process is not None, "a slot is stopped that has no process")
        assert self.process is not None
        self.process.is_stopped = True

    def send(self, frame: Frame, run: int) -> None:
        if self.process is not None:
            self.process.hear(frame, run)


@dataclass(slots=True)
class PlayedRun:
    """A run as its process has it: its next frame's index, and its number of tokens so far."""

    expected: Expected
    index: int
    tokens: int
    is_cancelled: bool = False


class PlayedProcess:
    """One life of a worker."""

    def __init__(self, slot: SimulatedSlot) -> None:
        self.slot, self.world = slot, slot.origin.world
        self.runs: dict[int, PlayedRun] = {}
        self.is_stopped = False
        self._is_cut = self._is_doomed = False

    def hear(self, frame: Frame, run: int) -> None:
        """Take an order, unless nobody listens any more."""
        if self.slot.origin.is_dead or self._is_cut:
            return
        if isinstance(frame, StartRun):
            expected = self.world.by_number[frame.prompt_ids[1]]
            count = len(frame.generated_ids)
            made = expected.ids(count)
            require(list(frame.generated_ids) == made, "a run goes on from other tokens")
            known = self.slot.origin.runs.table.by_id[expected.id]
            before = expected.producers.setdefault(known.epoch, self)
            require(before is self, "two workers were given one epoch of a stream")
            self.runs[run] = PlayedRun(expected, frame.next_index, count)
        elif isinstance(frame, CancelRun) and run in self.runs:
            self.runs[run].is_cancelled = True
            self._is_doomed |= self._fails(0.3)

    async def live(self) -> None:
        """Load, be ready, make steps, and end one way or another."""
        slot, random, runs = self.slot, self.world.random, self.slot.origin.runs
        await self.world.pause(8.0)
        if self._is_over() or self._fails(0.15):
            await self._end("it could not load")
            return
        slot.ready = ready = replace(READY)
        welcoming = self.world.spawn(runs.worker_ready(slot, ready))
        while not self._is_over():
            await self.world.pause(1.0)
            if self._is_doomed or self._fails(0.02):
                break
            if self._fails(0.01):
                await self._fall_silent()
            if self.runs and random.random() < 0.5:
                runs.worker_begun(slot, ActiveRuns(tuple(self.runs)))
                if any(each.expected.kills for each in self.runs.values()):
                    break
            await self._step()
        welcoming.cancel()
        await self._end("killed")

    def _fails(self, chance: float) -> bool:
        return not self.world.is_calm and self.world.random.random() < chance

    def _is_over(self) -> bool:
        return self.is_stopped or self.slot.origin.is_dead

    async def _fall_silent(self) -> None:
        self.slot.origin.runs.worker_silent(self.slot)
        await self.world.pause(15.0)
        if not self._is_over():
            await self.slot.origin.runs.worker_heard(self.slot)

    async def _step(self) -> None:
        random, emissions = self.world.random, []
        for run, each in list(self.runs.items()):
            index, count = each.index, each.tokens
            if each.expected.kills or random.random() < 0.3:
                continue
            if count >= each.expected.tokens or each.is_cancelled:
                reason = FinishReason.CANCELLED if each.is_cancelled else FinishReason.LENGTH
                end = encode(StreamEnd(count, reason, index, 2))
                emissions.append(Emission(run, index, (), (), end))
                del self.runs[run]
            elif self._fails(0.03):
                each.expected.failures += 1
                reason, held = FinishReason.FAILED, encode(Token(HELD, index))
                end = encode(StreamEnd(count, reason, index + 1, 2, NOT_A_NUMBER, retryable=True))
                emissions.append(Emission(run, index, (), (), held))
                emissions.append(Emission(run, index + 1, (), (), end, can_retry=True))
                del self.runs[run]
            else:
                token = encode(Token(each.expected.own_text(count), index))
                emissions.append(Emission(run, index, (each.expected.own_id(count),), (), token))
                each.index, each.tokens = index + 1, count + 1
        if emissions:
            await self.slot.origin.runs.worker_step(self.slot, Step.of(emissions).cut())

    async def _end(self, reason: str) -> None:
        """End, which the owner hears a little later."""
        slot, runs = self.slot, self.slot.origin.runs
        self._is_cut = True
        await self.world.pause(0.5)
        if slot.origin.is_dead:
            return
        slot.ready, slot.exit_reason, slot.process = None, reason, None
        if self.is_stopped:
            await runs.worker_rested(slot)
        else:
            await runs.worker_lost(slot)


class PlayedReader:
    """One connection of a client, with credit for some frames."""

    congested = False

    def __init__(self, world: StreamWorld, expected: Expected) -> None:
        self._expected = expected
        credit = 1000 if world.is_calm else world.random.choice((1, 3, 1000))
        self.window = Window.starting(expected.read, credit)
        self.is_cut = self.has_end = False

    def send(self, data: bytes) -> None:
        """Take the answer to a reader that has all frames."""
        self.has_end = True

    def relay(self, frames: Sequence[bytes], corr: int) -> None:
        """Take frames, which come in order."""
        if self.is_cut:
            return
        for raw in frames:
            at, shared = self._expected.read, self._expected.shared
            require(index_of(raw) == at, "a reader gets a wrong frame")
            is_shared = at >= len(shared) or decode(raw)[1] == decode(shared[at].frame)[1]
            require(is_shared, "a reader of a branch gets another frame than the parent's")
            self._expected.read += 1
            self.has_end |= tag_of(raw) == StreamEnd.tag

    def closed(self, corr: int) -> None:
        """Take note that nothing follows."""


class SimulatedOrigin:
    """One origin: its runs, and what its supervisor does again and again."""

    def __init__(self, world: StreamWorld) -> None:
        self.world = world
        self.is_dead = False
        self.ledger = SharedLedger(world)
        metrics = Metrics(world.loop.time)
        self.slots = [SimulatedSlot(number, self) for number in range(world.random.randint(1, 2))]
        random = Random(world.random.random())
        pool = single_pool(len(self.slots), world.loop.time, random)
        self.models = ModelHost(pool, self.slots, metrics, unix_s=world.loop.time)
        shared: Any = self.ledger
        self.runs = Runs(shared, 8, self.models, metrics, paused_s=1e6, idle_s=1e6)

    async def supervise(self) -> None:
        """Adopt streams and look at readers, twice a second, until it is dead."""
        self.models.start()
        while not self.is_dead:
            for work in (self._adopt, self.runs.report_readers, self._relieve):
                with suppress(Unavailable):  # as the supervisor does
                    await work()
            await self.world.loop.sleep(0.5)

    async def _adopt(self) -> None:
        await self.runs.restore(await self.ledger.unfinished())

    async def _relieve(self) -> None:
        free = 0.01 if not self.world.is_calm and self.world.random.random() < 0.05 else 1.0
        await self.runs.measure_load(free)

    def kill(self) -> None:
        """Its process is gone, with all its workers; nothing of it goes on."""
        self.is_dead = self.ledger.is_dead = True
        self.models.close()


class StreamWorld:
    """Clients, origins and the ledger of one seed."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.loop = SimulatedLoop(self.random)
        self.is_calm = False
        self.away = self.random.choice((0.0, 0.02, 0.15))
        """How often the ledger does not answer, before and after it has done what was asked."""
        self.streams: dict[bytes, Expected] = {}
        self.by_number: dict[int, Expected] = {}
        self.origins: list[SimulatedOrigin] = []
        self.ledger: SqliteLedger
        self.refused = 0
        self._over: asyncio.Future[None] = self.loop.create_future()

    def run(self) -> int:
        """Play the seed; return the number of callbacks."""
        try:
            ended = self.loop.run(self._live(), MAX_STEPS)
        finally:
            events._set_running_loop(self.loop)
            try:
                self.loop.abandon()
            finally:
                events._set_running_loop(None)
        require(ended, f"not all streams have ended after {MAX_STEPS} callbacks")
        require(not self.loop.errors, f"an error went nowhere: {self.loop.errors[:1]}")
        return self.loop.steps

    async def _live(self) -> None:
        storage: Any = SimulatedStorage(SimulatedDisk(self.random))
        self.ledger = await SqliteLedger.recover(storage, lambda: 1_000_000)
        for _ in range(self.random.randint(1, 3)):
            self._open_origin()
        for number in range(self.random.randint(1, 6)):
            self.spawn(self._client(self._draw(number)))
        self.spawn(self._trouble())
        calm = self.spawn(self._calm())
        calm.add_done_callback(self._finish)
        await self._over
        await self._require_ends()

    def spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Begin something whose error ends the run, as it would end an origin."""
        task = self.loop.create_task(work)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None and not self._over.done():
            self._over.set_exception(error)

    def _finish(self, calm: asyncio.Task[None]) -> None:
        if calm.exception() is None and not self._over.done():
            self._over.set_result(None)

    def pause(self, longest_s: float) -> asyncio.Future[None]:
        """Return a future that ends after a random time."""
        return self.loop.sleep(self.random.random() * longest_s)

    def _open_origin(self) -> None:
        origin = SimulatedOrigin(self)
        self.origins.append(origin)
        if self.is_calm:
            self._read_all(origin)
        self.spawn(origin.supervise())

    def _living(self) -> list[SimulatedOrigin]:
        return [one for one in self.origins if not one.is_dead]

    async def _trouble(self) -> None:
        """Kill origins, and begin others in their place."""
        while not self.is_calm:
            await self.pause(40.0)
            if not self.is_calm and self.random.random() < 0.5:
                self.random.choice(self._living()).kill()  # the only one at times
                await self.pause(3.0)
                self._open_origin()

    async def _calm(self) -> None:
        """Stop all faults after a while, and give everybody time."""
        await self.loop.sleep(CHAOS_S)
        self.is_calm = True
        for origin in self._living():
            self._read_all(origin)
        left = await self._unfinished()
        killers = sum(self.streams[stream].kills for stream in left)
        deadline_s = self.loop.time() + BOUND_S + KILLER_S * max(killers - 1, 0)
        while left or self._are_held():
            require(self.loop.time() < deadline_s, "a stream has not ended in time")
            await self.loop.sleep(5.0)
            left = await self._unfinished()
        await self.loop.sleep(5.0)

    def _read_all(self, origin: SimulatedOrigin) -> None:
        """Whoever has left a stream comes back to it."""
        for stream, expected in self.streams.items():
            if expected.log is None:
                origin.runs.readers.begin(stream)

    def _are_held(self) -> bool:
        """Return True while an origin holds streams: it may wait for a worker to see their end."""
        return any(origin.runs.table.count for origin in self._living())

    async def _unfinished(self) -> set[bytes]:
        return set(await self.ledger.unfinished()) & self.streams.keys()

    # ---- clients ----

    def _draw(self, number: int, parent: Expected | None = None) -> Expected:
        """Return a new stream, which may be a branch of `parent`."""
        random = self.random
        unread = random.choice((Unread.RUN, Unread.RUN, Unread.PAUSE, Unread.CANCEL))
        expected = Expected(
            number, random.randint(0, MAX_TOKENS), random.random() < 0.1, unread, parent
        )
        self.by_number[number] = expected
        return expected

    async def _client(self, expected: Expected) -> None:
        """Open a stream, read it for a while, and perhaps branch or cancel it."""
        random = self.random
        await self.pause(CHAOS_S / 2)
        for _ in range(100):
            if self.loop.time() > OPENS_S or await self._open(expected):
                break
            self.refused += 1
            await self.pause(3.0)
        if expected.owner is None:
            return
        self.spawn(self._read(expected))
        if random.random() < 0.3:
            self.spawn(self._branch(expected))
        for _ in range(random.choice((0, 0, 1, 3))):  # through any origin, and again
            await self.pause(10.0)
            if (living := self._living()) and expected.log is None:
                expected.cancelled = True
                origin = random.choice(living)
                with suppress(Unavailable, NotFound):
                    ran_here = origin.runs.table.state_of(expected.id) in GENERATING
                    await origin.runs.cancel(expected.id)
                    made = (await self.ledger.info(expected.id)).next_index
                    expected.cancels.append(Cancel(origin, made, ran_here))

    async def _branch(self, parent: Expected) -> None:
        """Branch a stream, which runs or has ended, and perhaps delete it after that."""
        await self.pause(CHAOS_S / 2)
        if parent.log is not None or len(self.by_number) >= MAX_STREAMS:
            return
        branch = self._draw(len(self.by_number), parent)
        with suppress(NotFound):  # another branch may have had its parent deleted
            info = await self.ledger.info(parent.id)
            index = self.random.randint(0, info.next_index - info.ended)
            branch.shared = tuple((await self.ledger.read(parent.id, 0, MAX_RECORDS))[:index])
            branch.tokens = max(branch.tokens, len(branch.shared_ids))
            branch.failures = sum(map(_is_retry, branch.shared))
            self.spawn(self._client(branch))
            await self.pause(CHAOS_S)
            if self.random.random() < 0.5:
                await self._forget(parent)

    async def _forget(self, expected: Expected) -> None:
        """Delete a stream whose client has its end, as a Cancel with `forget` does."""
        if expected.finished is None or expected.log is not None:
            return
        log = await self.ledger.read(expected.id, 0, MAX_RECORDS)
        if not expected.finished.is_dead:
            try:
                await expected.finished.runs.store_deliveries(ended=expected.id)
            except Unavailable:
                return  # the request is refused
        if not self._over.done() and expected.log is None:
            expected.log = log
            await self.ledger.delete(expected.id)

    async def _read(self, expected: Expected) -> None:
        """Read a stream over many connections, each through any origin, until its end or not."""
        is_patient = self.random.random() < 0.7
        while self.is_calm or is_patient or self.random.random() < 0.7:
            await self.pause(4.0)
            if not (living := self._living()):
                continue
            reader = PlayedReader(self, expected)
            origin = self.random.choice(living)
            feed = Feed(reader, 1, reader.window, self.ledger, origin.runs.readers)
            info = await self.ledger.info(expected.id)
            feed.attach(expected.id, info.next_index)
            await self.pause(20.0)
            if origin.is_dead:
                reader.is_cut = True  # what it is sent from now on, it is sent by nobody
                self.ledger.unwatch(expected.id, feed.pump)
            else:
                feed.detach()
            if reader.has_end:
                expected.finished = origin
                return

    async def _open(self, expected: Expected) -> bool:
        """Return False where the origin refuses, and may accept it later."""
        if not (living := self._living()):
            return False
        origin = self.random.choice(living)
        recipe = Recipe(
            model="demo",
            fingerprint="fingerprint",
            prompt_ids=packed_ids((5, expected.number)),
            prompt_sha256=prompt_hash((5, expected.number)),
            max_tokens=9,
            stop=(),
            ignore_eos=True,
            priority=self.random.choice([*Priority]).word,
            unread=expected.unread.word,
            unread_after_s=UNREAD_AFTER_S,
            sampling=Sampling(temperature=0.0, top_k=0, top_p=1.0, seed=1),
            base=len(expected.shared),
        )
        new = NewStream(expected.id, recipe.model_dump_json(), Durability.PROCESS, 1e6)
        if expected.parent is not None:
            new = replace(new, base=BranchPoint(expected.parent.id, recipe.base))
        try:
            with origin.runs.room([expected.id], Priority.from_word(recipe.priority)) as model:
                async with origin.runs.opening(model, expected.id):
                    self.streams[expected.id] = expected
                    await origin.ledger.create(new)
                    await origin.runs.start((expected.id, recipe))
        except Unavailable:
            return expected.owner is not None  # or it was refused
        except NotFound:  # the stream to branch was deleted
            pass
        return True

    # ---- what must be ----

    async def _require_usage(self) -> None:
        """Compare what the ledger counts with what the log holds, and with what readers got.

        What an origin had not stored when it was killed is missing from what readers got.
        """
        readers = list(self.streams.values())  # some may get their end while this is checked
        finished = [one.id for one in readers if one.finished and not one.finished.is_dead]
        for origin in self._living():
            await origin.runs.store_deliveries()
        counted = await self.ledger.usage(UsageQuery(("finish",)))
        logged, least, most = UsageSums(UsageQuery(("finish",))), 0, 0
        for expected in self.streams.values():
            if expected.owner is None:
                continue
            records = await self._log_of(expected)
            end = decode(records[-1].frame)[1]
            assert isinstance(end, StreamEnd)
            tokens = sum(len(record.ids) for record in records)
            logged.add_row((end.finish_reason.word,), (1, end.prompt_tokens, 0, tokens, 0, 0, 0))
            most += min(expected.read, tokens)
            least += tokens if expected.id in finished else 0
        expected_rows = [(group, counts[:5]) for group, counts in logged.rows]
        found = [(group, counts[:5]) for group, counts in counted.rows]
        require(found == expected_rows, f"{found} was counted, and the log holds {expected_rows}")
        delivered = counted.total.delivered_tokens
        require(
            least <= delivered <= most, f"{delivered} tokens are delivered of {least} to {most}"
        )

    async def _require_ends(self) -> None:
        for expected in self.streams.values():
            if expected.owner is None:
                continue  # its origin died before it was created
            records = await self._log_of(expected)
            await self._require_shared(expected, records)
            *frames, end = [decode(record.frame)[1] for record in records]
            require(isinstance(end, StreamEnd), "a stream has no end")
            assert isinstance(end, StreamEnd)
            tokens, retries = self._made(expected, frames, end)
            require(end.index == len(frames), "the end of a stream is not its last frame")
            match end.finish_reason:
                case FinishReason.LENGTH:
                    require(tokens == expected.tokens, "a stream ended too soon")
                    most = IN_FLIGHT + retries
                    last = expected.producers[max(expected.producers)].slot.origin
                    is_obeyed = all(
                        len(frames) <= cancel.frames + most
                        for cancel in expected.cancels
                        if not (cancel.origin.is_dead or cancel.was_overtaken(last))
                    )
                    # Where the ledger is away, the order waits, and the stream may end before.
                    require(is_obeyed or self.away > 0, "an order to cancel was lost")
                case FinishReason.CANCELLED:
                    may_be = expected.cancelled or expected.unread is Unread.CANCEL
                    require(may_be, "a stream was cancelled by nobody")
                case FinishReason.FAILED if end.message == NOT_A_NUMBER:
                    require(expected.failures > 1, "a stream ended with its first failed run")
                case FinishReason.FAILED:
                    why = end.message or ""
                    was_relieved = "memory" in why
                    require(expected.kills or was_relieved, f"a stream failed: {end.message}")
                case other:
                    require(False, f"a stream ended as {other}")
        await self._require_usage()
        for origin in self._living():
            self._require_none(origin)

    async def _log_of(self, expected: Expected) -> list[Record]:
        """Return the records of a stream, also of one that was deleted."""
        if expected.log is not None:
            return expected.log
        return await self.ledger.read(expected.id, 0, MAX_RECORDS)

    async def _require_shared(self, branch: Expected, records: Sequence[Record]) -> None:
        """Require that a branch begins as its parent does, which may be deleted."""
        count = len(branch.shared)
        require(tuple(records[:count]) == branch.shared, "a branch lost what it shares")
        if branch.parent is not None:
            parent = await self._log_of(branch.parent)
            require(tuple(parent[:count]) == branch.shared, "a parent has other records now")

    def _made(
        self, expected: Expected, frames: Sequence[object], end: StreamEnd
    ) -> tuple[int, int]:
        """Return the number of tokens and of retries in a log, which must have nothing else.

        The frames that a branch shares are those of its parent, and only counted here.
        """
        begin, tokens = len(expected.shared), len(expected.shared_ids)
        retries = sum(map(_is_retry, expected.shared))
        for index, frame in enumerate(frames[begin:], begin):
            if isinstance(frame, Notice):
                if (frame.code, frame.index) != (RETRIED, index):
                    raise Violation(f"a stream has a {frame}")
                retries += 1
            elif frame == Token(HELD, index):
                is_last = index == len(frames) - 1 and end.message == NOT_A_NUMBER
                require(is_last, "held text is in the log")
            elif frame == Token(expected.own_text(tokens), index):
                tokens += 1
            else:
                raise Violation(f"a stream holds what no worker made: {frames}")
        require(retries <= 1, "the log says twice that a run was retried")
        return tokens, retries

    def _require_none(self, origin: SimulatedOrigin) -> None:
        """Require that no request counts any more."""
        [model] = origin.models.core.models
        require(not model.requests, "a model counts requests that have ended")


def _is_retry(record: Record) -> bool:
    """Return True if the record is the notice that a failed run was retried."""
    frame = decode(record.frame)[1]
    return isinstance(frame, Notice) and frame.code == RETRIED
