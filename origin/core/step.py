"""The frames of one engine step on their way into the ledger, in columns."""

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
    """The emissions of runs that are known, with the stream of each."""

    streams: Sequence[Stream]
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


def end_reason(frame: bytes) -> FinishReason:
    """Return why a stream has ended, from its encoded StreamEnd."""
    _, end = decode(frame)
    assert isinstance(end, StreamEnd), end
    return end.finish_reason
