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
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import structlog

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
from ledger.frame import FinishReason, Tag, tag_of
from ledger.interface import Append, Ledger, Record, Refusal
from origin.metrics import Metrics
from origin.recipe import Recipe
from origin.stream import TEXT, UNKNOWN_EPOCH, Stream, find, log_refusal
from origin.worker_frame import Emission, Halt, Load, LoadProgress, Ready, Step
from origin.worker_process import WorkerSlot

MAX_DEATHS = 5
"""A stream that so many workers in a row died on, when no other could be the cause, is ended
as failed."""
OVERLOADED_RETRY_MS = 1_000
LOADING_RETRY_MS = 500
ELSEWHERE_RETRY_MS = 1_000
CANCEL_TRIES = 3
"""Takeovers for one cancel: another origin may take the stream over between ours and its end."""

log = structlog.get_logger("runs")


class Runs:
    """The owner of all worker slots. `changed` is called when readiness may have changed."""

    def __init__(
        self, ledger: Ledger, max_streams: int, changed: Callable[[], None], metrics: Metrics
    ) -> None:
        self._ledger = ledger
        self._metrics = metrics
        self._max_streams = max_streams
        self._reserved = 0
        self._changed = changed
        self._streams: dict[bytes, Stream] = {}
        self._waiting: deque[Stream] = deque()
        self._deferred: list[Stream] = []  # wait for a ledger that was away
        self._left: set[bytes] = set()  # unfinished, and not ours to go on with
        self._runs: dict[tuple[WorkerSlot, int], Stream] = {}
        self._slots: list[WorkerSlot] = []
        self._numbers = itertools.count(1)
        self._loading: LoadProgress | None = None
        self._deaths = 0  # of workers since one became ready
        self.model: Ready | None = None

    @property
    def count(self) -> int:
        """Streams that run or wait, or are about to."""
        return len(self._streams) + self._reserved

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why no token can be made now; empty when ready."""
        if self._slots:
            return ()
        if self._loading is None:
            again = f"; {self._deaths} died before, see the origin's log" if self._deaths else ""
            return (f"starting a worker{again}",)
        progress = self._loading
        how_far = f" {progress.done}/{progress.total}" if progress.total else ""
        return (f"loading: {progress.stage}{how_far}",)

    @contextmanager
    def room(self, streams: int = 1) -> Iterator[Ready]:
        """Keep room for so many new streams, to be started within; gives the model to admit for.

        Raises `Unavailable` while none was loaded, or `Overloaded`.
        """
        if self.model is None:
            raise Unavailable(
                "the model is loading", code="loading", retry_after_ms=LOADING_RETRY_MS
            )
        if self.count + streams > self._max_streams:
            raise Overloaded(
                f"{self.count} streams run or wait, the limit is {self._max_streams}",
                retry_after_ms=OVERLOADED_RETRY_MS,
            )
        self._reserved += streams
        try:
            yield self.model
        finally:
            self._reserved -= streams

    # ---- streams ----

    async def start(self, *streams: tuple[bytes, Recipe]) -> None:
        """Generate streams that were just created."""
        now = self._metrics.clock()
        for stream, recipe in streams:
            if stream not in self._streams:
                self._enqueue(Stream(stream, recipe, started=False, asked_s=now))
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
        known = self._streams.keys() | self._left
        unknown = [stream for stream in streams if stream not in known][:room]
        found = await asyncio.gather(*(find(self._ledger, stream) for stream in unknown))
        for id_, stream in zip(unknown, found, strict=True):
            if stream is None:
                self._left.add(id_)
            elif id_ not in self._streams:
                self._enqueue(stream)
        await self._assign()

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
        known = self._streams.get(stream)
        if known is None and await find(self._ledger, stream) is None:
            raise Conflict("the stream has ended", hint="open a new stream with the text")
        if known is None:
            raise Unavailable(
                "another origin generates this stream, or soon will",
                hint="an edge of that origin takes it",
                retry_after_ms=ELSEWHERE_RETRY_MS,
            )
        if known.cancelled:
            raise known.not_taken()
        order, taken = known.steering.add(ids)
        if known.ordered and known.slot is not None:
            known.slot.send(order, known.run)
        await taken

    def _enqueue(self, stream: Stream) -> None:
        self._streams[stream.id] = stream
        self._waiting.append(stream)
        self._metrics.streams.set(len(self._streams))

    async def _assign(self) -> None:
        """Hand over what a worker may take; again, because one that is dropped makes way."""
        while placed := self._place():
            await asyncio.gather(*(self._hand_over(*each) for each in placed))

    def _place(self) -> list[tuple[Stream, WorkerSlot, int]]:
        """Give waiting streams, in order, to the worker with the fewest runs that may take them."""
        placed = []
        while self._waiting:
            slots = [slot for slot in self._slots if self._may_take(slot, self._waiting[0])]
            if not slots:
                break
            stream, slot = self._waiting.popleft(), min(slots, key=self._load)
            run = stream.run = next(self._numbers)
            stream.slot, stream.proven, stream.ordered = slot, False, False
            self._runs[slot, run] = stream
            placed.append((stream, slot, run))
        return placed

    def _may_take(self, slot: WorkerSlot, stream: Stream) -> bool:
        """A suspect shares a worker with proven streams only."""
        unproven = [s for (owner, _), s in self._runs.items() if owner is slot and not s.proven]
        return not unproven if stream.suspect else not any(s.suspect for s in unproven)

    def _load(self, slot: WorkerSlot) -> int:
        return sum(1 for owner, _ in self._runs if owner is slot)

    async def _hand_over(self, stream: Stream, slot: WorkerSlot, run: int) -> None:
        claim = unreadable = None
        ready = slot.ready
        async with stream.claiming:
            is_ours = self._runs.get((slot, run)) is stream and not stream.cancelled
            try:
                if ready is not None and is_ours:
                    claim = await stream.claim(self._ledger, ready)
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
            await self._order(stream, slot, claim.records)

    async def _order(self, stream: Stream, slot: WorkerSlot, records: Sequence[Record]) -> None:
        """Send a worker its order to run, and what the stream was steered with meanwhile."""
        is_text = slot.ready is not None and slot.ready.kind == TEXT
        try:
            order = stream.recipe.ask(records) if is_text else stream.recipe.run(records)
            slot.send(order, stream.run)
        except FrameError as error:
            log.error("stream.not_ordered", stream=stream.id.hex(), error=str(error))
            await self._end(stream, FinishReason.FAILED, "no worker can be told to go on with it")
            return
        for steer in stream.steering.orders:
            slot.send(steer, stream.run)
        stream.ordered = True
        if stream.epoch > 1:
            self._metrics.taken_over()
            log.info(
                "stream.taken_over",
                stream=stream.id.hex(),
                epoch=stream.epoch,
                frames=len(records),
                slot=slot.number,
            )

    async def _end(self, stream: Stream, reason: FinishReason, message: str | None = None) -> None:
        """Write the end of a stream that no worker can write, and forget it.

        Where another origin takes it over at this moment, a cancel insists.
        """
        tries = CANCEL_TRIES if reason is FinishReason.CANCELLED else 1
        async with stream.claiming:
            try:
                while tries and (refusal := await stream.append_end(self._ledger, reason, message)):
                    tries -= 1
                    log_refusal(refusal)
            except NotFound:
                pass  # retention took it
            except Unavailable as error:
                self._defer(stream, error)
                return
        self._metrics.ended(reason)
        self._forget(stream)

    def _defer(self, stream: Stream, error: Unavailable) -> None:
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

    def _forget(self, stream: Stream) -> None:
        self._streams.pop(stream.id, None)
        self._metrics.streams.set(len(self._streams))
        if stream.slot is not None:
            self._runs.pop((stream.slot, stream.run), None)
            stream.slot, stream.ordered = None, False
        stream.steering.fail(stream.not_taken())

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
                stream.proven, stream.suspect, stream.deaths = True, False, 0
                stream.steering.confirm(emission.steers)
                if tag_of(emission.frame) == Tag.STREAM_END:
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
            await self._end(stream, FinishReason.FAILED, refusal.error.message)
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
        self._metrics.worker_lost(slot.number)
        self._loading = None
        orphans = [stream for (owner, _), stream in self._runs.items() if owner is slot]
        unproven = [stream for stream in orphans if not stream.proven]
        for stream in orphans:
            del self._runs[slot, stream.run]
            stream.slot, stream.ordered = None, False
            stream.suspect = not stream.proven
        self._changed()
        if len(unproven) == 1:
            await self._blame(unproven[0], "died on")
        # In front of those that have waited for their first token, because their readers see a
        # pause; suspects last, because each of them holds up who comes after.
        orphans.sort(key=lambda stream: stream.suspect)
        self._waiting.extendleft(filter(self._is_homeless, reversed(orphans)))
        await self._assign()

    def _is_homeless(self, stream: Stream) -> bool:
        """Whether a stream that had a run has not ended since, or been deferred."""
        return stream.id in self._streams and stream not in self._deferred

    async def _blame(self, stream: Stream, fate: str) -> None:
        stream.deaths += 1
        if stream.deaths >= MAX_DEATHS:
            message = f"{stream.deaths} workers {fate} this stream"
            await self._end(stream, FinishReason.FAILED, message)
