"""Samples of a load test, their report, and comparison of two runs."""

from __future__ import annotations

from typing import Any

import pytest

from tailrace.load.drive import poisson
from tailrace.load.samples import Goal, Sample, compare, quantiles, report

GOAL = Goal(first_ms=500, gap_ms=50)


def sample(first_s: float, *gaps_s: float, error: str | None = None) -> Sample:
    pieces = [first_s]
    for gap in gaps_s:
        pieces.append(pieces[-1] + gap)
    return Sample(1.0, first_s, pieces[-1], pieces, len(pieces), error=error)


def run_of(samples: list[Sample]) -> dict[str, Any]:
    return report(samples, GOAL)


def test_the_figures_of_a_run() -> None:
    run = run_of([sample(0.25, 0.01, 0.03, 0.01), sample(0.75, 0.02), sample(0.1, error="timeout")])
    assert (run["requests_sent"], run["requests_failed"]) == (3, 1)
    assert run["errors"] == {"timeout": 1}
    assert run["ttft_ms"] == {"p50": 250, "p95": 750, "p99": 750, "mean": 500, "max": 750}
    assert run["itl_ms"]["max"] == 30 and run["itl_ms"]["p50"] == 10
    assert run["jitter_ms"]["mean"] == 20  # |30 - 10| and |10 - 30| of the first one
    assert run["resume_ms"] is None
    # The second one is late, the third failed: one good request, until the last has ended.
    assert run["good_share"] == pytest.approx(1 / 3, abs=1e-4)
    assert run["goodput_per_s"] == pytest.approx(1 / 1.77, abs=1e-4)
    assert run["tokens_per_s"] == pytest.approx(6 / 1.77, abs=0.01)


def test_what_a_cut_cost_is_no_gap_between_tokens() -> None:
    cut = sample(0.2, 0.01, 0.4, 0.01)
    cut.cuts = {2: 0.39}
    run = run_of([cut])
    assert run["itl_ms"]["max"] == 10
    assert run["resume_ms"]["p50"] == 390


def test_ranks_are_of_what_was_seen() -> None:
    found = quantiles([n / 1000 for n in range(1, 101)])
    assert found is not None
    assert (found["p50"], found["p95"], found["p99"], found["max"]) == (50, 95, 99, 100)


def test_arrivals_come_at_the_rate_and_alike_for_a_seed() -> None:
    due = poisson(20, 100, seed=7)
    assert due == poisson(20, 100, seed=7) != poisson(20, 100, seed=8)
    assert due == sorted(due) and due[0] > 0 and due[-1] < 100
    assert 1700 < len(due) < 2300  # seven deviations


def varied(first_ms: float, count: int = 40) -> list[Sample]:
    return [sample((first_ms + n % 7) / 1000, 0.01, 0.012, 0.01) for n in range(count)]


def words(old: list[Sample], new: list[Sample], tolerance: float = 0.1) -> dict[str, str]:
    return {v.figure: v.word for v in compare(run_of(old), run_of(new), tolerance)}


def test_a_run_is_like_itself() -> None:
    found = words(varied(100), varied(100))
    assert found.pop("resume_ms") == "unknown"  # nothing was cut
    assert set(found.values()) == {"alike"}


def test_slower_and_faster_are_told_apart() -> None:
    assert words(varied(100), varied(130))["ttft_ms"] == "slower"
    assert words(varied(130), varied(100))["ttft_ms"] == "faster"
    assert words(varied(100), varied(130), tolerance=0.5)["ttft_ms"] == "alike"
    assert words(varied(100), varied(700))["good_share"] == "slower"


def test_of_few_requests_and_of_chance_nothing_is_said() -> None:
    assert words(varied(100, 5), varied(300, 5))["ttft_ms"] == "unknown"
    # A median that is off by a third, of times that are all over the place.
    wide = [sample(first, 0.01) for first in (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 0.05, 0.2)]
    other = [sample(first, 0.01) for first in (0.02, 0.05, 0.2, 0.25, 2.0, 1.0, 0.03, 0.3)]
    assert words(wide, other)["ttft_ms"] == "alike"
