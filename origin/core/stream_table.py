"""The records of an origin's streams: their states, their queue, and the worker of each.

This table makes no decisions; `origin.core.streams` does.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence
from math import ceil
from typing import NamedTuple

from tailrace.ledger.errors import Overloaded
from tailrace.ledger.frame import FinishReason, Priority
from tailrace.origin.core.poison_streams import Suspicion
from tailrace.origin.core.states import STREAM_TRANSITIONS, StreamEvent, StreamState
from tailrace.origin.core.step import StepFrames
from tailrace.origin.core.stream import EndedStream, Stream
from tailrace.origin.generations.recipe import Recipe
from tailrace.origin.workers.worker_frame import Emissions

ROOM_SHARES = {Priority.INTERACTIVE: 1.0, Priority.STANDARD: 7 / 8, Priority.BATCH: 3 / 4}
"""Share of `max_streams` that a class and all less urgent classes together may fill."""
MAX_SUSPICIONS = 1024
"""Maximum number of streams that have left this origin without an end, and whose suspicions are
kept; the oldest are dropped."""
MAX_ENDED = 512
"""Maximum number of ended streams that are kept in memory; older ones are in the ledger only."""


class Opening(NamedTuple):
    """The room that is reserved for a stream while its request is being handled."""

    priority: Priority
    tenant: str


class Paused(NamedTuple):
    """A stream that waits for a reader.

    Attributes:
        since_s: The time at which it was paused.
        epoch: The stream's epoch at that time. If the ledger has a later one, another origin has
            taken the stream.
    """

    since_s: float
    epoch: int


class StreamTable:
    """The streams of one origin; each is in `by_id`, `opening`, `paused` or `left`.

    Attributes:
        by_id: Records of the streams that are generated here or wait for a worker.
        opening: Streams that are being opened.
        paused: Streams that wait for a reader, in the order in which they were paused.
        left: Streams without an end that this origin cannot continue.
        ended: The last streams that have ended here.
        revision: Number of the latest change of records; one step changes several.
        may_place: True if a change may allow a waiting stream to be placed on a worker.
    """

    def __init__(self, max_streams: int) -> None:
        """Create an empty table; `max_streams` limits `by_id` and `opening` together."""
        self.by_id: dict[bytes, Stream] = {}
        self.opening: dict[bytes, Opening] = {}
        self.paused: dict[bytes, Paused] = {}
        self.left: set[bytes] = set()
        self.ended: deque[EndedStream] = deque(maxlen=MAX_ENDED)
        self.revision = 0
        self.may_place = False
        self._max_streams = max_streams
        self._waiting: dict[bytes, Stream] = {}
        self._first_place = self._last_place = 0
        self._runs: dict[int, Stream] = {}
        self._run_numbers = itertools.count(1)
        self._suspicions: dict[bytes, Suspicion] = {}
        """Suspicions against streams that were paused here or taken by another origin. A stream
        that kills workers could go from origin to origin for ever if each began to count anew."""

    # ---- states ----

    def state_of(self, stream: bytes) -> StreamState:
        """Return the state of a stream, which may be unknown here (ABSENT)."""
        if (known := self.by_id.get(stream)) is not None:
            return known.state
        if stream in self.opening:
            return StreamState.OPENING
        if stream in self.paused:
            return StreamState.PAUSED
        return StreamState.LEFT if stream in self.left else StreamState.ABSENT

    def may(self, stream: bytes, event: StreamEvent) -> bool:
        """Return True if an event is possible in a stream's current state."""
        return (self.state_of(stream), event) in STREAM_TRANSITIONS

    def turn(self, stream: Stream, event: StreamEvent) -> bool:
        """Change a stream's state by STREAM_TRANSITIONS; return False if an event is too late."""
        before = stream.state
        after = STREAM_TRANSITIONS.get((before, event))
        if after is None:
            return False
        stream.state = after
        if before is StreamState.WAITING:
            del self._waiting[stream.id]
        self.changed(stream)
        return True

    def add(
        self, id_: bytes, recipe: Recipe, event: StreamEvent, now: float, epoch: int | None = None
    ) -> Stream:
        """Create the record of a stream; `epoch` is the epoch of its last producer, if any."""
        state = STREAM_TRANSITIONS[self.state_of(id_), event]
        self.opening.pop(id_, None)
        self.paused.pop(id_, None)
        self.left.discard(id_)
        has_producer = epoch is not None
        stream = Stream(id_, recipe, state, has_producer, 1 if epoch is None else epoch)
        stream.read_s = stream.progress.began_s = stream.progress.time.since_s = now
        stream.standing = self._suspicions.pop(id_, stream.standing)
        self.by_id[id_] = stream
        self.changed(stream)
        if state is StreamState.WAITING:
            self.queue(stream)
        return stream

    def drop(self, stream: Stream, event: StreamEvent, now: float) -> bool:
        """Remove the record of a stream that no longer runs or waits here.

        Return False if the stream's state does not allow `event`, because the event is too late.
        """
        if not self.turn(stream, event):
            return False
        self.unplace(stream)
        del self.by_id[stream.id]
        if stream.state is StreamState.PAUSED:
            self.paused[stream.id] = Paused(now, stream.epoch)
        elif stream.state is StreamState.LEFT:
            self.left.add(stream.id)
        if stream.standing.is_grave and event in (StreamEvent.PAUSED, StreamEvent.TAKEN):
            self._suspicions[stream.id] = stream.standing
            if len(self._suspicions) > MAX_SUSPICIONS:
                del self._suspicions[next(iter(self._suspicions))]
        return True

    def remember(self, stream: Stream, reason: FinishReason, now: float) -> None:
        """Keep the summary of a stream that has ended here."""
        self.changed(stream)
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
                ended_s=now,
            )
        )

    # ---- room ----

    @property
    def count(self) -> int:
        """Return the number of streams that are here or are being opened."""
        return len(self.by_id) + len(self.opening)

    @property
    def room(self) -> int:
        """Return the number of streams that may still be opened."""
        return max(0, self._max_streams - self.count)

    @property
    def is_crowded(self) -> bool:
        """Return True if there are so many streams that those without readers should be paused."""
        return self.count >= self._max_streams * ROOM_SHARES[Priority.BATCH]

    def require_room(self, streams: int, priority: Priority) -> None:
        """Raise `Overloaded` unless there is room for `streams` more streams of a class.

        Some room is kept for more urgent classes.
        """
        for level in range(priority + 1):
            self._require_room(streams, Priority(level))

    def _require_room(self, streams: int, priority: Priority) -> None:
        """Raise `Overloaded` if this class and the less urgent ones would have too many streams."""
        words = {one.word for one in Priority if one >= priority}
        count = sum(stream.recipe.priority in words for stream in self.by_id.values())
        count += sum(one.priority >= priority for one in self.opening.values())
        limit = ceil(self._max_streams * ROOM_SHARES[priority])
        if count + streams > limit:
            what = "streams" if len(words) == len(Priority) else f"{priority.word} streams"
            raise Overloaded(f"{count} {what} run or wait, the limit is {limit}")

    def unfinished(self, tenant: str) -> int:
        """Return the number of a tenant's streams that are here or are being opened."""
        here = sum(stream.recipe.tenant == tenant for stream in self.by_id.values())
        return here + sum(one.tenant == tenant for one in self.opening.values())

    def tokens_of(self, key: str) -> int:
        """Return the tokens that an API key's streams at this origin have used so far."""
        return sum(one.used for one in self.by_id.values() if one.recipe.key == key)

    # ---- waiting ----

    def queue(self, stream: Stream, *, is_first: bool = False) -> None:
        """Put a stream at the end of the queue of waiting streams, or at its front."""
        self._waiting[stream.id] = stream
        self.may_place = True
        if is_first:
            self._first_place -= 1
            stream.place = self._first_place
        else:
            self._last_place += 1
            stream.place = self._last_place

    @property
    def waiting(self) -> list[Stream]:
        """Return the waiting streams in the order in which they are given workers."""
        return sorted(self._waiting.values(), key=_order_of)

    @property
    def has_waiting(self) -> bool:
        """Return True if a stream waits for a worker."""
        return bool(self._waiting)

    # ---- on workers ----

    def place(self, stream: Stream, worker: int) -> None:
        """Put a waiting stream on a worker, under a new run."""
        self.turn(stream, StreamEvent.PLACED)
        stream.worker, stream.run = worker, next(self._run_numbers)
        stream.standing.place(retried=stream.has_producer)
        self._runs[stream.run] = stream

    def unplace(self, stream: Stream) -> None:
        """Take a stream off its worker, if it has one."""
        if stream.worker is not None:
            del self._runs[stream.run]
            stream.worker = None
            self.may_place = True
            self.changed(stream)

    def on(self, worker: int) -> list[Stream]:
        """Return the streams that are on a worker."""
        return [stream for stream in self._runs.values() if stream.worker == worker]

    def standings(self, workers: Sequence[int]) -> dict[int, list[Suspicion]]:
        """Return the suspicions against the streams on each of these workers."""
        found: dict[int, list[Suspicion]] = {worker: [] for worker in workers}
        for stream in self._runs.values():
            if stream.worker in found:
                found[stream.worker].append(stream.standing)
        return found

    def step(self, worker: int, emissions: Emissions) -> StepFrames:
        """Return the emissions whose runs are still on the worker, with their streams."""
        runs = self._runs
        streams = [runs.get(run) for run in emissions.runs]
        known = [one for one in streams if one is not None and one.worker == worker]
        if len(known) < len(streams):
            wanted = [one is not None and one.worker == worker for one in streams]
            emissions = emissions.those(wanted)
        return StepFrames(known, emissions)

    # ---- what operators see ----

    def next_revision(self) -> int:
        """Return a new number for changes of streams that operators can see."""
        self.revision += 1
        return self.revision

    def changed(self, stream: Stream) -> None:
        """Note a change of a stream that operators can see."""
        stream.progress.revision = self.next_revision()

    def resumed(self, stream: bytes) -> None:
        """Count that a client has resumed reading a stream."""
        if (known := self.by_id.get(stream)) is not None:
            known.progress.resumes += 1
            self.changed(known)


def _order_of(stream: Stream) -> tuple[bool, Priority, int]:
    """Return the sort key of a waiting stream: suspects last; otherwise by class, then by place."""
    is_suspect = stream.standing.group is not None
    return is_suspect, Priority.from_word(stream.recipe.priority), stream.place
