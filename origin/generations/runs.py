"""Which stream is generated where: the runs of all workers, and the streams that wait.

A run is one stream on one worker under one epoch. A worker's death turns its runs into
waiting streams; the next ready worker takes each over under a new epoch and goes on from
what the ledger holds. Every token passes through `worker_step`, and is released by the
ledger only when its group commit is durable.

Other origins may share the ledger. Whoever took a stream over last is its producer; the runs
of the others end when the ledger refuses what they append.
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
    LedgerAway,
    LedgerFailed,
    LedgerFull,
    NotFound,
    StaleEpoch,
    StreamFull,
    Unavailable,
)
from tailrace.ledger.frame import Caller, FinishReason, Priority, Unread
from tailrace.ledger.interface import Ledger, Refusal
from tailrace.origin.core.events import (
    RequestArrived,
    RequestEnded,
    WorkerDied,
    WorkerExited,
    WorkerHeard,
    WorkerLoading,
    WorkerProved,
    WorkerSilent,
)
from tailrace.origin.core.model import ServedModel
from tailrace.origin.generations.callers import Allowances, tenant_of
from tailrace.origin.generations.load_shedding import Overload
from tailrace.origin.generations.poison_streams import judge
from tailrace.origin.generations.presence import Attendance, Readers, is_idle, is_left
from tailrace.origin.generations.recipe import Recipe
from tailrace.origin.generations.stream import (
    TEXT,
    GeneratedStream,
    find,
    log_refusal,
    record_span,
    tell_first,
)
from tailrace.origin.generations.stream_log import History
from tailrace.origin.generations.table import Placed, StreamTable
from tailrace.origin.metrics import Metrics
from tailrace.origin.pool.history.recorder import HistoryRecorder, no_history
from tailrace.origin.pool.history.schema import COLD, HOT
from tailrace.origin.serving.model_host import ModelHost
from tailrace.origin.workers.load_spans import ColdStarts
from tailrace.origin.workers.worker_frame import (
    Attend,
    Begun,
    Emissions,
    Halt,
    Load,
    LoadProgress,
    Ready,
)
from tailrace.origin.workers.worker_process import Owner, WorkerSlot

MOST_WAIT_S = 60.0
IDLE_STREAM_S = 21_600.0
MAX_DEATHS = 5
"""A stream that so many workers in a row died on, when no other could be the cause, is ended
as failed."""
CANCEL_TRIES = 3
"""Takeovers for one cancel: another origin may take the stream over between ours and its end."""
log = structlog.get_logger("runs")


class Runs(Owner):
    """The owner of all worker slots; `models` decides which of them have workers."""

    def __init__(
        self,
        ledger: Ledger,
        max_streams: int,
        models: ModelHost,
        metrics: Metrics,
        *,
        paused_s: float = 86_400,
        most_wait_s: float = MOST_WAIT_S,
        idle_s: float = IDLE_STREAM_S,
        recorder: HistoryRecorder | None = None,
    ) -> None:
        """`paused_s` is how long a paused stream is kept; to wait for so long as
        `most_wait_s` to be begun is too long, and makes the origin do less. A stream that nobody
        has read, and that has made nothing, for `idle_s` is ended."""
        self.models = models
        self.readers = Readers(self._touch, metrics.replayed)
        self.recorder = recorder or no_history()
        self.starts = ColdStarts()
        self.allowances = Allowances(metrics.clock)
        self._ledger = ledger
        self._metrics = metrics
        self.table = StreamTable(max_streams, metrics)
        self.overload = Overload(self.table, metrics, most_wait_s, self.models.is_up)
        self._attendance = Attendance(paused_s)
        self._idle_s = idle_s
        self._left: set[bytes] = set()  # unfinished, and not ours to go on with
        self._groups = itertools.count(1)  # of suspects
        self._reading = asyncio.Lock()  # one log at a time

    @contextmanager
    def room(
        self,
        streams: int = 1,
        priority: Priority = Priority.STANDARD,
        caller: Caller | None = None,
        model: str = "",
    ) -> Iterator[ServedModel]:
        """Keep room for so many new streams of a model, to be started within; gives the model.

        Raises `Overloaded`, `Unavailable` while it can be neither asked nor waited for, CallerError
        (429) where the caller's tenant has, or has had, as much as it may, NotFound.
        """
        wanted = self.models.find(model)
        self.models.check_starts(wanted)
        self.overload.admit(priority)
        tenant = tenant_of(caller)
        with self.table.reserved(streams, priority, tenant):
            self.allowances.admit(caller, streams, self.table.unfinished(tenant) - streams)
            yield wanted

    @asynccontextmanager
    async def opening(
        self, model: ServedModel, stream: bytes, *, known: bool = True
    ) -> AsyncIterator[str]:
        """Within, a stream of that id can be opened: see `ModelHost.until_open`.

        It counts as a request for its model, and goes on counting if it was opened.
        """
        self.models.happen(RequestArrived(model.name, stream))
        try:
            yield await self.models.until_open(model, stream, known=known)
        finally:
            if stream not in self.table.by_id:
                self.models.happen(RequestEnded(model.name, stream))

    # ---- streams ----

    async def start(
        self, *streams: tuple[bytes, Recipe], read: bool = True, waited: bool = False
    ) -> None:
        """Generate streams that were just created.

        `read`: whoever opened them is to read them; `waited`: their model had to be loaded.
        """
        for stream, recipe in streams:
            if not self.models.is_up(recipe.model):
                await tell_first(self._ledger, stream, recipe)
        now = self._metrics.clock()
        for stream, recipe in streams:
            if stream not in self.table.by_id:
                self.allowances.charge(recipe.tenant, len(recipe.prompt_ids))
                is_up = self.models.is_up(recipe.model) and not waited
                self.recorder.arrived(stream, recipe.model, HOT if is_up else COLD)
                self._enqueue(
                    GeneratedStream(stream, recipe, started=False, asked_s=now, unread=not read)
                )
        await self._assign()

    async def restore(self, streams: Sequence[bytes]) -> None:
        """Go on with unfinished streams of origins that are gone, as many as there is room for.

        Those that run or wait here are left alone, so it may be called again and again. What
        had to wait because the ledger was away is tried again.
        """
        self.table.resume_deferred()
        for cancelled in self.table.withdraw_cancelled():  # an end takes no worker
            await self._end(cancelled, FinishReason.CANCELLED)
        self._left.intersection_update(streams)
        paused = self._attendance.paused
        known = self.table.by_id.keys() | self._left | paused.keys()
        unknown = [stream for stream in streams if stream not in known][: self.table.room]
        found = await asyncio.gather(*(find(self._ledger, stream) for stream in unknown))
        for id_, stream in zip(unknown, found, strict=True):
            if stream is None:
                self._left.add(id_)
            elif stream.recipe.unread == Unread.PAUSE.word and self.table.is_crowded:
                paused[id_] = self._metrics.clock()
            elif id_ not in self.table.by_id:
                self._enqueue(stream)
        await self._assign()

    def _enqueue(self, stream: GeneratedStream) -> None:
        """Have a stream that was not here wait for a worker of its model."""
        self.table.enqueue(stream)
        if (model := self.models.of(stream.recipe.model)) is not None:
            self.models.happen(RequestArrived(model.name, stream.id, begun=True))

    async def cancel(self, stream: bytes) -> None:
        """End a stream; its worker writes the end, or this origin where it has none here.

        A stream that another origin generates is taken from it. One that has ended stays as it is.
        While the ledger is away the order is kept, and carried out later.
        """
        if stream not in self.table.by_id:
            elsewhere = await find(self._ledger, stream)
            if elsewhere is None:
                return
            if stream not in self.table.by_id:
                # From now on it is known: nothing else makes another record of it meanwhile.
                elsewhere.cancelled = True
                self.table.add(elsewhere)
                await self._end(elsewhere, FinishReason.CANCELLED)
                return
        known = self.table.by_id[stream]
        known.cancelled = True
        self.table.touch(known)
        if known.slot is not None:
            known.slot.send(Halt(), known.run)
        elif self.table.is_waiting(known):
            self.table.withdraw(known)
            await self._end(known, FinishReason.CANCELLED)

    async def steer(self, stream: bytes, ids: Sequence[int]) -> None:
        """Have a generation go on with `ids`; returns when they are durable in its log.

        Raises `Conflict` if it ends before, `Overloaded` where many wait already, and
        `Unavailable` for a stream that is not generated here.
        """
        if stream in self._attendance.paused:
            await self._wake(stream)
            await self._assign()
        known = self.table.by_id.get(stream)
        if known is None and await find(self._ledger, stream) is None:
            raise Conflict("the stream has ended", hint="open a new stream with the text")
        if known is None:
            raise Unavailable(
                "another origin generates this stream, or soon will",
                hint="an edge of that origin takes it",
            )
        if known.cancelled:
            raise known.not_taken()
        order, taken = known.steering.add(ids)
        if known.ordered and known.slot is not None:
            known.slot.send(order, known.run)
        await taken

    async def _assign(self) -> None:
        """Hand over what a worker may take; again, because one that is dropped makes way."""
        while self.table.has_waiting:  # after most steps of a worker nothing is
            placed = self.table.place(self.models.ready_slots(), self.models.may_take)
            if not placed:
                return
            # Whoever waits may be cancelled as its worker goes; streams of others are handed over.
            await asyncio.shield(self._hand_over_all(placed))

    async def _hand_over_all(self, placed: Sequence[Placed]) -> None:
        """Class by class: none waits until less urgent streams are taken over."""
        for _, some in itertools.groupby(placed, lambda each: each[0].recipe.priority):
            await asyncio.gather(*(self._hand_over(*each) for each in some))

    async def _hand_over(self, stream: GeneratedStream, slot: WorkerSlot, run: int) -> None:
        claim = unreadable = None
        ready = slot.ready
        async with stream.claiming:
            is_ours = self.table.run(slot, run) is stream and not stream.cancelled
            try:
                if ready is not None and is_ours:
                    claim = await stream.claim(self._ledger, ready, self._reading)
            except Unavailable as error:
                self._defer(stream, error)
            except (Damaged, FrameError) as error:
                unreadable = error
        if self.table.run(slot, run) is not stream:
            return  # the worker died meanwhile, and worker_lost has put the stream back
        if stream.cancelled:
            await self._end(stream, FinishReason.CANCELLED)
        elif ready is None:  # the worker left after the stream was placed
            self.table.take_off(stream)
            self.table.wait_again([stream])
        elif unreadable is not None:
            log.error("stream.damaged", stream=stream.id.hex(), error=str(unreadable))
            await self._end(stream, FinishReason.FAILED, "what was stored of it is damaged")
        elif claim is None:
            self._forget(stream)
        elif claim.lost is not None:
            await self._end(stream, FinishReason.ORIGIN_LOST, claim.lost)
        elif claim.refusal is not None:
            await self._stop_refused(slot, claim.refusal)
        else:
            await self._order(stream, slot, claim.history)

    async def _order(self, stream: GeneratedStream, slot: WorkerSlot, history: History) -> None:
        """Send a worker its order to run, and what the stream was steered with meanwhile."""
        is_text = slot.ready is not None and slot.ready.kind == TEXT
        try:
            order = stream.recipe.ask(history) if is_text else stream.recipe.run(history)
            slot.send(order, stream.run)
        except FrameError as error:
            log.error("stream.not_ordered", stream=stream.id.hex(), error=str(error))
            await self._end(stream, FinishReason.FAILED, "no worker can be told to go on with it")
            return
        for steer in stream.steering.orders:
            slot.send(steer, stream.run)
        stream.ordered = True
        log.debug(
            "stream.ordered",
            stream=stream.id.hex(),
            slot=slot.number,
            run=stream.run,
            trace=stream.recipe.trace,
        )
        stream.progress.go_on(history, self._metrics.clock())
        self.table.touch(stream)
        if stream.unread:
            self._tell_unread(stream)
        if stream.epoch > 1:
            self._metrics.takeovers.inc()
            log.info(
                "stream.taken_over",
                stream=stream.id.hex(),
                epoch=stream.epoch,
                frames=history.next_index,
                slot=slot.number,
            )

    async def _end(
        self,
        stream: GeneratedStream,
        reason: FinishReason,
        message: str | None = None,
        *,
        retryable: bool = False,
    ) -> None:
        """Write the end of a stream that no worker can write, and forget it.

        Where another origin takes it over at this moment, a cancel insists, and is tried again
        later. Any other end is the other origin's to write.
        """
        is_cancel = reason is FinishReason.CANCELLED
        tries, refusal = CANCEL_TRIES if is_cancel else 1, None
        async with stream.claiming:
            try:
                while tries and (
                    refusal := await stream.append_end(
                        self._ledger, reason, message, retryable, self._reading, self.clock()
                    )
                ):
                    tries -= 1
                    log_refusal(refusal)
            except NotFound:
                pass  # retention took it
            except Damaged as error:
                self._leave(stream, error)
                return
            except Unavailable as error:
                self._defer(stream, error)
                return
        if refusal is not None and isinstance(refusal.error, StaleEpoch):
            if is_cancel:
                self.table.defer(stream)
            else:
                self._forget(stream)
            return
        self._metrics.ended(reason)
        self._over(stream, reason)

    def _defer(self, stream: GeneratedStream, error: Unavailable) -> None:
        """Hand it over again later; raises the error where the ledger is not only away."""
        if isinstance(error, LedgerFailed):
            raise error
        log.warning("stream.deferred", stream=stream.id.hex(), error=str(error))
        self.table.defer(stream)

    def _leave(self, stream: GeneratedStream, error: Damaged) -> None:
        """Give up a stream whose row is damaged: it can be neither continued nor ended.

        It stays as it is in the ledger, and whoever asks for it is told that it is damaged.
        """
        log.error("stream.damaged", stream=stream.id.hex(), error=error.message)
        self._left.add(stream.id)
        self._metrics.ended(FinishReason.FAILED)
        self._over(stream, FinishReason.FAILED)

    def _over(self, stream: GeneratedStream, reason: FinishReason) -> None:
        self.table.remember(stream, reason)
        self.recorder.served(stream.id, stream.progress.first_ms, stream.made, reason.word)
        if self._metrics.traces is not None:
            record_span(self._metrics.traces, stream, reason, self.clock())
        self._forget(stream)

    def _forget(self, stream: GeneratedStream) -> None:
        self._attendance.paused.pop(stream.id, None)
        self.table.forget(stream)
        if (model := self.models.of(stream.recipe.model)) is not None:
            self.models.happen(RequestEnded(model.name, stream.id))

    # ---- what operators see ----

    @property
    def clock(self) -> Callable[[], float]:
        """The metrics' clock, by which the times of streams are."""
        return self._metrics.clock

    @property
    def paused_count(self) -> int:
        return len(self._attendance.paused)

    def resumed(self, stream: bytes) -> None:
        """A client reads it anew."""
        if (known := self.table.by_id.get(stream)) is not None:
            known.progress.resumes += 1
            self.table.touch(known)

    def _touch(self, stream: bytes) -> None:
        if (known := self.table.by_id.get(stream)) is not None:
            self.table.touch(known)

    # ---- too much to do ----

    async def relieve(self, free_memory: float) -> None:
        """Do less, or more again, as things are; called now and then. `free_memory` is a share."""
        if not self.models.up_slots():
            return  # who waits, waits for a worker
        before = self.overload.ladder.rung
        longest = self.overload.look(self._metrics.clock(), free_memory)
        if self.overload.ladder.rung is not before:
            for slot in self.models.up_slots():
                self.overload.ease(slot)
        if longest is not None and longest.slot is not None:
            longest.slot.send(Halt(), longest.run)
            self.table.take_off(longest)
            why = "it ran longest when the memory was nearly used up"
            await self._end(longest, FinishReason.FAILED, why, retryable=True)

    # ---- who reads ----

    async def attend(self) -> None:
        """Look who is read, and do with what is not as its request says; called now and then."""
        now, lately = self._metrics.clock(), self.readers.lately()
        for stream in self._attendance.look(self.table.by_id.values(), lately, now):
            self._tell_unread(stream)
        for stream in [s for s in self.table.by_id.values() if is_left(s, now)]:
            if not (stream.ordered or self.table.is_waiting(stream)):
                continue  # it is being handed over
            if stream.recipe.unread == Unread.PAUSE.word:
                self._pause(stream, now)
            else:
                await self.cancel(stream.id)
        for stream in [s for s in self.table.by_id.values() if is_idle(s, now, self._idle_s)]:
            if stream.ordered or self.table.is_waiting(stream):
                await self._end_idle(stream)
        overdue = self.models.overdue(self.table.by_id.values(), now)
        for stream in filter(self.table.is_waiting, overdue):
            self.table.withdraw(stream)
            why = self.models.why_late(stream.recipe.model)
            await self._end(stream, FinishReason.FAILED, why, retryable=True)
        for id_ in self._attendance.too_old(now):
            await self.cancel(id_)
        for id_ in sorted(self._attendance.wanted(lately, self.table.by_id)):
            await self._wake(id_)
        await self._assign()

    def _pause(self, stream: GeneratedStream, now: float) -> None:
        """Take it from its worker. What is in the ledger is all that it takes to go on."""
        if stream.slot is not None:
            stream.slot.send(Halt(), stream.run)
        else:
            self.table.withdraw(stream)
        self._forget(stream)
        self._attendance.paused[stream.id] = now
        log.info("stream.paused", stream=stream.id.hex())

    async def _end_idle(self, stream: GeneratedStream) -> None:
        """It holds room, and perhaps a worker, that others could use."""
        state = "running" if stream.ordered else "waiting"
        log.warning("stream.idle", stream=stream.id.hex(), state=state, idle_s=self._idle_s)
        self._metrics.idle_ended(state)
        if stream.slot is not None:
            stream.slot.send(Halt(), stream.run)
            self.table.take_off(stream)
        else:
            self.table.withdraw(stream)
        why = f"nobody read it and nothing came of it for {self._idle_s:g} s"
        await self._end(stream, FinishReason.FAILED, why, retryable=True)

    async def _wake(self, stream: bytes) -> None:
        """Go on with a stream that is read here, if it is one that its readers keep going.

        It may have been paused, here or by another origin, or be another's that sees no reader.
        """
        if not self.table.room:
            return  # it is looked for again
        self._attendance.looked_for.add(stream)
        found = await find(self._ledger, stream)
        if found is None or found.recipe.unread == Unread.RUN.word or stream in self.table.by_id:
            return
        self._attendance.paused.pop(stream, None)
        self._enqueue(found)

    def _tell_unread(self, stream: GeneratedStream) -> None:
        """Let its worker know whether it gives way; those that answer in text have no classes."""
        ready = stream.slot.ready if stream.slot is not None and stream.ordered else None
        if stream.slot is not None and ready is not None and ready.kind != TEXT:
            stream.slot.send(Attend(stream.unread), stream.run)

    # ---- what the workers say ----

    def worker_loading(self, slot: WorkerSlot, progress: LoadProgress) -> None:
        """Note how far a worker's start has come."""
        self.starts.loading(slot.number, progress.stage, self._metrics.clock())
        self.models.happen(WorkerLoading(slot.number, progress))

    async def worker_ready(self, slot: WorkerSlot, ready: Ready) -> None:
        """Give streams to a worker that is ready, unless it was told to stop meanwhile."""
        if slot.ready is not ready or not self.models.worker_ready(slot, ready):
            return
        self.starts.ready(slot.number, self._metrics.clock(), slot.start)
        self.recorder.loaded(slot.number, ready.model, slot.start)
        if self.overload.ladder.rung:
            self.overload.ease(slot)
        await self._assign()

    def worker_begun(self, slot: WorkerSlot, begun: Begun) -> None:
        """What the worker is at work on that has made nothing yet; a death may be its doing."""
        for stream in self.table.on(slot):
            stream.standing.begun = stream.run in begun.runs

    def worker_silent(self, slot: WorkerSlot) -> None:
        """Give a worker no streams while it says nothing."""
        self.models.happen(WorkerSilent(slot.number))

    async def worker_heard(self, slot: WorkerSlot) -> None:
        """Give streams again to a worker that was silent."""
        self.models.happen(WorkerHeard(slot.number))
        await self._assign()

    def worker_load(self, slot: WorkerSlot, load: Load) -> None:
        self._metrics.worker_load(slot.number, load)

    async def worker_step(self, slot: WorkerSlot, made: Emissions) -> None:
        """Store what one engine step made, in one group commit."""
        known = self.table.made(slot, made)
        begun = self._metrics.clock()
        batch = known.appends(begun)
        refusals = await self._ledger.append(batch)
        now = self._metrics.clock()
        self._metrics.appended(now - begun, sum(map(len, batch.frames)))
        for refusal in refusals:
            await self._stop_refused(slot, refusal)
        for stream, end in self.table.released(known, slot, now, self.allowances):
            self._over(stream, self._metrics.ended_with(end))
        if self.models.core.model_of(slot.number).circuit.deaths:
            self.models.happen(WorkerProved(slot.number))
        await self._assign()

    async def _stop_refused(self, slot: WorkerSlot, refusal: Refusal) -> None:
        """End the run: its stream has another producer, or it is not in step with the ledger."""
        stream = self.table.by_id.get(refusal.append.stream)
        if stream is None or stream.slot is not slot or stream.epoch != refusal.append.epoch:
            return  # the end of this run is known already
        log_refusal(refusal)
        if stream.ordered:
            slot.send(Halt(), stream.run)
        self.table.take_off(stream)
        if isinstance(refusal.error, StreamFull):
            await self._end(stream, FinishReason.LENGTH, refusal.error.message)
        elif isinstance(refusal.error, LedgerFull):
            await self._end(stream, FinishReason.FAILED, refusal.error.message, retryable=True)
        elif isinstance(refusal.error, Damaged):
            self._leave(stream, refusal.error)
        elif isinstance(refusal.error, LedgerAway):
            self._defer(stream, refusal.error)
        elif not isinstance(refusal.error, StaleEpoch):
            await self._blame(stream, "fell out of step with")
            self.table.wait_again([stream], last=True)
        elif stream.cancelled:
            await self._end(stream, FinishReason.CANCELLED)
        else:
            self._forget(stream)

    async def worker_lost(self, slot: WorkerSlot) -> None:
        """Have the streams of a worker that died wait for another one."""
        model = self.models.core.model_of(slot.number)
        if self.models.worker(slot).is_up:
            lost = model.ready.model if model.ready is not None else ""
            self.recorder.changed_tier(slot.number, lost, COLD, slot.fate)
        self.starts.lost(slot.number, slot.fate, self._metrics.clock())
        self._metrics.worker_lost(slot.number, slot.death)
        orphans = self.table.take_all_off(slot)
        self.models.happen(WorkerDied(slot.number, slot.fate))
        blamed = judge([stream.standing for stream in orphans], self._groups)
        for stream in orphans:
            if stream.standing in blamed:
                await self._blame(stream, "died on")
        self.table.wait_again(orphans)
        await self._assign()

    async def worker_rested(self, slot: WorkerSlot) -> None:
        """Forget the process of a slot, which has ended as it was told to."""
        self._metrics.worker_left(slot.number)
        self.table.wait_again(self.table.take_all_off(slot))  # none, unless it was given up
        self.models.happen(WorkerExited(slot.number))

    async def _blame(self, stream: GeneratedStream, fate: str) -> None:
        stream.standing.blamed += 1
        if stream.standing.blamed >= MAX_DEATHS:
            message = f"{stream.standing.blamed} workers {fate} this stream"
            await self._end(stream, FinishReason.FAILED, message)
