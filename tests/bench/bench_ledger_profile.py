"""Where the time of a step goes: 64 appends through the ledger, each with a subscriber.

    python tests/bench/bench_ledger_profile.py [--durability power] [--rounds 5]

The methods that a step passes are wrapped from outside and leave time stamps; nothing of it
is in the ledger. p50 and p99 are of each phase by itself. "slow" is by how much a phase
exceeds its p50 in the mean of the slowest hundredth of the steps: where their time went. A
second table says what else those steps had in common.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

from rich.box import MARKDOWN
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from ledger.interface import Append, Record  # noqa: E402
from ledger.process import look_less_often  # noqa: E402
from ledger.sqlite.disk.file import SqliteFile  # noqa: E402
from ledger.sqlite.group import Group  # noqa: E402
from ledger.sqlite.storage import Commit  # noqa: E402
from tests.bench.bench_ledger import STEPS, STREAMS, place  # noqa: E402
from tests.bench.bench_ledger_ours import TOKEN_ID, OurLedger, Reader, stream_id  # noqa: E402
from tests.bench.bench_ledger_work import Mode, frame, percentile  # noqa: E402

ROUNDS = 5
SLOWEST = 0.01
"""Share of the steps that are looked at for what makes them slow."""

PHASES = (
    "build 64 Appends",
    "accept: checks, tails, group",
    "to the writer's turn",
    "prepare: the log row",
    "SQLite: the log row",
    "sync, until the loop knows",
    "meanwhile: notes, segments, pruning",
    "meanwhile: SQLite, what is stored behind",
    "release: 64 tails and subscribers",
    "resume the producer",
    "the whole step",
)


@dataclass(slots=True)
class Stopwatch:
    """When each of the wrapped methods began and ended last, and seconds in it altogether."""

    began: dict[str, float] = field(default_factory=dict)
    ended: dict[str, float] = field(default_factory=dict)
    spent: dict[str, float] = field(default_factory=dict)

    def wrap(self, owner: object, method: str, name: str = "") -> None:
        setattr(owner, method, self.around(name or method, getattr(owner, method)))

    def around(self, name: str, work: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any, **named: Any) -> Any:
            begun = self.began[name] = perf_counter()
            try:
                return work(*arguments, **named)
            finally:
                end = self.ended[name] = perf_counter()
                self.spent[name] = self.spent.get(name, 0.0) + end - begun

        return timed

    def reset(self) -> None:
        for times in (self.began, self.ended, self.spent):
            times.clear()


@dataclass(frozen=True, slots=True)
class Step:
    seconds: dict[str, float]
    facts: dict[str, bool]


class Profile(OurLedger):
    """The bench's ledger, each step of which is taken apart."""

    def __init__(self, mode: Mode) -> None:
        super().__init__(mode)
        self._watch = Stopwatch()
        self._commits: list[Commit] = []
        self._collections = 0
        gc.callbacks.append(self._note_collection)

    def steps(self, first: int, *, read: bool) -> list[Step]:
        """A round on new streams from number `first` on, with subscribers or without."""
        return self._run(self._round(first, read))

    async def _open(self) -> None:
        await super()._open()
        watch, ledger = self._watch, self._ledger
        watch.wrap(ledger, "_accept")
        for method in ("_turn", "_prepare", "_release"):
            watch.wrap(ledger._commits, method)
        tidy = ledger._commits._tidy

        def noted(group: Group, commit: Commit) -> None:
            self._commits.append(commit)
            tidy(group, commit)

        ledger._commits._tidy = watch.around("_tidy", noted)
        self._wrap_storage(self._file)

    @property
    def _file(self) -> SqliteFile:
        file = self._ledger._storage
        assert isinstance(file, SqliteFile)
        return file

    def _wrap_storage(self, file: SqliteFile) -> None:
        row = self._watch.around("row", file._apply)
        behind = self._watch.around("behind", file._apply)

        def apply(commit: Commit, *, full: bool) -> None:
            (row if commit.log else behind)(commit, full=full)

        file._apply = apply  # type: ignore[method-assign]
        self._watch.wrap(file._wal_sync, "begin", "sync")

    def _note_collection(self, phase: str, _: dict[str, int]) -> None:
        self._collections += phase == "start"

    async def _round(self, first: int, read: bool) -> list[Step]:
        streams = [stream_id(number) for number in range(first, first + STREAMS)]
        await self._create(streams)
        readers = [Reader(self._ledger, stream) for stream in streams] if read else []
        gc.collect()
        steps = [await self._step(streams, index) for index in range(STEPS)]
        for reader in readers:
            reader.finish(STEPS)
        await self._end(streams, STEPS)
        return steps

    async def _step(self, streams: Sequence[bytes], index: int) -> Step:
        self._watch.reset()
        self._commits.clear()
        collections, pages = self._collections, self._file._wal.pages
        began = perf_counter()
        record = Record(frame(index), (TOKEN_ID,))
        batch = [Append(stream, 1, index, record) for stream in streams]
        submitted = perf_counter()
        refused = await self._ledger.append(batch)
        ended = perf_counter()
        assert not refused
        facts = {
            "segments stored": any(commit.segments for commit in self._commits),
            "log pruned": any(commit.keep_from is not None for commit in self._commits),
            "checkpoint under way": self._file._wal.is_moved,
            "WAL begun anew": self._file._wal.pages < pages,
            "garbage collected": self._collections > collections,
        }
        return Step(self._phases(began, submitted, ended), facts)

    def _phases(self, started: float, submitted: float, resumed: float) -> dict[str, float]:
        began, ended, spent = self._watch.began, self._watch.ended, self._watch.spent
        released = began["_release"]
        times = (
            submitted - started,
            spent["_accept"],
            began["_turn"] - ended["_accept"],
            spent["_prepare"],
            spent["row"],
            released - began.get("sync", released),
            spent["_tidy"],
            spent.get("behind", 0.0),
            spent["_release"],
            resumed - ended["_release"],
            resumed - started,
        )
        return dict(zip(PHASES, times, strict=True))


def measure(folder: Path, mode: Mode, rounds: int) -> tuple[list[Step], float]:
    """The steps of all rounds, and the p50 of a release that wakes nobody, in seconds."""
    profile = Profile(mode)
    profile.start(folder)
    try:
        profile.steps(0, read=True)  # warms up
        steps: list[Step] = []
        unread: list[float] = []
        for number in range(1, rounds + 1):
            steps += profile.steps(2 * number * STREAMS, read=True)
            alone = profile.steps((2 * number + 1) * STREAMS, read=False)
            unread += [step.seconds[PHASES[-3]] for step in alone]
    finally:
        profile.stop()
    return steps, percentile(unread, 0.5)


def phase_table(steps: Sequence[Step], slow: Sequence[Step], title: str) -> Table:
    table = Table(title=title, title_justify="left", box=MARKDOWN)
    for heading in ("µs", "p50", "p99", "slow"):
        table.add_column(heading, justify="left" if heading == "µs" else "right")
    for phase in PHASES:
        times = [step.seconds[phase] for step in steps]
        p50, p99 = percentile(times, 0.5), percentile(times, 0.99)
        excess = statistics.mean(step.seconds[phase] for step in slow) - p50
        table.add_row(phase, *[f"{seconds * 1e6:,.0f}" for seconds in (p50, p99, excess)])
    return table


def fact_table(steps: Sequence[Step], slow: Sequence[Step]) -> Table:
    table = Table(box=MARKDOWN)
    for heading in ("share of the steps with", "all", "slow", "p50 with, µs", "p99 with, µs"):
        table.add_column(heading, justify="left" if "share" in heading else "right")
    for fact in steps[0].facts:
        shares = [statistics.mean(step.facts[fact] for step in some) for some in (steps, slow)]
        times = [step.seconds[PHASES[-1]] for step in steps if step.facts[fact]]
        waits = [f"{percentile(times, s) * 1e6:,.0f}" if times else "–" for s in (0.5, 0.99)]
        table.add_row(fact, *[f"{share:.1%}" for share in shares], *waits)
    return table


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--durability", type=Mode, choices=list(Mode), default=Mode.POWER)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--folder", type=Path, default=ROOT / ".tailrace", help="on which disk")
    options = parser.parse_args()
    look_less_often()  # as an origin does
    with place(options.folder) as folder:
        steps, unread = measure(folder, options.durability, options.rounds)
    slow = sorted(steps, key=lambda step: -step.seconds[PHASES[-1]])[: int(len(steps) * SLOWEST)]
    console = Console(width=120)
    console.print(phase_table(steps, slow, f"{options.durability.value}, {len(steps)} steps"))
    console.print(f"A release that wakes no subscriber: p50 {unread * 1e6:,.0f} µs")
    console.print(fact_table(steps, slow))
    return 0


if __name__ == "__main__":
    sys.exit(main())
