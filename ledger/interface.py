"""What every ledger offers, whatever it stores its frames in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from ledger.errors import TailraceError
from ledger.frame import Durability

STREAM_ID_BYTES = 16


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


class Record(NamedTuple):
    """One log record: a whole wire frame with corr 0, and the token ids it completes.

    The ids are what a continuation is made of; they are never sent to a client.
    """

    frame: bytes
    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Append:
    """One record on its way into a stream, by the producer that holds `epoch`."""

    stream: bytes
    epoch: int
    index: int
    record: Record


class Refusal(NamedTuple):
    """An append that was not stored, and why. The rest of its batch was."""

    append: Append
    error: TailraceError


class Ledger(Protocol):
    """Durable, ordered, fenced streams of frames.

    A frame is readable only after it is as durable as its stream asks. Methods raise
    `NotFound` for an unknown stream and `LedgerFailed` when storage refuses a write;
    after `LedgerFailed` the ledger takes no more writes until it is opened again.
    """

    async def create(self, new: NewStream) -> tuple[StreamInfo, bool]:
        """Make a stream at epoch 1; the flag is False where its idempotency key had one."""
        ...

    async def info(self, stream: bytes) -> StreamInfo: ...

    async def take_over(self, stream: bytes) -> int:
        """Become the stream's producer: returns the new epoch, which fences all older ones."""
        ...

    async def append(self, batch: Sequence[Append]) -> list[Refusal]:
        """Store a batch in one group commit; returns when it is durable and released."""
        ...

    async def read(self, stream: bytes, start: int, limit: int) -> list[Record]:
        """At most `limit` released records from index `start` on; empty at the tip."""
        ...

    def tip(self, stream: bytes, start: int, limit: int) -> list[Record] | None:
        """The same from memory, without waiting; None where storage must be asked."""
        ...

    def watch(self, stream: bytes, wake: Callable[[], None]) -> None:
        """Call `wake` after each release to a stream that `info` has just shown."""
        ...

    def unwatch(self, stream: bytes, wake: Callable[[], None]) -> None: ...

    def released(self, stream: bytes) -> int:
        """The next index to be released, of a watched stream."""
        ...

    async def unfinished(self) -> list[bytes]:
        """Streams without a StreamEnd, oldest first: what a new producer must take over."""
        ...

    async def expire(self) -> int:
        """Remove ended streams that nobody touched for their TTL; returns how many."""
        ...

    async def close(self) -> None: ...
