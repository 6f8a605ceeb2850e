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
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from math import ceil
from random import Random

import structlog

from ledger.backoff import spread_ms
from ledger.errors import (
    Conflict,
    Damaged,
    FrameError,
    LedgerFailed,
    LedgerFull,
    NotFound,
    Overloaded,
    StaleEpoch,
    StreamFull,
    Unavailable,
)
from ledger.frame import FinishReason, Priority, StreamEnd, Unread, tag_of
from ledger.interface import Append, Ledger, Record, Refusal
from origin.generations.history import History
from origin.generations.readers import Readers
from origin.generations.recipe import Recipe
from origin.generations.stream import TEXT, UNKNOWN_EPOCH, GeneratedStream, find, log_refusal
from origin.generations.suspects import judge, slot_for
from origin.metrics import Metrics
from origin.workers.liveness import SILENT_S
from origin.workers.worker_frame import (
    Attend,
    Begun,
    Emission,
    Halt,
    Load,
    LoadProgress,
    Ready,
    Step,
)
from origin.workers.worker_process import WorkerSlot

MAX_DEATHS = 5
"""A stream that so many workers in a row died on, when no other could be the cause, is ended
as failed."""
ROOM_SHARES = {Priority.INTERACTIVE: 1.0, Priority.STANDARD: 7 / 8, Priority.BATCH: 3 / 4}
"""How much of `max_streams` a class may fill, together with those that are less urgent."""
OVERLOADED_RETRY_MS = 1_000
LOADING_RETRY_MS = 500
"""At least; those who are refused are told different times."""
FAILED_STARTS = 4
"""Workers in a row that died, a served one among them perhaps, after which none is expected."""
CANNOT_START_RETRY_MS = 5_000
ELSEWHERE_RETRY_MS = 1_000
CANCEL_TRIES = 3
"""Takeovers for one cancel: another origin may take the stream over between ours and its end."""
UNREAD_GRACE_S = 5.0
"""A stream that was read gives way to others only when nobody has for so long: its reader may
be about to come back over another connection."""
MAX_PAUSED = 4096
"""Of more, those that were paused first are cancelled."""

log = structlog.get_logger("runs")


class Runs:
    """The owner of all worker slots. `changed` is called when readiness may have changed."""

    def __init__(
        self,
        ledger: Ledger,
        max_streams: int,
        changed: Callable[[], None],
        metrics: Metrics,
        *,
        paused_s: float = 86_400,
        random: Random | None = None,
    ) -> None:
        """`paused_s` is how long a paused stream is kept."""
        self.readers = Readers()
        self._ledger = ledger
        self._paused_s = paused_s
        self._random = random or Random()
        self._metrics = metrics
        self._max_streams = max_streams
        self._reserved: Counter[str] = Counter()  # by class
        self._changed = changed
        self._streams: dict[bytes, GeneratedStream] = {}
        self._waiting: deque[GeneratedStream] = deque()
        self._deferred: list[GeneratedStream] = []  # wait for a ledger that was away
        self._left: set[bytes] = set()  # unfinished, and not ours to go on with
        self._paused: dict[bytes, float] = {}  # since when, the first one first
        self._looked_for: set[bytes] = set()  # are read here, and are not ours to go on with
        self._runs: dict[tuple[WorkerSlot, int], GeneratedStream] = {}
        self._slots: list[WorkerSlot] = []
        self._numbers = itertools.count(1)
        self._groups = itertools.count(1)  # of suspects
        self._reading = asyncio.Lock()  # one log at a time
        self._loading: LoadProgress | None = None
        self._deaths = 0  # of workers since one became ready
        self._fate = ""  # of the last of them
        self.model: Ready | None = None

    @property
    def count(self) -> int:
        """Streams that run or wait, or are about to."""
        return len(self._streams) + self._reserved.total()

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why no token can be made now; empty when ready."""
        if self._slots:
            is_silent = all(slot.is_silent for slot in self._slots)
            return (f"all workers are silent for over {SILENT_S:.0f} s",) if is_silent else ()
        again = f"; {self._deaths} died before, the last: {self._fate}" if self._deaths else ""
        if self._loading is None:
            return (f"starting a worker{again}",)
        progress = self._loading
        how_far = f" {progress.done}/{progress.total}" if progress.total else ""
        return (f"loading: {progress.stage}{how_far}{again}",)

    @contextmanager
    def room(self, streams: int = 1, priority: Priority = Priority.STANDARD) -> Iterator[Ready]:
        """Keep room for so many new streams, to be started within; gives the model to admit for.

        Raises `Unavailable` while none was loaded, or `Overloaded`.
        """
        if not self._slots and self._deaths >= (1 if self.model is None else FAILED_STARTS):
            after_ms = spread_ms(CANNOT_START_RETRY_MS, self._random)
            raise Unavailable(f"the worker cannot start: {self._fate}", retry_after_ms=after_ms)
        if self.model is None:
            after_ms = spread_ms(LOADING_RETRY_MS, self._random)
            raise Unavailable("the model is loading", code="loading", retry_after_ms=after_ms)
        for level in range(priority + 1):  # what is kept for more urgent ones is not for this one
            self._require_room(streams, Priority(level))
        self._reserved[priority.word] += streams
        try:
            yield self.model
        finally:
            self._reserved[priority.word] -= streams

    def _require_room(self, streams: int, priority: Priority) -> None:
        """For so many more streams of this class or a less urgent one."""
        words = {p.word for p in Priority if p >= priority}
        count = sum(stream.recipe.priority in words for stream in self._streams.values())
        count += sum(self._reserved[word] for word in words)
        limit = ceil(self._max_streams * ROOM_SHARES[priority])
        if count + streams > limit:
            what = "streams" if len(words) == len(Priority) else f"{priority.word} streams"
            raise Overloaded(
                f"{count} {what} run or wait, the limit is {limit}",
                retry_after_ms=spread_ms(OVERLOADED_RETRY_MS, self._random),
            )

    # ---- streams ----

    async def start(self, *streams: tuple[bytes, Recipe], read: bool = True) -> None:
        """Generate streams that were just created; `read`: whoever opened them is to read them."""
        now = self._metrics.clock()
        for stream, recipe in streams:
            if stream not in self._streams:
                self._enqueue(
                    GeneratedStream(stream, recipe, started=False, asked_s=now, unread=not read)
                )
        await self._assign()

    async def restore(self, streams: Sequence[bytes]) -> None:
        """Go on with unfinished streams of origins that are gone, as many as there is room for.

        Those that run or wait here are left alone, so it may be called again and again. What
        had to wait because the ledger was away is tried again.
        """
        self._waiting.extendleft(reversed(self._deferred))
        self._deferred.clear()
        self._left.intersection_update(streams)
        room = max(0, self._max_streams - self.count)
        known = self._streams.keys() | self._left | self._paused.keys()
        unknown = [stream for stream in streams if stream not in known][:room]
        found = await asyncio.gather(*(find(self._ledger, stream) for stream in unknown))
        for id_, stream in zip(unknown, found, strict=True):
            if stream is None:
                self._left.add(id_)
            elif self._may_wait(stream):
                self._paused[id_] = self._metrics.clock()
            elif id_ not in self._streams:
                self._enqueue(stream)
        await self._assign()

    def _may_wait(self, found: GeneratedStream) -> bool:
        """Whether it waits for a reader: where many were left behind, others need room as well."""
        most = self._max_streams * ROOM_SHARES[Priority.BATCH]
        return found.recipe.unread == Unread.PAUSE.word and self.count >= most

    async def cancel(self, stream: bytes) -> None:
        """End a stream; its worker writes the end, or we do where it has none here.

        One that another origin generates is taken from it. What is over stays as it is.
        """
        known = self._streams.get(stream)
        if known is None:
            elsewhere = await find(self._ledger, stream)
            if elsewhere is not None:
                await self._end(elsewhere, FinishReason.CANCELLED)
            return
        known.cancelled = True
        if known.slot is not None:
            known.slot.send(Halt(), known.run)
        elif known in self._waiting:
            self._waiting.remove(known)
            await self._end(known, FinishReason.CANCELLED)

    async def steer(self, stream: bytes, ids: Sequence[int]) -> None:
        """Have a generation go on with `ids`; returns when they are durable in its log.

        Raises `Conflict` if it ends before, `Overloaded` where many wait already, and
        `Unavailable` for a stream that is not generated here.
        """
        if stream in self._paused:
            await self._wake(stream)
            await self._assign()
        known = self._streams.get(stream)
        if known is None and await find(self._ledger, stream) is None:
            raise Conflict("the stream has ended", hint="open a new stream with the text")
        if known is None:
            raise Unavailable(
                "another origin generates this stream, or soon will",
                hint="an edge of that origin takes it",
                retry_after_ms=spread_ms(ELSEWHERE_RETRY_MS, self._random),
            )
        if known.cancelled:
            raise known.not_taken()
        order, taken = known.steering.add(ids, self._random)
        if known.ordered and known.slot is not None:
            known.slot.send(order, known.run)
        await taken

    def _enqueue(self, stream: GeneratedStream) -> None:
        stream.read_s = self._metrics.clock()
        self._streams[stream.id] = stream
        self._waiting.append(stream)
        self._metrics.streams.set(len(self._streams))

    async def _assign(self) -> None:
        """Hand over what a worker may take; again, because one that is dropped makes way."""
        while placed := self._place():
            await asyncio.gather(*(self._hand_over(*each) for each in placed))

    def _place(self) -> list[tuple[GeneratedStream, WorkerSlot, int]]:
        """Give waiting streams, the most urgent class first, to workers that may take them."""
        placed = []
        slots = [slot for slot in self._slots if not slot.is_silent]
        company = {slot: [s.standing for s in self._of(slot)] for slot in slots}
        for stream in sorted(self._waiting, key=_turn) if company else ():
            slot = slot_for(stream.standing, company)
            if slot is None:
                continue  # a suspect: it waits, and holds nobody up
            self._waiting.remove(stream)
            run = stream.run = next(self._numbers)
            stream.slot, stream.ordered = slot, False
            stream.standing.place(retried=stream.started)
            company[slot].append(stream.standing)
            self._runs[slot, run] = stream
            placed.append((stream, slot, run))
        return placed

    def _of(self, slot: WorkerSlot) -> list[GeneratedStream]:
        return [stream for (owner, _), stream in self._runs.items() if owner is slot]

    async def _hand_over(self, stream: GeneratedStream, slot: WorkerSlot, run: int) -> None:
        claim = unreadable = None
        ready = slot.ready
        async with stream.claiming:
            is_ours = self._runs.get((slot, run)) is stream and not stream.cancelled
            try:
                if ready is not None and is_ours:
                    claim = await stream.claim(self._ledger, ready, self._reading)
            except Unavailable as error:
                self._defer(stream, error)
            except (Damaged, FrameError) as error:
                unreadable = error
        if self._runs.get((slot, run)) is not stream:
            return  # the worker died meanwhile, and worker_lost has put the stream back
        assert ready is not None  # only ready slots are in _slots
        if stream.cancelled:
            await self._end(stream, FinishReason.CANCELLED)
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
        if stream.unread:
            self._tell(stream)
        if stream.epoch > 1:
            self._metrics.taken_over()
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

        Where another origin takes it over at this moment, a cancel insists.
        """
        tries = CANCEL_TRIES if reason is FinishReason.CANCELLED else 1
        async with stream.claiming:
            try:
                while tries and (
                    refusal := await stream.append_end(
                        self._ledger, reason, message, retryable, self._reading
                    )
                ):
                    tries -= 1
                    log_refusal(refusal)
            except NotFound:
                pass  # retention took it
            except Unavailable as error:
                self._defer(stream, error)
                return
        self._metrics.ended(reason)
        self._forget(stream)

    def _defer(self, stream: GeneratedStream, error: Unavailable) -> None:
        """Hand it over again later; raises the error where the ledger is not only away."""
        if isinstance(error, LedgerFailed):
            raise error
        log.warning("stream.deferred", stream=stream.id.hex(), error=str(error))
        stream.started, stream.epoch = True, UNKNOWN_EPOCH
        if stream.slot is not None:
            self._runs.pop((stream.slot, stream.run), None)
            stream.slot, stream.ordered = None, False
        self._streams[stream.id] = stream
        if stream not in self._waiting and stream not in self._deferred:
            self._deferred.append(stream)

    def _forget(self, stream: GeneratedStream) -> None:
        self._streams.pop(stream.id, None)
        self._paused.pop(stream.id, None)
        self._metrics.streams.set(len(self._streams))
        if stream.slot is not None:
            self._runs.pop((stream.slot, stream.run), None)
            stream.slot, stream.ordered = None, False
        stream.steering.fail(stream.not_taken())

    # ---- who reads ----

    async def attend(self) -> None:
        """Look who is read, and do with what is not as its request says; called now and then."""
        now, lately = self._metrics.clock(), self.readers.lately()
        for stream in self._streams.values():
            was_unread = stream.unread
            if stream.id in lately:
                stream.read_s, stream.unread = now, False
            elif now - stream.read_s >= UNREAD_GRACE_S:
                stream.unread = True
            if stream.unread != was_unread:
                self._tell(stream)
        for stream in [s for s in self._streams.values() if self._is_left(s, now)]:
            if stream.recipe.unread == Unread.PAUSE.word:
                self._pause(stream, now)
            else:
                await self.cancel(stream.id)
        late = [id_ for id_, since in self._paused.items() if now - since >= self._paused_s]
        for id_ in late or [*self._paused][:-MAX_PAUSED]:
            await self.cancel(id_)
        # Once for as long as it is read without a pause: two origins would take it from each other.
        self._looked_for = lately & (self._looked_for | self._streams.keys())
        for id_ in lately - self._streams.keys() - self._looked_for:
            await self._wake(id_)
        await self._assign()

    def _is_left(self, stream: GeneratedStream, now: float) -> bool:
        """Whether what its request says of unread streams is due, and can be done now."""
        if stream.recipe.unread == Unread.RUN.word or stream.cancelled or stream.steering.orders:
            return False
        is_settled = stream.ordered or stream in self._waiting
        return is_settled and now - stream.read_s >= stream.recipe.unread_after_s

    def _pause(self, stream: GeneratedStream, now: float) -> None:
        """Take it from its worker. What is in the ledger is all that it takes to go on."""
        if stream.slot is not None:
            stream.slot.send(Halt(), stream.run)
        else:
            self._waiting.remove(stream)
        self._forget(stream)
        self._paused[stream.id] = now
        log.info("stream.paused", stream=stream.id.hex())

    async def _wake(self, stream: bytes) -> None:
        """Go on with a stream that is read here, if it is one that its readers keep going.

        It may have been paused, here or by another origin, or be another's that sees no reader.
        """
        if self.count >= self._max_streams:
            return  # it is looked for again
        self._looked_for.add(stream)
        found = await find(self._ledger, stream)
        if found is None or found.recipe.unread == Unread.RUN.word or stream in self._streams:
            return
        self._paused.pop(stream, None)
        self._enqueue(found)

    def _tell(self, stream: GeneratedStream) -> None:
        """Let its worker know whether it gives way; those that answer in text have no classes."""
        ready = stream.slot.ready if stream.slot is not None and stream.ordered else None
        if stream.slot is not None and ready is not None and ready.kind != TEXT:
            stream.slot.send(Attend(stream.unread), stream.run)

    # ---- what the workers say ----

    def worker_loading(self, slot: WorkerSlot, progress: LoadProgress) -> None:
        self._loading = progress
        self._changed()

    async def worker_ready(self, slot: WorkerSlot, ready: Ready) -> None:
        self.model = ready
        self._loading = None
        self._deaths = 0
        self._slots.append(slot)
        self._changed()
        await self._assign()

    def worker_begun(self, slot: WorkerSlot, begun: Begun) -> None:
        """What the worker is at work on that has made nothing yet; a death may be its doing."""
        for stream in self._of(slot):
            stream.standing.begun = stream.run in begun.runs

    def worker_silent(self, slot: WorkerSlot) -> None:
        self._changed()

    async def worker_heard(self, slot: WorkerSlot) -> None:
        """It was silent: it may be given streams again."""
        self._changed()
        await self._assign()

    def worker_load(self, slot: WorkerSlot, load: Load) -> None:
        self._metrics.worker_load(slot.number, load)

    async def worker_step(self, slot: WorkerSlot, step: Step) -> None:
        """Store what one engine step made, in one group commit."""
        batch = list(self._appends(slot, step.emissions))
        for refusal in await self._ledger.append(batch):
            await self._stop_refused(slot, refusal)
        now = self._metrics.clock()
        for emission in step.emissions:
            stream = self._runs.get((slot, emission.run))
            if stream is not None:
                stream.standing.prove()
                stream.steering.confirm(emission.steers)
                if tag_of(emission.frame) == StreamEnd.tag:
                    self._metrics.ended_with(emission.frame)
                    self._forget(stream)
                else:
                    stream.frame_released(self._metrics, now)
        await self._assign()

    def _appends(self, slot: WorkerSlot, emissions: Iterable[Emission]) -> Iterable[Append]:
        for emission in emissions:
            stream = self._runs.get((slot, emission.run))
            if stream is not None:
                record = Record(emission.frame, emission.ids)
                yield Append(stream.id, stream.epoch, emission.index, record)

    async def _stop_refused(self, slot: WorkerSlot, refusal: Refusal) -> None:
        """End the run: its stream has another producer, or it is not in step with the ledger."""
        stream = self._streams.get(refusal.append.stream)
        if stream is None or stream.slot is not slot or stream.epoch != refusal.append.epoch:
            return  # the end of this run is known already
        log_refusal(refusal)
        if stream.ordered:
            slot.send(Halt(), stream.run)
        del self._runs[slot, stream.run]
        stream.slot, stream.ordered = None, False
        if isinstance(refusal.error, StreamFull):
            await self._end(stream, FinishReason.LENGTH, refusal.error.message)
        elif isinstance(refusal.error, LedgerFull):
            await self._end(stream, FinishReason.FAILED, refusal.error.message, retryable=True)
        elif not isinstance(refusal.error, StaleEpoch):
            await self._blame(stream, "fell out of step with")
            if self._is_homeless(stream):
                self._waiting.append(stream)
        elif stream.cancelled:
            await self._end(stream, FinishReason.CANCELLED)
        else:
            self._forget(stream)

    async def worker_lost(self, slot: WorkerSlot) -> None:
        if slot in self._slots:
            self._slots.remove(slot)
        self._deaths += 1
        self._fate = slot.fate
        self._metrics.worker_lost(slot.number)
        self._loading = None
        orphans = self._of(slot)
        blamed = judge([stream.standing for stream in orphans], self._groups)
        for stream in orphans:
            del self._runs[slot, stream.run]
            stream.slot, stream.ordered = None, False
        self._changed()
        for stream in orphans:
            if stream.standing in blamed:
                await self._blame(stream, "died on")
        # In front of those that have waited for their first token, because their readers see a
        # pause; suspects behind those that wait already, which are likelier to be innocent.
        homeless = [stream for stream in orphans if self._is_homeless(stream)]
        suspects = [stream for stream in homeless if stream.standing.group is not None]
        others = [stream for stream in homeless if stream.standing.group is None]
        others.sort(key=lambda stream: not stream.standing.proven)
        self._waiting.extendleft(reversed(others))
        self._waiting.extend(suspects)
        await self._assign()

    def _is_homeless(self, stream: GeneratedStream) -> bool:
        """Whether a stream that had a run has not ended since, or been deferred."""
        return stream.id in self._streams and stream not in self._deferred

    async def _blame(self, stream: GeneratedStream, fate: str) -> None:
        stream.standing.blamed += 1
        if stream.standing.blamed >= MAX_DEATHS:
            message = f"{stream.standing.blamed} workers {fate} this stream"
            await self._end(stream, FinishReason.FAILED, message)


def _turn(stream: GeneratedStream) -> tuple[bool, Priority]:
    """By whom a worker is given streams: suspects last."""
    return stream.standing.group is not None, Priority.from_word(stream.recipe.priority)
