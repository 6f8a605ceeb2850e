"""The storage of one object: buffered changes over a small cache over the object store."""

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
"""Largest value, in bytes. What is larger belongs into a stream."""
MAX_VALUE_NAME_BYTES = 2 * 1024
"""Longest name of a value, in bytes of UTF-8."""
MAX_CACHE_BYTES = 128 * 1024
"""Names and values that one resident object keeps to read again without its store."""
MAX_PENDING_BYTES = 32 * 1024 * 1024
"""Names, values and frames of one object that may wait to be stored; more is `Overloaded`."""
CACHE_ENTRY_BYTES = 64
"""What an entry of the cache weighs beside its name and value, roughly."""
MAX_ALARM_MS = 2**53 - 1
"""Latest alarm, in Unix ms: the largest integer that every JSON reader keeps exact."""


class ValueCache:
    """The values read or stored last; None for a name that is known to have none."""

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

    Changes are buffered, seen at once by the object itself, and stored in order: all changes
    between two awaits as one atomic write. Nothing that the object does is seen outside before
    the changes made until then are durable. Once a write has failed every method raises its
    error. Reads raise `LedgerFailed` when storage does.

    It is for the one event that holds the object's input gate: `guard` raises for everybody else.
    What is read comes from the youngest layer that knows: a transaction, what is forming, what
    is in flight, the cache, the store.
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
        self._ringing = False  # the stored alarm is the one that runs now

    # ---- reading ----

    async def get(self, name: str) -> bytes | None:
        return (await self.get_many((name,))).get(name)

    async def get_many(self, names: Iterable[str]) -> dict[str, bytes]:
        """The values that exist among `names`, in the order of `names`."""
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
        """Values by name in order of their UTF-8 bytes: `start` included, `end` not."""
        self._check()
        if limit is not None and limit < 0:
            raise CallerError(f"{limit} values", field="limit", hint="0 or more")
        for bound in (prefix, start, end):
            _check_text(bound or "")
        # Taken before the store is asked: what is in flight may be there or not.
        cleared, buffered = self._buffered()
        wanted = ValueRange(prefix, start, end, MAX_LIST if limit is None else limit, reverse)
        changed = {name: value for name, value in buffered.items() if name in wanted}
        values: dict[str, bytes | None] = {}
        if not cleared:
            gone = sum(value is None for value in changed.values())
            more = replace(wanted, limit=wanted.limit + gone)
            values.update(await self._store.list(self._key, more))
        values.update(changed)
        # The order of code points is the order of their UTF-8 bytes.
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
        """Whether the stored values are all gone, and what was changed since."""
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
        """Buffer a value. `TooLarge` above MAX_VALUE_BYTES or MAX_VALUE_NAME_BYTES."""
        _check_name(name)
        if len(value) > MAX_VALUE_BYTES:
            raise TooLarge(
                f"value {name!r} of {self._key.kind} {self._key.name!r} has {len(value)} bytes",
                field=name,
                hint=f"at most {MAX_VALUE_BYTES}; put more into a stream",
            )
        self._changes(len(value)).put(name, bytes(value))

    def delete(self, name: str) -> None:
        _check_name(name)
        self._changes().put(name, None)

    def delete_all(self) -> None:
        """Buffer the removal of every value; the alarm and the streams stay."""
        self._changes().clear_values()

    def create_stream(self, new: NewStream) -> None:
        """Buffer a new stream of `StreamKind.OBJECT`; it starts at epoch 1."""
        changes = self._changes()
        self._check_present(new.stream)
        changes.creates.append(new)

    def append(self, stream: bytes, epoch: int, index: int, record: Record) -> None:
        """Buffer a record; one that the stream refuses fails the whole write."""
        changes = self._changes(len(record.frame))
        self._check_present(stream)
        changes.append(Append(stream, epoch, index, record))

    def drop_stream(self, stream: bytes) -> None:
        """Buffer the removal of a stream; its id must not be used again."""
        self._changes().drops.append(stream)

    def _check_present(self, stream: bytes) -> None:
        """Refuse what a write, which drops streams last, would store in the wrong order."""
        if any(stream in layer.drops for layer in self._layers()):
            raise Conflict(
                f"stream {stream.hex()} has been dropped", field="stream", hint="use a new id"
            )

    def _changes(self, size: int = 0) -> Changes:
        """Where a change of `size` bytes goes."""
        self._check()
        pending = sum(layer.size for layer in self._layers()) if size else 0
        if pending + size > MAX_PENDING_BYTES:
            raise Overloaded(
                f"{self._key.kind} {self._key.name!r} has {pending} bytes not stored yet",
                hint="await sync() now and then",
            )
        if self._transaction is not None:
            return self._transaction
        self._output.schedule()
        return self._output.forming

    async def sync(self) -> None:
        """Wait until all that is buffered is durable. The input gate stays closed."""
        self._check()
        if self._transaction is not None:
            raise RuntimeError("sync inside a transaction would wait for the transaction")
        await self._output.wait()

    @property
    def in_transaction(self) -> bool:
        return self._transaction is not None

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[None]:
        """Make the block's changes one atomic write; an exception inside rolls them back.

        Inside, `context.outside`, `context.call` and `sync` are refused (`RuntimeError`): they
        would wait for what is not written yet. Transactions do not nest.
        """
        self._check()
        if self._transaction is not None:
            raise RuntimeError("transactions do not nest")
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
        """Take note that `changes` are durable and no longer a layer."""
        if changes.clear:
            self._cache.clear()
        for name, value in changes.values.items():
            self._cache.keep(name, value)
        if changes.sets_alarm:
            self._alarm = changes.alarm

    # ---- the alarm ----

    def get_alarm(self) -> int | None:
        """When the object will be woken, in Unix ms; None while its alarm runs, as documented."""
        self._check()
        alarm = None if self._ringing else self._next_alarm()
        return None if alarm is None else alarm.at_ms

    def set_alarm(self, at_ms: int) -> None:
        """Replace the alarm; one that lies in the past is due at once."""
        if abs(at_ms) > MAX_ALARM_MS:
            raise CallerError(
                f"alarm at {at_ms} ms", field="at_ms", hint=f"Unix ms up to {MAX_ALARM_MS}"
            )
        self._changes().set_alarm(Alarm(at_ms))
        self._ringing = False

    def delete_alarm(self) -> None:
        """Of an alarm that runs, only the one that was set since; it is itself past deleting."""
        self._check()
        # An alarm that runs stays stored until it has ended: it would be lost in a crash.
        if not self._ringing and self._next_alarm() is not None:
            self._changes().set_alarm(None)

    def begin_alarm(self, now_ms: int) -> Alarm | None:
        """The alarm that is due, if one is (still); the object sees it as deleted."""
        alarm = self._next_alarm()
        if alarm is None or alarm.at_ms > now_ms:
            return None
        self._ringing = True
        return alarm

    def end_alarm(self, alarm: Alarm | None) -> bool:
        """Replace the alarm that has run, unless the object has done so; whether it was."""
        ringing, self._ringing = self._ringing, False
        if ringing and self._output.failure is None:
            self._changes().set_alarm(alarm)
            return True
        return False

    def interrupt_alarm(self) -> None:
        """Leave the alarm that runs as it is stored: it will run again."""
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
            hint=f"at most {MAX_VALUE_NAME_BYTES}",
        )


def is_text(text: str) -> bool:
    """Whether it can be written in UTF-8, as one with a lone surrogate cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
