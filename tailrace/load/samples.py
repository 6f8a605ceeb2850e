"""What one request's client saw, and what all of them say together.

Sans-I/O. Times of requests count from when each was due, not from when a busy client got round to
it: a server that falls behind must not look faster for that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from statistics import fmean, median
from typing import Any

QUANTILES = (50, 95, 99)


@dataclass(slots=True)
class Sample:
    """One request. Times are seconds; `due_s` from the run's beginning, the others from `due_s`."""

    due_s: float
    first_s: float | None = None
    whole_s: float | None = None
    pieces_s: list[float] = field(default_factory=list)
    """When each piece of text came."""
    tokens: int = 0
    cuts: dict[int, float] = field(default_factory=dict)
    """Which piece was the first after a cut, and how long after it that came."""
    error: str | None = None

    @property
    def gaps_s(self) -> list[float]:
        """Between pieces, but for those between which the client was cut off."""
        times = self.pieces_s
        return [times[n] - times[n - 1] for n in range(1, len(times)) if n not in self.cuts]

    @property
    def jitter_s(self) -> float | None:
        """How much a gap differs from the one before, on average."""
        gaps = self.gaps_s
        changes = [abs(after - before) for before, after in pairwise(gaps)]
        return fmean(changes) if changes else None


@dataclass(frozen=True, slots=True)
class Goal:
    """A request is good whose first piece and whose median gap came within these, in ms."""

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
    """The figures of a run: `requests` has those of each request, by which runs are compared."""
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
    """In ms, by nearest rank; None of nothing."""
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
