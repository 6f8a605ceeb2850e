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
    """A model is busy until the last of the requests that overlap has ended."""
    models, starts, lengths = [], [], []
    present = np.unique(trace.model)
    for model in present:
        mine = trace.model == model
        arrivals = trace.arrival_s[mine]
        ends = np.maximum.accumulate(arrivals + trace.duration_s[mine])[:-1]
        gaps = arrivals[1:] - ends
        idle = gaps > 0
        models.append(np.full(int(idle.sum()), model, np.int64))
        starts.append(ends[idle])
        lengths.append(gaps[idle])
    start_s = np.concatenate(starts) if starts else np.empty(0)
    order = np.argsort(start_s, kind="stable")
    empty = np.empty(0, np.int64)
    return IdleGaps(
        model=(np.concatenate(models) if models else empty)[order],
        start_s=start_s[order],
        length_s=(np.concatenate(lengths) if lengths else np.empty(0))[order],
        requests=len(trace),
        first_starts=len(present),
    )
