"""The streams that an origin generates: which are on a worker, which wait for one, and what a step
has made of them on its way into the ledger and out of it.

What is known here and nothing else; `origin.generations.runs` acts on it.
"""

from __future__ import annotations

import itertools
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from math import ceil
from typing import NamedTuple

from tailrace.ledger.errors import Overloaded
from tailrace.ledger.frame import TAG_OFFSET, FinishReason, Priority, StreamEnd
from tailrace.ledger.interface import Appends
from tailrace.ledger.record_extra import RecordExtra, life_numbers
from tailrace.origin.generations.callers import Allowances
from tailrace.origin.generations.poison_streams import slot_for
from tailrace.origin.generations.stream import (
    MAX_ENDED,
    UNKNOWN_EPOCH,
    EndedStream,
    GeneratedStream,
)
from tailrace.origin.metrics import Metrics
from tailrace.origin.workers.worker_frame import Emissions
from tailrace.origin.workers.worker_process import WorkerSlot

ROOM_SHARES = {Priority.INTERACTIVE: 1.0, Priority.STANDARD: 7 / 8, Priority.BATCH: 3 / 4}
"""How much of `max_streams` a class may fill, together with those that are less urgent."""

Placed = tuple[GeneratedStream, WorkerSlot, int]
"""A stream, the slot that it goes to, and the number of its run there."""

END = StreamEnd.tag


class Made(NamedTuple):
    """The emissions of runs that are still known, with the stream of each."""

    streams: Sequence[GeneratedStream]
    emissions: Emissions

    def appends(self, now: float) -> Appends:
        """Return them as appends; how a stream fared is stored beside its StreamEnd."""
        streams, made = self.streams, self.emissions
        extras = [b""] * len(streams)
        # Nearly every token has none of the three.
        some = {at for at, frame in enumerate(made.frames) if frame[TAG_OFFSET] == END}
        some |= {at for at, stream in enumerate(streams) if stream.new_engine}
        for at in sorted(some | made.steered.keys()):
            stream = streams[at]
            life: tuple[int | None, ...] = ()
            if made.frames[at][TAG_OFFSET] == END:
                others = streams.count(stream) - 1
                life = life_numbers(stream.progress.life(stream.epoch - 1, now, others))
            extras[at] = RecordExtra(made.steered.get(at, ()), stream.new_engine, life).pack()
            stream.new_engine = None
        ids, epochs = [stream.id for stream in streams], [stream.epoch for stream in streams]
        return Appends(ids, epochs, made.indexes, made.frames, made.ids, extras)


class StreamTable:
    """`by_id` holds every stream that runs or waits, or is about to be handed over again.

    `ended` are those that ended here lately, `revision` is that of the last change to any.
    """

    def __init__(self, max_streams: int, metrics: Metrics) -> None:
        self.by_id: dict[bytes, GeneratedStream] = {}
        self.ended: deque[EndedStream] = deque(maxlen=MAX_ENDED)
        self.revision = 0
        self._max_streams = max_streams
        self._metrics = metrics
        self._reserved: Counter[tuple[str, str]] = Counter()  # by class and tenant
        self._waiting: deque[GeneratedStream] = deque()
        self._deferred: list[GeneratedStream] = []  # wait for a ledger that was away
        self._runs: dict[int, GeneratedStream] = {}  # no two slots' runs have one number
        self._numbers = itertools.count(1)

    # ---- room ----

    @property
    def count(self) -> int:
        """Streams that run or wait, or are about to."""
        return len(self.by_id) + self._reserved.total()

    @property
    def room(self) -> int:
        """For so many more."""
        return max(0, self._max_streams - self.count)

    @property
    def is_crowded(self) -> bool:
        """Whether what can wait for its readers should, as others need room as well."""
        return self.count >= self._max_streams * ROOM_SHARES[Priority.BATCH]

    @contextmanager
    def reserved(self, streams: int, priority: Priority, tenant: str = "") -> Iterator[None]:
        """Keep room for so many new streams; raises `Overloaded` where there is none."""
        for level in range(priority + 1):  # what is kept for more urgent ones is not for this one
            self._require_room(streams, Priority(level))
        key = (priority.word, tenant)
        self._reserved[key] += streams
        try:
            yield
        finally:
            self._reserved[key] -= streams
            if not self._reserved[key]:
                del self._reserved[key]

    def unfinished(self, tenant: str) -> int:
        """Streams of a tenant that run or wait, or are about to."""
        here = sum(stream.recipe.tenant == tenant for stream in self.by_id.values())
        return here + sum(some for (_, whose), some in self._reserved.items() if whose == tenant)

    def _require_room(self, streams: int, priority: Priority) -> None:
        """For so many more streams of this class or a less urgent one."""
        words = {p.word for p in Priority if p >= priority}
        count = sum(stream.recipe.priority in words for stream in self.by_id.values())
        count += sum(some for (word, _), some in self._reserved.items() if word in words)
        limit = ceil(self._max_streams * ROOM_SHARES[priority])
        if count + streams > limit:
            what = "streams" if len(words) == len(Priority) else f"{priority.word} streams"
            raise Overloaded(f"{count} {what} run or wait, the limit is {limit}")

    # ---- what operators see ----

    def touch(self, stream: GeneratedStream) -> None:
        """Something has changed that operators see of it."""
        self.revision += 1
        stream.progress.revision = self.revision

    def remember(self, stream: GeneratedStream, reason: FinishReason) -> None:
        self.touch(stream)
        recipe = stream.recipe
        self.ended.append(
            EndedStream(
                id=stream.id,
                tenant=recipe.tenant,
                model=recipe.model,
                priority=recipe.priority,
                epoch=stream.epoch,
                tokens=stream.made,
                progress=stream.progress,
                reason=reason,
                ended_s=self._metrics.clock(),
            )
        )

    # ---- waiting ----

    def add(self, stream: GeneratedStream) -> None:
        """Know a stream that was not here; there is one record of each."""
        assert stream.id not in self.by_id, "a stream has two records"
        stream.read_s = stream.progress.began_s = self._metrics.clock()
        self.by_id[stream.id] = stream
        self.touch(stream)
        self._metrics.streams.set(len(self.by_id))

    def enqueue(self, stream: GeneratedStream) -> None:
        """Have a stream that was not here wait for a worker."""
        self.add(stream)
        self._waiting.append(stream)

    @property
    def has_waiting(self) -> bool:
        """Return True if any stream waits for a worker."""
        return bool(self._waiting)

    def is_waiting(self, stream: GeneratedStream) -> bool:
        return stream in self._waiting

    def withdraw_cancelled(self) -> list[GeneratedStream]:
        """Withdraw all streams that wait for a worker although they were cancelled."""
        cancelled = [stream for stream in self._waiting if stream.cancelled]
        for stream in cancelled:
            self._waiting.remove(stream)
        return cancelled

    def withdraw(self, stream: GeneratedStream) -> None:
        self._waiting.remove(stream)

    def defer(self, stream: GeneratedStream) -> None:
        """Hand a stream over again when the ledger is there; its epoch may have passed."""
        stream.started, stream.epoch = True, UNKNOWN_EPOCH
        self.take_off(stream)
        if self.by_id.get(stream.id) is not stream:
            return  # it was forgotten meanwhile
        if stream not in self._waiting and stream not in self._deferred:
            self._deferred.append(stream)

    def resume_deferred(self) -> None:
        self._waiting.extendleft(reversed(self._deferred))
        self._deferred.clear()

    def wait_again(self, streams: Iterable[GeneratedStream], *, last: bool = False) -> None:
        """Those that had a run wait again, but for those that have ended since, or are deferred.

        In front of those that have waited for their first token, because their readers see a
        pause; suspects behind those that wait already, which are likelier to be innocent, and
        all of them if they are to be `last`.
        """
        homeless = [s for s in streams if s.id in self.by_id and s not in self._deferred]
        if last:
            self._waiting.extend(homeless)
            return
        suspects = [stream for stream in homeless if stream.standing.group is not None]
        others = [stream for stream in homeless if stream.standing.group is None]
        others.sort(key=lambda stream: not stream.standing.proven)
        self._waiting.extendleft(reversed(others))
        self._waiting.extend(suspects)

    # ---- on workers ----

    def on(self, slot: WorkerSlot) -> list[GeneratedStream]:
        return [stream for stream in self._runs.values() if stream.slot is slot]

    def run(self, slot: WorkerSlot, run: int) -> GeneratedStream | None:
        """The stream of a run that is still one."""
        stream = self._runs.get(run)
        return stream if stream is not None and stream.slot is slot else None

    def place(
        self,
        slots: Sequence[WorkerSlot],
        may_take: Callable[[WorkerSlot, str], bool] | None = None,
    ) -> list[Placed]:
        """Give waiting streams, the most urgent class first, to workers that may take them.

        `may_take` says which slots a model's streams go to, where not to any.
        """
        placed = []
        company = {slot: [s.standing for s in self.on(slot)] for slot in slots}
        for stream in sorted(self._waiting, key=_turn) if company else ():
            those = company
            if may_take is not None:
                model = stream.recipe.model
                those = {slot: runs for slot, runs in company.items() if may_take(slot, model)}
            slot = slot_for(stream.standing, those)
            if slot is None:
                continue  # a suspect: it waits, and holds nobody up
            self._waiting.remove(stream)
            run = stream.run = next(self._numbers)
            stream.slot, stream.ordered = slot, False
            self.touch(stream)
            stream.standing.place(retried=stream.started)
            company[slot].append(stream.standing)
            self._runs[run] = stream
            placed.append((stream, slot, run))
        return placed

    def take_off(self, stream: GeneratedStream) -> None:
        """It has no run any more, if it had one."""
        if stream.slot is not None:
            self._runs.pop(stream.run, None)
            stream.slot, stream.ordered = None, False
            self.touch(stream)

    def take_all_off(self, slot: WorkerSlot) -> list[GeneratedStream]:
        """Its worker is gone; gives those that had a run there."""
        orphans = self.on(slot)
        for stream in orphans:
            self.take_off(stream)
        return orphans

    def forget(self, stream: GeneratedStream) -> None:
        """It is over here, and whoever steers it is told."""
        if self.by_id.get(stream.id) is stream:
            del self.by_id[stream.id]
        self._metrics.streams.set(len(self.by_id))
        self.take_off(stream)
        stream.steering.fail(stream.not_taken())

    # ---- what a step makes ----

    def made(self, slot: WorkerSlot, emissions: Emissions) -> Made:
        """Return the emissions of runs that are still known here."""
        streams = [self.run(slot, run) for run in emissions.runs]
        known = [stream for stream in streams if stream is not None]
        if len(known) < len(streams):
            emissions = emissions.those([stream is not None for stream in streams])
        return Made(known, emissions)

    def released(
        self, made: Made, slot: WorkerSlot, now: float, allowances: Allowances
    ) -> list[tuple[GeneratedStream, bytes]]:
        """Take note of what is durable; gives the streams that have ended, each with its end."""
        gaps: dict[tuple[str, float], int] = {}
        ended: list[tuple[GeneratedStream, bytes]] = []
        emissions = made.emissions
        columns = emissions.runs, emissions.indexes, emissions.ids, emissions.frames
        for at, spans in emissions.steered.items():
            stream = made.streams[at]
            if stream.slot is slot and stream.run == emissions.runs[at]:
                for span in spans:
                    stream.steering.confirm(span.count)
        for stream, run, index, ids, frame in zip(made.streams, *columns, strict=True):
            if stream.slot is not slot or stream.run != run:
                continue  # it has been taken off meanwhile
            if not stream.standing.proven:
                stream.standing.prove()
            allowances.charge(stream.recipe.tenant, len(ids))
            stream.progress.released(index, len(ids), now)
            self.touch(stream)
            if frame[TAG_OFFSET] == END:
                ended.append((stream, frame))
                continue
            if stream.released_s is not None:
                gap = stream.recipe.priority, stream.released_s
                gaps[gap] = gaps.get(gap, 0) + 1
            elif stream.asked_s is not None:
                recipe, waited_s = stream.recipe, now - stream.asked_s
                self._metrics.first_release(recipe.priority, waited_s, recipe.trace)
            stream.released_s = now
        for (priority, last_s), count in gaps.items():
            self._metrics.release(priority, now - last_s, count)
        return ended


def _turn(stream: GeneratedStream) -> tuple[bool, Priority]:
    """By whom a worker is given streams: suspects last."""
    return stream.standing.group is not None, Priority.from_word(stream.recipe.priority)
