"""Two runs beside each other: what got slower, by more than chance would make it.

Of each figure the medians over requests are compared. Slower is what is so by more than the
tolerance, and whose bootstrapped interval of the ratio (95 %, a seed of its own) leaves out 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from statistics import median
from typing import Any, NamedTuple

FIGURES = ("ttft_ms", "itl_ms", "jitter_ms", "resume_ms")
"""Of each request; less is better."""
RESAMPLES = 1000
LEAST_REQUESTS = 8
"""Of fewer nothing can be said."""


class Comparison(NamedTuple):
    """`word` is slower, faster, alike or unknown; `low` and `high` bound the ratio new/old."""

    figure: str
    word: str
    old: float | None = None
    new: float | None = None
    ratio: float | None = None
    low: float | None = None
    high: float | None = None


def compare(old: dict[str, Any], new: dict[str, Any], tolerance: float) -> list[Comparison]:
    """Of the reports of two runs; `tolerance` is a share, such as 0.1."""
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
    """Of requests that were good: fewer is slower."""
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
