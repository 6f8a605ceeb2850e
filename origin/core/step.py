"""The frames of one engine step, as columns, and their conversion to appends to the ledger."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import compress
from typing import NamedTuple

from tailrace.ledger.frame import TAG_OFFSET, FinishReason, StreamEnd, decode
from tailrace.ledger.interface import Appends
from tailrace.ledger.record_extra import EndUsage, RecordExtra, life_numbers
from tailrace.origin.core.frame_tokens import delivered_tokens
from tailrace.origin.core.stream import Stream
from tailrace.origin.generations.frame_times import TIME_STEP_MS, time_to_store
from tailrace.origin.workers.worker_frame import NOT_COUNTED, Emissions, TokenCounts

END = StreamEnd.tag


class FailedRun(NamedTuple):
    """A run that has failed and is to be retried; `message` is that of its StreamEnd."""

    stream: Stream
    run: int
    message: str


class StepFrames(NamedTuple):
    """The frames of one step whose runs are still on the step's worker, with their streams.

    Row i of `emissions` belongs to `streams[i]`. `failed` has the runs that are retried; their
    frames are not in `emissions`.
    """

    streams: Sequence[Stream]
    emissions: Emissions
    failed: Sequence[FailedRun] = ()

    def failures(self) -> list[FailedRun]:
        """Return the failed runs whose streams another run can continue, with their messages."""
        failing, made = set(self.emissions.failed), self.emissions
        found = []
        for stream, run, frame in zip(self.streams, made.runs, made.frames, strict=True):
            if run in failing and frame[TAG_OFFSET] == END:
                _, end = decode(frame)
                assert isinstance(end, StreamEnd), end
                found.append(FailedRun(stream, run, end.message or ""))
        return found

    def without(self, failed: Sequence[FailedRun]) -> StepFrames:
        """Return the step without the emissions of these failed runs."""
        runs = {one.run for one in failed}
        kept = [run not in runs for run in self.emissions.runs]
        return StepFrames([*compress(self.streams, kept)], self.emissions.those(kept), failed)

    def appends(self, now: float, now_ms: int, reach: Callable[[bytes, int], int]) -> Appends:
        """Return the frames of this step as appends to the ledger.

        A StreamEnd is stored with its stream's statistics and usage. `now` is the time of the
        core's clock in seconds, and `now_ms` the Unix time. `reach` returns the index up to which a
        stream's readers have its frames; see `Readers.reach`.
        """
        streams, made = self.streams, self.emissions
        extras = [b""] * len(streams)
        # Few frames need a `RecordExtra`: ends, frames with ids from Steer orders, the first frame
        # of a new engine, and frames whose time is stored.
        due_ms = now_ms - TIME_STEP_MS
        some = [
            at
            for at, (stream, frame) in enumerate(zip(streams, made.frames, strict=True))
            if frame[TAG_OFFSET] == END or stream.timed_ms <= due_ms or stream.new_engine
        ]
        for at in sorted({*some, *made.steered}):
            stream = streams[at]
            life: tuple[int | None, ...] = ()
            usage = None
            if made.frames[at][TAG_OFFSET] == END:
                others = streams.count(stream) - 1
                life = life_numbers(stream.progress.life(stream.epoch - 1, now, others))
                output = end_of(made.frames[at]).total_tokens
                read = self._delivered(at, reach(stream.id, made.indexes[at]), output)
                stream.is_delivered = read == output
                usage = end_usage(stream, now_ms, read, made.counted.get(at, NOT_COUNTED))
            at_ms = time_to_store(stream.timed_ms, now_ms)
            steered = made.steered.get(at, ())
            extras[at] = RecordExtra(steered, stream.new_engine, life, at_ms, usage).pack()
            stream.new_engine = None
            stream.timed_ms = at_ms or stream.timed_ms
        ids, epochs = [stream.id for stream in streams], [stream.epoch for stream in streams]
        return Appends(ids, epochs, made.indexes, made.frames, made.ids, extras)

    def _delivered(self, at: int, reach: int, output: int) -> int:
        """Return the number of tokens before index `reach` of the stream that ends in row `at`."""
        stream, made = self.streams[at], self.emissions
        known = stream.progress.next_index
        if not stream.recipe.prompt_ids or reach >= made.indexes[at]:
            return delivered_tokens(reach, made.indexes[at], output, None)
        coming = sum(
            len(ids)
            for one, index, ids in zip(self.streams, made.indexes, made.ids, strict=True)
            if one is stream and known <= index < reach
        )
        return min(output, stream.progress.frame_tokens.before(min(reach, known)) + coming)


def end_usage(
    stream: Stream, now_ms: int, delivered: int, counted: TokenCounts = NOT_COUNTED
) -> EndUsage:
    """Return the usage to store with the end of a stream, whose readers got `delivered` tokens."""
    recipe = stream.recipe
    return EndUsage(
        ended_ms=max(now_ms, 0),  # the system's clock may be set before 1970
        tenant=recipe.tenant,
        key=recipe.key,
        model=recipe.model,
        priority=recipe.priority,
        cached_tokens=counted.cached,
        reasoning_tokens=counted.reasoning,
        delivered_tokens=delivered,
    )


def end_reason(frame: bytes) -> FinishReason:
    """Return the finish reason in an encoded StreamEnd."""
    return end_of(frame).finish_reason


def end_of(frame: bytes) -> StreamEnd:
    """Decode an encoded StreamEnd."""
    _, end = decode(frame)
    assert isinstance(end, StreamEnd), end
    return end
