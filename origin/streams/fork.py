"""Forks: a stream that begins with what another one held, and then goes its own way.

A fork copies nothing: it names the ledger streams that hold what it inherits, up to a frame,
and goes on in one of its own with the next index, so that offsets of the source are offsets
of the fork. Only where it is cut within a message does it write the beginning of it anew. In
exchange every source keeps a reference per fork, and its frames as long as it has one.

`Stream-Fork-Sub-Offset` counts from the offset: bytes within the next message or, in JSON
mode, values.

A fork names itself by its ledger stream, so asking for a reference twice is asking once. It
writes down that it may hold one before it asks for it, and strikes that out with the write that
creates it; deleting the fork writes it down again. Whatever stands there is given back by the
alarm, as often as it takes: nothing leaks when a process dies, and nothing is held twice.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from tailrace.ledger.errors import CallerError, Conflict, TailraceError
from tailrace.ledger.interface import ObjectKey
from tailrace.ledger.objects.object import ObjectContext, ObjectRequest, ObjectResponse
from tailrace.origin.streams.config import (
    NEVER,
    Create,
    Expiry,
    ForkOrder,
    Part,
    StreamConfig,
    packed,
    unpack_order,
    unpack_parts,
)
from tailrace.origin.streams.json import Steps, first_values
from tailrace.origin.streams.page import Tip, piece
from tailrace.origin.streams.protocol import DEFAULT_TYPE, FORK_OFFSET, FORK_SUB_OFFSET, essence

MAX_DEPTH = 64
"""Forks of forks of …: so many ledger streams one stream may be made of."""

TAKE = "FORK"
GIVE_BACK = "UNFORK"
"""The methods by which objects ask each other; an edge passes no such method on."""

FORK = "fork:"
"""A value of a source: a reference that a fork holds."""
OWED = "release:"
"""A value of a fork: a reference to give back to the source that the value names."""
RETRY_MS = 30_000
"""How long the alarm waits before it gives back again what it could not, in ms."""


@dataclass(frozen=True, slots=True)
class Cut:
    """Where a fork leaves its source: it inherits `end` frames, and then begins with `head`."""

    end: int
    head: bytes = b""


class Cutter:
    """Finds the cut: takes the source's raw frames in order from `first_index` on.

    Raises CallerError if there is no such place in the source.
    """

    def __init__(self, order: ForkOrder, tip: Tip, *, json: bool) -> None:
        offset = tip.offset if order.offset is None else order.offset
        if offset.index > tip.index or (offset.byte and (json or offset.index == tip.index)):
            raise _no_place(FORK_OFFSET, "the source has no such position")
        self.cut: Cut | None = None
        self._index, self._byte, self._left = offset.index, offset.byte, order.sub_offset
        self._tip, self._json = tip, json
        self._open: list[bytes] = []  # the pieces of a message of JSON that has not ended yet
        # Whether the frame before it ends a message is to be seen first.
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
        """Several values may be one message: then the fork begins with those that it keeps."""
        found, end = yield from first_values(message, self._left)
        self._left -= found
        if not self._left:
            whole = end == len(message)
            begun = self._at + 1 - len(self._open)
            self.cut = Cut(self._at + 1) if whole else Cut(begun, message[:end])
        self._open.clear()

    def _look_back(self, data: bytes, last: bool) -> None:
        if self._json and not last:
            raise _no_place(FORK_OFFSET, "it is within a JSON value")
        if not self._left and not self._byte:
            self.cut = Cut(self._at + 1) if last else Cut(self._at, data)

    def _take_bytes(self, data: bytes, last: bool) -> None:
        begin = self._byte if self._at == self._index else 0
        if begin and begin >= len(data):
            raise _no_place(FORK_OFFSET, "its frame is shorter")
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
        raise Conflict("too many forks of forks", code="fork_depth", hint=f"at most {MAX_DEPTH}")
    return tuple(parts)


@dataclass(frozen=True, slots=True)
class Grant:
    """What a source tells a fork that it has taken a reference for."""

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
    """What `fork` asks of its source. `reference` is the fork's ledger stream in hex."""

    reference: str
    fork: str
    content_type: str | None
    order: ForkOrder

    @classmethod
    def unpack(cls, body: bytes) -> ForkRequest:
        reference, fork, content_type, order = json.loads(body)
        return cls(reference, fork, content_type, unpack_order(order))


def created(stream: bytes, asked: Create, grant: Grant | None) -> StreamConfig:
    """Return the configuration of a new stream, which takes from its source what is not asked for."""
    if grant is None:
        return StreamConfig(stream, asked.content_type or DEFAULT_TYPE, asked, asked.expiry)
    expiry = grant.expiry if asked.expiry == NEVER else asked.expiry
    return StreamConfig(
        stream, asked.content_type or grant.content_type, asked, expiry, grant.parts
    )


def confirms(asked: Create, config: StreamConfig, *, closed: bool) -> bool:
    """Return True if a request to create asks for just the stream that exists."""
    return (
        asked.closed == closed
        and asked.fork == config.asked.fork  # as requests name it: the same place
        and asked.expiry in (config.asked.expiry, config.expiry)
        and _same_type(asked, config)
    )


def _same_type(asked: Create, config: StreamConfig) -> bool:
    if asked.content_type is None and config.asked.fork is not None:
        return True  # a fork cannot have another one than its source
    return essence(asked.content_type or DEFAULT_TYPE) == essence(config.content_type)


class References:
    """The references of one object, both ways."""

    def __init__(self, context: ObjectContext) -> None:
        self._context, self._storage = context, context.storage
        self._asking: set[str] = set()  # not to be given back while the source is being asked

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
        """Ask the source for a reference; what it answers is a Grant, or the problem."""
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
        """The reference is not owed any more: it is held, or was never given."""
        self._storage.delete(OWED + reference)

    def owe(self, reference: str, source: str, at_ms: int) -> None:
        """Have the alarm give a reference back, from `at_ms` (Unix ms) on."""
        self._storage.put(OWED + reference, source.encode())
        wake_by(self._context, at_ms)

    async def owed(self) -> dict[str, bytes]:
        """Return the values that say what is owed."""
        return await self._storage.list(prefix=OWED)

    async def give_back(self) -> None:
        """Give back all that is owed; what cannot be now is left to the next alarm."""
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

    async def _ask(self, source: str, method: str, body: bytes) -> ObjectResponse:
        key = ObjectKey(self._context.key.kind, source)
        return await self._context.call(key, ObjectRequest(method, "", (), body))


def wake_by(context: ObjectContext, at_ms: int) -> None:
    """Have the alarm ring at `at_ms` or before; it rings in vain where it rings too early."""
    alarm = context.storage.get_alarm()
    if alarm is None or at_ms < alarm:
        context.storage.set_alarm(at_ms)
