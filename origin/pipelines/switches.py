"""The optional stages of one stream: which of them are on, and from which of their items on.

A client can switch an optional stage while its stream runs, and an optional stage that fails is
off from then on. Each change is stored in a log of the stream before it has an effect (`Change`).
So a worker that runs the stages again changes them at the same items, and gives the same outputs.

Clients' requests are in a log of their own, to which the origin appends them. A request has its
effect at the next item of the stage. A worker that repeats what an earlier run has done leaves
requests alone until it has repeated all of it: the outputs, those in the logs of the stages behind
this one, and their changes. Otherwise these would meet other items than the first time.

Sans-I/O: the owner reads the two logs, and passes an object that appends to the log of changes.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass
from typing import Protocol

from tailrace.ledger.errors import Damaged
from tailrace.ledger.frame import StageSwitch

REQUESTS, CHANGES = "+requests", "+changes"
"""Names of the two logs, where a log of a stage's outputs has the name of the stage. No stage can
have such a name."""
MAX_REQUESTS_BYTES = 64 << 10
"""Maximum size of the requests of one stream, in bytes. Each takes the length of the names of its
stages and some ten bytes."""
MAX_CHANGES_BYTES = 1 << 20
"""Maximum size of the changes of one stream, in bytes. There are at most as many as requests and
failures, and one that a failure has caused has at most some 300 bytes."""


@dataclass(frozen=True, slots=True)
class Change:
    """A stage is on, or off, from an item on.

    `item` counts the items of the stage from 0. `requests` is the number of requests in the log
    when the change was decided: these requests have no further effect on the stage. `reason` says
    how the stage has failed; it is empty if a request switched the stage.
    """

    stage: str
    item: int
    on: bool
    requests: int
    reason: str = ""


class Runs(Protocol):
    """The runs of the stages of one stream, of which several may be necessary."""

    async def append(self, line: bytes) -> None:
        """Append a line to the log of changes, and return when it is durable."""

    async def load_logs(self, stages: Sequence[str]) -> None:
        """Read the logs of the outputs of these stages, as far as they are on and have one."""

    def is_new(self, stages: Sequence[str]) -> bool:
        """Return True if earlier outputs were repeated: those given, and those in stages' logs.

        It is False while a log is not read.
        """


class Switches:
    """Decides when the stages of one stream are switched.

    Args:
        stages: the names of all stages, in their order.
        off: the stages that the stream's request switched off.
        runs: the log of the changes, and the progress of the runs.
    """

    def __init__(self, stages: Sequence[str], off: Iterable[str], runs: Runs) -> None:
        """Begin without requests and changes."""
        self._stages = stages
        self._off = frozenset(off)
        self._runs = runs
        self._changes: dict[str, list[Change]] = {}
        self._carried_out: dict[str, int] = {}  # how many of them, in this run
        self._requests = 0
        self._wanted: dict[str, tuple[int, bool]] = {}  # the last request for each stage

    def add_changes(self, log: bytes) -> None:
        """Add the changes of earlier runs.

        Raises:
            Damaged: The bytes are not such a log.
        """
        try:
            changes = [Change(*json.loads(line)) for line in log.splitlines()]
        except (ValueError, TypeError) as error:
            raise Damaged(f"the log of switched stages is malformed: {error}") from error
        for change in changes:
            self._add(change)

    def add_request(self, line: bytes) -> None:
        """Add one line of the log of requests; lines are added in order.

        Raises:
            Damaged: The bytes are not such a line.
        """
        self._requests += 1
        try:
            switches = list(json.loads(line).items())
        except (ValueError, AttributeError) as error:
            raise Damaged(f"a request to switch stages is malformed: {error}") from error
        for stage, on in switches:
            self._wanted[stage] = self._requests, on

    def is_on_first(self, stage: str) -> bool:
        """Return True if a stage is on before its first item."""
        return stage not in self._off

    def begin_run(self) -> None:
        """Note that the stages run again, from their first items on."""
        self._carried_out = dict.fromkeys(self._changes, 0)

    def due(self, stage: str, item: int) -> Change | None:
        """Return the change of a stage before it processes its item number `item`, if any."""
        changes, carried_out = self._changes.get(stage, ()), self._carried_out.get(stage, 0)
        if carried_out < len(changes):
            return changes[carried_out] if changes[carried_out].item == item else None
        is_on, settled = self.is_on_first(stage), 0
        if changes:
            is_on, settled = changes[-1].on, changes[-1].requests
        nth, wanted = self._wanted.get(stage, (0, is_on))
        if wanted is is_on or nth <= settled or not self._is_new(stage):
            return None
        return Change(stage, item, wanted, self._requests)

    def failed(self, stage: str, item: int, reason: str) -> Change:
        """Return the change for a stage that has failed to process its item number `item`."""
        return Change(stage, item, on=False, requests=self._requests, reason=reason)

    async def carry_out(self, change: Change) -> None:
        """Store a change, unless it is stored already. The caller must switch the stage afterwards.

        Raises:
            Conflict: Another worker has stored another change.
            TailraceError: The change cannot be stored.
        """
        nth = self._carried_out.get(change.stage, 0)
        if nth == len(self._changes.get(change.stage, ())):
            await self._runs.append(json.dumps(astuple(change)).encode() + b"\n")
            self._add(change)
        self._carried_out[change.stage] = nth + 1

    async def may_skip(self, stage: str) -> bool:
        """Return True if a stage that has failed may be skipped from this item on.

        All its earlier outputs must have gone through the stages behind it. Then it may not be
        skipped if these have outputs of more items: an earlier run did not fail at this item.
        """
        behind = self._behind(stage)
        await self._runs.load_logs(behind)
        return self._is_new(stage)

    def _is_new(self, stage: str) -> bool:
        """Return True if no earlier run was here: nothing is to be repeated behind the stage."""
        behind = self._behind(stage)
        return self._runs.is_new(behind) and all(
            self._carried_out.get(one, 0) == len(self._changes.get(one, ())) for one in behind
        )

    def _behind(self, stage: str) -> Sequence[str]:
        return self._stages[self._stages.index(stage) + 1 :]

    def _add(self, change: Change) -> None:
        self._changes.setdefault(change.stage, []).append(change)


def request_line(switches: Iterable[StageSwitch]) -> bytes:
    """Return the line of a request in the log of requests."""
    return json.dumps({each.stage: each.on for each in switches}).encode() + b"\n"
