"""The state of a stream in its object's memory, and its changes in the object's storage.

The object stores up to three values for a stream: its configuration, its last use (only if it has a
TTL) and the last `Stream-Seq`. It also stores one value per producer and one per fork. The length
of the stream is not stored, because the ledger stream has it, so an append of plain bytes writes
frames and no value.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

from tailrace.ledger.interface import NewStream, StreamKind
from tailrace.ledger.objects.object import ObjectContext
from tailrace.ledger.objects.storage import ObjectStorage
from tailrace.ledger.wire.schema import Durability
from tailrace.origin.streams.chunks import chunks, end
from tailrace.origin.streams.config import StreamConfig
from tailrace.origin.streams.expiry import LastUse
from tailrace.origin.streams.page import Tip
from tailrace.origin.streams.request import Sender

CONFIG = "config"
USED = "used"
SEQ = "seq"
PRODUCER = "producer:"

MAX_PRODUCERS = 4_096
"""Maximum producers of a stream whose last request is stored; above it, the quarter that has been
idle for longest is forgotten."""
FIRST_EPOCH = 1


@dataclass(slots=True)
class StoredStream:
    """A stream in memory.

    `tip` includes data that was accepted and is not durable yet. `epoch` is that of the ledger
    stream.
    """

    storage: ObjectStorage
    config: StreamConfig
    tip: Tip
    use: LastUse
    seq: str | None = None
    epoch: int = FIRST_EPOCH
    producers: int | None = None
    """Number of producers whose last request is stored; None before they were counted."""

    @classmethod
    async def load(cls, context: ObjectContext) -> StoredStream | None:
        """Load the stream from storage; return None if the object has no stream."""
        values = await context.storage.get_many((CONFIG, USED, SEQ))
        if CONFIG not in values:
            return None
        config = StreamConfig.unpack(values[CONFIG])
        info = await context.outside(context.ledger.info(config.stream))
        tip = Tip(config.base + info.next_index - info.ended, info.ended)
        used_ms = int(values.get(USED, b"0"))
        use = LastUse.restored(used_ms, config.expiry, context.now_ms())
        seq = values[SEQ].decode() if SEQ in values else None
        return cls(context.storage, config, tip, use, seq, info.epoch)

    @classmethod
    def create(
        cls, storage: ObjectStorage, config: StreamConfig, now_ms: int, durability: Durability
    ) -> StoredStream:
        """Create a stream, empty except for what it has inherited."""
        storage.put(CONFIG, config.pack())
        storage.create_stream(
            NewStream(config.stream, "", durability, ttl_s=0.0, kind=StreamKind.OBJECT)
        )
        state = cls(storage, config, Tip(config.base, False), LastUse(now_ms, now_ms))
        state.write_use(now_ms)
        return state

    @asynccontextmanager
    async def change(self) -> AsyncIterator[None]:
        """Make all changes of the block in one write; an exception undoes all of them."""
        before = self.tip, self.seq, replace(self.use), self.producers
        done = False
        try:
            async with self.storage.transaction():
                yield
            done = True
        finally:
            if not done:
                self.tip, self.seq, self.use, self.producers = before

    def append(self, messages: Sequence[bytes], *, closes: bool) -> None:
        """Append whole messages and, if `closes` is True, the stream's end."""
        own = self.tip.index - self.config.base
        records = chunks(messages, own)
        count = len(records)
        if closes:
            records.append(end(own + count))
        for index, record in enumerate(records, own):
            self.storage.append(self.config.stream, self.epoch, index, record)
        self.tip = Tip(self.tip.index + count, closes)

    def remember(self, producer: Sender | None, seq: str | None) -> None:
        """Store the producer's place and `Stream-Seq`, by which later appends are judged."""
        if producer is not None:
            place = producer.place.pack(self.tip.index)
            self.storage.put(PRODUCER + producer.name, place)
        if seq is not None:
            self.seq = seq
            self.storage.put(SEQ, seq.encode())

    async def room_for_producer(self) -> None:
        """Make room for a new producer: at the maximum, forget those idle for longest."""
        if self.producers is None:
            self.producers = len(await self.storage.list(prefix=PRODUCER))
        if self.producers >= MAX_PRODUCERS:
            places = await self.storage.list(prefix=PRODUCER)
            forgotten = stalest(places)
            for name in forgotten:
                self.storage.delete(name)
            self.producers = len(places) - len(forgotten)
        self.producers += 1

    def write_use(self, now_ms: int) -> None:
        """Record that the stream is used now, and store this with the other values of a write."""
        self.use.touch(self.config.expiry, now_ms)
        if self.config.expiry.ttl_s is not None:
            self.storage.put(USED, str(self.use.known_ms).encode())
            self.use.stored_ms = self.use.known_ms

    def touch(self, now_ms: int) -> None:
        """Record that the stream is used now.

        This is stored only if the last stored use is old enough.
        """
        if self.use.touch(self.config.expiry, now_ms):
            self.write_use(now_ms)

    def deadline_ms(self) -> int | None:
        """Time in Unix ms at which the stream expires unless it is used before."""
        return None if self.config.deleted else self.config.expiry.deadline_ms(self.use.known_ms)

    def is_over(self, now_ms: int) -> bool:
        deadline_ms = self.deadline_ms()
        return deadline_ms is not None and now_ms >= deadline_ms

    def hide(self) -> None:
        """Mark the stream as deleted for everyone but its forks."""
        config = replace(self.config, deleted=True)
        self.storage.put(CONFIG, config.pack())
        self.config = config
        self.storage.delete(USED)
        self.storage.delete(SEQ)


def stalest(places: Mapping[str, bytes]) -> list[str]:
    """Return the storage keys of the producers that have been idle for longest.

    `places` has each producer's packed `Place` by storage key. The result has a quarter of the
    keys, but at least one.
    """

    def index(name: str) -> int:
        return int([*places[name].split(), b"0"][2])

    return sorted(places, key=index)[: max(1, len(places) // 4)]
