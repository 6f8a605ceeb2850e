"""Which stream is generated where: the runs of all workers, and the streams that wait.

A run is one stream on one worker under one epoch. A worker's death turns its runs into
waiting streams; the next ready worker takes each over under a new epoch and goes on from
what the ledger holds. Every token passes through `worker_step`, and is released by the
ledger only when its group commit is durable.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import structlog

from ledger.errors import NotFound, Overloaded, Unavailable
from ledger.frame import FinishReason, StreamEnd, Tag, encode, tag_of
from ledger.interface import Append, Ledger, Record
from origin.recipe import Recipe
from origin.worker_frame import Emission, Halt, LoadProgress, Ready, Step
from origin.worker_process import WorkerSlot

MAX_DEATHS = 5
"""A stream that so many workers in a row died on, when no other could be the cause, is ended
as failed."""
OVERLOADED_RETRY_MS = 1_000
LOADING_RETRY_MS = 500
REPLAY_RECORDS = 4096
"""Records read at a time when a stream is taken over."""

log = structlog.get_logger("runs")


@dataclass(slots=True)
class Stream:
    """A stream that is generated or waits for it; `slot` and `run` while on a worker.

    `started` says that epoch 1 was handed out: the next worker must take over. `proven`: it has
    made a token on its worker. A worker that dies may have died of any stream that was not
    proven; each of them is a `suspect` then, and is tried again with no other unproven one
    beside it, so that the one which kills workers is found and its neighbours are not blamed.
    """

    id: bytes
    recipe: Recipe
    started: bool
    epoch: int = 1
    run: int = 0
    slot: WorkerSlot | None = None
    cancelled: bool = False
    proven: bool = False
    suspect: bool = False
    deaths: int = 0


class Runs:
    """The owner of all worker slots. `changed` is called when readiness may have changed."""

    def __init__(self, ledger: Ledger, max_streams: int, changed: Callable[[], None]) -> None:
        self._ledger = ledger
        self._max_streams = max_streams
        self._changed = changed
        self._streams: dict[bytes, Stream] = {}
        self._waiting: deque[Stream] = deque()
        self._runs: dict[tuple[WorkerSlot, int], Stream] = {}
        self._slots: list[WorkerSlot] = []
        self._numbers = itertools.count(1)
        self._loading: LoadProgress | None = None
        self._deaths = 0  # of workers since one became ready
        self.model: Ready | None = None

    @property
    def count(self) -> int:
        """Streams that run or wait."""
        return len(self._streams)

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why no token can be made now; empty when ready."""
        if self._slots:
            return ()
        if self._loading is None:
            again = f"; {self._deaths} died before, see the origin's log" if self._deaths else ""
            return (f"starting a worker{again}",)
        progress = self._loading
        return (f"loading: {progress.stage} {progress.done}/{progress.total}",)

    def require_room(self) -> Ready:
        """The model to admit for, or `Unavailable` while none was loaded, or `Overloaded`."""
        if self.model is None:
            raise Unavailable(
                "the model is loading", code="loading", retry_after_ms=LOADING_RETRY_MS
            )
        if self.count >= self._max_streams:
            raise Overloaded(
                f"{self.count} streams run or wait, the limit is {self._max_streams}",
                retry_after_ms=OVERLOADED_RETRY_MS,
            )
        return self.model

    # ---- streams ----

    async def start(self, stream: bytes, recipe: Recipe) -> None:
        """Generate a stream that was just created."""
        await self._enqueue(Stream(stream, recipe, started=False))

    async def restore(self, stream: bytes, recipe: Recipe) -> None:
        """Go on with an unfinished stream of an origin that is gone."""
        await self._enqueue(Stream(stream, recipe, started=True))

    async def cancel(self, stream: bytes) -> None:
        """End a stream; its worker writes the end, or we do where it has none."""
        known = self._streams.get(stream)
        if known is None:
            return
        known.cancelled = True
        if known.slot is not None:
            known.slot.send(Halt(), known.run)
        elif known in self._waiting:
            self._waiting.remove(known)
            await self._end(known, FinishReason.CANCELLED, None)

    async def _enqueue(self, stream: Stream) -> None:
        self._streams[stream.id] = stream
        self._waiting.append(stream)
        await self._assign()

    async def _assign(self) -> None:
        """Give waiting streams, in order, to the worker with the fewest runs that may take them."""
        while self._waiting:
            slots = [slot for slot in self._slots if self._may_take(slot, self._waiting[0])]
            if not slots:
                return
            await self._hand_over(self._waiting.popleft(), min(slots, key=self._load))

    def _may_take(self, slot: WorkerSlot, stream: Stream) -> bool:
        """A suspect shares a worker with proven streams only."""
        unproven = [s for (owner, _), s in self._runs.items() if owner is slot and not s.proven]
        return not unproven if stream.suspect else not any(s.suspect for s in unproven)

    def _load(self, slot: WorkerSlot) -> int:
        return sum(1 for owner, _ in self._runs if owner is slot)

    async def _hand_over(self, stream: Stream, slot: WorkerSlot) -> None:
        assert slot.ready is not None  # only ready slots are in _slots
        run = stream.run = next(self._numbers)
        stream.slot, stream.proven = slot, False
        self._runs[slot, run] = stream
        try:
            if stream.started:
                stream.epoch = await self._ledger.take_over(stream.id)
            stream.started = True
            records = await self._all_records(stream.id)
        except NotFound:  # retention took it while it waited
            self._forget(stream)
            return
        if self._runs.get((slot, run)) is not stream:
            return  # the worker died meanwhile, and worker_lost has put the stream back
        if stream.cancelled:
            await self._end(stream, FinishReason.CANCELLED, None, records)
        elif (lost := _cannot_continue(stream.recipe, slot.ready, records)) is not None:
            await self._end(stream, FinishReason.ORIGIN_LOST, lost, records)
        else:
            if stream.epoch > 1:
                log.info(
                    "stream.taken_over",
                    stream=stream.id.hex(),
                    epoch=stream.epoch,
                    frames=len(records),
                    slot=slot.number,
                )
            slot.send(stream.recipe.run(records), run)

    async def _all_records(self, stream: bytes) -> list[Record]:
        records: list[Record] = []
        while more := await self._ledger.read(stream, len(records), REPLAY_RECORDS):
            records += more
        return records

    async def _end(
        self,
        stream: Stream,
        reason: FinishReason,
        message: str | None,
        records: list[Record] | None = None,
    ) -> None:
        """Write the end of a stream that no worker can write."""
        if records is None:
            if stream.started:
                stream.epoch = await self._ledger.take_over(stream.id)
            records = await self._all_records(stream.id)
        end = StreamEnd(
            total_tokens=sum(len(record.ids) for record in records),
            finish_reason=reason,
            index=len(records),
            prompt_tokens=len(stream.recipe.prompt_ids),
            message=message,
        )
        record = Record(encode(end), ())
        await self._ledger.append([Append(stream.id, stream.epoch, len(records), record)])
        self._forget(stream)

    def _forget(self, stream: Stream) -> None:
        self._streams.pop(stream.id, None)
        if stream.slot is not None:
            self._runs.pop((stream.slot, stream.run), None)
            stream.slot = None

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

    async def worker_step(self, slot: WorkerSlot, step: Step) -> None:
        """Store what one engine step made, in one group commit."""
        batch = list(self._appends(slot, step.emissions))
        for refusal in await self._ledger.append(batch):
            log.error(
                "append.refused",
                stream=refusal.append.stream.hex(),
                index=refusal.append.index,
                error=str(refusal.error),
            )
        for emission in step.emissions:
            stream = self._runs.get((slot, emission.run))
            if stream is not None:
                stream.proven, stream.suspect, stream.deaths = True, False, 0
                if tag_of(emission.frame) == Tag.STREAM_END:
                    self._forget(stream)
        await self._assign()

    def _appends(self, slot: WorkerSlot, emissions: Iterable[Emission]) -> Iterable[Append]:
        for emission in emissions:
            stream = self._runs.get((slot, emission.run))
            if stream is not None:
                record = Record(emission.frame, emission.ids)
                yield Append(stream.id, stream.epoch, emission.index, record)

    async def worker_lost(self, slot: WorkerSlot) -> None:
        if slot in self._slots:
            self._slots.remove(slot)
        self._deaths += 1
        self._loading = None
        orphans = [stream for (owner, _), stream in self._runs.items() if owner is slot]
        unproven = [stream for stream in orphans if not stream.proven]
        for stream in orphans:
            del self._runs[slot, stream.run]
            stream.slot = None
            stream.suspect = not stream.proven
        self._changed()
        if len(unproven) == 1:
            await self._blame(unproven[0])
        # In front of those that have waited for their first token, because their readers see a
        # pause; suspects last, because each of them holds up who comes after.
        orphans.sort(key=lambda stream: stream.suspect)
        self._waiting.extendleft(
            stream for stream in reversed(orphans) if stream.id in self._streams
        )
        await self._assign()

    async def _blame(self, stream: Stream) -> None:
        stream.deaths += 1
        if stream.deaths >= MAX_DEATHS:
            message = f"{stream.deaths} workers died on this stream"
            await self._end(stream, FinishReason.FAILED, message)


def _cannot_continue(recipe: Recipe, ready: Ready, records: list[Record]) -> str | None:
    """Why this worker would not make the tokens that the lost one would have made."""
    if recipe.model != ready.model:
        return f"this origin serves {ready.model!r} now, not {recipe.model!r}"
    if records and recipe.fingerprint != ready.fingerprint:
        return "the engine changed since the stream began; its tokens would differ"
    return None
