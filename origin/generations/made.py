"""What a step has made of the streams of its worker, on its way into the ledger and out of it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress
from typing import Any, NamedTuple

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
    """The frames of runs that are still some: columns of one length, `steers` as in a `Step`."""

    streams: Sequence[GeneratedStream]
    runs: Sequence[int]
    indexes: Sequence[int]
    ids: Sequence[tuple[int, ...]]
    steers: Sequence[int]
    frames: Sequence[bytes]


def made_of(table: StreamTable, slot: WorkerSlot, step: Step) -> Made:
    """Without the runs that are none any more; raises FrameError as `Step.check` does."""
    ids, frames = step.cut()
    streams = [table.run(slot, run) for run in step.runs]
    columns: tuple[Sequence[Any], ...]
    columns = streams, step.runs, step.indexes, ids, step.steers, frames
    if None in streams:
        here = [stream is not None for stream in streams]
        columns = tuple(list(compress(column, here)) for column in columns)
    return Made(*columns)


def appends_of(made: Made, now: float) -> Appends:
    """Behind the ids of a StreamEnd lies what is kept of its stream's life."""
    streams, ids = made.streams, list(made.ids)
    for at, frame in enumerate(made.frames):
        if frame[TAG_OFFSET] == END:
            stream, others = streams[at], streams.count(streams[at]) - 1
            life = stream.progress.life(stream.epoch - 1, now, others)
            ids[at] = life.behind(ids[at])
    epochs = [stream.epoch for stream in streams]
    return Appends([stream.id for stream in streams], epochs, made.indexes, made.frames, ids)


def released(
    made: Made,
    slot: WorkerSlot,
    now: float,
    table: StreamTable,
    allowances: Allowances,
    metrics: Metrics,
) -> list[tuple[GeneratedStream, bytes]]:
    """Take note of what is durable; gives the streams that have ended, each with its end."""
    gaps: dict[tuple[str, float], int] = {}
    ended: list[tuple[GeneratedStream, bytes]] = []
    for stream, run, index, ids, steers, frame in zip(*made, strict=True):
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
