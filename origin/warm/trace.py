"""Arrivals of requests by model, and the idle gaps between them, which are all a policy decides.

Some traces are drawn: models asked in bursts, by the hour of the day, rarely, all of it, or by a
clock.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ledger.errors import CallerError
from origin.warm.policies import WarmPrices

Seconds = NDArray[np.float64]
Indices = NDArray[np.int64]

MIN_DURATION_S = 1e-3
"""A request that took no time, as one that failed, still needed its model for an instant."""

DAY_S = 86_400.0
BUSY_S = 5.0
"""Mean duration of a request."""
MODELS = 8
"""Of each kind."""
VISIT_S, STEP_S, ENDS = 1800.0, 8.0, 1 / 20
"""Of the bursty one: means between two visits and between the requests of one, and by what chance
a request is the last one of its visit."""


@dataclass(frozen=True)
class ArrivalTrace:
    """Requests in the order of their arrival; `model` indexes `names`."""

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
                raise CallerError("a time is negative or no number", field=field)
        order = np.argsort(arrival_s, kind="stable")
        took = np.maximum(duration_s[order], MIN_DURATION_S)
        return cls(names, model[order], arrival_s[order], took)

    def __len__(self) -> int:
        return len(self.model)


@dataclass(frozen=True)
class BusyPeriods:
    """When a model had a request under way, in the order in which that began.

    It is busy until the last of the requests that overlap has ended.
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
    """Every time that a model was idle between two requests, in the order in which it began.

    `requests` and `first_starts` count what no policy changes: all requests, and the first one
    of each model, which finds it cold whatever was decided. What follows a model's last request
    is no gap, as nobody knows how long it is.
    """

    model: Indices
    start_s: Seconds
    length_s: Seconds
    requests: int
    first_starts: int

    def __len__(self) -> int:
        return len(self.model)


def idle_gaps(trace: ArrivalTrace) -> IdleGaps:
    """Between two busy periods of a model, of which the second tells how long it was idle."""
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
    """Of each gap: seconds of idling on the device, and the share of a cold start that was left."""

    wasted_gpu_s: Seconds
    cold_share: Seconds

    def cost(self, prices: WarmPrices) -> Seconds:
        return self.wasted_gpu_s + prices.cold_cost_gpu_s * self.cold_share


def cost_of_gaps(
    length_s: Seconds, keep_s: Seconds, prewarm_s: Seconds, until_s: Seconds, load_s: float
) -> GapCosts:
    """Resident for `keep_s`, and again from `prewarm_s` to `until_s`, all since the gap began.

    A prewarm loads first: a request that meets it under way waits for, and is charged, the rest.
    `prewarm_s` is infinite where there is none. The arrays broadcast.
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
    """Visits every half hour or so, of twenty requests a few seconds apart."""
    visits = _poisson(rng, days * DAY_S, 1 / VISIT_S)
    lengths = rng.geometric(ENDS, len(visits))
    steps = rng.exponential(STEP_S, int(lengths.sum()))
    first = np.repeat(np.cumsum(lengths) - lengths, lengths)
    since = np.cumsum(steps)
    arrivals: Seconds = np.repeat(visits, lengths) + since - since[first]
    return arrivals


def diurnal(rng: np.random.Generator, days: float) -> Seconds:
    """One request in 15 s at noon, hardly any at night."""
    peak = 1 / 15
    arrivals = _poisson(rng, days * DAY_S, peak)
    share = np.clip(np.sin(np.pi * ((arrivals % DAY_S) / DAY_S)), 0.0, 1.0) ** 4
    drawn: Seconds = arrivals[rng.random(len(arrivals)) < np.maximum(share, 0.002)]
    return drawn


def rare(rng: np.random.Generator, days: float) -> Seconds:
    """Single requests, two hours apart in the median."""
    gaps = rng.lognormal(np.log(7200.0), 1.0, int(days * 40) + 10)
    arrivals = np.cumsum(gaps)
    drawn: Seconds = arrivals[arrivals < days * DAY_S]
    return drawn


def clockwork(rng: np.random.Generator, days: float) -> Seconds:
    """A job at regular times, of five minutes to an hour, that begins up to 20 s late."""
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
"""Not in the mix, which is of people's requests."""
GENERATED = (*KINDS, "mixed", *REGULAR)


def generated(kind: str, seed: int, days: float = 7.0) -> ArrivalTrace:
    """The same seed gives the same trace."""
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
