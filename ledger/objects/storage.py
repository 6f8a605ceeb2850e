"""Storage of one object: buffered changes, a small cache, and the object store below."""

from __future__ import annotations

import builtins
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import replace

from tailrace.ledger.errors import CallerError, Conflict, Overloaded, TooLarge
from tailrace.ledger.interface import (
    MAX_LIST,
    Alarm,
    Append,
    NewStream,
    ObjectKey,
    ObjectStore,
    Record,
    ValueRange,
)
from tailrace.ledger.objects.gate import Changes, OutputGate

MAX_VALUE_BYTES = 2 * 1024 * 1024
"""Maximum size of a value in bytes. Larger data belongs in a stream."""
MAX_VALUE_NAME_BYTES = 2 * 1024
"""Maximum length of a value's name, in bytes of UTF-8."""
MAX_CACHE_BYTES = 128 * 1024
"""Maximum bytes of names and values in the cache of one object."""
MAX_PENDING_BYTES = 32 * 1024 * 1024
"""Maximum bytes of an object's changes that wait to be stored; more raise `Overloaded`."""
CACHE_ENTRY_BYTES = 64
"""Approximate overhead of a cache entry in bytes."""
MAX_ALARM_MS = 2**53 - 1
"""Latest time of an alarm in Unix ms: the largest integer that is exact in every JSON parser."""


class ValueCache:
    """The values that were last read or stored; None for a name without a value."""

    def __init__(self) -> None:
        self._values: OrderedDict[str, bytes | None] = OrderedDict()
        self._bytes = 0

    def find(self, name: str) -> tuple[bool, bytes | None]:
        if name not in self._values:
            return False, None
        self._values.move_to_end(name)
        return True, self._values[name]

    def keep(self, name: str, value: bytes | None) -> None:
        self._drop(name)
        self._values[name] = value
        self._bytes += _weight(name, value)
        while self._bytes > MAX_CACHE_BYTES:
            self._drop(next(iter(self._values)))

    def clear(self) -> None:
        self._values.clear()
        self._bytes = 0

    def _drop(self, name: str) -> None:
        if name in self._values:
            self._bytes -= _weight(name, self._values.pop(name))


def _weight(name: str, value: bytes | None) -> int:
    return CACHE_ENTRY_BYTES + len(name) + len(value or b"")


class ObjectStorage:
    """The values, the alarm and the streams of one object.

    Changes are buffered, visible to the object at once, and stored in order: all changes between
    two awaits are one atomic write. Nothing that the object does is visible outside before the
    earlier changes are durable. After a failed write every method raises the error of that write.
    Reads raise `LedgerFailed` if the store does.

    Only the event that holds the object's input gate may use the storage; `guard` raises for any
    other code. Reads look for a value in the open transaction, the changes that wait for the next
    write, the changes in flight, the cache and the store, in this order.
    """

    def __init__(
        self,
        key: ObjectKey,
        store: ObjectStore,
        alarm: Alarm | None,
        output: OutputGate,
        guard: Callable[[], None],
    ) -> None:
        self._key = key
        self._store = store
        self._alarm = alarm
        self._output = output
        self._guard = guard
        self._cache = ValueCache()
        self._transaction: Changes | None = None
        self._ringing = False  # True while the handler of the stored alarm runs

    # ---- reading ----

    async def get(self, name: str) -> bytes | None:
        return (await self.get_many((name,))).get(name)

    async def get_many(self, names: Iterable[str]) -> dict[str, bytes]:
        """Return the existing values of `names`, in the order of `names`."""
        self._check()
        found: dict[str, bytes | None] = {}
        missing: builtins.list[str] = []
        for name in names:
            _check_name(name)
            known, found[name] = self._find(name)
            if not known:
                missing.append(name)
        if missing:
            stored = await self._store.get(self._key, missing)
            for name in missing:
                found[name] = stored.get(name)
                self._cache.keep(name, found[name])
        return {name: value for name, value in found.items() if value is not None}

    async def list(
        self,
        *,
        prefix: str = "",
        start: str | None = None,
        end: str | None = None,
        limit: int | None = None,
        reverse: bool = False,
    ) -> dict[str, bytes]:
        """Return values in byte order of their names, from `start` up to but not `end`."""
        self._check()
        if limit is not None and limit < 0:
            raise CallerError(f"{limit} is negative", field="limit", hint="use 0 or more")
        for bound in (prefix, start, end):
            _check_text(bound or "")
        # Copy the buffered changes before reading the store. If a write in flight ends after the
        # store was read, its changes leave the buffer, and a later copy would miss them.
        cleared, buffered = self._buffered()
        wanted = ValueRange(prefix, start, end, MAX_LIST if limit is None else limit, reverse)
        changed = {name: value for name, value in buffered.items() if name in wanted}
        values: dict[str, bytes | None] = {}
        if not cleared:
            gone = sum(value is None for value in changed.values())
            more = replace(wanted, limit=wanted.limit + gone)
            values.update(await self._store.list(self._key, more))
        values.update(changed)
        # sorted() compares code points, whose order is that of their UTF-8 bytes.
        names = sorted((n for n, value in values.items() if value is not None), reverse=reverse)
        return {name: value for name in names[:limit] if (value := values[name]) is not None}

    def _find(self, name: str) -> tuple[bool, bytes | None]:
        for layer in reversed(self._layers()):
            if name in layer.values:
                return True, layer.values[name]
            if layer.clear:
                return True, None
        return self._cache.find(name)

    def _buffered(self) -> tuple[bool, dict[str, bytes | None]]:
        """Return (cleared, changed values) of all buffered changes.

        `cleared` is True if all stored values are deleted before the values are changed.
        """
        cleared, values = False, dict[str, bytes | None]()
        for layer in self._layers():
            if layer.clear:
                cleared, values = True, {}
            values.update(layer.values)
        return cleared, values

    def _layers(self) -> builtins.list[Changes]:
        pending = self._output.pending
        return pending if self._transaction is None else [*pending, self._transaction]

    # ---- changing ----

    def put(self, name: str, value: bytes) -> None:
        """Buffer a value.

        Raises:
            TooLarge: The value or its name is too large.
        """
        _check_name(name)
        if len(value) > MAX_VALUE_BYTES:
            raise TooLarge(
                f"value {name!r} of {self._key.kind} {self._key.name!r} has {len(value)} bytes",
                field=name,
                hint=f"at most {MAX_VALUE_BYTES} bytes are possible; use a stream for more",
            )
        self._changes(len(value)).put(name, bytes(value))

    def delete(self, name: str) -> None:
        _check_name(name)
        self._changes().put(name, None)

    def delete_all(self) -> None:
        """Buffer the removal of every value, but not of the alarm and the streams."""
        self._changes().clear_values()

    def create_stream(self, new: NewStream) -> None:
        """Buffer a new stream of kind `StreamKind.OBJECT`, which starts at epoch 1."""
        changes = self._changes()
        self._check_present(new.stream)
        changes.creates.append(new)

    def append(self, stream: bytes, epoch: int, index: int, record: Record) -> None:
        """Buffer a record. If the stream refuses it, the whole write fails."""
        changes = self._changes(len(record.frame))
        self._check_present(stream)
        changes.append(Append(stream, epoch, index, record))

    def drop_stream(self, stream: bytes) -> None:
        """Buffer the removal of a stream. Its id must not be used again."""
        self._changes().drops.append(stream)

    def _check_present(self, stream: bytes) -> None:
        """Refuse changes of a dropped stream.

        A write drops streams after all other changes, so a later change would be lost.
        """
        if any(stream in layer.drops for layer in self._layers()):
            raise Conflict(
                f"stream {stream.hex()} has been dropped",
                field="stream",
                hint="create a stream with a new id",
            )

    def _changes(self, size: int = 0) -> Changes:
        """Return the buffer for a change of `size` bytes: the open transaction or the next write.

        Raises:
            Overloaded: Too many bytes already wait to be stored.
        """
        self._check()
        pending = sum(layer.size for layer in self._layers()) if size else 0
        if pending + size > MAX_PENDING_BYTES:
            raise Overloaded(
                f"{self._key.kind} {self._key.name!r} has {pending} bytes that are not stored yet",
                hint="await sync() more often",
            )
        if self._transaction is not None:
            return self._transaction
        self._output.schedule()
        return self._output.forming

    async def sync(self) -> None:
        """Wait until all buffered changes are durable. No other event runs in the meantime."""
        self._check()
        if self._transaction is not None:
            raise RuntimeError("sync() inside a transaction would wait for the transaction itself")
        await self._output.wait()

    @property
    def in_transaction(self) -> bool:
        return self._transaction is not None

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[None]:
        """Make the block's changes one atomic write; an exception rolls them back.

        `context.outside`, `context.call` and `sync` raise `RuntimeError` inside, because they
        would wait for changes that are not written yet. Transactions do not nest.
        """
        self._check()
        if self._transaction is not None:
            raise RuntimeError("transactions cannot be nested")
        self._transaction, ringing = Changes(), self._ringing
        done = False
        try:
            yield
            self._check()
            done = True
        finally:
            changes, self._transaction = self._transaction, None
            if done and not changes.empty:
                self._changes().add(changes)
            elif not done:
                self._ringing = ringing

    def stored(self, changes: Changes) -> None:
        """Move `changes`, which are durable now, to the cache of stored values."""
        if changes.clear:
            self._cache.clear()
        for name, value in changes.values.items():
            self._cache.keep(name, value)
        if changes.sets_alarm:
            self._alarm = changes.alarm

    # ---- the alarm ----

    def get_alarm(self) -> int | None:
        """Return the time of the alarm in Unix ms; None while its handler runs (as Cloudflare)."""
        self._check()
        alarm = None if self._ringing else self._next_alarm()
        return None if alarm is None else alarm.at_ms

    def set_alarm(self, at_ms: int) -> None:
        """Replace the alarm. A time in the past is due at once."""
        if abs(at_ms) > MAX_ALARM_MS:
            raise CallerError(
                f"{at_ms} is not a valid time of an alarm",
                field="at_ms",
                hint=f"use Unix time in ms, up to {MAX_ALARM_MS}",
            )
        self._changes().set_alarm(Alarm(at_ms))
        self._ringing = False

    def delete_alarm(self) -> None:
        """Delete the alarm, unless its handler is running.

        An alarm that the running handler has set can be deleted.
        """
        self._check()
        # The alarm stays stored while its handler runs, or a crash would lose it.
        if not self._ringing and self._next_alarm() is not None:
            self._changes().set_alarm(None)

    def begin_alarm(self, now_ms: int) -> Alarm | None:
        """Return the alarm if it is still due, otherwise None.

        From now on `get_alarm` returns None, although the alarm stays stored until `end_alarm`.
        """
        alarm = self._next_alarm()
        if alarm is None or alarm.at_ms > now_ms:
            return None
        self._ringing = True
        return alarm

    def end_alarm(self, alarm: Alarm | None) -> bool:
        """Store `alarm`, or no alarm if it is None, in place of the one whose handler has ended.

        Return False, storing nothing, if the handler has set another alarm or the storage failed.
        """
        ringing, self._ringing = self._ringing, False
        if ringing and self._output.failure is None:
            self._changes().set_alarm(alarm)
            return True
        return False

    def interrupt_alarm(self) -> None:
        """Stop treating the alarm as running, but keep it stored, so that it runs again."""
        self._ringing = False

    def _next_alarm(self) -> Alarm | None:
        for layer in reversed(self._layers()):
            if layer.sets_alarm:
                return layer.alarm
        return self._alarm

    # ---- checks ----

    def _check(self) -> None:
        self._guard()
        self._output.check()


def _check_text(name: str) -> None:
    if not is_text(name):
        raise CallerError(f"value name {name!r} is not Unicode text", field="name")


def _check_name(name: str) -> None:
    _check_text(name)
    size = len(name.encode())
    if size == 0:
        raise CallerError("empty value name", field="name")
    if size > MAX_VALUE_NAME_BYTES:
        raise TooLarge(
            f"value name {name[:32]!r}… has {size} bytes",
            field="name",
            hint=f"at most {MAX_VALUE_NAME_BYTES} bytes are possible",
        )


def is_text(text: str) -> bool:
    """Return True if `text` can be encoded as UTF-8, which lone surrogates cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
