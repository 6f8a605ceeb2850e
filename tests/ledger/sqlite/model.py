"""What a ledger is: the same calls as the real one, with no disk and nothing to wait for.

Streams are fifty lines, objects another fifty. An error is what it would be of; its words
are not modelled.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from ledger.errors import Conflict, NotFound, StaleEpoch, TailraceError, WrongIndex
from ledger.frame import Tag, tag_of
from ledger.interface import (
    Alarm,
    Append,
    NewStream,
    ObjectKey,
    ObjectWrite,
    Record,
    StreamInfo,
    StreamKind,
)


@dataclass
class ModelStream:
    new: NewStream
    created_ms: int
    epoch: int = 1
    records: list[Record] = field(default_factory=list)
    expires_ms: int = 0

    @property
    def ended(self) -> bool:
        return bool(self.records) and tag_of(self.records[-1].frame) == Tag.STREAM_END

    def check(self, append: Append, at: int) -> TailraceError | None:
        if append.epoch != self.epoch:
            return StaleEpoch("")
        if self.ended:
            return Conflict("")
        return None if append.index == at else WrongIndex("")


class Model:
    """Streams in the order of their creation. `touched`: expiries that only memory knows."""

    def __init__(self) -> None:
        self.now = 1_000_000
        self.streams: dict[bytes, ModelStream] = {}
        self.touched: dict[bytes, int] = {}
        self.objects = ModelObjects(self)

    def find(self, stream: bytes) -> ModelStream:
        if stream not in self.streams:
            raise NotFound("")
        return self.streams[stream]

    def create(self, new: NewStream) -> tuple[StreamInfo, bool]:
        for stream, known in self.streams.items():
            if new.idempotency_key is not None and new.idempotency_key == known.new.idempotency_key:
                if new.request_hash != known.new.request_hash:
                    raise Conflict("")
                return self.info(stream), False
        self.add(new)
        return self.info(new.stream), True

    def add(self, new: NewStream) -> None:
        if new.stream in self.streams:
            raise Conflict("")
        self.streams[new.stream] = ModelStream(new, self.now)

    def info(self, stream: bytes) -> StreamInfo:
        s = self.find(stream)
        new, count = s.new, len(s.records)
        return StreamInfo(
            stream, s.epoch, count, s.ended, new.durability, new.recipe, s.created_ms, new.kind
        )

    def take_over(self, stream: bytes) -> int:
        self.find(stream).epoch += 1
        return self.streams[stream].epoch

    def append(self, batch: Sequence[Append]) -> list[tuple[Append, type[TailraceError]]]:
        refused: list[tuple[Append, type[TailraceError]]] = []
        for append in batch:
            s = self.streams.get(append.stream)
            error = NotFound("") if s is None else s.check(append, len(s.records))
            if error is not None:
                refused.append((append, type(error)))
            elif s is not None:
                s.records.append(append.record)
                s.expires_ms = self.now + int(s.new.ttl_s * 1000)
        return refused

    def read(self, stream: bytes, start: int, limit: int) -> list[Record]:
        s = self.find(stream)
        if s.ended:
            self.touched[stream] = self.now + int(s.new.ttl_s * 1000)
        return s.records[start : start + limit]

    def unfinished(self) -> list[bytes]:
        kind = StreamKind.GENERATION
        return [id_ for id_, s in self.streams.items() if not s.ended and s.new.kind is kind]

    def delete(self, stream: bytes) -> None:
        self.find(stream)
        del self.streams[stream]

    def expire(self) -> int:
        for stream, expires_ms in self.touched.items():
            if stream in self.streams:
                s = self.streams[stream]
                s.expires_ms = max(s.expires_ms, expires_ms)
        self.touched = {}
        kind = StreamKind.GENERATION
        old = [s for s in self.streams.values() if s.ended and s.expires_ms <= self.now]
        gone = [s.new.stream for s in old if s.new.kind is kind]
        for stream in gone:
            del self.streams[stream]
        return len(gone)

    def reopen(self) -> None:
        self.touched = {}
        self.objects.epochs = {}


class ModelObjects:
    """Objects: their values, their alarms, and who owns them."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.epochs: dict[ObjectKey, int] = {}
        self.values: dict[ObjectKey, dict[str, bytes]] = {}
        self.alarms: dict[ObjectKey, Alarm] = {}

    def write(self, write: ObjectWrite) -> None:
        if self.epochs.get(write.key) != write.epoch:
            raise StaleEpoch("")
        nexts = Counter[bytes]()
        created = {new.stream for new in write.creates}
        for append in [append for append in write.appends if append.stream not in created]:
            stream = self.model.find(append.stream)
            error = stream.check(append, len(stream.records) + nexts[append.stream])
            if error is not None:
                raise error
            nexts[append.stream] += 1
        for new in write.creates:
            self.model.add(new)
        values = {} if write.clear else dict(self.values.get(write.key, {}))
        for name in write.deletes:
            values.pop(name, None)
        self.values[write.key] = {**values, **write.puts}
        self.model.append(write.appends)
        for dropped in write.drops:
            self.model.streams.pop(dropped, None)
        if write.sets_alarm:
            self.alarms.pop(write.key, None)
            if write.alarm is not None:
                self.alarms[write.key] = write.alarm

    def get(self, key: ObjectKey, names: Sequence[str]) -> dict[str, bytes]:
        values = self.values.get(key, {})
        return {name: values[name] for name in names if name in values}

    def due(self, now_ms: int) -> set[tuple[ObjectKey, Alarm]]:
        return {(key, alarm) for key, alarm in self.alarms.items() if alarm.at_ms <= now_ms}

    def names(self, kind: str) -> list[str]:
        keys = {*self.alarms, *(key for key, values in self.values.items() if values)}
        return sorted((key.name for key in keys if key.kind == kind), key=str.encode)

    def list(
        self,
        key: ObjectKey,
        *,
        prefix: str,
        start: str | None,
        end: str | None,
        limit: int | None,
        reverse: bool,
    ) -> list[tuple[str, bytes]]:
        found = sorted(self.values.get(key, {}).items(), key=lambda item: item[0].encode())
        found = [
            (name, value)
            for name, value in found
            if name.startswith(prefix)
            and (start is None or name.encode() >= start.encode())
            and (end is None or name.encode() < end.encode())
        ]
        return (found[::-1] if reverse else found)[:limit]
