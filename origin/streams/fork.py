"""Forks: streams that begin with the content of another stream and then diverge.

A fork copies nothing. It names the ledger streams that hold its inherited frames, up to an index,
and continues in a ledger stream of its own with the next index, so that offsets of the source are
offsets of the fork. If the fork begins inside a message, the first part of that message is written
again. In exchange every source stores a reference for each of its forks, and keeps its frames while
it has any reference.

`Stream-Fork-Sub-Offset` counts from the offset: bytes within the next message or, in JSON mode,
values.

A fork identifies itself by its ledger stream, so that the source stores only one reference even if
the request is repeated. No reference may leak when a process dies. So before a fork requests its
reference, it stores a note that it must return the reference. The write that creates the fork
deletes the note, and deleting the fork stores the note again. The object's alarm returns each
reference that has a note, and retries until that succeeds.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from tailrace.ledger.errors import CallerError, Conflict, TailraceError
from tailrace.ledger.interface import ObjectKey
from tailrace.ledger.objects.object import ObjectContext, ObjectRequest, ObjectResponse
from tailrace.origin.streams.chunks import piece
from tailrace.origin.streams.config import (
    Create,
    ForkOrder,
    Part,
    StreamConfig,
    packed,
    unpack_order,
    unpack_parts,
)
from tailrace.origin.streams.expiry import NEVER, Expiry
from tailrace.origin.streams.json_messages import Steps, first_values
from tailrace.origin.streams.page import Tip
from tailrace.origin.streams.protocol import DEFAULT_TYPE, FORK_OFFSET, FORK_SUB_OFFSET, essence

MAX_DEPTH = 64
"""Maximum number of ledger streams of which a stream consists: a fork of a fork has three."""

TAKE = "take a reference"
GIVE_BACK = "give a reference back"
"""Internal methods between objects for references; edges do not pass them on."""

FORK = "fork:"
"""Prefix of the keys under which a source stream stores the references that forks hold."""
OWED = "release:"
"""Prefix of the keys under which a fork stores references that it must return to its source."""
RETRY_MS = 30_000
"""Interval in ms between attempts of the alarm to return references."""


@dataclass(frozen=True, slots=True)
class Cut:
    """Place where a fork leaves its source: `end` inherited frames, then `head` as own data."""

    end: int
    head: bytes = b""


class Cutter:
    """Finds the cut of a fork; takes the source's raw frames in order from `first_index` on.

    Raises CallerError if there is no such place in the source.
    """

    def __init__(self, order: ForkOrder, tip: Tip, *, json: bool) -> None:
        offset = tip.offset if order.offset is None else order.offset
        if offset.index > tip.index or (offset.byte and (json or offset.index == tip.index)):
            raise _no_place(FORK_OFFSET, "the source has no such position")
        self.cut: Cut | None = None
        self._index, self._byte, self._left = offset.index, offset.byte, order.sub_offset
        self._tip, self._json = tip, json
        self._open: list[bytes] = []  # chunks so far of a JSON message whose end was not read yet
        # Begin with the frame before the offset, which shows if the previous message has ended.
        self.first_index = self._at = max(0, offset.index - 1)
        if offset.index == 0 and not offset.byte and not self._left:
            self.cut = Cut(0)

    def feed(self, frames: Sequence[bytes]) -> Steps[None]:
        """Take frames until there is a `cut`."""
        for raw in frames:
            if self.cut is None:
                yield from self._take(raw)
                self._at += 1
        if self.cut is None and self._at >= self._tip.index:
            raise _no_place(FORK_SUB_OFFSET, "the source has no such position")

    def _take(self, raw: bytes) -> Steps[None]:
        yield
        data, last = piece(raw)
        if self._at < self._index:
            self._look_back(data, last)
        elif self._json:
            self._open.append(data)
            if last:
                yield from self._take_values(b"".join(self._open))
        else:
            self._take_bytes(data, last)

    def _take_values(self, message: bytes) -> Steps[None]:
        """Cut inside a message of several JSON values.

        The values before the cut become the first message of the fork.
        """
        found, end = yield from first_values(message, self._left)
        self._left -= found
        if not self._left:
            whole = end == len(message)
            begun = self._at + 1 - len(self._open)
            self.cut = Cut(self._at + 1) if whole else Cut(begun, message[:end])
        self._open.clear()

    def _look_back(self, data: bytes, last: bool) -> None:
        if self._json and not last:
            raise _no_place(FORK_OFFSET, "the offset is within a JSON value")
        if not self._left and not self._byte:
            self.cut = Cut(self._at + 1) if last else Cut(self._at, data)

    def _take_bytes(self, data: bytes, last: bool) -> None:
        begin = self._byte if self._at == self._index else 0
        if begin and begin >= len(data):
            raise _no_place(FORK_OFFSET, "the frame at this offset is shorter")
        end = begin + self._left
        if end <= len(data):
            whole = end == len(data) and last
            self.cut = Cut(self._at + 1) if whole else Cut(self._at, data[:end])
        elif last:
            raise _no_place(FORK_SUB_OFFSET, "the message is shorter")
        self._left = end - len(data)


def _no_place(field: str, why: str) -> CallerError:
    return CallerError(f"no place to fork at: {why}", code="bad_fork", field=field)


def inherited(source: StreamConfig, end: int) -> tuple[Part, ...]:
    """Return the ledger streams that hold the source's first `end` frames."""
    parts: list[Part] = []
    begin = 0
    for part in (*source.parts, Part(source.stream, end)):
        if begin < min(part.end, end):
            parts.append(Part(part.stream, min(part.end, end)))
        begin = part.end
    if len(parts) >= MAX_DEPTH:
        raise Conflict(
            "the chain of forks of forks is too long",
            code="fork_depth",
            hint=f"a stream may consist of at most {MAX_DEPTH} ledger streams",
        )
    return tuple(parts)


@dataclass(frozen=True, slots=True)
class Grant:
    """A source's answer to a new fork, which it now keeps a reference for.

    The answer has everything that the fork takes over from its source.
    """

    content_type: str
    expiry: Expiry
    parts: tuple[Part, ...]
    head: bytes

    @classmethod
    def unpack(cls, body: bytes) -> Grant:
        content_type, expiry, parts, head = json.loads(body)
        return cls(content_type, Expiry(*expiry), unpack_parts(parts), bytes.fromhex(head))


@dataclass(frozen=True, slots=True)
class ForkRequest:
    """A fork's request to its source; `reference` is the fork's ledger stream in hex."""

    reference: str
    fork: str
    content_type: str | None
    order: ForkOrder

    @classmethod
    def unpack(cls, body: bytes) -> ForkRequest:
        reference, fork, content_type, order = json.loads(body)
        return cls(reference, fork, content_type, unpack_order(order))


def created(stream: bytes, asked: Create, grant: Grant | None) -> StreamConfig:
    """Return the configuration of a new stream.

    A fork takes settings that were not requested from its source.
    """
    if grant is None:
        return StreamConfig(stream, asked.content_type or DEFAULT_TYPE, asked, asked.expiry)
    expiry = grant.expiry if asked.expiry == NEVER else asked.expiry
    return StreamConfig(
        stream, asked.content_type or grant.content_type, asked, expiry, grant.parts
    )


def confirms(asked: Create, config: StreamConfig, *, closed: bool) -> bool:
    """Return True if a request to create describes exactly the existing stream."""
    return (
        asked.closed == closed
        and asked.fork == config.asked.fork  # both as requested, without values from the source
        and asked.expiry in (config.asked.expiry, config.expiry)
        and _same_type(asked, config)
    )


def _same_type(asked: Create, config: StreamConfig) -> bool:
    if asked.content_type is None and config.asked.fork is not None:
        return True  # a fork always has the content type of its source
    return essence(asked.content_type or DEFAULT_TYPE) == essence(config.content_type)


class References:
    """The references of one stream's object, which keep deleted sources readable for their forks.

    As a source, the object stores the references that its forks hold. As a fork, it stores those
    that it must return to its source.
    """

    def __init__(self, context: ObjectContext) -> None:
        self._context, self._storage = context, context.storage
        # References that are being requested from a source, so the alarm must not return them yet.
        self._asking: set[str] = set()

    # ---- as a source ----

    def add(self, reference: str, fork: str) -> None:
        self._storage.put(FORK + reference, fork.encode())

    def remove(self, reference: str) -> None:
        self._storage.delete(FORK + reference)

    async def held(self) -> bool:
        """Return True if any fork needs this stream."""
        return bool(await self._storage.list(prefix=FORK, limit=1))

    # ---- as a fork ----

    async def take(self, claim: ForkRequest) -> ObjectResponse:
        """Ask the source to keep a reference for this fork, and return the source's response.

        With status 200, the body is a packed Grant. Any other response is an error for the client.
        """
        self.owe(claim.reference, claim.order.source, self._context.now_ms() + RETRY_MS)
        self._asking.add(claim.reference)
        try:
            response = await self._ask(claim.order.source, TAKE, packed(claim))
        finally:
            self._asking.discard(claim.reference)
        if response.status != 200:
            self.settle(claim.reference)
        return response

    def settle(self, reference: str) -> None:
        """Forget that a reference must be returned, because it is in use or was never granted."""
        self._storage.delete(OWED + reference)

    def owe(self, reference: str, source: str, at_ms: int) -> None:
        """Store that a reference must be returned; the alarm does so from `at_ms` (Unix ms) on."""
        self._storage.put(OWED + reference, source.encode())
        wake_by(self._context, at_ms)

    async def owed(self) -> dict[str, bytes]:
        """Return the references that must be returned: storage key -> name of the source."""
        return await self._storage.list(prefix=OWED)

    async def give_back(self) -> None:
        """Return all owed references; those that fail are left to the next alarm."""
        for name, source in (await self.owed()).items():
            reference = name.removeprefix(OWED)
            if reference not in self._asking:
                try:
                    await self._ask(source.decode(), GIVE_BACK, reference.encode())
                except TailraceError:
                    break
                self.settle(reference)
        if await self.owed():
            wake_by(self._context, self._context.now_ms() + RETRY_MS)

    async def _ask(self, source: str, operation: str, body: bytes) -> ObjectResponse:
        key = ObjectKey(self._context.key.kind, source)
        return await self._context.call(key, ObjectRequest.internal(operation, body))


def wake_by(context: ObjectContext, at_ms: int) -> None:
    """Set the alarm for `at_ms` or earlier; an alarm that is too early does nothing."""
    alarm = context.storage.get_alarm()
    if alarm is None or at_ms < alarm:
        context.storage.set_alarm(at_ms)
