"""The frames of one engine step, as columns, and their conversion to appends to the ledger."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from tailrace.ledger.frame import TAG_OFFSET, FinishReason, StreamEnd, decode
from tailrace.ledger.interface import Appends
from tailrace.ledger.record_extra import RecordExtra, life_numbers
from tailrace.origin.core.stream import Stream
from tailrace.origin.workers.worker_frame import Emissions

END = StreamEnd.tag


class StepFrames(NamedTuple):
    """The emissions of the runs that are still on their worker, with the stream of each row."""

    streams: Sequence[Stream]
    emissions: Emissions

    def appends(self, now: float) -> Appends:
        """Return the emissions as appends; a StreamEnd is stored with its stream's statistics."""
        streams, made = self.streams, self.emissions
        extras = [b""] * len(streams)
        # Nearly every row has no extra: only ends, steered ids and a new engine need one.
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


def end_reason(frame: bytes) -> FinishReason:
    """Return the finish reason in an encoded StreamEnd."""
    _, end = decode(frame)
    assert isinstance(end, StreamEnd), end
    return end.finish_reason
