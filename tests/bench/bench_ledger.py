"""The ledger beside its peers: the same frames, the same disk, in one run.

    python tests/bench/bench_ledger.py [--only redis,ledger] [--rounds 5] [--turns 40] [--json]

A step is one frame of 18 bytes for each of 64 streams (then for one stream), and the next
step begins when all of it is acknowledged. In every round each contender does 500 steps,
in an order that is drawn anew. Then the ledger, Redis and the raw file take 40 turns more,
directly one after the other and in the opposite order each time. Figures are medians of rounds
and turns, ratios are made within one. The last line of output is one JSON object. LEDGER.md
says more.
"""

from __future__ import annotations

import argparse
import gc
import random
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TypeVar

import psycopg
import structlog
from rich.console import Console

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tailrace.ledger.errors import TailraceError  # noqa: E402
from tailrace.ledger.process.lifecycle import look_less_often  # noqa: E402
from tests.bench.bench_ledger_cold import measure_cold  # noqa: E402
from tests.bench.bench_ledger_memory import measure_all  # noqa: E402
from tests.bench.bench_ledger_ours import OurLedger, OurLedgerOfTasks, OurStorage  # noqa: E402
from tests.bench.bench_ledger_report import (  # noqa: E402
    ALWAYS,
    EVERYSEC,
    FLOOR,
    LEDGER,
    Report,
    Result,
)
from tests.bench.bench_ledger_work import (  # noqa: E402
    LONG_FRAMES,
    Batch,
    Contender,
    Missing,
    Mode,
    Replayer,
)
from tests.bench.peers.durable_streams import DurableStreams  # noqa: E402
from tests.bench.peers.nats_jetstream import NatsJetStream  # noqa: E402
from tests.bench.peers.postgres import Postgres  # noqa: E402
from tests.bench.peers.raw_file import RawFile  # noqa: E402
from tests.bench.peers.redis_streams import RedisStreams  # noqa: E402

ROUNDS = 5
TURNS = 40
STREAMS = 64
STEPS = 500
WARM_UP_STEPS = 20
REPLAYS = 15
LONG_REPLAYS = 5
SEED = 1
FAILURES = (Missing, OSError, RuntimeError, ValueError, TailraceError, psycopg.Error)
"""Errors with which a contender may fail without ending the run; its row shows the error."""

BESIDE = (
    [(LEDGER, Mode.PROCESS), EVERYSEC],
    [(LEDGER, Mode.POWER), ALWAYS, FLOOR],
)
"""Groups of contenders that take turns, because a target compares them with each other."""

T = TypeVar("T")


def contenders() -> list[Contender]:
    process, power = Mode.PROCESS, Mode.POWER
    return [
        OurStorage(process),
        OurLedger(process),
        OurLedgerOfTasks(process),
        RedisStreams("everysec", process),
        NatsJetStream(process, atomic=False),
        NatsJetStream(process, atomic=True),
        RawFile(),
        OurStorage(power),
        OurLedger(power),
        OurLedgerOfTasks(power),
        RedisStreams("always", power),
        Postgres(),
        NatsJetStream(power, atomic=True),
        NatsJetStream(power, atomic=False),
        DurableStreams(),
    ]


class Bench:
    """Contenders that were started, and their results."""

    def __init__(self, chosen: Sequence[Contender], report: Report, console: Console) -> None:
        self.chosen = chosen
        self._report = report
        self._console = console
        self._random = random.Random(SEED)
        self._next_stream = 0

    @property
    def able(self) -> list[Contender]:
        """Return the contenders that have not failed, in random order."""
        able = [one for one in self.chosen if not self._result(one).failure]
        self._random.shuffle(able)
        return able

    @property
    def _readers(self) -> list[Replayer]:
        return [one for one in self.able if isinstance(one, Replayer) and one.reads]

    def start(self, folder: Path) -> None:
        self._status("starting")
        for number, contender in enumerate(self.chosen):
            place = folder / str(number)
            place.mkdir(mode=0o711)
            self._try(contender, partial(contender.start, place))
        warm_up = self._batch(STREAMS, WARM_UP_STEPS)
        for contender in self.able:
            self._try(contender, partial(contender.append, warm_up))

    def stop(self) -> None:
        with ExitStack() as each:
            for contender in self.chosen:
                each.callback(contender.stop)

    def append(self, rounds: int) -> None:
        """Run all rounds of both widths; the streams of the last round are kept for `replay`."""
        for number in range(rounds):
            for streams in (1, STREAMS):
                batch = self._batch(streams, STEPS)
                self._status(f"round {number + 1} of {rounds}, streams: {streams}")
                for contender in self.able:
                    self._append(contender, batch)
                self._written = batch

    def take_turns(self, turns: int) -> None:
        """Measure each group's contenders in turns, in alternating order.

        What else the machine does meets all of a group alike if it lasts longer than a turn.
        """
        for group in BESIDE:
            beside = [one for one in self.able if (one.name, one.mode) in group]
            beside.sort(key=lambda one: group.index((one.name, one.mode)))
            self._status(f"in turns: {', '.join(one.name for one in beside)}")
            for _ in range(turns if len(beside) == len(group) else 0):
                batch = self._batch(STREAMS, STEPS)
                for contender in beside:
                    self._append(contender, batch)
                beside.reverse()

    def _append(self, contender: Contender, batch: Batch) -> None:
        steps = min(batch.steps, contender.max_steps)
        work = Batch(batch.first, batch.streams, steps)
        gc.collect()
        sample = self._try(contender, partial(contender.append, work))
        if sample is not None:
            result = self._result(contender)
            (result.wide if batch.streams > 1 else result.narrow).append(sample)
            result.frames += sample.appends

    def settle(self) -> None:
        self._status("bytes on disk")
        for contender in self.able:
            self._result(contender).disk = self._try(contender, contender.settle)

    def replay(self) -> None:
        """Streams of 500 frames as the last round left them, then one of 50,000."""
        loaded = self._batch(REPLAYS, STEPS)
        long = self._batch(1, LONG_FRAMES)
        self._status("replay")
        for contender in self._readers:
            if contender.max_steps < STEPS:
                for number in loaded.numbers:
                    self._try(contender, partial(contender.load, number, STEPS))
            self._try(contender, partial(contender.load, long.first, LONG_FRAMES))
        for nth in range(REPLAYS):
            for contender in self._readers:
                kept = self._written if contender.max_steps >= STEPS else loaded
                self._replay(contender, kept.first + nth, STEPS)
        for _ in range(LONG_REPLAYS):
            for contender in self._readers:
                self._replay(contender, long.first, LONG_FRAMES)

    def _replay(self, contender: Replayer, number: int, count: int) -> None:
        took = self._try(contender, partial(contender.replay, number, count))
        if took is not None:
            result = self._result(contender)
            (result.replays if count == STEPS else result.long_replays).append(took)

    def _batch(self, streams: int, steps: int) -> Batch:
        """Streams that no contender has seen."""
        first = self._next_stream
        self._next_stream += streams
        return Batch(first, streams, steps)

    def _result(self, contender: Contender) -> Result:
        return self._report.results[contender.name, contender.mode]

    def _try(self, contender: Contender, act: Callable[[], T]) -> T | None:
        try:
            return act()
        except FAILURES as error:
            missing = isinstance(error, Missing)
            self._result(contender).failure = f"{'missing' if missing else 'failed'}: {error}"
            self._console.print(f"{contender.name}: {self._result(contender).failure}")
            return None

    def _status(self, text: str) -> None:
        self._console.print(f"[dim]{text}[/dim]")


@contextmanager
def place(parent: Path) -> Iterator[Path]:
    """Yield a folder for all files, gone at the end; servers of other users may pass through it."""
    parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="bench-", dir=parent))
    folder.chmod(0o711)
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


def chosen(only: str) -> list[Contender]:
    """Return the contenders whose name or mode contains one of the words; all without words."""
    words = [word.strip().lower() for word in only.split(",") if word.strip()]
    found = []
    for contender in contenders():
        name = f"{contender.name} {contender.mode.value}".lower()
        if not words or any(word in name for word in words):
            found.append(contender)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--only", default="", help="words of names, with commas: redis,storage")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--turns", type=int, default=TURNS)
    parser.add_argument("--folder", type=Path, default=ROOT / ".tailrace", help="on which disk")
    parser.add_argument("--json", action="store_true", help="print only the last line")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # servers are stopped then, too
    look_less_often()  # garbage collection as in an origin
    console = Console(stderr=True, quiet=options.json)
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    try:
        with place(options.folder) as folder:
            report = measure(folder, chosen(options.only), options, console)
            if not options.only:
                measure_the_rest(folder, report, console)
            report.print(quiet=options.json)
    except KeyboardInterrupt:
        return 130
    return 0


def measure(
    folder: Path, some: Sequence[Contender], options: argparse.Namespace, console: Console
) -> Report:
    """Measure appends, bytes on disk and replays of the contenders."""
    report = Report(folder, [(one.name, one.mode) for one in some])
    bench = Bench(some, report, console)
    try:
        bench.start(folder)
        bench.append(options.rounds)
        bench.take_turns(options.turns)
        bench.settle()
        bench.replay()
    finally:
        bench.stop()
    return report


def measure_the_rest(folder: Path, report: Report, console: Console) -> None:
    """Measure memory and real text, for our ledger only."""
    console.print("[dim]memory of idle streams, bytes of real text[/dim]")
    try:
        report.memory = measure_all(folder)
        report.cold = measure_cold(folder / "cold")
    except FAILURES as error:
        console.print(f"memory or real text: failed: {error}")


if __name__ == "__main__":
    sys.exit(main())
