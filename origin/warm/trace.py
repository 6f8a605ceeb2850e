"""Arrivals of requests by model, and the idle gaps between them, which are all a policy decides."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ledger.errors import CallerError

Seconds = NDArray[np.float64]
Indices = NDArray[np.int64]

MIN_DURATION_S = 1e-3
"""A request that took no time, as one that failed, still needed its model for an instant."""


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
        if not len(model) == len(arrival_s) == len(duration_s):
            raise CallerError("models, arrivals and durations differ in number", field="trace")
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
