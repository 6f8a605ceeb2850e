"""The interface of a ledger, whatever stores its frames."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple, Protocol

from tailrace.ledger.branch import BranchPoint
from tailrace.ledger.errors import CallerError, Conflict, StaleEpoch, TailraceError, WrongIndex
from tailrace.ledger.frame import Durability
from tailrace.ledger.usage import UsageQuery, UsageSums


class StreamKind(IntEnum):
    """The kind of producer of a stream, which decides what happens when the producer dies."""

    GENERATION = 0
    """The producer is an engine. A stream without StreamEnd is unfinished, and another worker takes
    it over."""
    OBJECT = 1
    """The producer is an object, which also ends and deletes the stream; the ledger never expires
    it."""


MAX_TTL_S = 100 * 365 * 24 * 3600
"""Maximum seconds that a stream is kept after its last use: 100 years."""


@dataclass(frozen=True, slots=True)
class NewStream:
    """A stream to create.

    `recipe` is what a continuation needs besides the token ids (prompt ids, sampling parameters,
    engine fingerprint). The ledger stores it as text and never reads it. A second create with the
    same `idempotency_key` and `request_hash` returns the stream that the first one created; with
    another hash it raises `Conflict`. With a `base`, the stream is a branch: it begins with records
    of another stream, and `create` also raises `NotFound` or `BeyondEnd` if these do not exist.
    `identity` is a hash of everything that the records depend on, by which `known` finds the stream
    once it has ended; it is empty if no such hash determines the records.
    """

    stream: bytes
    recipe: str
    durability: Durability
    ttl_s: float
    idempotency_key: str | None = None
    request_hash: bytes = b""
    kind: StreamKind = StreamKind.GENERATION
    base: BranchPoint | None = None
    identity: bytes = b""

    def __post_init__(self) -> None:
        if not 0 <= self.ttl_s <= MAX_TTL_S:  # in this form, the test also refuses NaN
            raise CallerError(
                f"{self.ttl_s} is not a valid time to live",
                field="ttl_s",
                hint=f"use 0 to {MAX_TTL_S} seconds (100 years)",
            )


@dataclass(frozen=True, slots=True)
class StreamInfo:
    """A stream as its readers see it: all frames before `next_index` are released."""

    stream: bytes
    epoch: int
    next_index: int
    ended: bool
    durability: Durability
    recipe: str
    created_ms: int
    kind: StreamKind = StreamKind.GENERATION


class Record(NamedTuple):
    """A log record: an encoded frame on channel 0, and the token ids that it completes.

    A continuation needs the ids. `extra` is further data that the producer stores
    (`ledger/record_extra.py`). Clients get neither the ids nor `extra`.
    """

    frame: bytes
    ids: tuple[int, ...]
    extra: bytes = b""


class Append(NamedTuple):
    """A record to append to a stream, by the producer that holds `epoch`."""

    stream: bytes
    epoch: int
    index: int  # type: ignore[assignment]  # hides tuple.index, which is not used
    record: Record


@dataclass(frozen=True, slots=True)
class Appends:
    """Appends as columns of equal length, as an engine's step produces them."""

    streams: Sequence[bytes]
    epochs: Sequence[int]
    indexes: Sequence[int]
    frames: Sequence[bytes]
    ids: Sequence[tuple[int, ...]]
    extras: Sequence[bytes]

    @classmethod
    def of(cls, batch: Sequence[Append] | Appends) -> Appends:
        """Return a batch as columns."""
        if isinstance(batch, Appends):
            return batch
        streams, epochs, indexes, records = zip(*batch, strict=True) if batch else ((),) * 4
        frames, ids, extras = zip(*records, strict=True) if records else ((),) * 3
        return cls(streams, epochs, indexes, frames, ids, extras)

    def __len__(self) -> int:
        return len(self.streams)

    def __getitem__(self, at: int) -> Append:
        record = Record(self.frames[at], self.ids[at], self.extras[at])
        return Append(self.streams[at], self.epochs[at], self.indexes[at], record)


class Refusal(NamedTuple):
    """An append that was not stored, and the reason. The rest of its batch was stored."""

    append: Append
    error: TailraceError


def why_refused(epoch: int, index: int, last_epoch: int, next_index: int, ended: bool) -> Conflict:
    """Return the error for an append that does not fit the state of its stream."""
    if epoch != last_epoch:
        return StaleEpoch(
            f"epoch {epoch} was replaced by epoch {last_epoch}",
            field="epoch",
            hint="another producer owns this stream now; stop appending",
        )
    if ended:
        return Conflict(
            "the stream has ended", field="index", hint="nothing can be appended after the end"
        )
    return WrongIndex(
        f"index {index} is not the next one",
        field="index",
        hint=f"the next index is {next_index}",
    )


def reused_key() -> Conflict:
    return Conflict(
        "this idempotency key was used for another request",
        field="idempotency_key",
        hint="use a new key for a new request",
    )


def taken_id() -> Conflict:
    return Conflict("the stream id is taken", field="stream")


# ---- objects ----


class ObjectKey(NamedTuple):
    """The address of an object: its class and its name, both 1 to 512 characters."""

    kind: str
    name: str


class Alarm(NamedTuple):
    """The Unix time in ms at which an object's alarm is due, and the number of failed tries."""

    at_ms: int
    retries: int = 0


def stale_object(key: ObjectKey, epoch: int) -> StaleEpoch:
    return StaleEpoch(
        f"epoch {epoch} of {key.kind} {key.name!r} was replaced",
        field="epoch",
        hint="the object has another owner now",
    )


@dataclass(frozen=True, slots=True)
class ObjectState:
    """The stored state of an object without its values. `epoch` fences former owners."""

    epoch: int
    alarm: Alarm | None


@dataclass(frozen=True, slots=True)
class ObjectWrite:
    """An atomic write of one object.

    The order is `clear` (delete every value), `deletes`, `puts`, then `creates`, `appends` and
    `drops` of streams of `StreamKind.OBJECT`. If a stream refuses an append (StaleEpoch,
    WrongIndex, Conflict), the whole write is refused. If `sets_alarm`, `alarm` replaces the stored
    alarm; None deletes that.
    """

    key: ObjectKey
    epoch: int
    puts: Mapping[str, bytes] = field(default_factory=dict)
    deletes: Sequence[str] = ()
    clear: bool = False
    alarm: Alarm | None = None
    sets_alarm: bool = False
    creates: Sequence[NewStream] = ()
    appends: Sequence[Append] = ()
    drops: Sequence[bytes] = ()
    durability: Durability = Durability.PROCESS


MAX_LIST = 2**31 - 1
"""Limit of a `ValueRange` for which the caller gives none."""


@dataclass(frozen=True, slots=True)
class ValueRange:
    """A range of values by the UTF-8 bytes of their names, from `start` up to but not `end`."""

    prefix: str = ""
    start: str | None = None
    end: str | None = None
    limit: int = MAX_LIST
    reverse: bool = False

    def __contains__(self, name: str) -> bool:
        return self.first <= name and (self.beyond is None or name < self.beyond)

    @property
    def first(self) -> str:
        return max(self.prefix, self.start or "")

    @property
    def beyond(self) -> str | None:
        """The first name after the range; None if the range has no end."""
        ends = (after_prefix(self.prefix), self.end)
        return min((end for end in ends if end is not None), default=None)


ALL_VALUES = ValueRange()


def after_prefix(prefix: str) -> str | None:
    """Return the first string that sorts after all strings with this prefix, or None.

    Strings are ordered by their UTF-8 bytes, which is the order of their code points.
    """
    for at in range(len(prefix) - 1, -1, -1):
        code = ord(prefix[at])
        if code < 0x10FFFF:
            # Skip the surrogates (D800 to DFFF), which have no UTF-8 encoding.
            following = 0xE000 if code == 0xD7FF else code + 1
            return prefix[:at] + chr(following)
    return None


class ObjectStore(Protocol):
    """Durable storage of objects: values by name and one alarm each, fenced by epochs.

    Reading needs no claim. Methods raise `LedgerFailed` like those of a ledger.
    """

    async def claim(self, key: ObjectKey) -> ObjectState:
        """Become the owner of an object with a new epoch, which fences all older ones.

        Raises:
            HeldElsewhere: Another live origin owns the object.
        """

    async def seize(self, key: ObjectKey) -> None:
        """Take an object from its owner, even a live one, so that this origin can claim it."""

    async def owns(self, key: ObjectKey, epoch: int) -> bool:
        """Return True if the owner that claimed `epoch` has not been replaced."""

    async def get(self, key: ObjectKey, names: Sequence[str]) -> dict[str, bytes]:
        """Return the existing values of `names`."""

    async def list(self, key: ObjectKey, wanted: ValueRange = ALL_VALUES) -> dict[str, bytes]:
        """Return the values in a range, in order of their names."""

    async def write(self, write: ObjectWrite) -> None:
        """Store a write in a group commit; return when it is durable.

        Raises:
            StaleEpoch: The object has another owner.
        """

    async def due(self, now_ms: int, limit: int) -> Sequence[tuple[ObjectKey, Alarm]]:
        """Return at most `limit` alarms that are due at `now_ms` (Unix time), earliest first."""

    async def names(self, kind: str, *, after: str = "", limit: int = 1000) -> Sequence[str]:
        """Return the names of a class's objects that have a value or an alarm, in order."""


# ---- presence ----


class PublishedReaders(NamedTuple):
    """The published numbers of readers of a stream: this origin's, and those of other origins."""

    own: int
    others: int


NO_READERS = PublishedReaders(0, 0)


class SharedPresence(Protocol):
    """The numbers of readers that the origins of a shared ledger publish for each other.

    They are hints for people and never part of a stream. The numbers of an origin count while its
    lease is valid. A crash of the storage may lose numbers; then their origin must publish them
    again.
    Methods raise `LedgerAway` or `LedgerFailed` like those of a ledger.
    """

    async def publish(self, readers: Mapping[bytes, int]) -> None:
        """Store how many readers streams have at this origin, and notify the other origins."""

    async def read(self, streams: Sequence[bytes]) -> Mapping[bytes, PublishedReaders]:
        """Return the published numbers of streams; streams without readers may be missing."""

    def watch(self, changed: Callable[[Sequence[bytes] | None], None]) -> None:
        """Call `changed` with the streams for which another origin has published a number.

        It gets None if any number may have changed. Notifications may be lost.
        """


# ---- the ledger ----


class LiveTail(Protocol):
    """The live end of a stream in memory; the same object while the stream is watched."""

    @property
    def released(self) -> int:
        """The index after the last frame that readers may see."""

    @property
    def gone(self) -> bool:
        """True if the stream was deleted, or the tail evicted: no frames will follow."""

    def take(self, start: int, limit: int) -> list[bytes] | None:
        """Return released frames from `start` on; None if they must be read from storage."""


class LedgerSize(NamedTuple):
    """Storage used by a ledger, in bytes; None if unknown."""

    used_bytes: int
    free_bytes: int | None = None
    """Free space inside the ledger's file."""
    wal_bytes: int | None = None
    disk_free_bytes: int | None = None


class Ledger(Protocol):
    """Durable, ordered, fenced streams of frames.

    A frame can be read only after it has the durability that its stream requires. Methods raise
    `NotFound` for an unknown stream, and `LedgerFailed` if the storage refuses a write. After
    `LedgerFailed` the ledger accepts no writes until it is opened again.
    """

    @property
    def objects(self) -> ObjectStore: ...

    @property
    def presence(self) -> SharedPresence | None:
        """The numbers of readers at other origins; None if a ledger has only one origin."""

    @property
    def name(self) -> str:
        """`file:…` or `postgresql:…`; equal for two origins only if they share the ledger."""

    async def create(self, new: NewStream, *others: NewStream) -> tuple[StreamInfo, bool]:
        """Create a stream at epoch 1, and `others` in the same commit.

        Return the stream of `new`, and True if this call has created it. An earlier call with the
        same idempotency key may have created it; then nothing is created, and the flag is False.
        `others` must have no idempotency key.
        """

    async def made_by(self, idempotency_key: str, request_hash: bytes) -> StreamInfo | None:
        """Return the stream that was created with the idempotency key, or None.

        Raises:
            Conflict: The key was used for another request.
        """

    async def known(self, identity: bytes) -> StreamInfo | None:
        """Return the newest ended stream with this `NewStream.identity`, or None.

        The identity is a hash of everything in a request that determines its output.
        """

    async def info(self, stream: bytes) -> StreamInfo: ...

    async def take_over(self, stream: bytes) -> int:
        """Become the stream's producer; return the new epoch, which fences all older ones."""

    async def append(self, batch: Sequence[Append] | Appends) -> list[Refusal]:
        """Store a batch in one group commit; return when it is durable and released.

        Refused appends are returned with `StaleEpoch`, `WrongIndex` or `Conflict` (after the end),
        or because the stream is unknown (`NotFound`), damaged (`Damaged`) or cannot be read now
        (`LedgerAway`). The rest of the batch is stored. Waits while the queue of uncommitted
        frames is full. If all streams of a batch have durability RELAXED, it is released at once.
        """

    async def read(self, stream: bytes, start: int, limit: int) -> list[Record]:
        """Return at most `limit` released records from index `start` on.

        The list is empty if no record from `start` on has been released.
        """

    async def frames(self, stream: bytes, start: int, limit: int) -> list[bytes]:
        """Return the frames of the records that `read` would return; faster than `read`."""

    def tail(self, stream: bytes) -> LiveTail:
        """Return the tail of a stream that is in memory, which every watched stream is.

        Raises:
            NotFound: The stream is not in memory.
        """

    def watch(self, stream: bytes, wake: Callable[[], None]) -> None:
        """Call `wake` after each release to a stream that `info` has just returned.

        Raises:
            NotFound: The stream is not in memory.
        """

    def unwatch(self, stream: bytes, wake: Callable[[], None]) -> None: ...

    async def usage(self, query: UsageQuery) -> UsageSums:
        """Return sums of the usage of generations that have ended.

        Each generation whose end was durable before the call is counted once, also if it has
        expired or was deleted since then.
        """

    async def deliver(self, tokens: Mapping[bytes, int]) -> None:
        """Record how many output tokens of ended generations were sent to a reader, by stream.

        A smaller number than the stored one is ignored, and so is an unknown stream.
        """

    def silent_s(self) -> float:
        """Return for how many seconds the storage has been unresponsive or away."""

    async def size(self) -> LedgerSize:
        """Return the used storage. The call is fast enough to be made every second."""

    def shortage(self) -> str | None:
        """Return why there is no space for new streams; None if there is space.

        The call is fast enough to be made every second.
        """

    async def unfinished(self) -> list[bytes]:
        """Return the generations without StreamEnd whose producer has no lease, oldest first.

        In a file, which has one owner, these are all unfinished generations when the file has just
        been opened. In a shared ledger they belong to origins that no longer renew their lease.
        """

    async def delete(self, stream: bytes) -> None:
        """Delete a stream and its frames now, before its retention ends."""

    async def expire(self) -> int:
        """Delete ended streams that were not used for their TTL; return their number."""

    async def close(self) -> None: ...
