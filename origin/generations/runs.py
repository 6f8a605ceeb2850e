"""Does the I/O of an origin's streams: carries out the decisions of the core.

The core (`origin.core.streams`) has the rules and no I/O. Calls of clients, workers and the
supervisor are passed to the core as events. The commands that the core returns are carried out on
the ledger and the workers, and the ledger's answers are passed to the core as events, too.

Every token passes through `worker_step`, and the ledger releases it only when its group commit is
durable.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager

import structlog

from tailrace.ledger.errors import (
    Conflict,
    Damaged,
    FrameError,
    LedgerFailed,
    NotFound,
    TailraceError,
    Unavailable,
)
from tailrace.ledger.frame import Caller, Priority
from tailrace.ledger.interface import Ledger
from tailrace.origin.core.events import (
    RequestArrived,
    RequestEnded,
    WorkerDied,
    WorkerExited,
    WorkerHeard,
    WorkerLoading,
    WorkerSilent,
)
from tailrace.origin.core.model import ServedModel
from tailrace.origin.core.states import StreamState
from tailrace.origin.core.stream import TEXT
from tailrace.origin.core.stream_events import (
    AnswerSteers,
    AppendEnd,
    AppendNotices,
    CancelRequested,
    ClaimFailed,
    EndRefused,
    EndStored,
    FindFailed,
    FindStreams,
    LoadMeasured,
    LogLine,
    NoticesLogged,
    OrderRefused,
    OrderRun,
    ReadersSeen,
    RecordArrival,
    RecordEnd,
    RecordIdle,
    RecordReleases,
    RecordRetry,
    ReportToModels,
    RequestClosed,
    RunsStarted,
    SendFrame,
    SteerRequested,
    StepDurable,
    StreamCommand,
    StreamHappening,
    StreamsAdmitted,
    StreamsFound,
    StreamsRequested,
    TakenOver,
    TakeOver,
    UnfinishedListed,
    WakeRequested,
    WorkerAvailable,
    WorkerGone,
)
from tailrace.origin.core.streams import IDLE_STREAM_S, MOST_WAIT_S, PAUSED_S, StreamCore
from tailrace.origin.core.time_spent import ReaderWait
from tailrace.origin.generations.deliveries import store_deliveries
from tailrace.origin.generations.presence import Readers
from tailrace.origin.generations.recipe import Recipe
from tailrace.origin.generations.spending import SpendingReader
from tailrace.origin.generations.stream_log import History, read_history
from tailrace.origin.generations.stream_span import record_span
from tailrace.origin.generations.takeover import (
    append_end,
    find,
    log_first_notices,
    log_notices,
    log_refusal,
    take_over,
)
from tailrace.origin.metrics import Metrics
from tailrace.origin.pool.history.recorder import HistoryRecorder, no_history
from tailrace.origin.pool.history.schema import COLD, HOT
from tailrace.origin.serving.model_host import ModelHost
from tailrace.origin.steady_clock import now_ms
from tailrace.origin.workers.load_spans import ColdStarts
from tailrace.origin.workers.worker_frame import (
    ActiveRuns,
    Emissions,
    Load,
    LoadProgress,
    Ready,
    RunWaits,
    StageTimes,
)
from tailrace.origin.workers.worker_process import Owner, WorkerSlot

log = structlog.get_logger("runs")


LedgerCommand = FindStreams | TakeOver | AppendNotices | AppendEnd
"""Commands that need the ledger, whose answer is reported to the core as an event."""


class Runs(Owner):
    """The streams of an origin, and the owner of all its worker slots.

    `core` makes the decisions. `table` has the core's records of streams, which other code may read
    but not change. `models` has the models and their workers.
    """

    def __init__(
        self,
        ledger: Ledger,
        max_streams: int,
        models: ModelHost,
        metrics: Metrics,
        *,
        paused_s: float = PAUSED_S,
        most_wait_s: float = MOST_WAIT_S,
        idle_s: float = IDLE_STREAM_S,
        recorder: HistoryRecorder | None = None,
        now_ms: Callable[[], int] = now_ms,
    ) -> None:
        """Create the runs of an origin, without streams.

        `paused_s`, `most_wait_s` and `idle_s` are explained in `StreamCore`. `now_ms` returns the
        Unix time in ms, which is stored with records.
        """
        self.models = models
        self.core = StreamCore(
            max_streams,
            models.core,
            paused_s=paused_s,
            most_wait_s=most_wait_s,
            idle_s=idle_s,
            cold_wait_s=models.wait_s,
        )
        self.table = self.core.table
        self.spending = SpendingReader(ledger, self.core.budgets, metrics.clock, now_ms)
        self.readers = Readers(self._readers_changed, metrics.replayed)
        self.recorder = recorder or no_history()
        self.starts = ColdStarts()
        self._ledger = ledger
        self._now_ms = now_ms
        self._metrics = metrics
        metrics.streams.set_function(lambda: len(self.table.by_id))
        metrics.overload.set_function(lambda: self.core.shedding.level)
        self._tickets = itertools.count(1)
        self._steers: dict[int, asyncio.Future[None]] = {}
        """Futures of callers that wait until their Steer orders are durable, by ticket."""
        self._storing_deliveries = asyncio.Lock()
        self._reading = asyncio.Lock()
        """Held while a log is read, so that logs are read one after another. Between two logs other
        tasks can run, such as those that store tokens."""

    @property
    def clock(self) -> Callable[[], float]:
        """Return the clock for all times of streams, in seconds; metrics use the same clock."""
        return self._metrics.clock

    @property
    def paused_count(self) -> int:
        return len(self.table.paused)

    # ---- what clients want ----

    @contextmanager
    def room(
        self,
        streams: Sequence[bytes],
        priority: Priority = Priority.STANDARD,
        caller: Caller | None = None,
        model: str = "",
    ) -> Iterator[ServedModel]:
        """Reserve room for new streams, which the `with` block starts; yield their model.

        Raises:
            NotFound: The model is not served.
            Overloaded: The origin has too many streams.
            TooManyRequests: The caller's tenant has reached its quota.
            Unavailable: The model is not ready, and requests do not wait for it.
        """
        wanted = self.models.find(model)
        self.models.check_starts(wanted)
        requested = StreamsRequested(streams, priority, caller, self._now_ms())
        self._do(self.core.handle(requested, self.clock()))
        try:
            yield wanted
        finally:
            self._do(self.core.handle(RequestClosed(streams), self.clock()))

    @asynccontextmanager
    async def opening(
        self, model: ServedModel, stream: bytes, *, known: bool = True
    ) -> AsyncIterator[str]:
        """Wait until the stream can be opened in the `with` block: see `ModelHost.until_open`.

        The stream counts as a request for its model during the wait and the block, and afterwards
        if the block has opened it.
        """
        self.models.happen(RequestArrived(model.name, stream))
        try:
            yield await self.models.until_open(model, stream, known=known)
        finally:
            if stream not in self.table.by_id:
                self.models.happen(RequestEnded(model.name, stream))

    async def start(
        self, *streams: tuple[bytes, Recipe], read: bool = True, waited: bool = False
    ) -> None:
        """Generate streams that were just created.

        `read`: the client that opened the streams will read them. `waited`: the request waited for
        their model.
        """
        for stream, recipe in streams:
            if not self.models.is_up(recipe.model):
                await log_first_notices(self._ledger, stream, recipe, self._now_ms())
        await self._happen(StreamsAdmitted(streams, is_read=read, has_waited=waited))

    async def history(self, stream: bytes, begin: int, until: int) -> History:
        """Return the log of a stream from index `begin` up to but not `until`."""
        return await read_history(self._ledger, stream, self._reading, begin, until)

    def answered(self) -> None:
        """Count a request that was answered from the ledger."""
        self._metrics.cached.inc()

    async def cancel(self, stream: bytes) -> None:
        """Cancel a stream: its worker writes the end, or this origin if the stream has no worker.

        A stream that another origin generates is first taken over. A stream that has ended is not
        changed. If the ledger does not answer, a stream of this origin is cancelled later.
        """
        await self._happen(CancelRequested(stream))

    async def steer(self, stream: bytes, ids: Sequence[int]) -> None:
        """Insert token ids into a running stream; return when they are durable in its log.

        Raises:
            Conflict: The stream ends, or leaves this origin, before the ids are inserted.
            Overloaded: Too many Steer orders of the stream are pending.
            Unavailable: The stream is not generated here.
        """
        if self.table.state_of(stream) is StreamState.PAUSED:
            await self._happen(WakeRequested(stream))
        if stream not in self.table.by_id and await find(self._ledger, stream) is None:
            raise Conflict(
                "the stream has ended", hint="open a new stream with the text in its prompt"
            )
        ticket = next(self._tickets)
        taken = self._steers[ticket] = asyncio.get_running_loop().create_future()
        try:
            await self._happen(SteerRequested(stream, ids, ticket))
        except TailraceError:
            del self._steers[ticket]
            raise
        await taken

    def _readers_changed(self, stream: bytes) -> None:
        """Note if some reader of a stream can take its next frame, or why none can."""
        if (known := self.table.by_id.get(stream)) is not None:
            wait: ReaderWait | None = None
            if not self.readers.count(stream):
                wait = ReaderWait.RELAY if self.readers.is_connected(stream) else ReaderWait.AWAY
            known.progress.time.readers_changed(self.clock(), wait)
            self.table.changed(known)

    def resumed(self, stream: bytes) -> None:
        """Count that a client has resumed reading a stream."""
        self.table.resumed(stream)

    # ---- what the supervisor reports ----

    async def restore(self, streams: Sequence[bytes]) -> None:
        """Continue unfinished streams of dead origins, as many as there is room for.

        The supervisor calls this again and again with all unfinished streams. Streams that this
        origin has already are not affected. Streams that could not be continued because the ledger
        did not answer are tried again.
        """
        await self._happen(UnfinishedListed(streams))

    async def report_readers(self) -> None:
        """Report to the core which streams were read lately; the core pauses or ends the others."""
        await self._happen(ReadersSeen(self.readers.lately()))
        await self.store_deliveries()

    async def store_deliveries(self, ended: bytes | None = None) -> None:
        """Store how many tokens of ended streams were delivered to readers.

        A call waits for the previous one, so that at its end all earlier deliveries are stored.
        `ended` is a stream that has ended in the ledger. This origin may still have a record of
        it, if another origin wrote the end.
        """
        async with self._storing_deliveries:
            running = self.table.by_id if ended is None else self.table.by_id.keys() - {ended}
            await store_deliveries(self._ledger, self.readers, running)

    async def measure_load(self, free_memory: float) -> None:
        """Adapt load shedding to the current load; `free_memory` is a share from 0 to 1."""
        await self._happen(LoadMeasured(free_memory))

    # ---- what the workers report ----

    def worker_loading(self, slot: WorkerSlot, progress: LoadProgress) -> None:
        """Record the progress of a worker's start."""
        self.starts.loading(slot.number, progress.stage, self.clock())
        self.models.happen(WorkerLoading(slot.number, progress))

    async def worker_ready(self, slot: WorkerSlot, ready: Ready) -> None:
        """Assign streams to a worker that is ready, unless it was told to stop meanwhile."""
        if slot.ready is not ready or not self.models.worker_ready(slot, ready):
            return
        self.starts.ready(slot.number, self.clock(), slot.start)
        self.recorder.loaded(slot.number, ready.model, slot.start)
        await self._happen(WorkerAvailable(slot.number, is_new=True))

    def worker_begun(self, slot: WorkerSlot, begun: ActiveRuns) -> None:
        """Report to the core the runs that a worker computes now and that have no output yet.

        If the worker dies, one of these runs may be the cause.
        """
        self._do(self.core.handle(RunsStarted(slot.number, begun.runs), self.clock()))

    def worker_silent(self, slot: WorkerSlot) -> None:
        """Assign no further streams to a worker while it is silent."""
        self.models.happen(WorkerSilent(slot.number))

    async def worker_heard(self, slot: WorkerSlot) -> None:
        """Assign streams again to a worker that was silent and has now sent a frame."""
        self.models.happen(WorkerHeard(slot.number))
        await self._happen(WorkerAvailable(slot.number))

    def worker_load(self, slot: WorkerSlot, load: Load) -> None:
        """Record how busy a worker is."""
        self._metrics.worker_load(slot.number, load)

    def worker_stages(self, slot: WorkerSlot, times: StageTimes) -> None:
        """Record how long the stages of a pipeline took for a stream, so far or in all."""
        if times.is_final:
            self._metrics.stages(slot.model, times.times)
        if (stream := self.core.table.by_id.get(times.stream)) is not None:
            stream.progress.stages = times.times
            self.table.changed(stream)

    def worker_waits(self, slot: WorkerSlot, waits: RunWaits) -> None:
        """Record how long streams of a worker have waited for a place in its batch."""
        waited_ms = {one.run: one.waited_ms for one in waits.waits}
        for stream in self.core.table.on(slot.number):
            if (ms := waited_ms.get(stream.run)) is not None:
                stream.progress.time.waited_for_batch(ms / 1000)
                self.table.changed(stream)

    async def worker_step(self, slot: WorkerSlot, made: Emissions) -> None:
        """Store the frames of engine steps in one group commit."""
        step = self.core.step(slot.number, made)
        begun = self.clock()
        batch = step.appends(begun, self._now_ms(), self.readers.reach)
        refusals = await self._ledger.append(batch)
        took_s = self.clock() - begun
        self._metrics.appended(took_s, sum(map(len, batch.frames)))
        await self._happen(StepDurable(slot.number, step, refusals, took_s))

    async def worker_lost(self, slot: WorkerSlot) -> None:
        """Handle the death of a worker: its streams wait for another one."""
        model = self.models.core.model_of(slot.number)
        if self.models.worker(slot).is_up:
            lost = model.ready.model if model.ready is not None else ""
            self.recorder.changed_tier(slot.number, lost, COLD, slot.exit_reason)
        self.starts.lost(slot.number, slot.exit_reason, self.clock())
        self._metrics.worker_lost(slot.number, slot.exit_kind)
        self.models.happen(WorkerDied(slot.number, slot.exit_reason))
        await self._happen(WorkerGone(slot.number))

    async def worker_rested(self, slot: WorkerSlot) -> None:
        """Handle that a worker's process has ended because it was told to."""
        self._metrics.worker_left(slot.number)
        self.models.happen(WorkerExited(slot.number))
        # A worker that was stopped while it still had streams leaves them to other workers.
        await self._happen(WorkerGone(slot.number, is_death=False))

    # ---- commands ----

    async def _happen(self, event: StreamHappening) -> None:
        """Report an event to the core; return when all resulting commands are carried out."""
        asked = self._do(self.core.handle(event, self.clock()))
        if asked:
            # Shielded, because the caller may be cancelled, for example when its worker ends. The
            # commands must be completed even then, since they also concern other streams.
            await asyncio.shield(self._ask(asked))

    def _do(self, commands: Sequence[StreamCommand]) -> list[LedgerCommand]:
        """Carry out commands in order, except those that need the ledger, which are returned."""
        asked: list[LedgerCommand] = []
        for command in commands:
            match command:
                case RecordReleases() | RecordRetry() | RecordIdle():
                    self._record(command)
                case FindStreams() | TakeOver() | AppendNotices() | AppendEnd():
                    asked.append(command)
                case OrderRun():
                    asked += self._order(command)
                case SendFrame(worker, run, frame):
                    self.models.slots[worker].send(frame, run)
                case AnswerSteers():
                    self._answer(command)
                case ReportToModels(event):
                    self.models.happen(event)
                case RecordArrival(stream, model, is_up):
                    self.recorder.arrived(stream, model, HOT if is_up else COLD)
                case RecordEnd():
                    self._record_end(command)
                case LogLine(level, event, fields):
                    getattr(log, level)(event, **fields)
        return asked

    async def _ask(self, commands: Sequence[LedgerCommand]) -> None:
        """Carry out commands that need the ledger, and report its answers to the core."""
        claims = [one for one in commands if isinstance(one, TakeOver)]
        others = (self._answered(one) for one in commands if not isinstance(one, TakeOver))
        await asyncio.gather(self._claim_all(claims), *others)

    async def _claim_all(self, claims: Sequence[TakeOver]) -> None:
        """Take streams over, one priority class after another, so that urgent ones come first."""
        for _, some in itertools.groupby(claims, lambda one: one.stream.recipe.priority):
            await asyncio.gather(*map(self._answered, some))

    async def _answered(self, command: LedgerCommand) -> None:
        match command:
            case TakeOver():
                event = await self._take_over(command)
            case AppendNotices():
                event = await self._log_notices(command)
            case AppendEnd():
                event = await self._append_end(command)
            case FindStreams():
                event = await self._find(command)
        await self._happen(event)

    async def _find(self, command: FindStreams) -> StreamHappening:
        """Look streams up; if the ledger does not answer, tell the core and raise `Unavailable`."""
        purpose, streams = command.purpose, command.streams
        try:
            found = await asyncio.gather(*(find(self._ledger, one) for one in streams))
        except Unavailable:
            await self._happen(FindFailed(purpose, streams))
            raise
        return StreamsFound(purpose, dict(zip(streams, found, strict=True)))

    async def _take_over(self, command: TakeOver) -> StreamHappening:
        stream, run = command.stream, command.run
        try:
            taken = await take_over(self._ledger, stream, self._reading)
        except LedgerFailed:
            raise
        except (Unavailable, Damaged, FrameError) as error:
            return ClaimFailed(stream.id, run, error)
        return ClaimFailed(stream.id, run) if taken is None else TakenOver(stream.id, run, *taken)

    async def _log_notices(self, command: AppendNotices) -> StreamHappening:
        stream, run, history = command.stream, command.run, command.history
        try:
            refusal = await log_notices(
                self._ledger, stream, command.epoch, command.notices, history, self._now_ms()
            )
        except LedgerFailed:
            raise
        except Unavailable as error:
            return ClaimFailed(stream, run, error)
        if refusal is not None:
            return ClaimFailed(stream, run, log_refusal(refusal))
        return NoticesLogged(stream, run, history)

    async def _append_end(self, command: AppendEnd) -> StreamHappening:
        stream, nth = command.stream, command.nth
        try:
            written = await append_end(
                self._ledger,
                stream,
                command.end,
                self._reading,
                self.clock(),
                self._now_ms(),
                self.readers.reach,
            )
        except LedgerFailed:
            raise
        except (NotFound, Damaged, Unavailable) as error:
            return EndRefused(stream.id, nth, error)
        if written.refusal is not None:
            return EndRefused(stream.id, nth, log_refusal(written.refusal))
        return EndStored(stream.id, nth, written.epoch)

    def _order(self, command: OrderRun) -> list[LedgerCommand]:
        """Send a worker the order to generate a stream, and then the command's further frames."""
        stream, slot, run = command.stream, self.models.slots[command.worker], command.run
        recipe, history = stream.recipe, command.history
        try:
            is_text = command.kind == TEXT
            slot.send(recipe.ask(history, stream.id) if is_text else recipe.run(history), run)
        except FrameError as error:
            log.error("stream.order_failed", stream=stream.id.hex(), error=str(error))
            return self._do(self.core.handle(OrderRefused(stream.id, run), self.clock()))
        for frame in command.follow_up:
            slot.send(frame, run)
        fields = {"stream": stream.id.hex(), "slot": slot.number}
        log.debug("stream.ordered", run=run, trace=recipe.trace, **fields)
        if stream.epoch > 1:
            self._metrics.takeovers.inc()
            taken = {"epoch": stream.epoch, "frames": history.next_index}
            log.info("stream.taken_over", **taken, **fields)
        return []

    def _answer(self, command: AnswerSteers) -> None:
        for ticket in command.tickets:
            taken = self._steers.pop(ticket)
            if taken.done():
                continue  # the caller was cancelled
            if command.error is None:
                taken.set_result(None)
            else:
                taken.set_exception(command.error)

    def _record(self, command: RecordReleases | RecordRetry | RecordIdle) -> None:
        """Update the metrics as a command says."""
        match command:
            case RecordReleases(gaps, firsts):
                for priority, gap_s, count in gaps:
                    self._metrics.release(priority, gap_s, count)
                for priority, model, waited_s, trace in firsts:
                    self._metrics.first_release(priority, model, waited_s, trace)
            case RecordRetry():
                self._metrics.retries.inc()
            case RecordIdle(state):
                self._metrics.idle_ended(state)

    def _record_end(self, command: RecordEnd) -> None:
        stream, reason = command.stream, command.reason
        if command.is_delivered:
            self.readers.forget(stream.id)
        self._metrics.ended(reason)
        if stream.asked_s is not None and stream.released_s is None:
            waited_s, recipe = self.clock() - stream.asked_s, stream.recipe
            self._metrics.slo.ended(recipe.priority, recipe.model, waited_s, reason)
        self.recorder.served(stream.id, stream.progress.first_ms, stream.made, reason.word)
        if self._metrics.traces is not None:
            record_span(self._metrics.traces, stream, reason, self.clock())
