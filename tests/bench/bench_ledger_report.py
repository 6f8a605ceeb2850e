"""Report results as tables, as targets that were met or missed, and as JSON."""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import apsw
from rich.box import MARKDOWN
from rich.console import Console
from rich.table import Table

from tests.bench.bench_ledger_cold import Cold
from tests.bench.bench_ledger_memory import STREAMS as IDLE_STREAMS
from tests.bench.bench_ledger_memory import Memory
from tests.bench.bench_ledger_work import Disk, Mode, Sample, percentile
from tests.bench.machine import cpu, disk, print_line
from tests.bench.measured import median_interval

WIDTH = 160  # columns
MIB = 1024 * 1024

Key = tuple[str, Mode]

STORAGE = "Tailrace storage"
LEDGER = "Tailrace ledger, a subscriber each"
FLOOR: Key = ("raw file + fdatasync", Mode.POWER)
EVERYSEC: Key = ("Redis Streams everysec", Mode.PROCESS)
ALWAYS: Key = ("Redis Streams always", Mode.POWER)


@dataclass(slots=True)
class Result:
    """Results of one contender: samples of 64 streams and of one, and replays in seconds."""

    wide: list[Sample] = field(default_factory=list)
    narrow: list[Sample] = field(default_factory=list)
    replays: list[float] = field(default_factory=list)
    long_replays: list[float] = field(default_factory=list)
    frames: int = 0
    disk: Disk | None = None
    failure: str = ""


@dataclass(frozen=True, slots=True)
class Target:
    """A figure that the ledger is to reach; `measured` is None where it could not be had."""

    name: str
    wanted: float
    measured: float | None
    at_least: bool

    @property
    def met(self) -> bool | None:
        if self.measured is None:
            return None
        return self.measured >= self.wanted if self.at_least else self.measured <= self.wanted


class Report:
    """Results by contender, and everything that is said about them."""

    def __init__(self, folder: Path, keys: Sequence[Key]) -> None:
        self.results = {key: Result() for key in keys}
        self.memory: Memory | None = None
        self.cold: Cold | None = None
        self._date = datetime.now(UTC)
        self._disk = disk(folder)
        self._load = os.getloadavg()[0]

    # ---- figures ----

    def rate(self, key: Key) -> float | None:
        """Return appends per second at 64 streams."""
        samples = self._wide(key)
        return statistics.median(map(_rate, samples)) if samples else None

    def ratio(self, key: Key, peers: Sequence[Key]) -> float | None:
        """Return how many times the rate of the quickest of the peers, as a median of rounds."""
        interval = self.ratio_interval(key, peers)
        return interval and interval[1]

    def ratio_interval(self, key: Key, peers: Sequence[Key]) -> tuple[float, float, float] | None:
        """Return the same between the bounds in which it lies, as sure as so few rounds can be."""
        mine, theirs = self._wide(key), [self._wide(peer) for peer in peers]
        theirs = [samples for samples in theirs if samples]
        if not mine or not theirs:
            return None
        best = max(theirs, key=lambda samples: statistics.median(map(_rate, samples)))
        return median_interval(
            _rate(one) / _rate(other) for one, other in zip(mine, best, strict=False)
        )

    def ratio_of_medians(self, key: Key, peer: Key) -> float | None:
        """Return how many times as fast a step is by its p50, without the machine's pauses."""
        found = [
            percentile(theirs.waits, 0.5) / percentile(mine.waits, 0.5)
            for mine, theirs in zip(self._wide(key), self._wide(peer), strict=False)
        ]
        return statistics.median(found) if found else None

    def in_fsyncs(self, key: Key, less: Key | None = None) -> float | None:
        """Return the p99 of an append, minus that of `less`, in median fdatasyncs of the round."""
        columns = self._wide(key), self._wide(FLOOR), self._wide(less or key)
        found = [
            (percentile(mine.waits, 0.99) - (percentile(other.waits, 0.99) if less else 0))
            / percentile(floor.waits, 0.5)
            for mine, floor, other in zip(*columns, strict=False)
        ]
        return statistics.median(found) if found else None

    def replay_ms(self, key: Key, *, long: bool) -> float | None:
        result = self.results.get(key)
        took = (result.long_replays if long else result.replays) if result else []
        return statistics.median(took) * 1e3 if took else None

    def _wide(self, key: Key) -> list[Sample]:
        result = self.results.get(key)
        return [] if result is None or result.failure else result.wide

    def _nats(self, mode: Mode) -> list[Key]:
        return [key for key in self.results if key[1] is mode and key[0].startswith("NATS")]

    def targets(self) -> list[Target]:
        process, power = Mode.PROCESS, Mode.POWER
        at_least, at_most = partial(Target, at_least=True), partial(Target, at_least=False)
        ledger, durable = (LEDGER, process), (LEDGER, power)
        storage = (STORAGE, process)
        idle_mb = _of(self.memory, lambda m: m.watched_rss * IDLE_STREAMS / 1e6)
        subscriber_kib = _of(self.memory, lambda m: m.subscriber_rss / 1024)
        nats, synced = self._nats(process), self._nats(power)
        behind = self.in_fsyncs(durable, less=FLOOR)
        return [
            at_least("process: storage / Redis everysec", 1.1, self.ratio(storage, [EVERYSEC])),
            at_least("process: storage / NATS default, its best", 2, self.ratio(storage, nats)),
            at_least("process: ledger, appends/s", 100_000, self.rate(ledger)),
            at_least("process: ledger / Redis everysec", 1.3, self.ratio(ledger, [EVERYSEC])),
            at_least("power: storage / Redis always", 1, self.ratio((STORAGE, power), [ALWAYS])),
            at_least("power: ledger / Redis always", 1.05, self.ratio(durable, [ALWAYS])),
            at_least("power: ledger / NATS with sync, its best", 5, self.ratio(durable, synced)),
            at_most("power: ledger, p99 over the raw file's, in fsyncs", 0.5, behind),
            at_most("replay of 500, ms", 2, self.replay_ms(ledger, long=False)),
            at_most("replay of 50,000, ms", 60, self.replay_ms(ledger, long=True)),
            at_most("10,000 idle streams, a subscriber each, MB", 40, idle_mb),
            at_most("one more subscriber, KiB", 30, subscriber_kib),
        ]

    def summary(self) -> dict[str, object]:
        """Return the JSON of the last line: times in ms, sizes in bytes, ratios of rates."""
        process, power = Mode.PROCESS, Mode.POWER
        ledger, durable = (LEDGER, process), (LEDGER, power)
        storage, storage_durable = (STORAGE, process), (STORAGE, power)
        memory, cold = self.memory, self.cold
        figures: dict[str, float | None] = {
            "process_appends_per_s": self.rate(ledger),
            "process_storage_appends_per_s": self.rate(storage),
            "process_vs_redis_everysec": self.ratio(storage, [EVERYSEC]),
            "process_ledger_vs_redis_everysec": self.ratio(ledger, [EVERYSEC]),
            "process_ledger_vs_redis_everysec_by_p50": self.ratio_of_medians(ledger, EVERYSEC),
            "power_vs_redis_always_by_p50": self.ratio_of_medians(durable, ALWAYS),
            "process_vs_nats": self.ratio(storage, self._nats(process)),
            "power_appends_per_s": self.rate(durable),
            "power_storage_appends_per_s": self.rate(storage_durable),
            "power_vs_redis_always": self.ratio(durable, [ALWAYS]),
            "power_storage_vs_redis_always": self.ratio(storage_durable, [ALWAYS]),
            "power_vs_nats_sync": self.ratio(durable, self._nats(power)),
            "power_p99_in_fsyncs": self.in_fsyncs(durable),
            "floor_p99_in_fsyncs": self.in_fsyncs(FLOOR),
            "redis_always_p99_in_fsyncs": self.in_fsyncs(ALWAYS),
            **self._waits("process", ledger),
            **self._waits("power", durable),
            **self._waits("fdatasync", FLOOR),
            "replay_500_ms": self.replay_ms(ledger, long=False),
            "replay_50000_ms": self.replay_ms(ledger, long=True),
            "bytes_per_frame": self._per_frame(ledger, lambda d: d.compacted),
            "idle_stream_bytes": _of(memory, lambda m: m.watched_rss),
            "idle_stream_unwatched_bytes": _of(memory, lambda m: m.idle_rss),
            "subscriber_bytes": _of(memory, lambda m: m.subscriber_rss),
            "bytes_per_token": None if cold is None else cold.cold_segments,
            "bytes_per_token_cold_file": None if cold is None else cold.cold_file,
            "bytes_per_token_warm_file": None if cold is None else cold.warm_file,
        }
        return {
            **{name: _rounded(value) for name, value in figures.items()},
            "process_ledger_vs_redis_everysec_interval": self.ratio_interval(ledger, [EVERYSEC]),
            "power_vs_redis_always_interval": self.ratio_interval(durable, [ALWAYS]),
            "power_p99_over_raw_in_fsyncs": _rounded(self.in_fsyncs(durable, less=FLOOR)),
            "targets_missed": [target.name for target in self.targets() if target.met is False],
            "peers": self._peers(),
            "disk": self._disk,
            "load_average": [round(self._load, 2), round(os.getloadavg()[0], 2)],
            "date": self._date.isoformat(timespec="seconds"),
            "sqlite": apsw.sqlite_lib_version(),
        }

    def _waits(self, name: str, key: Key) -> dict[str, float | None]:
        samples = self._wide(key)
        return {
            f"{name}_{label}_ms": _wait_ms(samples, share) if samples else None
            for label, share in (("p50", 0.5), ("p99", 0.99))
        }

    def _per_frame(self, key: Key, size: Callable[[Disk], int]) -> float | None:
        result = self.results.get(key)
        if result is None or result.disk is None or not result.frames:
            return None
        return size(result.disk) / result.frames

    def _peers(self) -> dict[str, object]:
        """Return appends per second of every contender, or why there is no figure."""
        return {
            f"{name} ({mode.value})": result.failure or _rounded(self.rate((name, mode)))
            for (name, mode), result in self.results.items()
        }

    # ---- print ----

    def print(self, *, quiet: bool) -> None:
        console = Console(quiet=quiet, width=WIDTH)
        for mode, survives in ((Mode.PROCESS, "kill -9"), (Mode.POWER, "loss of power")):
            console.print(self._table(mode, f"{mode.value}: survives {survives}"))
        if self.memory is not None:
            console.print(self._memory_table(self.memory))
        if self.cold is not None:
            cold = self.cold
            console.print(
                f"real text, {cold.documents} documents of {cold.tokens} tokens, bytes per token"
                f" with its ids: file as stored {cold.warm_file:.2f}, packed as cold"
                f" {cold.cold_file:.2f} (some of it free), cold segments alone"
                f" {cold.cold_segments:.2f}"
            )
        console.print(self._target_table())
        console.print(f"{self._date:%Y-%m-%d} · {cpu()} · {self._disk} · {self._floor_line()}")
        print_line(self.summary())

    def _floor_line(self) -> str:
        samples = self._wide(FLOOR)
        if not samples:
            return "fdatasync was not measured"
        p50, p99 = _wait_ms(samples, 0.5), _wait_ms(samples, 0.99)
        return f"write + fdatasync of 1,152 bytes p50 {p50:.2f} ms, p99 {p99:.2f} ms"

    def _table(self, mode: Mode, title: str) -> Table:
        peer = EVERYSEC if mode is Mode.PROCESS else ALWAYS
        table = Table(title=title, title_justify="left", box=MARKDOWN)
        table.add_column("", no_wrap=True)
        for heading in (
            "64 str./s", "× Redis", "p50 ms", "p99 ms", "1 str./s", "p50 ms", "p99 ms",
            "B/frame", "packed", "500 ms", "50,000 ms",
        ):  # fmt: skip
            table.add_column(heading, justify="right", no_wrap=True)
        for key, result in self.results.items():
            if key[1] is mode:
                table.add_row(key[0], *self._row(key, result, peer))
        table.caption = "\n".join(
            f"{name}: {result.failure}"
            for (name, its_mode), result in self.results.items()
            if its_mode is mode and result.failure
        )
        return table

    def _row(self, key: Key, result: Result, peer: Key) -> list[str]:
        if result.failure:
            return [result.failure.partition(":")[0]]
        ratio = self.ratio(key, [peer])
        return [
            *[_shown(self.rate(key), 0), _shown(ratio, 2), *_shown_waits(result.wide)],
            _shown(statistics.median(map(_rate, result.narrow)) if result.narrow else None, 0),
            *_shown_waits(result.narrow),
            _shown(self._per_frame(key, lambda d: d.appended), 0),
            _shown(self._per_frame(key, lambda d: d.compacted), 0),
            _shown(self.replay_ms(key, long=False), 2),
            _shown(self.replay_ms(key, long=True), 1),
        ]

    def _memory_table(self, memory: Memory) -> Table:
        table = Table(
            title=f"memory, bytes each of {IDLE_STREAMS:,}", title_justify="left", box=MARKDOWN
        )
        for heading in ("", "resident", "of Python"):
            table.add_column(heading, justify="right" if heading else "left")
        for name, rss, traced in (
            ("idle stream with a subscriber", memory.watched_rss, memory.watched_traced),
            ("idle stream that nobody reads", memory.idle_rss, memory.idle_traced),
            ("one more subscriber of a stream", memory.subscriber_rss, memory.subscriber_traced),
        ):
            table.add_row(name, f"{rss:,}", f"{traced:,}")
        return table

    def _target_table(self) -> Table:
        table = Table(title="targets", title_justify="left", box=MARKDOWN)
        for heading in ("", "wanted", "measured", ""):
            table.add_column(heading, justify="right" if heading else "left")
        for target in self.targets():
            wanted = f"{'≥' if target.at_least else '≤'} {target.wanted:,g}"
            verdict = {True: "met", False: "[bold red]MISSED[/]", None: "not measured"}[target.met]
            table.add_row(target.name, wanted, _shown(target.measured, 2), verdict)
        return table


def _of(memory: Memory | None, figure: Callable[[Memory], float]) -> float | None:
    return None if memory is None else figure(memory)


def _rate(sample: Sample) -> float:
    return sample.appends / sample.seconds


def _wait_ms(samples: Sequence[Sample], share: float) -> float:
    return statistics.median(percentile(sample.waits, share) for sample in samples) * 1e3


def _shown_waits(samples: Sequence[Sample]) -> list[str]:
    return [_shown(_wait_ms(samples, share) if samples else None, 3) for share in (0.5, 0.99)]


def _shown(value: float | None, digits: int) -> str:
    return "–" if value is None else f"{value:,.{digits}f}"


def _rounded(value: float | None) -> float | None:
    """Round to three significant digits or more; further ones are noise."""
    if value is None:
        return None
    return round(value) if abs(value) >= 100 else round(value, 3)
