"""What an object has changed and storage does not have yet."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from ledger.errors import Conflict
from ledger.frame import Durability
from ledger.interface import Alarm, Append, NewStream, ObjectKey, ObjectWrite


@dataclass(slots=True, eq=False)
class Changes:
    """Changes that are stored together or not at all. In `values` None stands for deleted."""

    clear: bool = False  # before `values`
    values: dict[str, bytes | None] = field(default_factory=dict)
    alarm: Alarm | None = None
    sets_alarm: bool = False
    creates: list[NewStream] = field(default_factory=list)
    appends: list[Append] = field(default_factory=list)
    drops: list[bytes] = field(default_factory=list)
    size: int = 0
    """Bytes of names, values and frames."""
    waiters: list[asyncio.Future[None]] = field(default_factory=list)

    @property
    def empty(self) -> bool:
        streams = self.appends or self.creates or self.drops
        return not (self.values or self.clear or self.sets_alarm or streams)

    def put(self, name: str, value: bytes | None) -> None:
        if name in self.values:
            self.size -= len(name) + len(self.values[name] or b"")
        self.values[name] = value
        self.size += len(name) + len(value or b"")

    def clear_values(self) -> None:
        self.size -= sum(len(name) + len(value or b"") for name, value in self.values.items())
        self.values.clear()
        self.clear = True

    def set_alarm(self, alarm: Alarm | None) -> None:
        self.alarm, self.sets_alarm = alarm, True

    def create(self, new: NewStream) -> None:
        self.check_present(new.stream)
        self.creates.append(new)

    def append(self, append: Append) -> None:
        self.check_present(append.stream)
        self.appends.append(append)
        self.size += len(append.record.frame)

    def check_present(self, stream: bytes) -> None:
        """Refuse what a write, which drops streams last, would store in the wrong order."""
        if stream in self.drops:
            raise Conflict(
                f"stream {stream.hex()} has been dropped", field="stream", hint="use a new id"
            )

    def add(self, later: Changes) -> None:
        """Take in the changes of a transaction that began after these."""
        if later.clear:
            self.clear_values()
        for name, value in later.values.items():
            self.put(name, value)
        if later.sets_alarm:
            self.set_alarm(later.alarm)
        for new in later.creates:
            self.create(new)
        for append in later.appends:
            self.append(append)
        self.drops += later.drops

    def write(self, key: ObjectKey, epoch: int, durability: Durability) -> ObjectWrite:
        """The same as the ledger takes it, at least as durable as the streams it creates."""
        return ObjectWrite(
            key=key,
            epoch=epoch,
            puts={name: value for name, value in self.values.items() if value is not None},
            deletes=[name for name, value in self.values.items() if value is None],
            clear=self.clear,
            alarm=self.alarm,
            sets_alarm=self.sets_alarm,
            creates=self.creates,
            appends=self.appends,
            drops=self.drops,
            durability=max((durability, *(new.durability for new in self.creates))),
        )
