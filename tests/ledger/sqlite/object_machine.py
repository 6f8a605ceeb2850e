"""Objects of a ledger on a file and their model, among the same random calls to streams."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import invariant, rule

from tailrace.ledger.frame import Durability
from tailrace.ledger.interface import (
    MAX_LIST,
    Alarm,
    NewStream,
    ObjectKey,
    ObjectWrite,
    StreamKind,
    ValueRange,
)
from tests.ledger.sqlite.object_model import ObjectModel
from tests.ledger.sqlite.stream_machine import (
    DURABILITY,
    MOSTLY_0,
    PARTS,
    Part,
    StreamMachine,
)

KEYS = st.builds(ObjectKey, st.sampled_from("ab"), st.sampled_from("￿𐀀"))
NAMES = st.text("aé￿𐀀", max_size=2)
VALUES = st.dictionaries(NAMES, st.binary(max_size=3), max_size=3)
OWN_NEWS = st.builds(
    NewStream,
    stream=st.just(b""),
    recipe=st.just(""),
    durability=DURABILITY,
    ttl_s=st.just(0.0),
    kind=st.just(StreamKind.OBJECT),
)
RANGES = st.fixed_dictionaries(
    {
        "prefix": NAMES,
        "start": st.none() | NAMES,
        "end": st.none() | NAMES,
        "limit": st.just(MAX_LIST) | st.integers(0, 3),
        "reverse": st.booleans(),
    }
)
CHANGES = st.fixed_dictionaries(
    {
        "puts": VALUES,
        "deletes": st.lists(NAMES, max_size=2),
        "clear": st.booleans(),
        "alarm": st.none() | st.builds(Alarm, st.integers(0, 10), st.integers(0, 6)),
        "sets_alarm": st.booleans(),
    }
)
"""Keywords of an `ObjectWrite`, but for its streams."""
DUE_MS = 5


class ObjectMachine(StreamMachine):
    """Random operations on streams and objects, compared with their models."""

    def __init__(self) -> None:
        super().__init__()
        self.objects = ObjectModel(self.model)

    def reopen(self) -> None:
        """No owner outlives its process."""
        for thing in self.objects.values():
            thing.epoch = None
        super().reopen()

    @rule(key=KEYS)
    def claim(self, key: ObjectKey) -> None:
        state, thing = self.run(self.ledger.objects.claim(key)), self.objects[key]
        assert state.epoch > (thing.epoch or 0)
        assert state.alarm == thing.alarm
        thing.epoch = state.epoch

    @rule(key=KEYS, changes=CHANGES, durability=DURABILITY, epoch_off=MOSTLY_0)
    def write(
        self, key: ObjectKey, changes: dict[str, Any], durability: Durability, epoch_off: int
    ) -> None:
        epoch = (self.objects[key].epoch or 0) + epoch_off if epoch_off else self.epoch(key)
        self.write_to_both(ObjectWrite(key, epoch, durability=durability, **changes))

    @rule(
        key=KEYS,
        changes=CHANGES,
        news=st.lists(OWN_NEWS, max_size=1),
        parts=st.lists(PARTS, min_size=1, max_size=3),
        drops=st.sampled_from((False, False, True)),
    )
    def write_streams(
        self,
        key: ObjectKey,
        changes: dict[str, Any],
        news: list[NewStream],
        parts: list[Part],
        drops: bool,
    ) -> None:
        """To streams of objects: a new one first, one that there is not alone.

        Of several faults a ledger may name any; so that it is the model's, there is only one
        where they would be looked for in another order.
        """
        owned = [s for s, known in self.model.items() if known.new.kind is StreamKind.OBJECT]
        streams = [self.missing()] if news or not owned else []
        streams += [owned[part.number % len(owned)] for part in parts if owned]
        if news:
            first = parts[0]._replace(epoch_off=0)
            parts = [first] if first.goes_on_after_its_end else [first, *parts[1:]]
        made = [part.appends(s, self.model.get(s)) for s, part in zip(streams, parts, strict=False)]
        self.write_to_both(
            ObjectWrite(
                key,
                self.epoch(key),
                creates=[replace(new, stream=streams[0]) for new in news],
                appends=[append for appends in made for append in appends],
                drops=streams[-1:] if drops else [],
                **changes,
            )
        )

    def epoch(self, key: ObjectKey) -> int:
        """Return the epoch of the object's owner; claim the object if it has none."""
        if self.objects[key].epoch is None:
            self.claim(key)
        return self.objects[key].epoch or 0

    def write_to_both(self, write: ObjectWrite) -> None:
        self.agree(self.ledger.objects.write(write), lambda: self.objects.write(write))

    @rule(asked=RANGES)
    def read_values(self, asked: dict[str, Any]) -> None:
        for key in self.objects:
            objects, right = self.ledger.objects, self.objects.listed(key, **asked)
            assert list(self.run(objects.list(key, ValueRange(**asked))).items()) == right
            assert self.run(objects.get(key, [name for name, _ in right])) == dict(right)

    @invariant()
    def the_same_is_due_and_named(self) -> None:
        objects, alarms = self.ledger.objects, self.objects.alarms()
        due = {(key, alarm) for key, alarm in alarms if alarm.at_ms <= DUE_MS}
        assert set(self.run(objects.due(DUE_MS, 100))) == due
        assert self.run(objects.names("a")) == self.objects.names("a")
