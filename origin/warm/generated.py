"""Traces that are drawn: models asked in bursts, by the hour of the day, rarely, all of it, or by a
clock."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ledger.errors import CallerError
from origin.warm.trace import ArrivalTrace, Seconds

DAY_S = 86_400.0
BUSY_S = 5.0
"""Mean duration of a request."""
MODELS = 8
"""Of each kind."""
VISIT_S, STEP_S, ENDS = 1800.0, 8.0, 1 / 20
"""Of the bursty one: means between two visits and between the requests of one, and by what chance
a request is the last one of its visit."""


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
