"""A model of a ledger's streams: an epoch, records without a gap, one end, an expiry."""

from dataclasses import dataclass, field

from tailrace.ledger.errors import BeyondEnd, Conflict, NotFound, StaleEpoch, WrongIndex
from tailrace.ledger.frame import StreamEnd, tag_of
from tailrace.ledger.interface import Append, NewStream, Record, StreamInfo, StreamKind


@dataclass
class ModelStream:
    """One stream of the model."""

    new: NewStream
    created_ms: int
    epoch: int = 1
    records: list[Record] = field(default_factory=list)
    ended: bool = False
    used_ms: int = 0

    @property
    def info(self) -> StreamInfo:
        new, tip = self.new, (self.epoch, len(self.records), self.ended)
        return StreamInfo(new.stream, *tip, new.durability, new.recipe, self.created_ms, new.kind)


class Model(dict[bytes, ModelStream]):
    """The ledger's calls on a dict of streams, oldest first. Errors have no words."""

    now_ms = 1_000_000

    def __missing__(self, stream: bytes) -> ModelStream:
        raise NotFound("")

    def create(self, new: NewStream) -> tuple[StreamInfo, bool]:
        for known in self.values():
            if known.new.idempotency_key == new.idempotency_key is not None:
                if known.new.request_hash != new.request_hash:
                    raise Conflict("")
                return known.info, False
        if new.stream in self:
            raise Conflict("")
        records = [] if new.base is None else self._shared(*new.base)
        self[new.stream] = ModelStream(new, self.now_ms, records=records)
        return self[new.stream].info, True

    def _shared(self, stream: bytes, end: int) -> list[Record]:
        """Return the records that a branch of a stream shares, which are never its end."""
        parent = self[stream]
        if end > len(parent.records) - parent.ended:
            raise BeyondEnd("")
        return parent.records[:end]

    def take_over(self, stream: bytes) -> int:
        self[stream].epoch += 1
        return self[stream].epoch

    def append(self, append: Append) -> None:
        stream = self[append.stream]
        if append.epoch != stream.epoch:
            raise StaleEpoch("")
        if stream.ended:
            raise Conflict("")
        if append.index != len(stream.records):
            raise WrongIndex("")
        stream.records.append(append.record)
        stream.ended = tag_of(append.record.frame) == StreamEnd.tag
        stream.used_ms = self.now_ms

    def read(self, stream: bytes, start: int, limit: int) -> list[Record]:
        self[stream].used_ms = self.now_ms
        return self[stream].records[start : start + limit]

    def delete(self, stream: bytes) -> None:
        del self[self[stream].new.stream]

    def generations(self, *, ended: bool) -> list[ModelStream]:
        kind = StreamKind.GENERATION
        return [s for s in self.values() if s.new.kind is kind and s.ended is ended]

    def expire(self) -> int:
        ended = self.generations(ended=True)
        old = [s for s in ended if s.used_ms + s.new.ttl_s * 1000 <= self.now_ms]
        for stream in old:
            del self[stream.new.stream]
        return len(old)
