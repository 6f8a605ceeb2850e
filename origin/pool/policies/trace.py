"""Traces of requests by model, and the idle gaps between them, which policies decide about.

Traces are generated (bursty, diurnal, rare, regular or a mix), or read from files in public formats
or our own; errors name the place in the file. Durations that a trace lacks are estimated from its
tokens, with configurable speeds.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from math import isfinite
from pathlib import Path
from typing import TextIO

import numpy as np
from numpy.typing import NDArray

from tailrace.ledger.errors import CallerError
from tailrace.origin.pool.policies.policies import WarmPrices

Seconds = NDArray[np.float64]
Indices = NDArray[np.int64]

MIN_DURATION_S = 1e-3
"""Minimum duration of a request in seconds, because even a failed one needed its model."""

DAY_S = 86_400.0
BUSY_S = 5.0
"""Mean duration of a request in a generated trace, in seconds."""
MODELS = 8
"""Number of models in a generated trace whose models all have the same kind of traffic."""
VISIT_S, STEP_S, ENDS = 1800.0, 8.0, 1 / 20
"""Parameters of bursty traces: the mean seconds between visits, the mean seconds between requests
of a visit, and the probability that a request is the last one of its visit."""

PREFILL_TOKENS_PER_S = 5000.0
DECODE_TOKENS_PER_S = 50.0
MAX_STEP_S = 30 * DAY_S
"""Maximum seconds between two requests, a month; a longer pause means times in another unit."""
MAX_REQUESTS = 20_000_000
SERVEGEN_WINDOW_S = 600.0
SERVEGEN_COLUMNS = ("start", "rate", "cv", "distribution", "shape", "scale")
PROGRESS_EVERY = 10_000
OWN_COLUMNS = ("model", "arrival_s", "duration_s")


@dataclass(frozen=True)
class ArrivalTrace:
    """Requests in order of arrival; `model` indexes `names`."""

    names: tuple[str, ...]
    model: Indices
    arrival_s: Seconds
    duration_s: Seconds

    @classmethod
    def of(
        cls, names: tuple[str, ...], model: Indices, arrival_s: Seconds, duration_s: Seconds
    ) -> ArrivalTrace:
        for field, times in (("arrival_s", arrival_s), ("duration_s", duration_s)):
            if not np.all(np.isfinite(times)) or np.any(times < 0):
                raise CallerError("a time is negative or not a finite number", field=field)
        order = np.argsort(arrival_s, kind="stable")
        took = np.maximum(duration_s[order], MIN_DURATION_S)
        return cls(names, model[order], arrival_s[order], took)

    def __len__(self) -> int:
        return len(self.model)


@dataclass(frozen=True)
class BusyPeriods:
    """Periods in which a model was busy, in order of their start.

    Overlapping requests form one period.
    """

    model: Indices
    start_s: Seconds
    end_s: Seconds

    def __len__(self) -> int:
        return len(self.model)


def busy_periods(trace: ArrivalTrace) -> BusyPeriods:
    models, starts, ends = [np.empty(0, np.int64)], [np.empty(0)], [np.empty(0)]
    for model in np.unique(trace.model):
        mine = trace.model == model
        arrivals = trace.arrival_s[mine]
        done = np.maximum.accumulate(arrivals + trace.duration_s[mine])
        first = np.concatenate([[True], arrivals[1:] - done[:-1] > 0])
        last = np.concatenate([first[1:], [True]])
        starts.append(arrivals[first])
        ends.append(done[last])
        models.append(np.full(int(first.sum()), model, np.int64))
    start_s = np.concatenate(starts)
    order = np.argsort(start_s, kind="stable")
    return BusyPeriods(np.concatenate(models)[order], start_s[order], np.concatenate(ends)[order])


@dataclass(frozen=True)
class IdleGaps:
    """Idle periods of models between two requests, in order of their start.

    `requests` and `first_starts` count what no policy can change: all requests, and the first one
    of each model, which is always cold. The time after a model's last request is no gap, since its
    length is unknown.
    """

    model: Indices
    start_s: Seconds
    length_s: Seconds
    requests: int
    first_starts: int

    def __len__(self) -> int:
        return len(self.model)


def idle_gaps(trace: ArrivalTrace) -> IdleGaps:
    """Return the gaps of each model: the time from one busy period to the model's next one."""
    busy = busy_periods(trace)
    by_model = np.argsort(busy.model, kind="stable")
    model, end_s = busy.model[by_model], busy.end_s[by_model]
    again = np.flatnonzero(model[1:] == model[:-1])
    gaps = again[np.argsort(end_s[again], kind="stable")]
    return IdleGaps(
        model=model[gaps],
        start_s=end_s[gaps],
        length_s=busy.start_s[by_model][gaps + 1] - end_s[gaps],
        requests=len(trace),
        first_starts=len(np.unique(model)),
    )


@dataclass(frozen=True)
class GapCosts:
    """Costs of each gap: seconds of idling on the device, and cold starts.

    `cold_share` is 0 for a gap without a cold start, 1 for a whole cold start, and the remaining
    share of the load if a prewarm was loading the model.
    """

    wasted_gpu_s: Seconds
    cold_share: Seconds

    def cost(self, prices: WarmPrices) -> Seconds:
        return self.wasted_gpu_s + prices.cold_cost_gpu_s * self.cold_share


def cost_of_gaps(
    length_s: Seconds, keep_s: Seconds, prewarm_s: Seconds, until_s: Seconds, load_s: float
) -> GapCosts:
    """Compute costs of being resident for `keep_s`, and again from `prewarm_s` to `until_s`.

    Times count from the start of the gap. A prewarm begins with a load; a request during that load
    waits for the rest of the load and is charged for it. Without a prewarm, `prewarm_s` is
    infinite. The arrays must broadcast.
    """
    kept = np.minimum(length_s, keep_s)
    begun = np.maximum(prewarm_s, keep_s)
    with np.errstate(invalid="ignore"):
        again = np.maximum(np.minimum(length_s, until_s) - begun, 0.0)
    again = np.where(np.isfinite(begun), again, 0.0)
    in_time = (length_s > begun) & (length_s <= until_s)
    left = np.where(in_time, np.maximum(1.0 - again / load_s, 0.0), 1.0)
    return GapCosts(kept + again, np.where(length_s <= keep_s, 0.0, left))


def bursty(rng: np.random.Generator, days: float) -> Seconds:
    """Generate visits every half hour or so, with about twenty requests a few seconds apart."""
    visits = _poisson(rng, days * DAY_S, 1 / VISIT_S)
    lengths = rng.geometric(ENDS, len(visits))
    steps = rng.exponential(STEP_S, int(lengths.sum()))
    first = np.repeat(np.cumsum(lengths) - lengths, lengths)
    since = np.cumsum(steps)
    arrivals: Seconds = np.repeat(visits, lengths) + since - since[first]
    return arrivals


def diurnal(rng: np.random.Generator, days: float) -> Seconds:
    """Generate a request every 15 s at noon, and hardly any at night."""
    peak = 1 / 15
    arrivals = _poisson(rng, days * DAY_S, peak)
    share = np.clip(np.sin(np.pi * ((arrivals % DAY_S) / DAY_S)), 0.0, 1.0) ** 4
    drawn: Seconds = arrivals[rng.random(len(arrivals)) < np.maximum(share, 0.002)]
    return drawn


def rare(rng: np.random.Generator, days: float) -> Seconds:
    """Generate single requests, two hours apart in the median."""
    gaps = rng.lognormal(np.log(7200.0), 1.0, int(days * 40) + 10)
    arrivals = np.cumsum(gaps)
    drawn: Seconds = arrivals[arrivals < days * DAY_S]
    return drawn


def clockwork(rng: np.random.Generator, days: float) -> Seconds:
    """Generate jobs at regular times, every five minutes to an hour, up to 20 s late."""
    period = rng.uniform(300.0, 3600.0)
    at = np.arange(0.0, days * DAY_S, period)
    late: Seconds = at + rng.uniform(0.0, 20.0, len(at))
    return late


KINDS: dict[str, Callable[[np.random.Generator, float], Seconds]] = {
    "bursty": bursty,
    "diurnal": diurnal,
    "rare": rare,
}
REGULAR = {"clockwork": clockwork}
"""Kinds of generated traces that are not part of `mixed`, which imitates requests of people."""
GENERATED = (*KINDS, "mixed", *REGULAR)


def generated(kind: str, seed: int, days: float = 7.0) -> ArrivalTrace:
    """Generate a trace; the same seed gives the same trace."""
    if kind not in GENERATED:
        raise CallerError(f"no generated trace is called {kind!r}", hint=", ".join(GENERATED))
    rng = np.random.default_rng(seed)
    kinds = tuple(KINDS) if kind == "mixed" else (kind,)
    known = KINDS | REGULAR
    drawn = [(f"{one}-{n}", known[one](rng, days)) for one in kinds for n in range(MODELS)]
    counts = [len(arrivals) for _, arrivals in drawn]
    return ArrivalTrace.of(
        tuple(name for name, _ in drawn),
        np.repeat(np.arange(len(drawn)), counts),
        np.concatenate([arrivals for _, arrivals in drawn]),
        rng.exponential(BUSY_S, sum(counts)),
    )


def _poisson(rng: np.random.Generator, span_s: float, rate: float) -> Seconds:
    return np.sort(rng.random(rng.poisson(span_s * rate)) * span_s)


@dataclass(frozen=True)
class TokenSpeeds:
    """Speeds from which durations are estimated if a trace has only numbers of tokens."""

    prefill_per_s: float = PREFILL_TOKENS_PER_S
    decode_per_s: float = DECODE_TOKENS_PER_S

    def seconds(self, read: float, written: float) -> float:
        return read / self.prefill_per_s + written / self.decode_per_s


@dataclass(frozen=True)
class _Row:
    """A row of a trace file; errors about its columns name the file and the row number."""

    path: Path
    number: int
    values: dict[str, object]

    def wrong(self, column: str, message: str, hint: str | None = None) -> CallerError:
        return CallerError(
            message, field=f"{self.path}: row {self.number}: column {column}", hint=hint
        )

    def value(self, column: str) -> object:
        value = self.values.get(column)
        if value is None or value == "":
            raise self.wrong(column, "is missing")
        return value

    def number_of(self, column: str, unit: str) -> float:
        value = self.value(column)
        try:
            if isinstance(value, bool) or not isinstance(value, str | int | float):
                raise ValueError
            number = float(value)
        except ValueError:
            raise self.wrong(
                column, f"{value!r} is not a number", f"{unit}, without a unit"
            ) from None
        if not isfinite(number) or number < 0:
            raise self.wrong(column, f"{value!r} is negative or not finite", unit)
        return number

    def whole(self, column: str, unit: str) -> float:
        number = self.number_of(column, unit)
        if number != int(number):
            raise self.wrong(column, f"{number:g} is not a whole number", f"whole {unit}")
        return number


Request = tuple[_Row, str, str, float, float]
"""A request in a file: its row, the name of the time column, the model, the arrival in seconds, and
the duration in seconds."""


def _csv_rows(path: Path, columns: tuple[str, ...], optional: tuple[str, ...]) -> Iterator[_Row]:
    with _opened(path) as lines:
        reader = csv.reader(lines)
        header = next(reader, [])
        wanted = ", ".join(columns)
        unknown = [name for name in header if name not in (*columns, *optional)]
        missing = [name for name in columns if name not in header]
        for names, what in ((missing, "is missing"), (unknown, "is not of this format")):
            if names:
                where = f"{path}: row 1: column {names[0]}"
                raise CallerError(what, field=where, hint=f"the columns are {wanted}")
        for values in reader:
            row = _Row(path, reader.line_num, dict(zip(header, values, strict=False)))
            if len(values) != len(header):
                raise row.wrong(header[-1], f"the row has {len(values)} values for {len(header)}")
            yield row


def _opened(path: Path) -> TextIO:
    try:
        return path.open(encoding="utf-8-sig", newline="")
    except OSError as error:
        raise CallerError(f"cannot be read: {error.strerror}", field=str(path)) from error


def _azure(path: Path, speeds: TokenSpeeds, seed: int) -> Iterator[Request]:
    zero: datetime | None = None
    for row in _csv_rows(path, ("TIMESTAMP", "ContextTokens", "GeneratedTokens"), ()):
        text = str(row.value("TIMESTAMP"))
        try:
            at = datetime.fromisoformat(text)  # ignores the seventh decimal of Azure's seconds
        except ValueError:
            raise row.wrong(
                "TIMESTAMP",
                f"{text!r} is not a date and time",
                "a time as in ISO 8601, such as 2023-11-16 18:15:46.680590",
            ) from None
        zero = zero or at
        if (at.tzinfo is None) != (zero.tzinfo is None):
            raise row.wrong("TIMESTAMP", "only some times have a time zone", "all or none")
        tokens = [row.whole(name, "tokens") for name in ("ContextTokens", "GeneratedTokens")]
        yield row, "TIMESTAMP", path.stem, (at - zero).total_seconds(), speeds.seconds(*tokens)


def _mooncake(path: Path, speeds: TokenSpeeds, seed: int) -> Iterator[Request]:
    with _opened(path) as lines:
        for number, line in enumerate(lines, 1):
            try:
                values = json.loads(line)
            except ValueError:
                values = None
            if not isinstance(values, dict):
                raise CallerError("is not a JSON object", field=f"{path}: row {number}")
            row = _Row(path, number, values)
            at = row.whole("timestamp", "milliseconds")
            tokens = [row.whole(name, "tokens") for name in ("input_length", "output_length")]
            yield row, "timestamp", path.stem, at / 1000, speeds.seconds(*tokens)


def _burstgpt(path: Path, speeds: TokenSpeeds, seed: int) -> Iterator[Request]:
    columns = ("Timestamp", "Model", "Request tokens", "Response tokens", "Total tokens")
    for row in _csv_rows(path, (*columns, "Log Type"), ("Session ID", "Elapsed time")):
        at = row.number_of("Timestamp", "seconds")
        tokens = [row.whole(name, "tokens") for name in columns[2:4]]
        if (total := row.whole("Total tokens", "tokens")) != sum(tokens):
            wrong = f"{total:.0f} is not {sum(tokens):.0f}, the sum of Request and Response tokens"
            raise row.wrong("Total tokens", wrong)
        took = speeds.seconds(*tokens)
        if row.values.get("Elapsed time"):
            took = row.number_of("Elapsed time", "seconds")
        yield row, "Timestamp", str(row.value("Model")), at, took


def _servegen(path: Path, speeds: TokenSpeeds, seed: int) -> Iterator[Request]:
    """Draw random arrivals, because a file of ServeGen has only their rates and distributions."""
    rng = np.random.default_rng(seed)
    with _opened(path) as lines:
        for number, values in enumerate(csv.reader(lines), 1):
            row = _Row(path, number, dict(zip(SERVEGEN_COLUMNS, values, strict=False)))
            if len(values) > len(SERVEGEN_COLUMNS):
                raise row.wrong(
                    SERVEGEN_COLUMNS[-1], "is followed by more values than the format has"
                )
            start, rate = row.number_of("start", "seconds"), row.number_of("rate", "requests/s")
            if start % SERVEGEN_WINDOW_S:
                raise row.wrong("start", f"{start:g} begins no window", "multiples of 600 s")
            cv = row.number_of("cv", "no unit")
            if rate * SERVEGEN_WINDOW_S > MAX_REQUESTS:
                raise row.wrong("rate", f"{rate:g} requests/s is too many")
            if not rate:
                continue
            kind = str(row.value("distribution"))
            shapes = {"Exponential": 0, "Gamma": 1, "Weibull": 1}
            if kind not in shapes:
                raise row.wrong("distribution", f"{kind!r} is unknown", ", ".join(shapes))
            shape = row.number_of("shape", "no unit") if shapes[kind] else 1.0
            if not shape > 0 or not cv > 0:
                raise row.wrong("shape" if cv else "cv", "must be above zero")
            size = int(rate * SERVEGEN_WINDOW_S * 2) + 16
            steps = rng.weibull(shape, size) if kind == "Weibull" else rng.gamma(shape, 1, size)
            # Gaps are scaled to the CSV row's column `rate`, so its column `scale` is not used.
            mean = float(steps.mean())
            at = np.cumsum(steps / mean / rate) if mean else np.empty(0)
            took = speeds.seconds(1000, 200)
            for one in at[at < SERVEGEN_WINDOW_S].tolist():
                yield row, "start", path.stem, start + one, took


def _own(path: Path, speeds: TokenSpeeds, seed: int) -> Iterator[Request]:
    for row in _csv_rows(path, OWN_COLUMNS, ()):
        times = [row.number_of(name, "seconds") for name in OWN_COLUMNS[1:]]
        yield row, "arrival_s", str(row.value("model")), times[0], times[1]


FORMATS: dict[str, Callable[[Path, TokenSpeeds, int], Iterator[Request]]] = {
    "azure": _azure,
    "burstgpt": _burstgpt,
    "mooncake": _mooncake,
    "servegen": _servegen,
    "tailrace": _own,
}


def import_trace(
    form: str,
    path: Path,
    *,
    speeds: TokenSpeeds | None = None,
    seed: int = 0,
    progress: Callable[[int], None] = lambda done: None,
) -> ArrivalTrace:
    """Read all requests of a file; times that go back, or forward by a month, are refused."""
    if form not in FORMATS:
        raise CallerError(f"no format is called {form!r}", hint=", ".join(FORMATS))
    names: dict[str, int] = {}
    models: list[int] = []
    arrivals: list[float] = []
    durations: list[float] = []
    before = None
    try:
        for row, column, model, at, took in FORMATS[form](path, speeds or TokenSpeeds(), seed):
            if before is not None and at < before:
                raise row.wrong(column, "is before the row above", "one unit, in order")
            if before is not None and at - before > MAX_STEP_S:
                raise row.wrong(column, "is over a month after the row above", "check the unit")
            if len(models) == MAX_REQUESTS:
                raise row.wrong(column, f"a trace holds at most {MAX_REQUESTS} requests")
            before = at
            models.append(names.setdefault(model, len(names)))
            arrivals.append(at)
            durations.append(took)
            if len(models) % PROGRESS_EVERY == 0:
                progress(len(models))
    except UnicodeDecodeError as error:
        raise CallerError("is not UTF-8", field=str(path)) from error
    except csv.Error as error:
        raise CallerError(f"is not a CSV file: {error}", field=str(path)) from error
    if not models:
        raise CallerError("holds no request", field=str(path))
    return ArrivalTrace.of(
        tuple(names), np.array(models, np.int64), np.array(arrivals), np.array(durations)
    )


def write_trace(trace: ArrivalTrace, path: Path) -> None:
    """Write a trace in the format that `tailrace warm simulate` reads."""
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(OWN_COLUMNS)
        columns = (trace.model.tolist(), trace.arrival_s.tolist(), trace.duration_s.tolist())
        for model, arrival, duration in zip(*columns, strict=True):
            writer.writerow((trace.names[model], f"{arrival:.6f}", f"{duration:.6f}"))
