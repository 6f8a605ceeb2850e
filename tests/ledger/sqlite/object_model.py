"""A model of a ledger's objects: values, an alarm, one owner, and writes that are whole."""

from collections import defaultdict
from copy import deepcopy
from dataclasses import dataclass, field

from tailrace.ledger.errors import StaleEpoch
from tailrace.ledger.interface import Alarm, ObjectKey, ObjectWrite
from tests.ledger.sqlite.model import Model


@dataclass
class ModelObject:
    """One object of the model."""

    epoch: int | None = None  # the epoch of its owner in this process
    values: dict[str, bytes] = field(default_factory=dict)
    alarm: Alarm | None = None


class ObjectModel(defaultdict[ObjectKey, ModelObject]):
    """The object store's calls on a dict of objects, beside the model of the ledger's streams."""

    def __init__(self, streams: Model) -> None:
        super().__init__(ModelObject)
        self.streams = streams

    def write(self, write: ObjectWrite) -> None:
        thing = self[write.key]
        if write.epoch != thing.epoch:
            raise StaleEpoch("")
        change(deepcopy(self.streams), write)  # where this is refused, nothing has changed
        change(self.streams, write)
        kept = {} if write.clear else thing.values
        kept = {name: value for name, value in kept.items() if name not in write.deletes}
        thing.values = {**kept, **write.puts}
        if write.sets_alarm:
            thing.alarm = write.alarm

    def listed(
        self,
        key: ObjectKey,
        *,
        prefix: str,
        start: str | None,
        end: str | None,
        limit: int | None,
        reverse: bool,
    ) -> list[tuple[str, bytes]]:
        def wanted(name: str) -> bool:
            after = start is None or name.encode() >= start.encode()
            return (
                after and name.startswith(prefix) and (end is None or name.encode() < end.encode())
            )

        names = sorted(filter(wanted, self[key].values), key=str.encode, reverse=reverse)
        return [(name, self[key].values[name]) for name in names[:limit]]

    def names(self, kind: str) -> list[str]:
        known = (key for key, thing in self.items() if thing.values or thing.alarm)
        return sorted((key.name for key in known if key.kind == kind), key=str.encode)

    def alarms(self) -> list[tuple[ObjectKey, Alarm]]:
        return [(key, thing.alarm) for key, thing in self.items() if thing.alarm]


def change(streams: Model, write: ObjectWrite) -> None:
    for new in write.creates:
        streams.create(new)
    for append in write.appends:
        streams.append(append)
    for stream in write.drops:
        streams.pop(stream, None)
