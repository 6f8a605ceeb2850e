"""What every ledger offers, whatever it stores its frames in."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple, Protocol

from tailrace.ledger.errors import CallerError, Conflict, StaleEpoch, TailraceError, WrongIndex
from tailrace.ledger.frame import Durability


class StreamKind(IntEnum):
    """Who appends to a stream, and so who goes on with it when its producer is gone."""

    GENERATION = 0
    """An engine. Without a StreamEnd it is unfinished, and another worker takes it over."""
    OBJECT = 1
    """An object, which also ends and deletes it; it has no retention of its own."""


MAX_TTL_S = 100 * 365 * 24 * 3600
"""Maximum time that a stream is kept after its last use: 100 years, in seconds."""


@dataclass(frozen=True, slots=True)
class NewStream:
    """A stream to be created.

    `recipe` is what a continuation needs besides the token ids (prompt ids, sampling
    parameters, engine fingerprint); the ledger keeps it as text and never reads it.
    `idempotency_key` names the open: a second create with the same key and the same
    `request_hash` gives the first stream, with another hash it is a `Conflict`.
    """

    stream: bytes
    recipe: str
    durability: Durability
    ttl_s: float
    idempotency_key: str | None = None
    request_hash: bytes = b""
    kind: StreamKind = StreamKind.GENERATION

    def __post_init__(self) -> None:
        if not 0 <= self.ttl_s <= MAX_TTL_S:  # which is true of nan, too
            raise CallerError(
                f"{self.ttl_s} is not a time to keep a stream for",
                field="ttl_s",
                hint=f"from 0 to {MAX_TTL_S} seconds (100 years)",
            )


@dataclass(frozen=True, slots=True)
class StreamInfo:
    """A stream as its readers may know it: everything before `next_index` is released."""

    stream: bytes
    epoch: int
    next_index: int
    ended: bool
    durability: Durability
    recipe: str
    created_ms: int
    kind: StreamKind = StreamKind.GENERATION


class Record(NamedTuple):
    """One log record: a whole wire frame with corr 0, and the token ids it completes.

    The ids are what a continuation is made of; they are never sent to a client.
    """

    frame: bytes
    ids: tuple[int, ...]


class Append(NamedTuple):
    """One record on its way into a stream, by the producer that holds `epoch`."""

    stream: bytes
    epoch: int
    index: int  # type: ignore[assignment]  # hides tuple.index, which nobody needs
    record: Record


@dataclass(frozen=True, slots=True)
class Appends:
    """Appends in columns, as a step of an engine makes them: each is a place in all of these."""

    streams: Sequence[bytes]
    epochs: Sequence[int]
    indexes: Sequence[int]
    frames: Sequence[bytes]
    ids: Sequence[tuple[int, ...]]
    rows: Sequence[Append] = ()  # that it was made of, if it was

    @classmethod
    def of(cls, batch: Sequence[Append] | Appends) -> Appends:
        if isinstance(batch, Appends):
            return batch
        streams, epochs, indexes, records = zip(*batch, strict=True) if batch else ((),) * 4
        frames, ids = zip(*records, strict=True) if records else ((), ())
        return cls(streams, epochs, indexes, frames, ids, batch)

    def __len__(self) -> int:
        return len(self.streams)

    def __getitem__(self, at: int) -> Append:
        if self.rows:
            return self.rows[at]
        record = Record(self.frames[at], self.ids[at])
        return Append(self.streams[at], self.epochs[at], self.indexes[at], record)


class Refusal(NamedTuple):
    """An append that was not stored, and why. The rest of its batch was."""

    append: Append
    error: TailraceError


def why_refused(epoch: int, index: int, last_epoch: int, next_index: int, ended: bool) -> Conflict:
    """The error for an append that cannot be the next one of such a stream."""
    if epoch != last_epoch:
        return StaleEpoch(
            f"epoch {epoch} was replaced by epoch {last_epoch}",
            field="epoch",
            hint="another producer owns this stream now; stop appending",
        )
    if ended:
        return Conflict("the stream has ended", field="index", hint="nothing follows its end")
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
    """When an object wants to be woken, in Unix ms, and how often that has failed already."""

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
    """What is stored of an object beside its values. `epoch` fences its former owners."""

    epoch: int
    alarm: Alarm | None


@dataclass(frozen=True, slots=True)
class ObjectWrite:
    """All that one object changes at once; stored as a whole or not at all.

    The order is: `clear` (drop every value), `deletes`, `puts`; then `creates`, `appends`,
    `drops` of streams of `StreamKind.OBJECT`. An append that a stream refuses (StaleEpoch,
    WrongIndex, Conflict) refuses the whole write. `alarm` is stored if `sets_alarm`.
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
"""Values that a list without a limit has at most."""


@dataclass(frozen=True, slots=True)
class ValueRange:
    """Which values of an object, by the UTF-8 bytes of their names: `start` included, `end` not."""

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
        """The first name behind it; None where it has no end."""
        ends = (after_prefix(self.prefix), self.end)
        return min((end for end in ends if end is not None), default=None)


ALL_VALUES = ValueRange()


def after_prefix(prefix: str) -> str | None:
    """The first string above all that begin with `prefix`, by code points and by UTF-8 alike."""
    for at in range(len(prefix) - 1, -1, -1):
        code = ord(prefix[at])
        if code < 0x10FFFF:
            # Surrogates are no characters: UTF-8 has nothing between D7FF and E000.
            following = 0xE000 if code == 0xD7FF else code + 1
            return prefix[:at] + chr(following)
    return None


class ObjectStore(Protocol):
    """The durable side of objects: values by key, one alarm each, fenced by epoch.

    Reading needs no claim. Methods raise `LedgerFailed` as a ledger's do.
    """

    async def claim(self, key: ObjectKey) -> ObjectState:
        """Become the object's owner: its epoch is raised, and every older one is fenced.

        `HeldElsewhere` while an origin that lives has it.
        """

    async def seize(self, key: ObjectKey) -> None:
        """Take the object from whoever has it, living or not: a claim from here succeeds then."""

    async def owns(self, key: ObjectKey, epoch: int) -> bool:
        """Whether the owner that claimed `epoch` is still the last one."""

    async def get(self, key: ObjectKey, names: Sequence[str]) -> dict[str, bytes]:
        """The values that exist among `names`."""

    async def list(self, key: ObjectKey, wanted: ValueRange = ALL_VALUES) -> dict[str, bytes]:
        """Values by name, in order."""

    async def write(self, write: ObjectWrite) -> None:
        """Store in a group commit; returns when durable. `StaleEpoch` from a former owner."""

    async def due(self, now_ms: int, limit: int) -> Sequence[tuple[ObjectKey, Alarm]]:
        """Alarms up to `now_ms`, earliest first."""

    async def names(self, kind: str, *, after: str = "", limit: int = 1000) -> Sequence[str]:
        """Names of objects of a class that have a value or an alarm, in order."""


# ---- the ledger ----


class LiveTail(Protocol):
    """The live end of a stream in memory, and the same one for as long as somebody watches it."""

    @property
    def released(self) -> int:
        """The next index to be released."""

    @property
    def gone(self) -> bool:
        """Whether its stream has been deleted, or it has been forgotten; nothing will follow."""

    def take(self, start: int, limit: int) -> list[bytes] | None:
        """Released frames from `start` on; None where storage must be asked."""


class LedgerSize(NamedTuple):
    """What a ledger takes where it is stored, in bytes; None is what it cannot know there."""

    used_bytes: int
    free_bytes: int | None = None
    """Of its file, for what comes next."""
    wal_bytes: int | None = None
    disk_free_bytes: int | None = None


class Ledger(Protocol):
    """Durable, ordered, fenced streams of frames.

    A frame is readable only after it is as durable as its stream asks. Methods raise
    `NotFound` for an unknown stream and `LedgerFailed` when storage refuses a write;
    after `LedgerFailed` the ledger takes no more writes until it is opened again.
    """

    @property
    def objects(self) -> ObjectStore: ...

    @property
    def name(self) -> str:
        """`file:…` or `postgresql:…`: the same for two origins only where they share it."""

    async def create(self, new: NewStream, *others: NewStream) -> tuple[StreamInfo, bool]:
        """Create a stream at epoch 1, and `others` with it: all of them in one commit, or none.

        Return the first stream. The flag is False where its idempotency key had created one
        before; then nothing is created. `others` have no idempotency key.
        """

    async def made_by(self, idempotency_key: str, request_hash: bytes) -> StreamInfo | None:
        """The stream that the key has made; `Conflict` if it was with another request."""

    async def info(self, stream: bytes) -> StreamInfo: ...

    async def take_over(self, stream: bytes) -> int:
        """Become the stream's producer: returns the new epoch, which fences all older ones."""

    async def append(self, batch: Sequence[Append] | Appends) -> list[Refusal]:
        """Store a batch in one group commit; returns when it is durable and released.

        What a stream refuses (`StaleEpoch`, `WrongIndex`, `Conflict` after its end) comes back,
        and so does what is for a stream that is unknown (`NotFound`), damaged (`Damaged`) or
        cannot be read now (`LedgerAway`). The rest of the batch is stored.
        Waits while the queue of uncommitted frames is full. A batch of `relaxed` streams
        only is released and returns at once.
        """

    async def read(self, stream: bytes, start: int, limit: int) -> list[Record]:
        """At most `limit` released records from index `start` on; empty at the tip."""

    async def frames(self, stream: bytes, start: int, limit: int) -> list[bytes]:
        """The frames of `read` alone: what a client is sent, and quicker to get."""

    def tail(self, stream: bytes) -> LiveTail:
        """Of a stream in memory, as a watched one is; `NotFound` for all others."""

    def watch(self, stream: bytes, wake: Callable[[], None]) -> None:
        """Call `wake` after each release to a stream that `info` has just shown.

        `NotFound` for a stream that is not in memory.
        """

    def unwatch(self, stream: bytes, wake: Callable[[], None]) -> None: ...

    def silent_s(self) -> float:
        """For how long storage has owed an answer, or has been away; 0 when neither."""

    async def size(self) -> LedgerSize:
        """What it takes now; quick enough to be asked every second."""

    def shortage(self) -> str | None:
        """Return why the place where it is stored has no room for new streams; None if it has.

        Quick enough to be asked every second.
        """

    async def unfinished(self) -> list[bytes]:
        """Generations without a StreamEnd whose producer's lease is gone, oldest first.

        A file has one owner, so after opening it that is all of them. Where several origins
        share a ledger it is those of the origins that no longer renew their lease.
        """

    async def delete(self, stream: bytes) -> None:
        """Remove a stream and all of its frames now, whatever its retention."""

    async def expire(self) -> int:
        """Remove ended streams that nobody touched for their TTL; returns how many."""

    async def close(self) -> None: ...
