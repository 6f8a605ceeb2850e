"""What a step has made of the streams of its worker, on its way into the ledger and out of it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ledger.frame import TAG_OFFSET, StreamEnd
from ledger.interface import Appends
from origin.generations.allowance import Allowances
from origin.generations.stream import GeneratedStream
from origin.generations.table import StreamTable
from origin.metrics import Metrics
from origin.workers.worker_frame import Step
from origin.workers.worker_process import WorkerSlot

END = StreamEnd.tag


class Made(NamedTuple):
    """One frame of a run that is still one; `steers` as in an `Emission`."""

    stream: GeneratedStream
    run: int
    index: int  # type: ignore[assignment]  # hides tuple.index, which nobody needs
    ids: tuple[int, ...]
    steers: int
    frame: bytes


def made_of(table: StreamTable, slot: WorkerSlot, step: Step) -> list[Made]:
    """Without the runs that are none any more; raises FrameError as `Step.check` does."""
    ids, frames = step.cut()
    streams = [table.run(slot, run) for run in step.runs]
    rows = zip(streams, step.runs, step.indexes, ids, step.steers, frames, strict=True)
    return [Made(*row) for row in rows if row[0] is not None]


def appends_of(made: Sequence[Made], now: float) -> Appends:
    """Behind the ids of a StreamEnd lies what is kept of its stream's life."""
    return Appends(
        [each.stream.id for each in made],
        [each.stream.epoch for each in made],
        [each.index for each in made],
        [each.frame for each in made],
        [
            each.ids if each.frame[TAG_OFFSET] != END else _with_life(each, made, now)
            for each in made
        ],
    )


def _with_life(end: Made, made: Sequence[Made], now: float) -> tuple[int, ...]:
    stream = end.stream
    others = sum(each.stream is stream for each in made) - 1
    return stream.progress.life(stream.epoch - 1, now, others).behind(end.ids)


def released(
    made: Iterable[Made],
    slot: WorkerSlot,
    now: float,
    table: StreamTable,
    allowances: Allowances,
    metrics: Metrics,
) -> list[tuple[GeneratedStream, bytes]]:
    """Take note of what is durable; gives the streams that have ended, each with its end."""
    gaps: dict[tuple[str, float], int] = {}
    ended: list[tuple[GeneratedStream, bytes]] = []
    for stream, run, index, ids, steers, frame in made:
        if stream.slot is not slot or stream.run != run:
            continue  # it has been taken off meanwhile
        if not stream.standing.proven:
            stream.standing.prove()
        allowances.charge(stream.recipe.tenant, len(ids))
        if steers:
            stream.steering.confirm(steers)
        stream.progress.released(index, len(ids), now)
        table.touch(stream)
        if frame[TAG_OFFSET] == END:
            ended.append((stream, frame))
            continue
        if stream.released_s is not None:
            gap = stream.recipe.priority, stream.released_s
            gaps[gap] = gaps.get(gap, 0) + 1
        elif stream.asked_s is not None:
            metrics.first_release(stream.recipe.priority, now - stream.asked_s, stream.recipe.trace)
        stream.released_s = now
    for (priority, last_s), count in gaps.items():
        metrics.release(priority, now - last_s, count)
    return ended
