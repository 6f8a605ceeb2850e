"""Measurements of single requests, reports of runs, and comparisons of two runs.

Sans-I/O. Latencies are measured from the time at which a request was due, not from the time at
which a busy client sent it. Otherwise a server would look faster when it slows the client down.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from random import Random
from statistics import fmean, median
from typing import Any, NamedTuple

QUANTILES = (50, 95, 99)


@dataclass(slots=True)
class Sample:
    """The measurements of one request.

    Times are in seconds: `due_s` is counted from the start of the run, all others from `due_s`.
    `first_s` is the time of the first piece of text, `whole_s` that of the end of the answer.
    """

    due_s: float
    first_s: float | None = None
    whole_s: float | None = None
    pieces_s: list[float] = field(default_factory=list)
    """Times at which pieces of text arrived."""
    tokens: int = 0
    cuts: dict[int, float] = field(default_factory=dict)
    """Maps the index of the first piece after a cut to the time between cut and piece."""
    error: str | None = None

    @property
    def gaps_s(self) -> list[float]:
        """Times between consecutive pieces, in seconds, without those that contain a cut."""
        times = self.pieces_s
        return [times[n] - times[n - 1] for n in range(1, len(times)) if n not in self.cuts]

    @property
    def jitter_s(self) -> float | None:
        """Mean absolute difference between consecutive gaps, in seconds."""
        gaps = self.gaps_s
        changes = [abs(after - before) for before, after in pairwise(gaps)]
        return fmean(changes) if changes else None


@dataclass(frozen=True, slots=True)
class Goal:
    """Limits for a good request: time to the first piece of text, and median gap between pieces."""

    first_ms: float
    gap_ms: float

    def is_met(self, sample: Sample) -> bool:
        if sample.error is not None or sample.first_s is None:
            return False
        gaps = sample.gaps_s
        return sample.first_s * 1000 <= self.first_ms and (
            not gaps or median(gaps) * 1000 <= self.gap_ms
        )


def report(samples: Sequence[Sample], goal: Goal) -> dict[str, Any]:
    """Return the statistics of a run, and the figures of each request for later comparisons."""
    good = [sample for sample in samples if sample.error is None]
    took_s = max((s.due_s + (s.whole_s or 0.0) for s in samples), default=0.0) or 1.0
    errors: dict[str, int] = {}
    for sample in samples:
        if sample.error is not None:
            errors[sample.error] = errors.get(sample.error, 0) + 1
    met = sum(goal.is_met(sample) for sample in samples)
    return {
        "requests_sent": len(samples),
        "requests_failed": len(samples) - len(good),
        "errors": errors,
        "seconds": round(took_s, 3),
        "ttft_ms": quantiles([s.first_s for s in good if s.first_s is not None]),
        "itl_ms": quantiles([gap for s in good for gap in s.gaps_s]),
        "jitter_ms": quantiles([s.jitter_s for s in good if s.jitter_s is not None]),
        "resume_ms": quantiles([wait for s in good for wait in s.cuts.values()]),
        "tokens_per_s": round(sum(s.tokens for s in good) / took_s, 2),
        "goal": asdict(goal),
        "goodput_per_s": round(met / took_s, 4),
        "good_share": round(met / len(samples), 4) if samples else 0.0,
        "requests": [_row(sample, goal) for sample in samples],
    }


def quantiles(seconds: Sequence[float]) -> dict[str, float] | None:
    """Return quantiles, mean and maximum in ms (nearest-rank method); None without values."""
    if not seconds:
        return None
    ordered = sorted(seconds)
    found = {f"p{q}": ordered[-(-len(ordered) * q // 100) - 1] for q in QUANTILES}
    found |= {"mean": fmean(ordered), "max": ordered[-1]}
    return {name: round(value * 1000, 3) for name, value in found.items()}


def _row(sample: Sample, goal: Goal) -> dict[str, Any]:
    gaps = sample.gaps_s
    return {
        "due_s": round(sample.due_s, 4),
        "ttft_ms": _ms(sample.first_s),
        "itl_ms": _ms(median(gaps) if gaps else None),
        "jitter_ms": _ms(sample.jitter_s),
        "resume_ms": _ms(fmean(sample.cuts.values()) if sample.cuts else None),
        "tokens": sample.tokens,
        "good": goal.is_met(sample),
        "error": sample.error,
    }


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1000, 3)


FIGURES = ("ttft_ms", "itl_ms", "jitter_ms", "resume_ms")
"""Names of each request's figures that are compared; a lower value is better."""
RESAMPLES = 1000
LEAST_REQUESTS = 8
"""Minimum number of measured requests in each run for a comparison; with fewer the result is
`unknown`."""


class Comparison(NamedTuple):
    """Result of comparing one figure of two runs.

    `word` is slower, faster, alike or unknown. `ratio` is new/old, and `low` and `high` are the
    bounds of its confidence interval.
    """

    figure: str
    word: str
    old: float | None = None
    new: float | None = None
    ratio: float | None = None
    low: float | None = None
    high: float | None = None


def compare(old: dict[str, Any], new: dict[str, Any], tolerance: float) -> list[Comparison]:
    """Compare the reports of two runs, and return a result for each figure.

    For each figure, the medians over all requests are compared. The new run is slower if its median
    is larger by more than `tolerance` (0.1 means 10 %), and if the 95 % confidence interval of the
    ratio, computed by a bootstrap with a fixed seed, lies above 1.
    """
    verdicts = [_of_times(name, old, new, tolerance) for name in FIGURES]
    return [*verdicts, _of_shares(old, new, tolerance)]


def _of_times(name: str, old: dict[str, Any], new: dict[str, Any], tolerance: float) -> Comparison:
    before, after = _values(old, name), _values(new, name)
    if min(len(before), len(after)) < LEAST_REQUESTS:
        return Comparison(name, "unknown")
    was, now = median(before), median(after)
    if was <= 0:
        return Comparison(name, "unknown", was, now)
    low, high = _interval(before, after)
    word = "alike"
    if now > was * (1 + tolerance) and low > 1:
        word = "slower"
    elif now < was / (1 + tolerance) and high < 1:
        word = "faster"
    return Comparison(name, word, was, now, now / was, low, high)


def _of_shares(old: dict[str, Any], new: dict[str, Any], tolerance: float) -> Comparison:
    """Compare the fractions of good requests; a lower fraction counts as slower."""
    was, now = float(old["good_share"]), float(new["good_share"])
    if min(len(old["requests"]), len(new["requests"])) < LEAST_REQUESTS:
        return Comparison("good_share", "unknown", was, now)
    word = "slower" if now < was - tolerance else "faster" if now > was + tolerance else "alike"
    return Comparison("good_share", word, was, now, now / was if was else None)


def _values(run: dict[str, Any], name: str) -> list[float]:
    return [row[name] for row in run["requests"] if row["error"] is None and row[name] is not None]


def _interval(before: Sequence[float], after: Sequence[float]) -> tuple[float, float]:
    random = Random(0)
    ratios = []
    for _ in range(RESAMPLES):
        was = median(random.choices(before, k=len(before)))
        now = median(random.choices(after, k=len(after)))
        ratios.append(now / was if was > 0 else float("inf"))
    ratios.sort()
    return ratios[RESAMPLES // 40], ratios[-RESAMPLES // 40 - 1]
